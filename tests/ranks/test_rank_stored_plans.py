"""A job that resumes from a checkpoint with the same structure makes no plan."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from support.checkpoints import verify
from support.plans import counting_plans
from support.ranks import QUICK, Job, run
from support.states import equal, replicas, stock_load
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard

from asyncckpt import Checkpointer, PerRank
from asyncckpt.extension import StorageSource
from asyncckpt.format.storage_meta import without_storage_meta

pytestmark = pytest.mark.usefixtures("forkserver")


def _state(seed: int, odd: bool = False) -> dict[str, Any]:
    """Return sharded tensors, replicas, and a value of this rank alone.

    ``odd``: return another structure.
    """
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    whole = torch.arange(7.0 * 3).view(7, 3) + seed
    parts = [whole.chunk(dist.get_world_size())[dist.get_rank()]] if dist.get_rank() < 7 else [whole[:0]]
    sharded = DTensor.from_local(parts[0], mesh, [Shard(0)], run_check=False, shape=whole.shape, stride=(3, 1))
    alike = DTensor.from_local(whole.clone(), mesh, [Replicate()], run_check=False)
    own = torch.full((5 if odd else 4,), float(dist.get_rank() + seed))
    return {**replicas(seed), "sharded": sharded, "alike": alike, "rng": PerRank(own)}


def _whole(state: dict[str, Any], seed: int) -> bool:
    whole = torch.arange(7.0 * 3).view(7, 3) + seed
    sharded = state["sharded"].to_local().equal(whole.chunk(dist.get_world_size())[dist.get_rank()])
    own = state["rng"].value.tolist() == [float(dist.get_rank() + seed)] * len(state["rng"].value)
    return bool(equal(state, replicas(seed)) and sharded and own and state["alike"].to_local().equal(whole))


def _go_on(root: str, memory: bool = True, odd_rank: int | None = None, dies: bool = False) -> tuple[bool, int]:
    """Load the newest step if there is one, and save the next.

    Return whether the save made a plan, and the loaded step.
    """
    checkpointer = Checkpointer(root, QUICK)
    odd = dist.get_rank() == odd_rank
    step = checkpointer.load(_state(99), memory=memory) if checkpointer.latest() is not None else 0
    with counting_plans() as planned:
        checkpointer.save(step + 1, _state(step + 1, odd)).result(60)
    if dies:
        dist.barrier()
        os.kill(os.getpid(), signal.SIGKILL)
    into = _state(98, odd)
    assert checkpointer.load(into, step + 1, memory=False) == step + 1 and _whole(into, step + 1)
    checkpointer.close()
    return planned.called, step


def _check(root: Path, step: int, like: int) -> None:
    """Check that ``step`` is undamaged, and that its metadata of tensors equals that of ``like``."""
    assert verify(str(root / f"step-{step:08d}")).damages == []
    metadata = [StorageSource(str(root / f"step-{each:08d}")).metadata() for each in (step, like)]
    assert without_storage_meta(metadata[0]) == without_storage_meta(metadata[1]) != metadata[0]


def _stock(root: str, step: int) -> bool:
    into = {name: value for name, value in _state(97).items() if name != "rng"}
    stock_load(into, f"{root}/step-{step:08d}")
    return equal(into, replicas(step)) and bool(into["sharded"].to_local().equal(_state(step)["sharded"].to_local()))


def test_a_restarted_job_plans_nothing(tmp_path: Path) -> None:
    root = tmp_path / "root"
    assert run(3, _go_on, str(root), False, folder=tmp_path) == [(True, 0)] * 3
    assert run(3, _go_on, str(root), False, folder=tmp_path) == [(False, 1)] * 3
    # A job that resumes from a step that was saved without planning makes no plan either.
    assert run(3, _go_on, str(root), False, folder=tmp_path) == [(False, 2)] * 3
    for step in (2, 3):
        _check(root, step, 1)
        assert all(run(3, _stock, str(root), step, folder=tmp_path))


def test_nor_does_one_that_loads_from_memory(tmp_path: Path) -> None:
    root = tmp_path / "root"
    Job(2, _go_on, str(root), True, None, True, folder=tmp_path).wait()
    assert run(2, _go_on, str(root), folder=tmp_path) == [(False, 1)] * 2
    _check(root, 2, 1)


@pytest.mark.parametrize("rank", [0, 1])
def test_where_one_rank_differs_all_plan(tmp_path: Path, rank: int) -> None:
    root = str(tmp_path / "root")
    run(2, _go_on, root, False, folder=tmp_path)
    assert run(2, _go_on, root, False, rank, folder=tmp_path) == [(True, 1)] * 2


def _save_replicas(root: str, step: int) -> bool:
    with Checkpointer(root, QUICK) as checkpointer, counting_plans() as planned:
        if step > 1:
            checkpointer.load(replicas(99), memory=False)
        checkpointer.save(step, replicas(step)).result(60)
    return planned.called


@pytest.mark.parametrize("then", [2, 4])
def test_another_number_of_ranks_plans_although_each_has_the_same(tmp_path: Path, then: int) -> None:
    """Each rank has the same state, but the ranks divide the writes in another way."""
    root = str(tmp_path / "root")
    run(3, _save_replicas, root, 1, folder=tmp_path)
    assert all(run(then, _save_replicas, root, 2, folder=tmp_path))
    into = replicas(99)
    stock_load(into, f"{root}/step-00000002")
    assert equal(into, replicas(2))
