"""Each rank has its own files for tensors that are likely to stay the same, and each checkpoint is complete."""

from __future__ import annotations

import os
import shutil
import signal
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from support.checkpoints import step_folder, verify
from support.plans import counting_plans
from support.ranks import CONSTANT, QUICK, Job, run
from support.states import same, stock_load, zeros_like
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Shard

from asyncckpt import Checkpointer
from asyncckpt.config import Config

pytestmark = pytest.mark.usefixtures("forkserver")

_SAVES = 8
_ELEMENTS = 1 << 18  # one MiB
_LATE = 6  # the step in which the second rank changes its part of the base


_NAMED = replace(QUICK, assume_unchanged=("base", "expert.0"))


def _state(step: int) -> dict[str, Any]:
    """Return a base with a part on each rank, replicas of an adapter, and experts.

    The second rank trains its own expert.
    """
    rank, ranks = dist.get_rank(), dist.get_world_size()
    mesh = init_device_mesh("cpu", (ranks,))
    base = torch.arange(float(_ELEMENTS)) * (rank + 1)
    if step >= _LATE and rank == 1:
        base += 1
    sharded = DTensor.from_local(base, mesh, [Shard(0)], run_check=False)
    expert = torch.full((_ELEMENTS,), float(rank + (step if rank == 1 else 0)))
    return {"base": sharded, "adapter": torch.full((100,), float(step)), f"expert.{rank}": expert, "step": step}


def _local(state: dict[str, Any]) -> dict[str, Any]:
    return {name: value.to_local() if isinstance(value, DTensor) else value for name, value in state.items()}


def _train(root: str, config: Config, begin: int, end: int) -> tuple[list[float], list[bool]]:
    """Save some steps.

    Return for each step the MiB that this rank shares with no other step, and whether the save made a plan.
    """
    planned = []
    with Checkpointer(root, config) as checkpointer:
        if begin > 1:
            checkpointer.load(zeros_like(_state(0)), memory=False)
        for step in range(begin, end):
            with counting_plans() as counted:
                checkpointer.save(step, _state(step)).result(60)
            planned.append(counted.called)
            dist.barrier()  # otherwise one rank may not have the result yet
    return [_written(step_folder(root, step)) for step in range(begin, end)], planned


def _written(path: str) -> float:
    files = [each.stat() for each in Path(path).glob(f"__{dist.get_rank()}_*.distcp")]
    return round(sum(facts.st_size for facts in files if facts.st_nlink == 1) / 4 / _ELEMENTS, 1)


def _check(root: str, step: int) -> None:
    assert verify(step_folder(root, step)).damages == []
    stock_load(loaded := zeros_like(_state(step)), step_folder(root, step))
    assert same(_local(loaded), _local(_state(step)))


def test_each_rank_has_its_own(tmp_path: Path) -> None:
    root = str(tmp_path / "root")
    (first, planned), (second, also_planned) = run(2, _train, root, _NAMED, 1, _SAVES + 1, folder=tmp_path)
    assert planned == also_planned == [True] + [False] * (_SAVES - 1)
    # The first rank's base and expert never change. On the second rank only the base stays the same, until step 6.
    assert first == [0] * _SAVES
    assert second == [*[1] * (_LATE - 1), 2, 1, 1]
    _check_each(root, tmp_path)


class _Adapted(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.base, self.adapter = torch.nn.Linear(1024, 512), torch.nn.Linear(1024, 2)


def _frozen(root: str, constant: bool) -> list[tuple[float, bool]]:
    model = _Adapted()
    fully_shard(model, mesh=init_device_mesh("cpu", (2,)))
    found = []
    with Checkpointer(root, CONSTANT if constant else QUICK) as checkpointer:
        for step in range(1, 6):
            # In step 4 the ranks have different parameters frozen. A wrong hint does no harm.
            model.base.requires_grad_(step == 5 or (step == 4 and dist.get_rank() == 1))
            with torch.no_grad():
                for parameter in model.parameters():
                    if parameter.requires_grad:
                        parameter.add_(step)
            with counting_plans() as counted:
                checkpointer.save(step, {"model": model}).result(60)
            found.append((_written(step_folder(root, step)), counted.called))
            assert not verify(step_folder(root, step)).damages
            checkpointer.load(loaded := {"model": zeros_like(model.state_dict())}, step, memory=False)
            assert same(_local(loaded["model"]), _local(model.state_dict()))
            dist.barrier()
    return found


@pytest.mark.parametrize("constant", [False, True])
def test_frozen_shards_need_no_configuration(tmp_path: Path, constant: bool) -> None:
    root = str(tmp_path / "root")
    first, second = run(2, _frozen, root, constant, folder=tmp_path)
    assert [planned for _, planned in first] == [True, False, False, not constant, not constant]
    assert [planned for _, planned in first] == [planned for _, planned in second]
    # Each rank has one MiB of the base.
    assert [size for size, _ in first[1:3]] == [size for size, _ in second[1:3]] == [0, 0]
    assert second[3][0] == second[4][0] == 1


def _check_each(root: str, folder: Path) -> None:
    for step in range(1, _SAVES + 1):
        run(2, _check, root, step, folder=folder)
    for step in range(1, _SAVES):
        shutil.rmtree(step_folder(root, step))
    run(2, _check, root, _SAVES, folder=folder)


def test_a_restarted_job_goes_on_with_its_plan(tmp_path: Path) -> None:
    root = str(tmp_path / "root")
    run(2, _train, root, _NAMED, 1, 4, folder=tmp_path)
    (first, planned), (second, _) = run(2, _train, root, _NAMED, 4, 7, folder=tmp_path)
    assert planned == [False, False, False]
    # The base is written once more, then linked until it changes.
    assert first == [0, 0, 0] and second == [1, 1, 2]
    run(2, _check, root, 6, folder=tmp_path)


def _uneven(step: int) -> dict[str, Any]:
    """Return a state with much unchanged data on the first rank, and none on the second."""
    rank = dist.get_rank()
    return {
        f"expert.{rank}": torch.full((_ELEMENTS,), float(step * rank)),
        f"own.{rank}": torch.full((9,), float(step)),
    }


def _save_and_die(root: str) -> None:
    checkpointer = Checkpointer(root, replace(QUICK, assume_unchanged=("expert.0",)))
    for step in (1, 2, 3):
        checkpointer.save(step, _uneven(step)).result(60)
        dist.barrier()
    os.kill(os.getpid(), signal.SIGKILL)


def _load(root: str) -> tuple[int, str]:
    with Checkpointer(root, QUICK) as checkpointer:
        found = checkpointer.load(loaded := zeros_like(_uneven(0)))
        assert same(loaded, _uneven(3)) and checkpointer.loaded is not None
        return found, checkpointer.loaded.source


def test_ranks_with_different_files_are_loaded_from_memory(tmp_path: Path) -> None:
    root = str(tmp_path / "root")
    Job(2, _save_and_die, root, folder=tmp_path).wait()
    names = {each.name for each in Path(step_folder(root, 3)).glob("*.distcp")}
    assert names == {"__0_0.distcp", "__0_1.distcp", "__1_0.distcp"}
    assert run(2, _load, root, folder=tmp_path) == [(3, "memory")] * 2
