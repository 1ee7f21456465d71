"""Small trainings, run by themselves: ``python surrounded_training.py PLAN ...``, where PLAN is a ``Plan`` in JSON.

Each training is a fork of this process, one after the other, so that torch is imported once. The training writes a
``Report`` to a file, because it may have no standard streams.
"""

from __future__ import annotations

import json
import os
import resource
import sys
import tempfile
import time
import traceback
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from itertools import cycle
from pathlib import Path
from typing import Any

import torch

from asyncckpt import Checkpointer, Config
from asyncckpt.errors import CheckpointError
from asyncckpt.integrations import dcp
from asyncckpt.integrations.torch_file import torch_save

MIB = 1 << 20
CLOCK_VARIABLE = "ASYNCCKPT_TEST_CLOCK"

# Key of the state to load into. All states are made before the limits hold.
_BLANK = -1


@dataclass(frozen=True)
class Plan:
    """The saves and loads of a training, and the changes to its surroundings before the first save."""

    root: str
    report: str
    steps: list[int] = field(default_factory=lambda: [1, 2])
    mib: int = 1
    """Size of the state."""
    load: str = "after"
    """Load the newest step ``after`` the last save, or before the first save, too (``both``), or never (empty)."""
    single: bool = True
    """Save by DCP's ``async_save`` and by ``torch_save``, too, beside the root."""
    keep_last: int | None = None
    hold: str = ""
    """Path of a file. The training makes the file before its second save, or its only one, and waits until the file is
    gone."""
    limits: dict[str, str] = field(default_factory=dict)
    """Limits of the training and its worker: name in ``resource`` to a number. A number with a ``+`` is added to the
    descriptors, or to the bytes of address space, in use."""
    variables: dict[str, str] = field(default_factory=dict)
    """Variables of the environment."""
    clocks: list[int] = field(default_factory=list)
    """Seconds for ``clock.c``: one before each save and one while it is under way, over and over."""


@dataclass
class Report:
    """The results of a training."""

    saved: list[int] = field(default_factory=list)
    """Steps whose ``result`` has returned."""
    loaded: list[int] = field(default_factory=list)
    """Steps that were loaded to the bit: before the first save, and from storage after the last."""
    errors: list[str] = field(default_factory=list)
    """``Class: text`` of each error of ours."""
    foreign: str = ""
    """The stack of any other exception."""
    slowest: float = 0.0
    """Seconds of the slowest save or load, by the monotonic clock."""

    @contextmanager
    def one(self) -> Iterator[None]:
        """Record the error and the duration of one save or load."""
        begun = time.monotonic()
        try:
            yield
        except CheckpointError as error:
            self.errors.append(f"{type(error).__name__}: {error}")
        self.slowest = max(self.slowest, time.monotonic() - begun)


def state(step: int, mib: int) -> dict[str, Any]:
    """Return the state of a step, the same in each process."""
    numbers = torch.arange(mib * MIB // 4, dtype=torch.int32)
    return {"w": numbers + step, "bias": torch.full((3,), float(step)), "step": step}


def same(one: dict[str, Any], other: dict[str, Any]) -> bool:
    """Return whether two states are equal to the bit."""
    return all(torch.equal(one[name], other[name]) for name in ("w", "bias")) and one["step"] == other["step"]


def main(plans: Sequence[str]) -> int:
    for text in plans:
        if (pid := os.fork()) == 0:
            os._exit(_run(text))
        if (status := os.waitpid(pid, 0)[1]) != 0:
            return os.waitstatus_to_exitcode(status)
    return 0


def _run(text: str) -> int:
    plan, report = Plan(**json.loads(text)), Report()
    with open(plan.report, "w") as file:
        try:
            states = {step: state(step, plan.mib) for step in (_BLANK, 0, *plan.steps)}
            os.environ.update(plan.variables)
            tempfile.tempdir = None  # torch has already cached the folder for the old variables
            for name, most in plan.limits.items():
                _limit(name, most)
            _train(plan, report, states)
        except BaseException:
            report.foreign = traceback.format_exc()
        file.write(json.dumps(asdict(report)))
    return 0


def _limit(name: str, most: str) -> None:
    used = 0
    if most.startswith("+") and name == "NOFILE":
        used = max(map(int, os.listdir("/proc/self/fd")))
    elif most.startswith("+"):
        used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(getattr(resource, f"RLIMIT_{name}"), (used + int(most),) * 2)


def _train(plan: Plan, report: Report, states: dict[int, dict[str, Any]]) -> None:
    config = Config(timeout=30, commit_timeout=30, keep_last=plan.keep_last, linger=0, restart_pause=0)
    clocks = cycle(plan.clocks or [None])
    with report.one(), Checkpointer(plan.root, config) as checkpointer:
        if plan.load == "both":
            with report.one():
                _load(plan, report, states, checkpointer)
        for step in plan.steps:
            if plan.hold and step == plan.steps[:2][-1]:
                _wait(Path(plan.hold))
            with report.one():
                _set_clock(next(clocks))
                save = checkpointer.save(step, states[step])
                _set_clock(next(clocks))
                save.result(30)
                report.saved.append(step)
        if plan.load:
            with report.one():
                _load(plan, report, states, checkpointer)
    if plan.single:
        with report.one():
            dcp.async_save(states[0], checkpoint_id=f"{plan.root}-dcp", no_dist=True).result(30)
        with report.one():
            torch_save(states[0], f"{plan.root}.pt").result(30)


def _load(plan: Plan, report: Report, states: dict[int, dict[str, Any]], checkpointer: Checkpointer) -> None:
    into = states[_BLANK]
    step = checkpointer.load(into, memory=False)
    if not same(into, states.get(step) or state(step, plan.mib)):
        raise AssertionError(f"these are not the values of step {step}")
    report.loaded.append(step)


def _wait(hold: Path) -> None:
    hold.touch()
    while hold.exists():
        time.sleep(0.02)


def _set_clock(seconds: int | None) -> None:
    if seconds is not None:
        with open(os.environ[CLOCK_VARIABLE], "r+b") as file:
            file.write(seconds.to_bytes(8, sys.byteorder, signed=True))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
