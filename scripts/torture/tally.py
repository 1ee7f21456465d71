"""The states to save, and the tally of outcomes and losses."""

from __future__ import annotations

import contextlib
import os
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from tqdm import tqdm

from asyncckpt import Config, FileSet

LIMIT_S = 30.0
# Maximum time of operations that should not make the user wait.
PATIENCE_S = 10.0
SIZES = (1_000_000, 200_000, 50_000, 3_000, 70, 1)
# The number of frozen elements, which get new values once in this number of steps.
FROZEN, FROZEN_STEPS = 600_000, 40
CONFIG = Config(
    keep_last=3,
    timeout=25.0,
    commit_timeout=25.0,
    linger=60.0,
    worker_restarts=10**9,
    restart_pause=0.0,
    assume_unchanged=["frozen.*"],
)


LOCAL_VARIABLE = "TORTURE_LOCAL_ROOT"
"""Environment variable of killed jobs: the local folder of their saves."""


SETS_VARIABLE = "TORTURE_SETS"
"""Environment variable of killed jobs: if set, each save is a set of files with the same state."""


def to_save(step: int, rank: int = 0) -> dict[str, Any] | FileSet:
    """Return the state or the set of files for ``step`` of a killed job."""
    if SETS_VARIABLE not in os.environ:
        return state_of(step, rank)
    files = FileSet()
    files.add_dcp_folder("", state_of(step, rank))
    files.add_dcp_folder("deep/down", {f"m{rank}": torch.full((SIZES[1],), float(step)), "step": step})
    files.add_torch_file(f"large_{rank}.pt", torch.full((SIZES[0],), float(step)))
    files.add_bytes(f"small/{rank}.json", str(step).encode())
    return files


def config_of_killed() -> Config:
    """Return the configuration of killed jobs."""
    return replace(CONFIG, local_root=os.environ.get(LOCAL_VARIABLE))


def state_of(step: int, rank: int = 0) -> dict[str, Any]:
    """Return the state of one step of one rank. No other step or rank has an equal state."""
    tensors = {f"w{rank}.{number}": torch.full((size,), float(step)) for number, size in enumerate(SIZES)}
    frozen = {f"f{rank}": torch.full((FROZEN,), float(step // FROZEN_STEPS))}
    return {"model": tensors, "frozen": frozen, "both": torch.full((1000,), float(step)), "step": step}


def value_of(name: str, step: int) -> int:
    """Return the value of ``step`` in the tensor ``name`` of ``state_of``, as DCP names it."""
    return step // FROZEN_STEPS if name.startswith("frozen.") else step


def is_of(state: dict[str, Any], step: int) -> bool:
    """Return whether every byte belongs to ``step``."""
    values = [*state["model"].values(), state["both"]]
    frozen = all(bool((value == float(step // FROZEN_STEPS)).all()) for value in state["frozen"].values())
    return frozen and state["step"] == step and all(bool((value == float(step)).all()) for value in values)


@dataclass
class Tally:
    """Counts of outcomes. ``losses``: sentences about broken promises."""

    counts: Counter[str] = field(default_factory=Counter)
    losses: list[str] = field(default_factory=list)
    longest_s: float = 0.0
    """Longest duration of a save or of a recovery, in seconds."""
    waits: dict[str, float] = field(default_factory=dict)
    """Longest durations of other waits, in seconds, by name."""

    def lose(self, what: str) -> None:
        self.losses.append(what)
        tqdm.write(f"LOST: {what}")

    def wait(self, name: str, took: float) -> None:
        """Note a wait of ``took`` seconds."""
        self.waits[name] = max(self.waits.get(name, 0.0), took)

    @contextlib.contextmanager
    def timed(self, what: str) -> Iterator[None]:
        """Time the block, and note a loss if ``what`` takes too long."""
        begun = time.monotonic()
        yield
        took = time.monotonic() - begun
        self.longest_s = max(self.longest_s, took)
        if took > PATIENCE_S:
            self.lose(f"{what} took {took:.1f} s")
