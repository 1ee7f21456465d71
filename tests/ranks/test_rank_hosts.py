"""Jobs that are started again on other hosts, in another order, with more ranks or fewer: they find what is held."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import psutil
import pytest
import torch.distributed as dist
from support.hosts import enter_host
from support.ranks import Job, run, say
from support.states import equal, replicas

from asyncckpt.checkpointer import Checkpointer
from asyncckpt.config import Config
from asyncckpt.worker.storage import complete_steps

pytestmark = pytest.mark.usefixtures("forkserver")


def _die(folder: str, places: list[int], steps: int) -> None:
    """Save some steps, on the hosts that are named, and die."""
    enter_host(folder, places[dist.get_rank()])
    checkpointer = Checkpointer(f"{folder}/root")
    for step in range(1, steps + 1):
        save = checkpointer.save(step, replicas(step))
        if step < steps:
            save.result(30)
        else:
            save.wait_staged(30)
    say(checkpointer._engine.worker.pid if checkpointer._engine.worker else 0)
    dist.barrier()
    os.kill(os.getpid(), signal.SIGKILL)


def _load(folder: str, places: list[int]) -> tuple[int, str, bool, dict[str, int]]:
    enter_host(folder, places[dist.get_rank()])
    with Checkpointer(f"{folder}/root", Config(timeout=5)) as checkpointer:
        into = replicas(99)
        assert checkpointer.latest() == 2
        step = checkpointer.load(into)
        loaded = checkpointer.loaded
        assert loaded is not None and sum(loaded.nbytes_from.values()) == (
            loaded.nbytes if loaded.source == "memory" else 0
        )
        return step, loaded.source, equal(into, replicas(step)), {**loaded.nbytes_from}


@pytest.mark.parametrize(
    "then",
    [[0, 1], [1, 0], [1, 0, 2], [1, 0, 1, 0, 2], [0, 2, 1]],
    ids=["as before", "swapped", "a spare host", "more", "among"],
)
def test_memory_of_other_hosts_is_found(hosts: Path, then: list[int]) -> None:
    Job(2, _die, str(hosts), [0, 1], 2, folder=hosts).wait()
    found = run(len(then), _load, str(hosts), then, folder=hosts)
    assert [each[:3] for each in found] == [(2, "memory", True)] * len(then)
    for host, (*_, nbytes_from) in zip(then, found, strict=True):
        # The states are replicas, spread over both: each has to read of the other host's memory.
        assert ("memory" in nbytes_from) == (host < 2) and nbytes_from["peer"] > 0


def test_what_is_on_no_host_any_more_comes_from_storage(hosts: Path) -> None:
    job = Job(2, _die, str(hosts), [0, 1], 2, folder=hosts)
    workers = [job.hear(rank) for rank in range(2)]
    job.wait()
    while complete_steps(str(hosts / "root")) != [1, 2]:
        pass
    psutil.Process(workers[1]).kill()
    found = run(2, _load, str(hosts), [0, 2], folder=hosts)
    assert [each[:3] for each in found] == [(2, "memory", True)] * 2
    assert found[0][3].keys() == {"memory", "storage"} and found[1][3].keys() == {"peer", "storage"}


def test_a_worker_that_is_stopped_is_not_waited_for(hosts: Path) -> None:
    job = Job(2, _die, str(hosts), [0, 1], 2, folder=hosts)
    workers = [job.hear(rank) for rank in range(2)]
    job.wait()
    while complete_steps(str(hosts / "root")) != [1, 2]:
        pass
    os.kill(workers[1], signal.SIGSTOP)
    try:
        found = run(2, _load, str(hosts), [0, 1], folder=hosts)
    finally:
        os.kill(workers[1], signal.SIGCONT)
    assert [each[0:3:2] for each in found] == [(2, True)] * 2
