"""Test how many files and calls a steady save and a load run, in trainer and worker.

The limits only go down. A change that needs more files shows that a seam is missing.
"""

from __future__ import annotations

import shutil
from collections import Counter
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
from support.call_counts import CallCounts, ask
from support.call_counts import __file__ as counted_worker

from asyncckpt import Checkpointer
from asyncckpt.devices.kinds import KINDS
from asyncckpt.link import process as worker_process


class Limit(NamedTuple):
    """The maximum numbers of files and calls."""

    files: int
    calls: int


SAVE_IN_TRAINER = Limit(36, 243)
SAVE_IN_WORKER = Limit(27, 436)
LOAD = Limit(42, 535)


def check(calls: Counter[str], limit: Limit) -> None:
    table = "\n".join(f"{count:6} {file}" for file, count in calls.most_common())
    found = Limit(len(calls), calls.total())
    print(f"{found}\n{table}")  # noqa: T201
    assert 0 < found.files <= limit.files and found.calls <= limit.calls, f"{found} is more than {limit}:\n{table}"


def test_a_steady_save_and_a_load(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for kind in KINDS.values():  # another test in this process may have used the simulated device
        monkeypatch.setattr(kind, "is_initialized", lambda: False)
    answer, real = tmp_path / "calls.json", worker_process.command
    monkeypatch.setattr(worker_process, "command", lambda: [real()[0], counted_worker, str(answer)])
    counts = CallCounts()
    state = {"model": {f"layer{i}": torch.full((100,), float(i)) for i in range(8)}, "step": 0}
    in_trainer, in_worker, loads = [], [], []
    with counts.installed(), Checkpointer(tmp_path / "root") as checkpointer:
        for step in range(1, 8):
            state["step"] = step
            counts.is_counting = True
            save = checkpointer.save(step, state)
            counts.is_counting = False
            save.result(60)
            shutil.rmtree(tmp_path / "root" / f"step-{step - 2:08}", ignore_errors=True)  # each save looks at all steps
            in_worker.append(ask(answer))
            in_trainer.append(counts.calls)
            counts.calls = Counter()
        for _ in range(3):
            counts.is_counting = True
            checkpointer.load(state)
            counts.is_counting = False
            loads.append(counts.calls)
            counts.calls = Counter()
    # On a busy machine a wait polls more often.
    check(min(in_trainer[3:], key=Counter.total), SAVE_IN_TRAINER)
    check(min(in_worker[3:], key=Counter.total), SAVE_IN_WORKER)
    check(min(loads, key=Counter.total), LOAD)
    assert state["step"] == 7
