"""A kind of training: what a framework's file says of itself."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torture.frameworks.log import Log

STEPS = 12
"""Of a training."""
EVERY = 2
"""Steps from one checkpoint to the next."""

Options = Mapping[str, Any]


@dataclass(frozen=True, kw_only=True)
class Kind:
    """A tiny training by one framework, the same in each process, and how its checkpoints are found and read."""

    world_size: int
    options: tuple[Options, ...]
    """Ways to save through asyncckpt: one is drawn for each start."""
    train: Callable[[Path, Log, Options | None], None]
    """On a rank: train to the end, from what the framework itself finds in the folder, and tell the log. Without
    options the framework saves itself, and keeps all."""
    checkpoints: Callable[[Path], dict[str, int | None]]
    """The paths of all that has the name of a checkpoint in the folder, each with the step that the name says."""
    candidates: Callable[[Path], list[str]]
    """Those of them of which the framework resumes from one, by whatever it goes by."""
    read: Callable[[str], tuple[int, Any]]
    """The step of a checkpoint, and all in it that matters, read by stock functions. Raises whatever they raise."""
    root: str = ""
    """Where the checkpoints are in the folder: a pattern."""
    verifies: bool = True
    """Whether ``asyncckpt verify`` knows these checkpoints: it does not know single files."""

    def roots(self, folder: Path) -> list[Path]:
        """The folders with checkpoints in that of a training."""
        return list(folder.glob(self.root)) if self.root else [folder]
