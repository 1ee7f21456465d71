"""Many ranks: what they save together, what stock DCP makes of it, and what it costs them."""

from __future__ import annotations

import io
import os
import pickle
import signal
import sys
import time
import warnings
from collections.abc import Callable, Iterator
from functools import partialmethod
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from ranks import Job, fsdp2_on_cpu, run, say, serve
from torch.distributed.checkpoint import state_dict_loader
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict
from torch.distributed.checkpoint.state_dict_saver import save as stock_save
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

import asyncckpt
from asyncckpt import Checkpointer, Config, dcp, engines, progress, reader
from asyncckpt.catalog import indexes, read_manifest
from asyncckpt.engine import Engine
from asyncckpt.errors import CheckpointError, SaveDroppedError, StructureChangedError
from asyncckpt.verify import verify
from asyncckpt.worker import client
from asyncckpt.worker.rounds import Rounds


@pytest.fixture(scope="module", autouse=True)
def ranks() -> Iterator[None]:
    yield from serve()


def stock_load(state: dict[str, Any], path: str | Path) -> None:
    """DCP's own ``load``, on the ranks together or in the test alone."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled", category=UserWarning)
        state_dict_loader.load(state, checkpoint_id=path)


QUICK = Config(timeout=20, commit_timeout=20)
CONSTANT = Config(timeout=20, commit_timeout=20, assume_constant_structure=True)


def faulty(fault: str) -> None:
    """On a rank: its workers fail as ``faulty_worker.py`` says."""
    real = client.command
    script = str(Path(__file__).with_name("faulty_worker.py"))
    client.command = lambda: [real()[0], script, fault]


def replicas(seed: int = 0, count: int = 24) -> dict[str, Any]:
    """A state that all ranks have alike."""
    generator = torch.Generator().manual_seed(seed)
    tensors = {f"w{number}": torch.randn(64, 16 + number, generator=generator) for number in range(count)}
    return {"model": tensors, "step": seed}


def equal(one: dict[str, Any], other: dict[str, Any]) -> bool:
    return one["step"] == other["step"] and all(
        torch.equal(value, other["model"][name]) for name, value in one["model"].items()
    )


# What they save.


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
    """``state`` with whole tensors, gathered."""
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
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    torch.manual_seed(1)
    whole = torch.randn(10, 6)
    placed = [(Shard(0), Shard(1)), (Replicate(), Shard(0)), (Shard(1), Replicate()), (Replicate(), Replicate())]
    state = {str(number): distribute_tensor(whole + number, mesh, way) for number, way in enumerate(placed)}
    with Checkpointer(root, QUICK) as checkpointer:
        checkpointer.save(1, state).result(60)
        for way in placed:
            into = {str(number): distribute_tensor(torch.zeros(10, 6), mesh, way) for number in range(len(placed))}
            checkpointer.load(into)
            for number in range(len(placed)):
                assert torch.equal(into[str(number)].full_tensor(), whole + number)


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
    found = list(indexes(path, manifest))
    names = [item.name for index in found for item in index.items]
    assert sorted(names) == sorted([*(f"model.w{number}" for number in range(24)), "step"])
    loads = [sum(item.payload_bytes for item in index.items if item.kind == "tensor") for index in found]
    assert len(loads) == 4 and max(loads) < 1.3 * min(loads)
    state = {"model": {name: torch.zeros_like(value) for name, value in replicas()["model"].items()}, "step": -1}
    stock_load(state, path)
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


# What it costs them.


class Counter:
    """Counts the calls of all collectives, and of what goes over the store."""

    def __init__(self) -> None:
        self.collectives: list[str] = []
        self.rounds: list[str] = []
        names = [name for name in dir(dist) if name.startswith(("all_", "broadcast", "gather", "scatter", "reduce"))]
        for name in [*names, "barrier", "monitored_barrier", "send", "recv", "new_group"]:
            if callable(getattr(dist, name)):
                setattr(dist, name, self._counted(getattr(dist, name), self.collectives, name))
        Rounds._do = self._counted(Rounds._do, self.rounds, "round")  # type: ignore[method-assign]

    @staticmethod
    def _counted(function: Callable[..., Any], into: list[str], name: str) -> Callable[..., Any]:
        def count(*args: Any, **kwargs: Any) -> Any:
            into.append(name)
            return function(*args, **kwargs)

        return count


def _count(root: str, config: Config) -> tuple[list[str], list[str]]:
    state = replicas()
    with Checkpointer(root, config) as checkpointer:
        checkpointer.prepare(state)
        counter = Counter()
        for step in range(1, 5):
            state["step"] = step
            checkpointer.save(step, state).result(60)
    return counter.collectives, counter.rounds


def test_later_saves_make_no_collective(tmp_path: Path) -> None:
    for collectives, rounds in run(2, _count, str(tmp_path / "one"), CONSTANT, folder=tmp_path):
        assert collectives == [] and rounds == []  # nothing is asked, and no byte of a plan is sent
    for collectives, rounds in run(2, _count, str(tmp_path / "two"), QUICK, folder=tmp_path):
        assert collectives == [] and len(rounds) > 0


def _stop_when_staged(root: str) -> None:
    with Checkpointer(root, QUICK) as checkpointer:
        checkpointer.prepare(replicas())
        dist.barrier()
        checkpointer.save(1, replicas())
        say(os.getpid())
        os.kill(os.getpid(), signal.SIGSTOP)


def test_no_trainer_takes_part_in_a_commit(tmp_path: Path) -> None:
    job = Job(2, _stop_when_staged, str(tmp_path / "root"), folder=tmp_path)
    pids = [job.hear(rank) for rank in range(2)]
    deadline = time.monotonic() + 20
    while not (tmp_path / "root/step-00000001").exists() and time.monotonic() < deadline:
        time.sleep(0.01)
    assert not verify(str(tmp_path / "root/step-00000001")).damages
    for pid in pids:
        while Path(f"/proc/{pid}/stat").read_text().split()[2] != "T":
            time.sleep(0.01)
        os.kill(pid, signal.SIGCONT)
    assert all(end.error is None for end in job.wait())


def _die_when_staged(root: str) -> None:
    checkpointer = Checkpointer(root, QUICK)
    checkpointer.prepare(replicas())
    dist.barrier()
    checkpointer.save(1, replicas())
    os.kill(os.getpid(), signal.SIGKILL)


def test_all_trainers_die_and_what_was_staged_is_saved(tmp_path: Path) -> None:
    ended = Job(2, _die_when_staged, str(tmp_path / "root"), folder=tmp_path).wait()
    assert all(end.killed for end in ended)
    into = replicas(5)
    with Checkpointer(tmp_path / "root") as checkpointer:
        assert checkpointer.load(into) == 1
    assert equal(into, replicas())


def _in_order(root: str) -> list[float]:
    if dist.get_rank() == 1:
        faulty("write:hold")
    times: dict[Any, float] = {}
    with Checkpointer(root, QUICK) as checkpointer:
        checkpointer.prepare(replicas())
        saves = [checkpointer.save(step, replicas(step)) for step in range(2)]
        for save in saves:
            save.future.add_done_callback(lambda _, save=save: times.setdefault(save.step, time.monotonic()))  # type: ignore[misc]
        if dist.get_rank() == 1:
            assert not any(save.done() for save in saves)
            Path(os.environ["ASYNCCKPT_TEST_GATE"]).touch()
        for save in reversed(saves):
            save.result(60)
    return [times[0], times[1]]


def test_overlapping_saves_commit_in_order(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    gate = tmp_path / "gate"
    for first, second in run(2, _gated, _in_order, str(gate), str(tmp_path / "root"), folder=tmp_path):
        assert first <= second


def _gated(function: Callable[..., Any], gate: str, *args: Any) -> Any:
    os.environ["ASYNCCKPT_TEST_GATE"] = gate
    return function(*args)


# Structures that change, and those that do not.


def _changing(root: str, config: Config, rank_that_changes: int) -> list[int]:
    """The numbers of the plans that each save went by."""
    numbers = []
    with Checkpointer(root, config) as checkpointer:
        for step in range(4):
            state = replicas(step)
            if step >= 2 and dist.get_rank() >= rank_that_changes:
                state["model"]["w3"] = state["model"]["w3"].to(torch.bfloat16)
            checkpointer.save(step, state).result(60)
            numbers.append(checkpointer._engine._homes.known[0].plan.number)
    return numbers


@pytest.mark.parametrize("rank", [0, 1])
def test_a_miss_on_any_rank_is_a_new_plan_for_all(tmp_path: Path, rank: int) -> None:
    root = tmp_path / "root"
    for numbers in run(2, _changing, str(root), QUICK, rank, folder=tmp_path):
        # A dtype that changes is seen (stock DCP's plan cache compares no dtypes), by all, and only then.
        assert numbers[0] == numbers[1] != numbers[2] == numbers[3]
    for step in range(4):
        metadata = FileSystemReader(root / f"step-{step:08d}").read_metadata()
        assert len(metadata.state_dict_metadata) == 25  # no rank's tensors are missing
        kept = metadata.state_dict_metadata["model.w3"]
        assert isinstance(kept, TensorStorageMetadata)
        stored = kept.properties.dtype
        assert stored == (torch.bfloat16 if step >= 2 and rank == 0 else torch.float32) or rank == 1
        into = replicas(9)
        into["model"]["w3"] = into["model"]["w3"].to(stored)
        stock_load(into, root / f"step-{step:08d}")
        assert all(torch.equal(into["model"][f"w{n}"], replicas(step)["model"][f"w{n}"]) for n in range(24) if n != 3)


def _growing(root: str) -> None:
    with Checkpointer(root, QUICK) as checkpointer:
        for step in range(6):
            # An object that outgrows its room, on one rank alone: XTuner's cache then lost the tensors of the others.
            state = replicas(step) | {f"own{dist.get_rank()}": "x" * (10 ** (step // 2) if dist.get_rank() == 1 else 1)}
            checkpointer.save(step, state).result(60)


def test_one_ranks_object_grows_and_nothing_vanishes(tmp_path: Path) -> None:
    run(2, _growing, str(tmp_path / "root"), folder=tmp_path)
    for step in range(6):
        metadata = FileSystemReader(tmp_path / f"root/step-{step:08d}").read_metadata()
        assert len(metadata.state_dict_metadata) == len(metadata.storage_data) == 27


def _constant_broken(root: str, rank_that_changes: int) -> tuple[str, int | None, bool]:
    config = Config(timeout=3, commit_timeout=3, assume_constant_structure=True)
    with Checkpointer(root, config) as checkpointer:
        checkpointer.save(1, replicas(1)).result(60)
        state = replicas(2)
        if dist.get_rank() == rank_that_changes:
            # All of them, as this rank writes only some.
            state["model"] = {name: value.double() for name, value in state["model"].items()}
        at_once = False
        try:
            save = checkpointer.save(2, state)
            with pytest.raises(StructureChangedError) as caught:
                save.result(60)
        except StructureChangedError:
            at_once = True
            with pytest.raises(StructureChangedError) as caught:
                raise
        checkpointer.save(3, replicas(3)).result(60)
        into = replicas(9)
        assert checkpointer.load(into) == 3 and equal(into, replicas(3))
        assert checkpointer.steps() == [1, 3]
    return type(caught.value).__name__, caught.value.rank, at_once


@pytest.mark.parametrize("rank", [0, 1])
def test_a_broken_promise_of_constant_structure(tmp_path: Path, rank: int) -> None:
    ended = run(2, _constant_broken, str(tmp_path / "root"), rank, folder=tmp_path)
    assert [at_once for _, _, at_once in ended] == [number == rank for number in range(2)]
    assert {(kind, where) for kind, where, at_once in ended if not at_once} == {("StructureChangedError", rank)}


def _taking_turns(root: str, config: Config) -> list[tuple[int, int]]:
    states = [{kind: replicas(seed)["model"]} for seed, kind in enumerate(["model", "optimizer", "ema"])]
    numbers = []
    with Checkpointer(root, config) as checkpointer:
        for step in range(9):
            checkpointer.save(step, states[step % 3]).result(60)
            numbers.append((step % 3, checkpointer._engine._homes.known[0].plan.number))
    return numbers


@pytest.mark.parametrize("config", [QUICK, CONSTANT], ids=["asked", "constant"])
def test_structures_that_take_turns_evict_none(tmp_path: Path, config: Config) -> None:
    for numbers in run(2, _taking_turns, str(tmp_path / "root"), config, folder=tmp_path):
        assert len(set(numbers)) == 3


def _losing_workers(root: str, config: Config, order: list[int]) -> int:
    with Checkpointer(root, config) as checkpointer:
        checkpointer.save(0, replicas(0)).result(60)
        for step, rank in enumerate(order, 1):
            dist.barrier()
            if dist.get_rank() == rank:
                worker = checkpointer._engine._client
                assert worker is not None
                os.kill(worker.pid, signal.SIGKILL)
                worker._listener.join(10)
            dist.barrier()
            checkpointer.save(step, replicas(step)).result(60)
        return checkpointer._engine._homes.known[0].plan.number


@pytest.mark.parametrize("config", [QUICK, CONSTANT], ids=["asked", "constant"])
def test_a_rank_that_lost_its_worker_still_has_its_plan(tmp_path: Path, config: Config) -> None:
    # The first rank's loss is the one that torch's plan cache answers with metadata that lacks the other ranks.
    assert run(2, _losing_workers, str(tmp_path / "root"), config, [0, 1, 0], folder=tmp_path) == [1, 1]
    for step in range(4):
        metadata = FileSystemReader(tmp_path / f"root/step-{step:08d}").read_metadata()
        assert len(metadata.storage_data) == 25
        into = replicas(9)
        stock_load(into, tmp_path / f"root/step-{step:08d}")
        assert equal(into, replicas(step))


def _shrinking(root: str) -> None:
    """The same state by two ranks, then by each alone: a plan is of its group."""
    state = {f"of{dist.get_rank()}": torch.full((10,), float(dist.get_rank())), "both": torch.ones(3)}
    dcp.async_save(state, checkpoint_id=f"{root}/two").result(60)
    dcp.async_save(state, checkpoint_id=f"{root}/one{dist.get_rank()}", no_dist=True).result(60)
    engines.shared.close()


def test_a_smaller_world_has_only_its_own_tensors(tmp_path: Path) -> None:
    run(2, _shrinking, str(tmp_path), folder=tmp_path)
    for name, expected in {"two": {"of0", "of1", "both"}, "one0": {"of0", "both"}, "one1": {"of1", "both"}}.items():
        assert set(FileSystemReader(tmp_path / name).read_metadata().state_dict_metadata) == expected


def test_metadata_is_of_one_save_alone(tmp_path: Path) -> None:
    # DCP hands out the metadata that its cache keeps, and writes the next save's facts into it.
    first = asyncckpt.save(replicas(1), checkpoint_id=tmp_path / "a")
    before = pickle.dumps(first)
    second = asyncckpt.save(replicas(2), checkpoint_id=tmp_path / "b")
    assert first is not second and pickle.dumps(first) == before
    assert (tmp_path / "a/.metadata").read_bytes() == (tmp_path / "b/.metadata").read_bytes()


# When all slots are busy.


def _busy(root: str, policy: str, slow: int) -> tuple[list[str], list[int]]:
    if dist.get_rank() == slow:
        faulty("write:hold")
    config = Config(slots=2, when_busy=policy, timeout=20, commit_timeout=20)  # type: ignore[arg-type]
    ends = []
    with Checkpointer(root, config) as checkpointer:
        checkpointer.prepare(replicas())
        saves = [checkpointer.save(step, replicas(step)) for step in range(4 if policy == "skip" else 3)]
        dist.barrier()
        Path(os.environ["ASYNCCKPT_TEST_GATE"]).touch()
        for save in saves:
            try:
                save.result(60)
                ends.append("saved")
            except SaveDroppedError:
                ends.append("dropped")
        steps = checkpointer.steps()
    return ends, steps


@pytest.mark.parametrize("slow", [0, 1])
@pytest.mark.parametrize("policy", ["skip", "latest"])
def test_the_policy_is_the_same_on_all_ranks(tmp_path: Path, policy: str, slow: int) -> None:
    gate = str(tmp_path / "gate")
    first, second = run(2, _gated, _busy, gate, str(tmp_path / "root"), policy, slow, folder=tmp_path)
    assert first == second
    ends, steps = first
    if policy == "skip":
        assert ends == ["saved", "saved", "dropped", "dropped"]
    else:
        assert ends == ["saved", "dropped", "saved"]
    assert steps == [step for step, end in enumerate(ends) if end == "saved"]


# For those who go on calling DCP.


def _plugged_in(root: str) -> list[int]:
    """The sizes in bytes of all that DCP's collectives carry in a later save."""
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


def _fails_to_plan(root: str, bad: int) -> tuple[str, int | None]:
    with Checkpointer(root, QUICK) as checkpointer:
        for state in (replicas(), replicas(1)):
            if dist.get_rank() == bad:
                state = state | {"generator": (number for number in range(3))}
            with pytest.raises(CheckpointError) as caught:
                checkpointer.save(1, state)
        checkpointer.save(2, replicas()).result(60)
    return type(caught.value).__name__, caught.value.rank


@pytest.mark.parametrize("bad", [0, 1])
def test_what_one_rank_cannot_save_all_are_told(tmp_path: Path, bad: int) -> None:
    ended = run(2, _fails_to_plan, str(tmp_path / "root"), bad, folder=tmp_path)
    assert {kind for kind, _ in ended} == {"UnsavableStateError"}
    assert all(rank == bad for number, (_, rank) in enumerate(ended) if number != bad)


def _not_shared(root: str) -> tuple[str, int | None]:
    engine = Engine(QUICK)
    with pytest.raises(CheckpointError) as caught:
        engine.save(f"{root}/{dist.get_rank()}/here", replicas()).result(60)
    with pytest.raises(CheckpointError):
        engine.wait()
        raise caught.value
    engine.close()
    return str(caught.value), caught.value.rank


def test_a_folder_that_is_not_shared_is_an_error_that_says_so(tmp_path: Path) -> None:
    for text, rank in run(2, _not_shared, str(tmp_path / "root"), folder=tmp_path):
        assert "file system that all nodes share" in text and rank == 1
    assert not list(tmp_path.glob("root/*/*")) and not list(tmp_path.glob("root/*/.*"))


def _loads_nothing(root: str) -> str:
    with Checkpointer(root, QUICK) as checkpointer, pytest.raises(asyncckpt.CheckpointError) as caught:
        checkpointer.load(replicas())
    return type(caught.value).__name__


def test_nothing_to_load_is_the_same_error_on_all_ranks(tmp_path: Path) -> None:
    assert run(2, _loads_nothing, str(tmp_path / "root"), folder=tmp_path) == ["CheckpointNotFoundError"] * 2


def _save_one(root: str) -> None:
    with Checkpointer(root, QUICK) as checkpointer:
        checkpointer.save(1, replicas(1)).result(60)


def _load_replicas(root: str, by_dcp_on: int | None) -> tuple[bool, bool]:
    """Whether all is there, and whether DCP was asked; ``by_dcp_on``: a rank that has to."""
    if dist.get_rank() == by_dcp_on:
        vars(reader)["draft"] = lambda *_: None
    asked = []
    load_by_dcp = reader.load_by_dcp

    def ask(*args: Any, **options: Any) -> None:
        asked.append(True)
        load_by_dcp(*args, **options)

    vars(reader)["load_by_dcp"] = ask
    into = replicas(99)
    with Checkpointer(root, QUICK) as checkpointer:
        checkpointer.load(into)
    return equal(into, replicas(1)), bool(asked)


def _load_in_vain(root: str, misfit_on: int | None) -> str:
    """The error; ``misfit_on``: a rank that asks for another shape."""
    into = replicas(99)
    if dist.get_rank() == misfit_on:
        into["model"]["w0"] = torch.zeros(3)
    with Checkpointer(root, QUICK) as checkpointer:
        try:
            checkpointer.load(into)
        except CheckpointError as error:
            return f"{type(error).__name__} {error.message}"
    return ""


def test_replicas_are_loaded_without_dcp_where_all_ranks_can(tmp_path: Path) -> None:
    root = str(tmp_path / "root")
    run(2, _save_one, root, folder=tmp_path)
    assert len(list((tmp_path / "root/step-00000001").glob("*.distcp"))) == 2
    assert run(2, _load_replicas, root, None, folder=tmp_path) == [(True, False)] * 2
    assert run(3, _load_replicas, root, 1, folder=tmp_path) == [(True, True)] * 3
    wrong = run(2, _load_in_vain, root, 1, folder=tmp_path)
    assert wrong[0] == wrong[1] and "MismatchError" in wrong[0] and "'model.w0'" in wrong[0]
    path = tmp_path / "root/step-00000001"
    index = list(indexes(str(path), read_manifest(str(path))))[1]
    data = bytearray((path / index.data).read_bytes())
    data[index.items[0].payload_at] ^= 1
    (path / index.data).write_bytes(data)
    bad = run(2, _load_in_vain, root, None, folder=tmp_path)
    assert bad[0] == bad[1] and "DamagedCheckpointError" in bad[0] and index.items[0].name in bad[0]


def _load_with_a_bar(root: str) -> tuple[bool, str]:
    """Whether all is there, and what the terminal was sent."""
    into = replicas(99)
    terminal = io.StringIO()
    with pytest.MonkeyPatch.context() as patch, Checkpointer(root, QUICK) as checkpointer:
        patch.setattr(reader, "_LONG_S", 1e-9)
        patch.setattr(progress._Bar, "__init__", partialmethod(progress._Bar.__init__, mininterval=0))
        patch.setattr(terminal, "isatty", lambda: True)
        patch.setattr(sys, "stderr", terminal)
        checkpointer.load(into)
    return equal(into, replicas(1)), terminal.getvalue()


def test_the_first_rank_alone_shows_how_far_a_load_is(tmp_path: Path) -> None:
    root = str(tmp_path / "root")
    run(2, _save_one, root, folder=tmp_path)
    (first, shown), (other, silence) = run(2, _load_with_a_bar, root, folder=tmp_path)
    assert first and other and "loading" in shown and not silence
