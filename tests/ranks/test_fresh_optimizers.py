"""Each rank's new optimizer gets its part of the stored state, with another number of ranks, too."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from support.ranks import QUICK, run
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from asyncckpt import Checkpointer

pytestmark = pytest.mark.usefixtures("forkserver")


def _training() -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(5, 7), torch.nn.Linear(7, 3))
    fully_shard(model, mesh=init_device_mesh("cpu", (dist.get_world_size(),)))
    return model, torch.optim.AdamW(model.parameters(), lr=0.1)


def _full(optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    moments = [value for state in optimizer.state.values() for value in state.values()]
    return [value.full_tensor() if isinstance(value, DTensor) else value for value in moments]


def _save(root: str) -> list[torch.Tensor]:
    model, optimizer = _training()
    for step in range(3):
        model(torch.full((2, 5), float(step + 1))).square().sum().backward()
        optimizer.step()
    with Checkpointer(root, QUICK) as checkpointer:
        checkpointer.save(1, {"model": model, "optimizer": optimizer}).result(30)
    return _full(optimizer)


def _load(root: str, memory: bool) -> list[torch.Tensor]:
    model, optimizer = _training()
    with Checkpointer(root, QUICK) as checkpointer:
        checkpointer.load({"model": model, "optimizer": optimizer}, memory=memory)
    assert all(isinstance(state["exp_avg"], DTensor) for state in optimizer.state.values())
    return _full(optimizer)


@pytest.mark.parametrize("ranks", [2, 3])
def test_moments_are_resharded(ranks: int, tmp_path: Path) -> None:
    root = str(tmp_path / "root")
    saved = run(2, _save, root, folder=tmp_path)[0]
    for loaded in run(ranks, _load, root, False, folder=tmp_path):
        assert len(loaded) == 12 and all(map(torch.equal, loaded, saved))
