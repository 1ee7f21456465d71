"""How far a stopped or dead worker of the first rank, which hosts the store, delays the other ranks."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import pytest
import torch.distributed as dist
from support.ranks import Job, faulty, gated, run, say
from support.states import equal, replicas
from support.workers import stop

from asyncckpt import Checkpointer, Config, Save
from asyncckpt.config import WhenBusy
from asyncckpt.errors import CheckpointError
from asyncckpt.link import process as worker_process
from asyncckpt.link.takeover import is_running

# Longer than a test may take, so that no wait here may end by a timeout.
LONG_S = 90.0


pytestmark = pytest.mark.usefixtures("forkserver")


def _config(when_busy: WhenBusy = "wait") -> Config:
    return Config(
        slots=2,
        timeout=LONG_S,
        commit_timeout=LONG_S,
        assume_constant_structure=True,
        when_busy=when_busy,
        failure="warn",
    )


def _end(save: Save) -> str:
    try:
        save.result(30)
    except CheckpointError as error:
        return type(error).__name__
    return "saved"


def _save_while_it_is_stopped(root: str, when_busy: WhenBusy, count: int) -> tuple[list[str], list[float]]:
    """Return how the saves end, and how long the calls take."""
    checkpointer = Checkpointer(root, _config(when_busy))
    checkpointer.save(1, replicas(1)).result(30)
    checkpointer.watch_signals()
    worker = checkpointer._engine.worker
    assert worker is not None
    dist.barrier()  # both ranks know that the first save is committed
    if dist.get_rank() == 0:
        stop(worker.pid)
    dist.barrier()
    if dist.get_rank() == 0:
        dist.barrier()  # the other rank has made its calls
        os.kill(worker.pid, signal.SIGCONT)
    took, saves = [], []
    for step in range(2, 2 + count):
        begun = time.monotonic()
        saves.append(checkpointer.save(step, replicas(step)))
        took.append(time.monotonic() - begun)
    begun = time.monotonic()
    checkpointer.terminating()
    took.append(time.monotonic() - begun)
    if dist.get_rank() == 1:
        dist.barrier()
    ends = [_end(save) for save in saves]
    dist.barrier()
    checkpointer.save(9, replicas(9)).result(30)
    checkpointer.close()
    return ends, took


@pytest.mark.parametrize(("when_busy", "count"), [("wait", 3), ("skip", 1)])
def test_a_stopped_first_worker_holds_up_no_other_rank(tmp_path: Path, when_busy: str, count: int) -> None:
    """Two saves have slots, and commit when the worker continues. A save without a slot fails on all ranks."""
    root = str(tmp_path / "root")
    first, second = run(2, _save_while_it_is_stopped, root, when_busy, count, folder=tmp_path)
    assert max(second[1]) < LONG_S / 3, second
    if when_busy == "wait":
        assert first[0] == second[0] == ["saved", "saved", "SaveTimeoutError"]
    else:
        assert second[0] == ["SaveTimeoutError"] and first[0] != ["saved"]


def _lose_its_own_too(root: str) -> float:
    """Return how long a save call takes on a rank without a worker while the first rank's worker is stopped."""
    checkpointer = Checkpointer(root, _config())
    checkpointer.save(1, replicas(1)).result(30)
    worker = checkpointer._engine.worker
    assert worker is not None
    dist.barrier()  # both ranks know that the first save is committed
    if dist.get_rank() == 0:
        stop(worker.pid)
    dist.barrier()
    took = 0.0
    if dist.get_rank() == 1:
        checkpointer.save(2, replicas(2))
        os.kill(worker.pid, signal.SIGKILL)
        worker.wait_for_end(0.0)
        begun = time.monotonic()
        checkpointer.save(3, replicas(3))
        took = time.monotonic() - begun
    dist.barrier()
    if dist.get_rank() == 0:
        os.kill(worker.pid, signal.SIGKILL)
    checkpointer._engine.abort()
    return took


def test_nor_one_whose_own_worker_dies_meanwhile(tmp_path: Path) -> None:
    assert max(run(2, _lose_its_own_too, str(tmp_path / "root"), folder=tmp_path)) < LONG_S / 3


def _die_after_it(root: str) -> None:
    """The first rank's worker dies, the other rank stages two more saves, then all trainers die."""
    checkpointer = Checkpointer(root, _config())
    checkpointer.save(1, replicas(1)).result(30)
    worker = checkpointer._engine.worker
    assert worker is not None
    dist.barrier()  # both ranks know that the first save is committed
    if dist.get_rank() == 0:
        os.kill(worker.pid, signal.SIGKILL)
        worker.wait_for_end(10)
    dist.barrier()
    if dist.get_rank() == 1:
        for step in (2, 3):
            checkpointer.save(step, replicas(step))
        say(worker.pid)
    os.kill(os.getpid(), signal.SIGKILL)


def test_what_is_left_of_the_job_leaves_soon(tmp_path: Path) -> None:
    """The other rank's worker holds saves that no worker will commit, and the restarted job waits for this worker."""
    root = str(tmp_path / "root")
    job = Job(2, _die_after_it, root, folder=tmp_path)
    orphan = job.hear(1)
    assert all(end.killed for end in job.wait())
    begun = time.monotonic()
    assert run(2, _go_on, root, folder=tmp_path) == [[1, 2]] * 2
    assert time.monotonic() - begun < LONG_S / 2
    assert not is_running(orphan)


def _go_on(root: str) -> list[int]:
    with Checkpointer(root, _config()) as checkpointer:
        into = replicas(9)
        assert checkpointer.load(into) == 1 and equal(into, replicas(1))
        checkpointer.save(2, replicas(2)).result(30)
        return checkpointer.steps()


def _replace_it(root: str) -> tuple[list[str], float]:
    """Kill the first rank's worker with two pending saves. Another worker starts in the next save."""
    real = worker_process.command
    if dist.get_rank() == 0:
        faulty("write:hold:7")  # the first save works
    checkpointer = Checkpointer(root, _config())
    checkpointer.save(1, replicas(1)).result(30)
    worker_process.command = real
    saves = [checkpointer.save(step, replicas(step)) for step in (2, 3)]
    dist.barrier()
    begun = time.monotonic()
    if dist.get_rank() == 0:
        worker = checkpointer._engine.worker
        assert worker is not None
        os.kill(worker.pid, signal.SIGKILL)
    ends = [_end(saves[0])]  # now a slot is free
    ends += [_end(checkpointer.save(4, replicas(4))), _end(saves[1])]
    took = time.monotonic() - begun
    dist.barrier()  # the first rank's worker stays until then
    checkpointer.close()
    return ends, took


def test_another_in_its_place_says_how_saves_ended(tmp_path: Path) -> None:
    """The new worker reports the saves that it does not know as failed, without a wait for their timeout."""
    gate, root = str(tmp_path / "gate"), str(tmp_path / "root")
    for ends, took in run(2, gated, _replace_it, gate, root, folder=tmp_path):
        assert ends[:2] == ["WorkerDiedError", "saved"]
        # RankFailedError: the new worker has removed the files of the save while this rank still wrote them.
        assert ends[2] in ("WorkerDiedError", "RankFailedError")
        assert took < LONG_S / 2
