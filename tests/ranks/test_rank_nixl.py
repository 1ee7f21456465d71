"""Copies on other hosts, and loads from them, through NIXL."""

from __future__ import annotations

import importlib.util
import os
import signal
from pathlib import Path

import pytest
import torch.distributed as dist
from support.hosts import enter_host
from support.ranks import Job, run, say
from support.states import equal, replicas

from asyncckpt import Checkpointer
from asyncckpt.config import Config
from asyncckpt.transfer.nixl_process import MODULES

pytestmark = [
    pytest.mark.usefixtures("forkserver"),
    pytest.mark.skipif(
        not any(map(importlib.util.find_spec, MODULES)), reason="NIXL is not installed: pip install 'asyncckpt[nixl]'"
    ),
]


def _enter(folder: str, host: int) -> None:
    enter_host(folder, host)
    os.environ["UCX_TLS"] = "tcp,self"  # as between hosts


def _save(folder: str) -> None:
    """Copy the images of each of two hosts to the other host, then kill all ranks."""
    _enter(folder, dist.get_rank())
    checkpointer = Checkpointer(f"{folder}/root", Config(replicas=1, timeout=30, transport="nixl"))
    for step in (1, 2, 3):
        save = checkpointer.save(step, replicas(step))
        save.wait_replicated(30)
        assert save.replicated()
        save.result(30)
    assert checkpointer._engine.worker is not None
    say(checkpointer._engine.worker.pid)
    dist.barrier()
    os.kill(os.getpid(), signal.SIGKILL)


def _load(folder: str, places: list[int]) -> tuple[int, str, bool, set[str]]:
    _enter(folder, places[dist.get_rank()])
    with Checkpointer(f"{folder}/root", Config(timeout=5, transport="nixl")) as checkpointer:
        into = replicas(99)
        step = checkpointer.load(into)
        assert checkpointer.loaded is not None
        return step, checkpointer.loaded.source, equal(into, replicas(step)), {*checkpointer.loaded.nbytes_from}


def test_what_was_on_a_lost_host_is_read_from_its_copies(hosts: Path) -> None:
    job = Job(2, _save, str(hosts), folder=hosts)
    workers = [job.hear(rank) for rank in range(2)]
    job.wait()
    os.kill(workers[1], signal.SIGKILL)
    found = run(2, _load, str(hosts), [2, 0], folder=hosts)
    assert found == [(3, "memory", True, {"peer"}), (3, "memory", True, {"memory"})]
