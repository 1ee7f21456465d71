"""The interface of a kind of training, which the file of each framework provides."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torture.frameworks.log import Log

STEPS = 12
"""Steps of a training."""
EVERY = 2
"""Steps between two checkpoints."""

Options = Mapping[str, Any]


@dataclass(frozen=True, kw_only=True)
class Kind:
    """A tiny, deterministic training by one framework, and how to find and read its checkpoints."""

    world_size: int
    options: tuple[Options, ...]
    """Ways to save through asyncckpt. Each start uses a random one."""
    train: Callable[[Path, Log, Options | None], None]
    """Runs a rank: trains to the end, resumes from what the framework finds in the folder, and writes to the log.
    Without options the framework itself saves, and keeps all checkpoints."""
    checkpoints: Callable[[Path], dict[str, int | None]]
    """Returns all paths with the name of a checkpoint in the folder, with the steps in their names."""
    candidates: Callable[[Path], list[str]]
    """Returns the checkpoints that the framework may resume from."""
    read: Callable[[str], tuple[int, Any]]
    """Returns the step and the content of a checkpoint, read by stock functions. Raises any error of them."""
    root: str = ""
    """A pattern for the folders with checkpoints within the folder."""
    history: Callable[[list[list[dict[str, Any]]]], list[str]] = lambda _: []
    """Returns what is wrong in the logs of the last rank, in the order of the starts."""
    verifies: bool = True
    """Whether ``asyncckpt verify`` knows these checkpoints. It does not know single files."""

    def roots(self, folder: Path) -> list[Path]:
        """Return the folders with checkpoints in the folder of a training."""
        return list(folder.glob(self.root)) if self.root else [folder]
