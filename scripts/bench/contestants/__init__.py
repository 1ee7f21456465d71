"""The contestants of the benchmarks. A peer is imported only when it is created, because it may not be installed."""

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
    """A contestant: the module in this folder, and the class or function in the module that creates the contestant."""

    title: str
    module: str
    maker: str
    by_default: bool = True
    """Whether the contestant takes part if the user names none."""

    def make(self, root: str) -> Contestant:
        """Create the contestant with the new folder ``root`` for its checkpoints. Raises any error of the peer."""
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
    "asyncckpt-torch-checkpointing": Entry(
        "asyncckpt beneath torch_checkpointing", "torch_checkpointing", "OverAsyncckpt", by_default=False
    ),
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
    """Return the name of a contestant in reports."""
    return ENTRIES[name].title if name in ENTRIES else name


def names_in(text: str) -> list[str]:
    """Return the names in ``a,b``, or the default ones for ``all``. Raises ``ValueError`` for an unknown name."""
    if text == "all":
        return [name for name, entry in ENTRIES.items() if entry.by_default]
    names = [name for name in text.split(",") if name]
    for name in names:
        if name not in ENTRIES:
            raise ValueError(f"there is no {name!r}; there are {', '.join(ENTRIES)}")
    return names


def make_all(names: Sequence[str], folder: str, state: State, left_out: dict[str, str]) -> dict[str, Contestant]:
    """Create and prepare the available contestants. Add the reason for each other one to ``left_out``."""
    made: dict[str, Contestant] = {}
    tensors = sum(1 for _ in tensors_of(state))
    free = int(Path("/proc/sys/vm/max_map_count").read_text()) - SPARE
    for name in names:
        try:
            made[name] = contestant = ENTRIES[name].make(f"{folder}/{name}")
            if contestant.shares_each:
                # A contestant that uses up all mappings would make the others fail.
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
    """Set how torch shares the memory of tensors, and return the name of that strategy.

    Share by descriptor, torch's default. If there are too few descriptors for one per tensor, share by name, as torch's
    documentation advises.
    """
    tensors = sum(1 for _ in tensors_of(state))
    descriptors, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    chosen = "file_descriptor" if tensors * SHARERS * 2 < descriptors - SPARE else "file_system"  # a copy is sent, too
    torch.multiprocessing.set_sharing_strategy(chosen)  # type: ignore[no-untyped-call]
    return chosen


def close_all(contestants: dict[str, Contestant], left_out: dict[str, str]) -> None:
    """Close the contestants. Add a note about each failure to ``left_out``."""
    for name, contestant in contestants.items():
        try:
            contestant.close()
        except Exception as error:
            left_out.setdefault(name, f"closing it: {told(error)}")


def told(error: BaseException) -> str:
    """Return the type and the last line of an error, on one line."""
    lines = str(error).strip().splitlines() or [""]
    return f"{type(error).__name__}: {lines[-1]}"[:300]
