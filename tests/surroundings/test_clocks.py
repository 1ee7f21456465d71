"""The wall clock jumps, or differs between processes: saves, retention and the sweep of leftovers go on."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from functools import partial
from pathlib import Path

import pytest
import torch
from support import surrounded_training
from support.abilities import need_command, need_locks
from support.checkpoints import read_manifest, step_folder
from support.surrounded_training import CLOCK_VARIABLE
from support.surroundings import Trainings, Trial, open_attempts, went_well

from asyncckpt import Checkpointer
from asyncckpt.config import Config
from asyncckpt.extension import Engine, Pointer
from asyncckpt.integrations.torch_file import torch_save

HOUR = 3600
YEAR = 366 * 24 * HOUR
TO_1970 = 24 * HOUR - int(time.time())
TO_2045 = 2_366_841_600 - int(time.time())
JUMPS = [0, HOUR, -HOUR, TO_1970, TO_2045, 0, HOUR, TO_1970, -HOUR, TO_2045, 0, -HOUR]


@pytest.fixture(scope="session")
def clock(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """The environment of a process with a clock of its own."""
    need_command("cc", "--version")
    folder = tmp_path_factory.mktemp("clock")
    source, library = Path(surrounded_training.__file__).with_name("clock.c"), folder / "clock.so"
    subprocess.run(["cc", "-shared", "-fPIC", "-O1", "-o", str(library), str(source), "-pthread"], check=True)
    return {"LD_PRELOAD": str(library)}


def _at(path: Path, seconds: int) -> str:
    path.write_bytes(seconds.to_bytes(8, sys.byteorder, signed=True))
    return str(path)


def test_the_clock_jumps_between_and_during_saves(root: Path, tmp_path: Path, clock: dict[str, str]) -> None:
    """Retention keeps the newest steps, and the next training loads the newest, whenever it starts."""
    trials: list[Trial] = [
        {"steps": [1, 2, 3, 4, 5, 6], "clocks": JUMPS},
        {"steps": [7, 8], "clocks": [TO_1970], "load": "both", "single": False},
    ]
    environment = clock | {CLOCK_VARIABLE: _at(tmp_path / "clock", 0)}
    trainings = Trainings.start(root, environment=environment, trials=trials, keep_last=2)
    first, second = trainings.end()
    assert first.saved == [1, 2, 3, 4, 5, 6] and second.loaded == [6, 8]
    went_well(trainings.plans[1], second)
    assert Checkpointer(root).latest() == 8
    assert read_manifest(step_folder(str(root), 8)).created > time.time() + YEAR  # the clock did jump


def test_the_worker_has_another_clock(root: Path, tmp_path: Path, clock: dict[str, str]) -> None:
    trials = [
        {"name": str(seconds), "variables": {CLOCK_VARIABLE: _at(tmp_path / f"{seconds}", seconds)}}
        for seconds in (TO_1970, HOUR)
    ]
    environment = clock | {CLOCK_VARIABLE: _at(tmp_path / "clock", 0)}
    trainings = Trainings.start(root, environment=environment, trials=trials, steps=[1, 2, 3, 4], keep_last=2)
    for plan, report in zip(trainings.plans, trainings.end(), strict=True):
        went_well(plan, report, kept=[3, 4])
        offset = int(Path(plan.root).name)
        assert abs(read_manifest(step_folder(plan.root, 4)).created - max(time.time(), time.time() + offset)) < HOUR / 2


@pytest.mark.parametrize("seconds", [-HOUR, HOUR, YEAR])
def test_work_of_the_dead_goes_although_the_clock_was_set_back(root: Path, seconds: int) -> None:
    """A leftover has a date of the clock before, which may be in the future now."""
    root.mkdir()
    need_locks(root)
    for attempt in open_attempts(root, time.time() + seconds):
        attempt.release()
    with Checkpointer(root) as checkpointer:
        checkpointer.save(3, {"w": torch.ones(3)}).result(60)
    torch_save({"w": torch.ones(3)}, root / "b.pt").result(60)
    assert sorted(os.listdir(root)) == ["asyncckpt.lock", "b.pt", "step-00000003"]


def test_a_pointer_names_the_later_save_although_the_clock_was_set_back(
    root: Path, gate: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both saves are under way then."""
    with Engine(Config(slots=2), alone=True) as engine:
        saves = []
        for step in (1, 2):
            pointer = Pointer(str(root / "latest"), str(step))
            saves.append(engine.save(root / f"{step}", {"w": torch.ones(3)}, step=step, pointer=pointer))
            now = time.time() - HOUR
            monkeypatch.setattr(time, "time", partial(float, now))
        gate.touch()
        assert [save.result(60) for save in saves]
    assert (root / "latest").read_text() == "2"
