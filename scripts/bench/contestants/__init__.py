"""Who takes part. A peer is imported when it is made, as it may not be there."""

from __future__ import annotations

import importlib
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from bench.contestants.contestant import Contestant


@dataclass(frozen=True)
class Entry:
    """Which class, or function of one, of which module of this folder makes it."""

    title: str
    module: str
    maker: str

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
    "asyncckpt-nvrx": Entry("asyncckpt in nvrx's place", "nvrx", "Nvrx.ours"),
    "nvrx": Entry("nvrx 0.7.0, CPU shm", "nvrx", "Nvrx.own"),
    "torch-checkpointing": Entry("torch_checkpointing 0.1", "torch_checkpointing", "TorchCheckpointing"),
    "torchsnapshot": Entry("torchsnapshot, async", "torchsnapshot", "TorchSnapshot"),
    "dcp-thread": Entry("DCP async_save, thread", "dcp", "DcpAsync.thread"),
    "dcp-process": Entry("DCP async_save, process", "dcp", "DcpAsync.process"),
    "dcp-save": Entry("DCP save", "dcp", "DcpSave"),
    "torch-save": Entry("torch.save, synced", "torch_save", "TorchSave"),
}
ASYNC_PEERS = ("nvrx", "torch-checkpointing", "torchsnapshot", "dcp-thread", "dcp-process")


def title(name: str) -> str:
    """How a report calls it."""
    return ENTRIES[name].title if name in ENTRIES else name


def names_in(text: str) -> list[str]:
    """``a,b``: those; all of them if it says ``all``. Raises ``ValueError`` for one that there is not."""
    if text == "all":
        return list(ENTRIES)
    names = [name for name in text.split(",") if name]
    for name in names:
        if name not in ENTRIES:
            raise ValueError(f"there is no {name!r}; there are {', '.join(ENTRIES)}")
    return names


def make_all(
    names: Sequence[str], folder: str, prepare: Callable[[Contestant], object], left_out: dict[str, str]
) -> dict[str, Contestant]:
    """Those that can be had and prepared; ``left_out`` gets a note about each other."""
    made: dict[str, Contestant] = {}
    for name in names:
        try:
            made[name] = ENTRIES[name].make(f"{folder}/{name}")
            prepare(made[name])
        except Exception as error:
            left_out[name] = told(error)
            if name in made:
                close_all({name: made.pop(name)}, left_out)
    return made


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
