"""Scenarios: one kind of save each, small enough to be interrupted thousands of times.

A scenario opens savers, one for each rank. Each saver saves a step as a training would. ``promises.py`` judges the
resulting folder, given the newest step that was begun and the newest step with a returned ``result()``.
"""

from __future__ import annotations

import contextlib
from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, Protocol

import torch

import asyncckpt
from asyncckpt import Checkpointer, Config, FileSet
from asyncckpt.extension import Engine, Pointer, Rotation
from torture import tally
from torture.tally import LIMIT_S

CONFIG = replace(tally.CONFIG, keep_last=2, linger=20.0)

# The frozen tensors get new values once in this number of steps. In all other steps their file is linked.
_FROZEN_STEPS = 4

Checkpoint = dict[str, Any]


class Saver(Protocol):
    """Save a step. Return when the checkpoint is durable."""

    def __call__(self, step: int) -> None: ...


def state_of(step: int, rank: int = 0) -> Checkpoint:
    """Return a state of some 100 KiB. Every byte depends on the step and the rank.

    The tensors cross the borders of 4 KiB blocks, so a torn write shows. No two steps have equal bytes.
    """

    def filled(size: int, seed: int) -> torch.Tensor:
        return torch.randint(0, 1 << 62, (size,), generator=torch.Generator().manual_seed(seed))

    seed = step * 64 + rank
    return {
        "model": {f"w{rank}.{size}": filled(size, seed + size) for size in (9000, 700, 1)},
        "frozen": {f"f{rank}": filled(3000, (step // _FROZEN_STEPS) * 64 + rank)},
        "text": {f"t{rank}": f"step {step}, rank {rank}"},
        "step": step,
    }


class Scenario(ABC):
    """One kind of save: how its ranks save a step."""

    name: str
    ranks: int = 1
    config: Config = CONFIG

    @abstractmethod
    def saving(self, root: Path, rank: int = 0) -> contextlib.AbstractContextManager[Saver]:
        """Open a saver to ``root``. ``torch.distributed`` is initialized if the scenario has several ranks."""


class Steps(Scenario):
    """Each step gets its own folder. Retention removes older steps, and unchanged files are linked."""

    def __init__(self, name: str = "steps", *, ranks: int = 1) -> None:
        self.name = name
        self.ranks = ranks

    def config_in(self, root: Path) -> Config:
        return self.config

    def value(self, step: int, rank: int) -> Checkpoint | FileSet:
        return state_of(step, rank)

    @contextlib.contextmanager
    def saving(self, root: Path, rank: int = 0) -> Iterator[Saver]:
        with Checkpointer(self.folder(root), self.config_in(root)) as checkpointer:

            def save(step: int) -> None:
                checkpointer.save(step, self.value(step, rank)).result(LIMIT_S)

            yield save

    def folder(self, root: Path) -> Path:
        """Return the folder of the checkpoints."""
        return root / "steps"

    def durable_folder(self, root: Path) -> Path:
        """Return the folder that contains a step when ``result()`` returns."""
        return self.folder(root)


class Sets(Steps):
    """Each step is a set of files: two DCP folders, a torch file and bytes."""

    def __init__(self) -> None:
        super().__init__("sets")

    def value(self, step: int, rank: int) -> FileSet:
        files = FileSet()
        files.add_dcp_folder("", state_of(step, rank))
        files.add_dcp_folder("deep/down", state_of(step, rank + 1))
        files.add_torch_file(f"large_{rank}.pt", state_of(step, rank + 2))
        files.add_bytes(f"small/{rank}.json", str(step).encode())
        return files


class Uploads(Steps):
    """Each step is saved to a local folder and uploaded from there."""

    def __init__(self) -> None:
        super().__init__("uploads")

    def config_in(self, root: Path) -> Config:
        return replace(self.config, local_root=str(self.local_folder(root)))

    def local_folder(self, root: Path) -> Path:
        """Return the local folder. Its only subfolder has the checkpoints of this root."""
        return root / "local"

    def durable_folder(self, root: Path) -> Path:
        return next(self.local_folder(root).glob("*"), self.local_folder(root))


class Replaced(Scenario):
    """Each save replaces the folder of the save before."""

    name = "replaced"

    @contextlib.contextmanager
    def saving(self, root: Path, rank: int = 0) -> Iterator[Saver]:
        with Engine(self.config) as engine:
            yield lambda step: _finish(engine.save(root / "latest", state_of(step, rank), existing="replace"))


class Pointers(Scenario):
    """A text file names the newest folder, as the trackers of Megatron and DeepSpeed do. Older folders are removed."""

    name = "pointers"

    @contextlib.contextmanager
    def saving(self, root: Path, rank: int = 0) -> Iterator[Saver]:
        older = sorted(root.glob("global_*"), key=lambda path: int(path.name.removeprefix("global_")))
        with Engine(self.config) as engine:

            def save(step: int) -> None:
                _finish(
                    engine.save(
                        root / f"global_{step}",
                        state_of(step, rank),
                        existing="replace",
                        pointer=Pointer(str(root / "latest.txt"), str(step)),
                        rotation=Rotation(tuple(map(str, older)), spares=1),
                    )
                )
                older.append(root / f"global_{step}")

            yield save


class Files(Scenario):
    """Each save replaces one file, which ``torch.load`` reads."""

    name = "files"

    @contextlib.contextmanager
    def saving(self, root: Path, rank: int = 0) -> Iterator[Saver]:
        yield lambda step: _finish(asyncckpt.torch_save(state_of(step, rank), root / "model.pt", config=self.config))


def _finish(save: asyncckpt.Save) -> None:
    save.result(LIMIT_S)


SCENARIOS: tuple[Scenario, ...] = (
    Steps(),
    Replaced(),
    Sets(),
    Files(),
    Uploads(),
    Pointers(),
    Steps("two ranks", ranks=2),
    Steps("three ranks", ranks=3),
)
