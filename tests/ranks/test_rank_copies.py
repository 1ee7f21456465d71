"""Copies on other hosts: a lost host takes no replicated save along."""

from __future__ import annotations

import os
import shutil
import signal
from pathlib import Path

import psutil
import pytest
import torch.distributed as dist
from support.hosts import enter_host, host_folder
from support.ranks import Job, faulty, run, say
from support.states import equal, replicas

from asyncckpt import Checkpointer
from asyncckpt.config import Config
from asyncckpt.errors import CheckpointError, OutOfMemoryError, UnsavableStateError

pytestmark = pytest.mark.usefixtures("forkserver")

TWO_BY_TWO = [0, 0, 1, 1]


def lose(folder: Path, host: int, workers: list[int], places: list[int]) -> None:
    """Simulate the loss of a host: kill its workers, and remove its folder."""
    for worker, place in zip(workers, places, strict=True):
        if place == host:
            psutil.Process(worker).kill()
    shutil.rmtree(host_folder(folder, host))


def _save(folder: str, places: list[int], steps: int) -> None:
    """Save and replicate some steps, and die."""
    enter_host(folder, places[dist.get_rank()])
    checkpointer = Checkpointer(f"{folder}/root", Config(replicas=1, timeout=30))
    for step in range(1, steps + 1):
        save = checkpointer.save(step, replicas(step))
        save.wait_replicated(30)
        assert save.replicated()
        save.result(30)
    assert checkpointer._engine.worker is not None
    say(checkpointer._engine.worker.pid)
    dist.barrier()
    os.kill(os.getpid(), signal.SIGKILL)


def _load(folder: str, places: list[int]) -> tuple[int, str, bool, set[str]]:
    enter_host(folder, places[dist.get_rank()])
    with Checkpointer(f"{folder}/root", Config(timeout=5)) as checkpointer:
        into = replicas(99)
        step = checkpointer.load(into)
        assert checkpointer.loaded is not None
        return step, checkpointer.loaded.source, equal(into, replicas(step)), {*checkpointer.loaded.nbytes_from}


@pytest.mark.parametrize("then", [[2, 2, 0, 0], [0, 0], [0, 2, 2]], ids=["a spare host", "fewer", "another order"])
def test_what_was_on_a_lost_host_is_read_from_the_next(hosts: Path, then: list[int]) -> None:
    job = Job(4, _save, str(hosts), TWO_BY_TWO, 3, folder=hosts)
    workers = [job.hear(rank) for rank in range(4)]
    job.wait()
    lose(hosts, 1, workers, TWO_BY_TWO)
    found = run(len(then), _load, str(hosts), then, folder=hosts)
    assert [each[:3] for each in found] == [(3, "memory", True)] * len(then)
    for host, each in zip(then, found, strict=True):
        assert each[3] == ({"memory"} if host == 0 else {"peer"})


def _prepare_and_die(folder: str, places: list[int]) -> None:
    enter_host(folder, places[dist.get_rank()])
    checkpointer = Checkpointer(f"{folder}/root", Config(replicas=1, timeout=30))
    into = replicas(99)
    assert checkpointer.load(into) == 3 and equal(into, replicas(3))
    checkpointer.prepare(into)
    assert checkpointer._engine.worker is not None
    say(checkpointer._engine.worker.pid)
    dist.barrier()
    os.kill(os.getpid(), signal.SIGKILL)


def test_copies_outlive_the_worker_that_made_them(hosts: Path) -> None:
    """A restarted job takes over the copies. They survive the loss of a host before the job's first save."""
    places = [0, 1]
    Job(2, _save, str(hosts), places, 3, folder=hosts).wait()
    job = Job(2, _prepare_and_die, str(hosts), places, folder=hosts)
    workers = [job.hear(rank) for rank in range(2)]
    job.wait()
    lose(hosts, 1, workers, places)
    found = run(2, _load, str(hosts), [0, 2], folder=hosts)
    assert [each[:3] for each in found] == [(3, "memory", True)] * 2
    assert found[0][3] == {"memory"} and found[1][3] == {"peer"}


def _go_on_and_die(folder: str, places: list[int], steps: int) -> None:
    """Load the newest step if there is one, save more steps, and die. Nothing is written from the second save on."""
    os.environ["ASYNCCKPT_TEST_GATE"] = f"{folder}/gate"
    faulty("create:hold:2")
    enter_host(folder, places[dist.get_rank()])
    checkpointer = Checkpointer(f"{folder}/root", Config(replicas=1, timeout=30))
    into = replicas(99)
    first = checkpointer.load(into) + 1 if checkpointer.latest() is not None else 1
    for step in range(first, first + steps):
        save = checkpointer.save(step, replicas(step))
        save.wait_replicated(30)
    assert checkpointer._engine.worker is not None
    say(checkpointer._engine.worker.pid)
    dist.barrier()
    os.kill(os.getpid(), signal.SIGKILL)


def test_one_host_after_the_other_is_lost_while_storage_stands_still(hosts: Path) -> None:
    places = [0, 1]
    for lost, spare in ((1, 2), (0, 3)):
        job = Job(2, _go_on_and_die, str(hosts), places, 2, folder=hosts)
        workers = [job.hear(rank) for rank in range(2)]
        job.wait()
        lose(hosts, lost, workers, places)
        places = [spare if host == lost else host for host in places]
        (hosts / "gate").touch()
        (hosts / "gate").rename(hosts / "gate-before")
    found = run(2, _load_step, str(hosts), places, folder=hosts)
    assert found == [(4, "memory", True)] * 2


def _load_step(folder: str, places: list[int]) -> tuple[int, str, bool]:
    enter_host(folder, places[dist.get_rank()])
    with Checkpointer(f"{folder}/root", Config(timeout=5)) as checkpointer:
        into = replicas(99)
        step = checkpointer.load(into)
        assert checkpointer.loaded is not None
        return step, checkpointer.loaded.source, equal(into, replicas(step))


def _poor(folder: str, places: list[int]) -> str:
    """The second host has no memory for copies."""
    enter_host(folder, places[dist.get_rank()])
    if dist.get_rank() == 1:
        faulty("start:poor")
    try:
        with Checkpointer(f"{folder}/root", Config(replicas=1, timeout=30, slots=2)) as checkpointer:
            checkpointer.prepare(replicas(1))
    except OutOfMemoryError as error:
        return str(error)
    return ""


def test_too_little_memory_is_refused_before_anything_is_saved(hosts: Path) -> None:
    found = run(2, _poor, str(hosts), [0, 1], folder=hosts)
    assert all("rank 1" in each for each in found)


def _prepare(folder: str, places: list[int], replicas_: int, domain: bool) -> str:
    enter_host(folder, places[dist.get_rank()])
    config = Config(replicas=replicas_, timeout=30, domain="rack" if domain else None)
    try:
        with Checkpointer(f"{folder}/root", config) as checkpointer:
            checkpointer.prepare(replicas(1))
    except CheckpointError as error:
        assert isinstance(error, (UnsavableStateError, OutOfMemoryError))
        return str(error)
    return ""


def test_too_few_hosts_are_refused_before_anything_is_saved(hosts: Path) -> None:
    for replicas_, domain, wanted in ((2, False, "are on 2"), (1, True, "are on 1")):
        found = run(2, _prepare, str(hosts), [0, 1], replicas_, domain, folder=hosts)
        assert all(wanted in each for each in found)
    assert run(2, _prepare, str(hosts), [0, 1], 1, False, folder=hosts) == ["", ""]
