"""Test a worker that still takes memory for another slot when its trainer dies."""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from pathlib import Path

import pytest
import torch
from support.ranks import alone

from asyncckpt import Checkpointer
from asyncckpt.config import Config
from asyncckpt.link import process as worker_process

pytestmark = pytest.mark.usefixtures("forkserver")

_HELD = str(Path(__file__).parents[1] / "support" / "held_worker.py")


def _state(step: int) -> dict[str, torch.Tensor]:
    return {"w": torch.full((1 << 20,), float(step))}


def _wait(path: str) -> None:
    deadline = time.monotonic() + 60
    while not os.path.exists(path):
        assert time.monotonic() < deadline, path
        time.sleep(0.005)


def _hold(gate: str, count: int) -> list[str]:
    return [sys.executable, _HELD, gate, str(count)]


def _die_while_memory_is_taken(root: str, local: str, gate: str) -> None:
    worker_process.command = lambda: _hold(gate, 0)
    checkpointer = Checkpointer(root, Config(local_root=local))

    def die() -> None:
        _wait(f"{gate}.take.reached")
        os.kill(os.getpid(), signal.SIGKILL)

    threading.Thread(target=die, daemon=True).start()
    checkpointer.save(1, _state(1))  # the worker writes this save
    checkpointer.save(2, _state(2))  # waits for a slot: the worker takes memory for another one


def _go_on(root: str, local: str, gate: str) -> None:
    worker_process.command = lambda: _hold(gate, 0)
    with Checkpointer(root, Config(local_root=local)) as checkpointer:
        assert checkpointer.load(_state(0)) == 1
        opening = threading.Timer(0.5, Path(f"{gate}.take").touch)
        opening.start()
        saves = [checkpointer.save(step, _state(step)) for step in (2, 3)]  # the second save takes another slot
        assert os.path.exists(f"{gate}.taken")  # the previous session took this memory before it ended
        for save in saves:
            save.result(60)
        opening.join()


def test_what_is_taken_for_a_dead_trainer_is_there_before_the_next_one_begins(root: Path, tmp_path: Path) -> None:
    """The next trainer may give this memory back, or reuse it."""
    gate, local = str(tmp_path / "gate"), str(tmp_path / "local")
    alone(_die_while_memory_is_taken, str(root), local, gate)
    for held in ("write", "upload"):
        Path(f"{gate}.{held}").touch()
    assert alone(_go_on, str(root), local, gate)[0] == 0
    with Checkpointer(root, Config(local_root=local)) as checkpointer:
        into = _state(0)
        assert checkpointer.load(into, memory=False) == 3 and torch.equal(into["w"], _state(3)["w"])
