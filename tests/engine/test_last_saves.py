"""Test a last save after SIGTERM from the launcher."""

from __future__ import annotations

import math
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from support.checkpoints import verify
from support.ranks import Job, say

from asyncckpt import Checkpointer
from asyncckpt.integrations.nvrx import AbortAsyncckpt

pytestmark = pytest.mark.usefixtures("forkserver")


TRAINER = """
import sys, time, torch
from asyncckpt import Checkpointer
state = {"w": torch.zeros(1000), "step": 0}
with Checkpointer(sys.argv[1]) as checkpointer:
    checkpointer.watch_signals()
    print("training", flush=True)
    while not checkpointer.terminating():
        state["step"] += 1
        state["w"].fill_(state["step"])
        time.sleep(0.01)
    checkpointer.save(state["step"], state)
print(state["step"])
"""


def test_it_saves_first(root: Path) -> None:
    trainer = subprocess.Popen([sys.executable, "-c", TRAINER, str(root)], stdout=subprocess.PIPE, text=True, cwd="/")
    try:
        assert trainer.stdout is not None and trainer.stdout.readline() == "training\n"
        trainer.terminate()
        step = int(trainer.communicate(timeout=120)[0])
    finally:
        trainer.kill()
        trainer.wait()
    assert trainer.returncode == 0
    with Checkpointer(root) as checkpointer:
        into = {"w": torch.zeros(1000), "step": 0}
        assert checkpointer.load(into) == step == into["step"]
        assert not verify(str(root / f"step-{step:08d}")).damages


def test_the_signal_is_given_back(root: Path) -> None:
    before = signal.getsignal(signal.SIGTERM)
    with Checkpointer(root) as checkpointer:
        checkpointer.watch_signals()
        checkpointer.watch_signals()
        assert not checkpointer.terminating()
        os.kill(os.getpid(), signal.SIGTERM)
        assert checkpointer.terminating() and checkpointer.terminating()
    assert signal.getsignal(signal.SIGTERM) is before


def test_the_signal_is_given_back_after_restarts_in_the_process(root: Path) -> None:
    """Checkpointers that were given up are never closed."""
    before = signal.getsignal(signal.SIGTERM)
    for _ in range(3):
        given_up = Checkpointer(root)
        given_up.watch_signals()
        AbortAsyncckpt()(None)
    with Checkpointer(root) as last:
        last.watch_signals()
        os.kill(os.getpid(), signal.SIGTERM)
        assert last.terminating()
    assert signal.getsignal(signal.SIGTERM) is before


def _train(root: str, signalled: int) -> tuple[int, float]:
    """Signal only rank ``signalled``. All ranks must end at the same step, or the last save hangs."""
    times = []
    with Checkpointer(root) as checkpointer:
        checkpointer.watch_signals()
        step = 0
        say(os.getpid())
        while True:
            begun = time.perf_counter()
            ended = checkpointer.terminating()
            times.append(time.perf_counter() - begun)
            if ended:
                break
            step += 1
            dist.barrier()
            if step == 20 and dist.get_rank() == signalled:
                os.kill(os.getpid(), signal.SIGTERM)
        checkpointer.save(step, {"w": torch.full((1000,), float(step))}).result(30)
    return step, sorted(times)[len(times) // 2]


@pytest.mark.parametrize("signalled", [0, 1])
def test_all_ranks_end_at_the_same_step(tmp_path: Path, signalled: int) -> None:
    root = tmp_path / "root"
    ended = Job(2, _train, str(root), signalled, folder=tmp_path).wait()
    assert not any(end.error for end in ended), ended
    (step, _), (other, _) = (end.result for end in ended)
    assert step == other >= 20
    assert not verify(str(root / f"step-{step:08d}")).damages


def test_other_signals_are_watched_and_given_back(root: Path) -> None:
    """Slurm sends the signal of ``--signal``."""
    before = [signal.getsignal(each) for each in (signal.SIGUSR1, signal.SIGTERM)]
    with Checkpointer(root) as checkpointer:
        checkpointer.watch_signals(signal.SIGUSR1, signal.SIGTERM)
        os.kill(os.getpid(), signal.SIGUSR1)
        assert checkpointer.terminating()
    assert [signal.getsignal(each) for each in (signal.SIGUSR1, signal.SIGTERM)] == before


def test_a_deadline_leaves_time_for_a_last_save(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The steps go on until a step and one and a half saves are left. The earliest deadline counts."""
    now = [1000.0]
    with Checkpointer(root) as checkpointer:
        assert not checkpointer.terminating()
        checkpointer.deadline(86_400)
        assert not checkpointer.terminating()
        checkpointer.deadline(600)
        assert checkpointer.terminating()  # no save was measured, so it may take Config.commit_timeout
        for step in (1, 2):
            checkpointer.save(step, {"w": torch.zeros(1000)}).result(30)
        longest = checkpointer._recent.expected_s(math.inf)
        assert 0 < longest < 30
        monkeypatch.setattr("asyncckpt.checkpointer.time.monotonic", lambda: now[0])
        checkpointer._ends_at = checkpointer._asked_at = math.inf
        checkpointer._step_s = 0.0
        checkpointer.deadline(1000)
        checkpointer.deadline(100)
        assert not checkpointer.terminating()
        steps = 0
        while not checkpointer.terminating():
            now[0] += 10.0
            steps += 1
        assert 100 - 10 * steps < 11 + 1.5 * longest <= 100 - 10 * (steps - 1)


def _until_the_deadline(root: str) -> tuple[int, float]:
    with Checkpointer(root) as checkpointer:
        for step in (1, 2):
            checkpointer.save(step, {"w": torch.zeros(1000)}).result(30)
        ends_at = time.monotonic() + 3
        if dist.get_rank() == 1:
            checkpointer.deadline(3)
        while not checkpointer.terminating():
            step += 1
            time.sleep(0.05)
            dist.barrier()
        checkpointer.save(step + 1, {"w": torch.full((1000,), float(step))}).result(30)
        return step, ends_at - time.monotonic()


def test_all_ranks_save_before_the_deadline_of_one(tmp_path: Path) -> None:
    ended = Job(2, _until_the_deadline, str(tmp_path / "root"), folder=tmp_path).wait()
    assert not any(end.error for end in ended), ended
    (step, left), (other, _) = (end.result for end in ended)
    assert step == other and left > 0
