"""Test that an image does not change while a process loads it, even if a trainer takes the memory over."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from support.ranks import alone
from support.recovery import source, train

from asyncckpt import Checkpointer
from asyncckpt.config import Config
from asyncckpt.shm.memcpy import Destinations

pytestmark = pytest.mark.usefixtures("forkserver")


def _state(step: int) -> dict[str, torch.Tensor]:
    return {name: torch.full((3_000_000,), float(step)) for name in ("a", "b")}


def _is(state: dict[str, torch.Tensor], step: int) -> bool:
    return all(torch.equal(state[name], tensor) for name, tensor in _state(step).items())


def _wait(path: str) -> None:
    deadline = time.monotonic() + 60
    while not os.path.exists(path):
        assert time.monotonic() < deadline, path
        time.sleep(0.005)


def _late(
    root: Path, monkeypatch: pytest.MonkeyPatch, meanwhile: Callable[[], object], step: int | None = None
) -> None:
    """From now on, call ``meanwhile`` before the last piece of a load of ``step`` is copied."""
    fill, last = Destinations.fill, 0

    def noted(self: Destinations, begin: int, data: memoryview) -> None:
        nonlocal last
        last = max(last, begin)
        fill(self, begin, data)

    def late(self: Destinations, begin: int, data: memoryview) -> None:
        if begin == last:
            meanwhile()
        fill(self, begin, data)

    monkeypatch.setattr(Destinations, "fill", noted)
    with Checkpointer(root) as reading:
        reading.load(_state(0), step)
    monkeypatch.setattr(Destinations, "fill", late)


def _save_and_die(root: str, step: int) -> None:
    checkpointer = Checkpointer(root)
    if step > 1:
        assert checkpointer.load(_state(0)) == step - 1
    checkpointer.save(step, _state(step)).result(60)
    os.kill(os.getpid(), signal.SIGKILL)


def test_a_trainer_takes_over_meanwhile(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An evaluation, for example, may load before the next trainer takes over."""
    alone(_save_and_die, str(root), 1)
    _late(root, monkeypatch, lambda: alone(_save_and_die, str(root), 2))
    with Checkpointer(root) as reading:
        into = _state(0)
        assert reading.load(into) == 1 and source(reading) == "memory" and _is(into, 1)


def test_another_checkpointer_of_the_process_saves_meanwhile(root: Path) -> None:
    train(root, 1, slots=None)
    script = f"""
import threading, torch
from asyncckpt.checkpointer import Checkpointer
from asyncckpt.shm.memcpy import Destinations

fill, once = Destinations.fill, threading.Lock()

def late(self, begin, data):
    if once.acquire(blocking=False):
        training.save(2, {{"w": torch.ones(5), "step": 2}}).result(60)
    fill(self, begin, data)

Destinations.fill = late
with Checkpointer({str(root)!r}) as evaluation, Checkpointer({str(root)!r}) as training:
    into = {{"w": torch.zeros(3_000_000), "step": 0}}
    evaluation.load(into)
    print(evaluation.loaded.source, into["w"].unique().tolist())
"""
    ended = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=120, check=False)
    assert (ended.returncode, ended.stdout.strip()) == (0, "memory [1.0]"), ended.stderr[-2000:]


def _save_two_and_die(root: str) -> None:
    checkpointer = Checkpointer(root, Config(slots=2))
    for step in (1, 2):
        checkpointer.save(step, _state(step)).result(60)
    os.kill(os.getpid(), signal.SIGKILL)


def _go_on_after_a_worker(root: str, gate: str) -> None:
    with Checkpointer(root) as checkpointer:
        state = _state(0)
        assert checkpointer.load(state) == 2
        checkpointer.save(3, state).result(60)
        Path(f"{gate}.saved").touch()
        _wait(f"{gate}.reads")
        worker = checkpointer._engine.worker
        assert worker is not None
        os.kill(worker.pid, signal.SIGKILL)
        worker.wait_for_end(60)
        checkpointer.save(4, state).result(60)
        Path(f"{gate}.again").touch()


def test_the_worker_of_its_trainer_dies_meanwhile(root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The next worker takes the memory over and gives back the surplus, except memory that is being read."""
    gate = str(tmp_path / "gate")
    alone(_save_two_and_die, str(root))  # two slots have an image
    trainer = threading.Thread(target=alone, args=[_go_on_after_a_worker, str(root), gate])
    trainer.start()
    _wait(f"{gate}.saved")

    def meanwhile() -> None:
        Path(f"{gate}.reads").touch()
        _wait(f"{gate}.again")

    _late(root, monkeypatch, meanwhile, step=2)
    with Checkpointer(root) as reading:
        into = _state(0)
        assert reading.load(into, 2) == 2 and source(reading) == "memory"
        trainer.join()
        assert _is(into, 2)
