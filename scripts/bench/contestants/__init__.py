"""Who takes part. A peer is imported when it is made, as it may not be there."""

from __future__ import annotations

import importlib
import os
import resource
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from bench.contestants.contestant import Contestant
from bench.states import State, tensors_of


@dataclass(frozen=True)
class Entry:
    """Which class, or function of one, of which module of this folder makes it."""

    title: str
    module: str
    maker: str
    by_default: bool = True
    """Whether it takes part if nobody is named."""

    def make(self, root: str) -> Contestant:
        """With the folder ``root`` for its checkpoints. Raises what is wrong with it."""
        os.makedirs(root)
        found: object = importlib.import_module(f"bench.contestants.{self.module}")
        for name in self.maker.split("."):
            found = getattr(found, name)
        if not callable(found):
            raise TypeError(f"{self.maker} of {self.module} makes nothing")
        made = found(root)
        if not isinstance(made, Contestant):
            raise TypeError(f"{self.maker} of {self.module} makes no contestant")
        return made


OURS = "asyncckpt"
ENTRIES = {
    OURS: Entry("asyncckpt", "ours", "Ours"),
    "asyncckpt-overlap": Entry("asyncckpt, overlap", "ours", "Ours.overlapping"),
    "asyncckpt-files": Entry("asyncckpt, set of files", "file_sets", "FileSets"),
    "asyncckpt-nvrx": Entry("asyncckpt in nvrx's place", "nvrx", "Nvrx.ours"),
    "nvrx": Entry("nvrx 0.7.0, CPU shm", "nvrx", "Nvrx.own"),
    "nvrx-ipc": Entry("nvrx 0.7.0, CUDA IPC", "nvrx", "Nvrx.own_by_ipc", by_default=False),
    "torch-checkpointing": Entry("torch_checkpointing 0.1", "torch_checkpointing", "TorchCheckpointing"),
    "torchsnapshot": Entry("torchsnapshot, async", "torchsnapshot", "TorchSnapshot"),
    "dcp-thread": Entry("DCP async_save, thread", "dcp", "DcpAsync.thread"),
    "dcp-process": Entry("DCP async_save, process", "dcp", "DcpAsync.process"),
    "dcp-save": Entry("DCP save", "dcp", "DcpSave"),
    "torch-save": Entry("torch.save, synced", "torch_save", "TorchSave"),
    "files-save": Entry("safetensors and torch.save", "file_sets", "Files"),
}
SPARE = 4000
SHARERS = 3
ASYNC_PEERS = ("nvrx", "torch-checkpointing", "torchsnapshot", "dcp-thread", "dcp-process")


def title(name: str) -> str:
    """How a report calls it."""
    return ENTRIES[name].title if name in ENTRIES else name


def names_in(text: str) -> list[str]:
    """``a,b``: those; all of them if it says ``all``. Raises ``ValueError`` for one that there is not."""
    if text == "all":
        return [name for name, entry in ENTRIES.items() if entry.by_default]
    names = [name for name in text.split(",") if name]
    for name in names:
        if name not in ENTRIES:
            raise ValueError(f"there is no {name!r}; there are {', '.join(ENTRIES)}")
    return names


def make_all(names: Sequence[str], folder: str, state: State, left_out: dict[str, str]) -> dict[str, Contestant]:
    """Those that can be had, prepared for ``state``; ``left_out`` gets a note about each other."""
    made: dict[str, Contestant] = {}
    tensors = sum(1 for _ in tensors_of(state))
    free = int(Path("/proc/sys/vm/max_map_count").read_text()) - SPARE
    for name in names:
        try:
            made[name] = contestant = ENTRIES[name].make(f"{folder}/{name}")
            if contestant.shares_each:
                # One that runs out of them would take those of all.
                if tensors > free:
                    raise OSError(
                        f"it shares each of {tensors:,} tensors by itself; a process has {free:,} mappings left"
                    )
                free -= tensors
            contestant.prepare(state)
        except Exception as error:
            left_out[name] = told(error)
            if name in made:
                close_all({name: made.pop(name)}, left_out)
    return made


def choose_sharing(state: State) -> str:
    """How torch shares the memory of tensors from here on: by descriptor, as it does by default, or, if those are too
    few for what shares each tensor by itself, by name, as its documentation advises then. Returns its name for that."""
    tensors = sum(1 for _ in tensors_of(state))
    descriptors, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    chosen = "file_descriptor" if tensors * SHARERS * 2 < descriptors - SPARE else "file_system"  # each is sent, too
    torch.multiprocessing.set_sharing_strategy(chosen)  # type: ignore[no-untyped-call]
    return chosen


def close_all(contestants: dict[str, Contestant], left_out: dict[str, str]) -> None:
    """End them; ``left_out`` gets a note about each that fails."""
    for name, contestant in contestants.items():
        try:
            contestant.close()
        except Exception as error:
            left_out.setdefault(name, f"closing it: {told(error)}")


def told(error: BaseException) -> str:
    """One line."""
    lines = str(error).strip().splitlines() or [""]
    return f"{type(error).__name__}: {lines[-1]}"[:300]
