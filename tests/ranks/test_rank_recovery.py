"""Jobs of many ranks that die, and are restarted."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from support.checkpoints import complete_steps
from support.ranks import Job, run, say
from support.states import equal, replicas

from asyncckpt import Checkpointer
from asyncckpt.config import Config
from asyncckpt.link import takeover as takeover

pytestmark = pytest.mark.usefixtures("forkserver")


def _state(step: int) -> dict[str, Any]:
    """Return replicas, which are spread over the ranks, and a value of this rank alone."""
    rank = dist.get_rank()
    return {**replicas(step), f"rng of {rank}": torch.full((1000,), float(100 * rank + step)), "step": step}


def _die(root: str, steps: int, unstaged: int | None) -> None:
    """Save some steps, and die. The rank ``unstaged`` dies in the copy of the last step."""
    from asyncckpt.staging import slot_copy as staging

    checkpointer = Checkpointer(root, Config(slots=2))
    for step in range(1, steps + 1):
        state = _state(step)
        dist.barrier()
        if step == steps and dist.get_rank() == unstaged:
            staging.SlotStager.copy = lambda *_, **__: os.kill(os.getpid(), signal.SIGKILL)  # type: ignore[method-assign]
        save = checkpointer.save(step, state)
        if step < steps:
            save.result(30)
    say("staged")
    os.kill(os.getpid(), signal.SIGKILL)


def _load(root: str, memory: bool = True) -> tuple[int, str, bool]:
    with Checkpointer(root, Config(timeout=30)) as checkpointer:
        into = _state(99)
        step = checkpointer.load(into, memory=memory)
        assert checkpointer.loaded is not None
        return step, checkpointer.loaded.source, equal(into, _state(step))


def test_all_ranks_load_from_memory(tmp_path: Path) -> None:
    root = str(tmp_path / "root")
    Job(3, _die, root, 2, None, folder=tmp_path).wait()
    for _ in range(2):  # the first job loads, and does not take the images over
        assert run(3, _load, root, folder=tmp_path) == [(2, "memory", True)] * 3
    assert run(3, _load, root, False, folder=tmp_path) == [(2, "storage", True)] * 3


def test_what_one_rank_has_not_staged_is_of_no_rank(tmp_path: Path) -> None:
    root = str(tmp_path / "root")
    Job(2, _die, root, 3, 1, folder=tmp_path).wait()
    assert run(2, _load, root, folder=tmp_path) == [(2, "memory", True)] * 2
    assert complete_steps(root) == [1, 2]


@pytest.mark.parametrize("ranks", [1, 3])
def test_with_more_ranks_or_fewer_it_comes_from_memory_too(tmp_path: Path, ranks: int) -> None:
    root = str(tmp_path / "root")
    Job(2, _die, root, 2, None, folder=tmp_path).wait()
    results = run(ranks, _load_some, root, folder=tmp_path)
    assert results == [(2, "memory", True)] * ranks


def _load_some(root: str, lost: bool = False) -> tuple[int, str, bool]:
    with Checkpointer(root, Config(timeout=30)) as checkpointer:
        into = replicas(99)
        step = checkpointer.load(into)
        assert checkpointer.loaded is not None
        assert ("storage" in checkpointer.loaded.nbytes_from) == lost
        return step, checkpointer.loaded.source, equal(into, replicas(step))


def test_what_one_has_lost_of_its_memory_comes_from_storage(tmp_path: Path) -> None:
    root = str(tmp_path / "root")
    Job(2, _die, root, 2, None, folder=tmp_path).wait()
    from asyncckpt.link.endpoint import endpoint_name

    found = takeover.Takeover.find(endpoint_name(f"{os.path.realpath(root)}\n", 1), 30)
    assert found is not None
    found.retire(30)
    found.close()
    assert run(2, _load_some, root, True, folder=tmp_path) == [(2, "memory", True)] * 2


def _go_on(root: str, until: int) -> list[int]:
    with Checkpointer(root, Config(timeout=30)) as checkpointer:
        into = _state(99)
        first = checkpointer.load(into) + 1
        for step in range(first, until):
            checkpointer.save(step, _state(step)).result(30)
        return checkpointer.steps()


def test_they_go_on_in_the_same_memory(tmp_path: Path) -> None:
    root = str(tmp_path / "root")
    Job(2, _die, root, 2, None, folder=tmp_path).wait()
    assert run(2, _go_on, root, 5, folder=tmp_path) == [[1, 2, 3, 4]] * 2
    assert run(2, _load, root, folder=tmp_path) == [(4, "storage", True)] * 2
