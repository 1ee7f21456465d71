"""States that many ranks save together, and stock DCP's loads of them."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from support.checkpoints import read_manifest, verify
from support.ranks import QUICK, fsdp2_on_cpu, run
from support.states import equal, replicas, stock_load
from torch.distributed.checkpoint import default_planner
from torch.distributed.checkpoint._dedup_save_plans import dedup_save_plans
from torch.distributed.checkpoint.planner import SavePlan
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict
from torch.distributed.checkpoint.state_dict_saver import save as stock_save
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from asyncckpt import Checkpointer
from asyncckpt.engine import shared as engines
from asyncckpt.errors import CheckpointError, MismatchError
from asyncckpt.extension import Engine, StorageSource
from asyncckpt.integrations import dcp
from asyncckpt.loading import load as reader

pytestmark = pytest.mark.usefixtures("forkserver")


class Net(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = torch.nn.ModuleList([torch.nn.Linear(24, 24) for _ in range(3)])
        self.odd = torch.nn.Parameter(torch.randn(7, 3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x).relu()
        return x * self.odd.sum()


def _fsdp(seed: int) -> dict[str, Any]:
    torch.manual_seed(seed)
    model = Net()
    if dist.get_world_size() > 1:
        mesh = init_device_mesh("cpu", (dist.get_world_size(),))
        for layer in model.layers:
            fully_shard(layer, mesh=mesh)
        fully_shard(model, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    model(torch.randn(4, 24)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    return {"model": model.state_dict(), "optimizer": get_optimizer_state_dict(model, optimizer), "step": seed}


def _whole(state: Any) -> Any:
    """Return ``state`` with gathered, whole tensors."""
    if isinstance(state, dict):
        return {key: _whole(value) for key, value in state.items()}
    if isinstance(state, list):
        return [_whole(value) for value in state]
    if isinstance(state, DTensor):
        return state.full_tensor()
    return state.clone() if isinstance(state, torch.Tensor) else state


def _save_fsdp(root: str, seed: int) -> Any:
    state = _fsdp(seed)
    with Checkpointer(root, QUICK) as checkpointer:
        checkpointer.save(1, _fsdp(seed + 100))
        checkpointer.save(seed, state).result(60)
    return _whole(state)


def _load_fsdp(root: str, seed: int, with_stock: bool) -> Any:
    state = _fsdp(seed + 50)
    if with_stock:
        stock_load(state, os.path.join(root, f"step-{seed:08d}"))
    else:
        with Checkpointer(root, QUICK) as checkpointer:
            assert checkpointer.load(state, seed) == seed
    return _whole(state)


def _same(one: Any, other: Any) -> bool:
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(_same(one[key], other[key]) for key in one)
    if isinstance(one, list):
        return len(one) == len(other) and all(map(_same, one, other))
    return torch.equal(one, other) if isinstance(one, torch.Tensor) else bool(one == other)


@fsdp2_on_cpu
@pytest.mark.parametrize(("saved_at", "loaded_at"), [(4, (2, 1)), (2, (4,)), (1, (2,))])
def test_fsdp2_and_adamw_reshard(tmp_path: Path, saved_at: int, loaded_at: tuple[int, ...]) -> None:
    root = tmp_path / "root"
    saved = run(saved_at, _save_fsdp, str(root), 7, folder=tmp_path)
    assert not verify(str(root / "step-00000007")).damages
    for world_size in loaded_at:
        for with_stock in (False, True):
            for state in run(world_size, _load_fsdp, str(root), 7, with_stock, folder=tmp_path):
                assert _same(state, saved[0])


def _save_placements(root: str) -> None:
    """Load by the indexes alone. DCP's planner is used only for shapes that do not fit."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    torch.manual_seed(1)
    whole = torch.randn(10, 6)
    placed = [(Shard(0), Shard(1)), (Replicate(), Shard(0)), (Shard(1), Replicate()), (Replicate(), Replicate())]
    state = {str(number): distribute_tensor(whole + number, mesh, way) for number, way in enumerate(placed)}
    load_by_dcp, asked = vars(reader)["load_by_dcp"], []

    def ask(*args: Any, **options: Any) -> None:
        asked.append(True)
        load_by_dcp(*args, **options)

    vars(reader)["load_by_dcp"] = ask
    with Checkpointer(root, QUICK) as checkpointer:
        checkpointer.save(1, state).result(60)
        for way in placed:
            into = {str(number): distribute_tensor(torch.zeros(10, 6), mesh, way) for number in range(len(placed))}
            checkpointer.load(into)
            for number in range(len(placed)):
                assert torch.equal(into[str(number)].full_tensor(), whole + number)
        plain = {str(number): torch.zeros(10, 6) for number in range(len(placed))}
        checkpointer.load(plain)
        assert all(torch.equal(plain[str(number)], whole + number) for number in range(len(placed)))
        assert not asked
        for shape in ((8, 6), (12, 6), (10, 3, 2)):
            with pytest.raises(MismatchError, match="'0'"):
                checkpointer.load({"0": distribute_tensor(torch.zeros(shape), mesh, placed[0])})
        assert len(asked) == 3


def test_any_placement_becomes_any_other(tmp_path: Path) -> None:
    run(4, _save_placements, str(tmp_path / "root"), folder=tmp_path)
    into = {str(number): torch.zeros(10, 6) for number in range(4)}
    stock_load(into, tmp_path / "root/step-00000001")
    torch.manual_seed(1)
    whole = torch.randn(10, 6)
    assert all(torch.equal(into[str(number)], whole + number) for number in range(4))


def _save_replicas(root: str) -> None:
    with Checkpointer(root, QUICK) as checkpointer:
        checkpointer.save(1, replicas()).result(60)


def test_replicas_are_written_once_spread_over_the_ranks(tmp_path: Path) -> None:
    root = tmp_path / "root"
    run(4, _save_replicas, str(root), folder=tmp_path)
    path = str(root / "step-00000001")
    manifest = read_manifest(path)
    assert manifest.world_size == 4
    found = list(StorageSource(path).indexes())
    names = [item.name for index in found for item in index.items]
    assert sorted(names) == sorted([*(f"model.w{number}" for number in range(24)), "step"])
    loads = [sum(item.payload_bytes for item in index.items if item.kind == "tensor") for index in found]
    assert len(loads) == 4 and max(loads) < 1.3 * min(loads)
    state = {"model": {name: torch.zeros_like(value) for name, value in replicas()["model"].items()}, "step": -1}
    stock_load(state, path)
    assert equal(state, replicas())


def _save_by_a_planner_that_changes_its_argument(root: str) -> None:
    def in_place(all_plans: list[SavePlan], save_to_lowest_rank: bool = False) -> list[SavePlan]:
        all_plans[:] = dedup_save_plans(all_plans, save_to_lowest_rank)
        return all_plans

    pytest.MonkeyPatch().setattr(default_planner, "dedup_save_plans", in_place)
    with Checkpointer(root, QUICK) as checkpointer:
        checkpointer.save(1, replicas()).result(60)


def test_a_planner_may_change_the_plans_that_it_gets(tmp_path: Path) -> None:
    """DCP's planner of torch 2.6 does."""
    run(2, _save_by_a_planner_that_changes_its_argument, str(root := tmp_path / "root"), folder=tmp_path)
    state = {"model": {name: torch.zeros_like(value) for name, value in replicas()["model"].items()}, "step": -1}
    stock_load(state, root / "step-00000001")
    assert equal(state, replicas())


def _save_apart(root: str) -> None:
    groups = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    mine = dist.get_rank() // 2
    for number in range(2):
        state = replicas(mine + number)
        dcp.async_save(state, checkpoint_id=f"{root}/{mine}", process_group=groups[mine]).result(60)
    into = replicas(9)
    dcp.load(into, checkpoint_id=f"{root}/{mine}", process_group=groups[mine])
    assert equal(into, replicas(mine + 1))
    dcp.async_save({"rank": torch.tensor(dist.get_rank())}, checkpoint_id=f"{root}/own{dist.get_rank()}", no_dist=True)
    engines.shared.close()


def _alone_and_then_together(root: str) -> None:
    rank, world = dist.get_rank(), dist.get_world_size()
    dist.barrier()  # an early exit would break the other rank's connecting
    dist.destroy_process_group()
    with Engine() as engine:
        engine.save(f"{root}/alone{rank}", replicas(1)).result(60)
        dist.init_process_group("gloo", init_method=f"file://{root}.meeting", rank=rank, world_size=world)
        with pytest.raises(CheckpointError, match="initialised after the first save"):
            engine.save(f"{root}/together", replicas(1))


def test_one_process_that_becomes_many_is_told(tmp_path: Path) -> None:
    run(2, _alone_and_then_together, str(tmp_path / "it"), folder=tmp_path)


def test_groups_save_apart(tmp_path: Path) -> None:
    run(4, _save_apart, str(tmp_path / "root"), folder=tmp_path)
    for rank in range(4):
        into = {"rank": torch.tensor(-1)}
        dcp.load(into, checkpoint_id=tmp_path / f"root/own{rank}")
        assert into["rank"] == rank


# Callers that keep calling DCP.


def _plugged_in(root: str) -> list[int]:
    """Return the bytes of each object that DCP's collectives carry in a later save."""
    sent: list[int] = []
    to_tensor: Any = dist.distributed_c10d._object_to_tensor

    def measured(*args: Any) -> Any:
        tensor, size = to_tensor(*args)
        sent.append(int(size.item()))
        return tensor, size

    writer = dcp.EngineWriter(config=QUICK)
    for number in range(3):
        sent.clear()
        setattr(dist.distributed_c10d, "_object_to_tensor", measured)  # noqa: B010
        state = replicas(number)
        stock_save(state, checkpoint_id=f"{root}/{number}", storage_writer=writer, planner=dcp.EnginePlanner())
        setattr(dist.distributed_c10d, "_object_to_tensor", to_tensor)  # noqa: B010
        into = replicas(9)
        stock_load(into, f"{root}/{number}")
        assert equal(into, replicas(number))
    writer.close()
    return sent


def test_dcps_own_save_with_our_planner_and_writer(tmp_path: Path) -> None:
    for sent in run(2, _plugged_in, str(tmp_path), folder=tmp_path):
        assert 0 < sum(sent) < 4096  # no plan, no results, no metadata
