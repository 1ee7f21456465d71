"""Saves by many ranks, with structures that change and structures that stay."""

from __future__ import annotations

import os
import pickle
import signal
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from support.checkpoints import read_manifest
from support.ranks import CONSTANT, QUICK, run
from support.states import equal, replicas, stock_load
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

import asyncckpt
from asyncckpt import Checkpointer, Config
from asyncckpt.engine import shared as engines
from asyncckpt.errors import CheckpointExistsError, StructureChangedError
from asyncckpt.integrations import dcp

pytestmark = pytest.mark.usefixtures("forkserver")


def _changing(root: str, config: Config, rank_that_changes: int) -> list[int]:
    """Return the number of the plan of each save."""
    numbers = []
    with Checkpointer(root, config) as checkpointer:
        for step in range(4):
            state = replicas(step)
            if step >= 2 and dist.get_rank() >= rank_that_changes:
                state["model"]["w3"] = state["model"]["w3"].to(torch.bfloat16)
            checkpointer.save(step, state).result(60)
            numbers.append(checkpointer._engine._buffers.known[0].plan.number)
    return numbers


@pytest.mark.parametrize("rank", [0, 1])
def test_a_miss_on_any_rank_is_a_new_plan_for_all(tmp_path: Path, rank: int) -> None:
    root = tmp_path / "root"
    for numbers in run(2, _changing, str(root), QUICK, rank, folder=tmp_path):
        # All ranks make a new plan if a dtype changes, and only then. Stock DCP's plan cache compares no dtypes.
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


class _Summed:
    """A value with a state that is a sum over all ranks, as in some sharded models."""

    def state_dict(self) -> dict[str, torch.Tensor]:
        found = torch.ones(3)
        dist.all_reduce(found)
        return {"sum": found}

    def load_state_dict(self, state_dict: dict[str, torch.Tensor]) -> None:
        raise NotImplementedError


def _save_twice_there(root: str) -> int:
    refused = 0
    with Checkpointer(root, QUICK) as checkpointer:
        for step in (1, 2, 2, 3, 3):
            try:
                checkpointer.save(step, {"app": _Summed(), "w": torch.ones(2)}).result(60)
            except CheckpointExistsError:
                refused += 1
    return refused


def test_states_that_ranks_make_together_are_made_where_a_save_is_refused(tmp_path: Path) -> None:
    """The first rank makes its state before it refuses a save, because the others wait in its collective."""
    assert run(2, _save_twice_there, str(tmp_path / "root"), folder=tmp_path) == [2, 2]


def _growing(root: str) -> None:
    with Checkpointer(root, QUICK) as checkpointer:
        for step in range(6):
            # An object outgrows its space on one rank alone. XTuner's cache then lost the tensors of the other ranks.
            state = replicas(step) | {f"own{dist.get_rank()}": "x" * (10 ** (step // 2) if dist.get_rank() == 1 else 1)}
            checkpointer.save(step, state).result(60)


def test_one_ranks_object_grows_and_nothing_vanishes(tmp_path: Path) -> None:
    run(2, _growing, str(tmp_path / "root"), folder=tmp_path)
    for step in range(6):
        metadata = FileSystemReader(tmp_path / f"root/step-{step:08d}").read_metadata()
        assert len(metadata.state_dict_metadata) == len(metadata.storage_data) == 27


def _constant_broken(root: str, rank_that_changes: int) -> tuple[str, int | None, bool]:
    with Checkpointer(root, CONSTANT) as checkpointer:
        checkpointer.save(1, replicas(1)).result(60)
        state = replicas(2)
        if dist.get_rank() == rank_that_changes:
            # Change all tensors, because this rank writes only some.
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


def _constant_prepared_anew(root: str) -> None:
    with Checkpointer(root, CONSTANT) as checkpointer:
        checkpointer.save(1, replicas(1)).result(60)
        state = replicas(2)
        state["model"] = {name: value.double() for name, value in state["model"].items()}
        with pytest.raises(StructureChangedError, match="call prepare with it on all ranks"):
            checkpointer.save(2, state).result(60)
        checkpointer.prepare(state)
        checkpointer.save(3, state).result(60)
        into = replicas(9)
        into["model"] = {name: value.double() for name, value in into["model"].items()}
        assert checkpointer.load(into) == 3 and equal(into, state)
        assert checkpointer.steps() == [1, 3]


def test_a_new_constant_structure_is_prepared(tmp_path: Path) -> None:
    """The error that refuses a new structure says how to prepare it."""
    run(2, _constant_prepared_anew, str(tmp_path / "root"), folder=tmp_path)


def _mixed(root: str) -> tuple[str, int | None]:
    with Checkpointer(root, CONSTANT) as checkpointer:
        for step, name in enumerate(["model", "ema"]):
            checkpointer.save(step, {name: replicas(step)["model"]}).result(60)
        # All shapes are equal, so that only the names differ.
        mine = "model" if dist.get_rank() == 0 else "ema"
        with pytest.raises(StructureChangedError, match="another structure") as caught:
            checkpointer.save(2, {mine: replicas(2)["model"]}).result(60)
        checkpointer.save(3, {"ema": replicas(3)["model"]}).result(60)
        assert checkpointer.steps() == [0, 1, 3]
    return type(caught.value).__name__, caught.value.rank


def test_ranks_that_save_other_names_of_the_same_shapes(tmp_path: Path) -> None:
    assert run(2, _mixed, str(tmp_path / "root"), folder=tmp_path) == [("StructureChangedError", 1)] * 2


def _taking_turns(root: str, config: Config) -> list[tuple[int, int]]:
    states = [{kind: replicas(seed)["model"]} for seed, kind in enumerate(["model", "optimizer", "ema"])]
    numbers = []
    with Checkpointer(root, config) as checkpointer:
        for step in range(9):
            checkpointer.save(step, states[step % 3]).result(60)
            numbers.append((step % 3, checkpointer._engine._buffers.known[0].plan.number))
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
                worker = checkpointer._engine.worker
                assert worker is not None
                os.kill(worker.pid, signal.SIGKILL)
                worker._listener.join(10)
            dist.barrier()
            checkpointer.save(step, replicas(step)).result(60)
        return checkpointer._engine._buffers.known[0].plan.number


@pytest.mark.parametrize("config", [QUICK, CONSTANT], ids=["asked", "constant"])
def test_a_rank_that_lost_its_worker_still_has_its_plan(tmp_path: Path, config: Config) -> None:
    # After a loss on the first rank, torch's plan cache answers with metadata that lacks the other ranks.
    assert run(2, _losing_workers, str(tmp_path / "root"), config, [0, 1, 0], folder=tmp_path) == [1, 1]
    for step in range(4):
        metadata = FileSystemReader(tmp_path / f"root/step-{step:08d}").read_metadata()
        assert len(metadata.storage_data) == 25
        into = replicas(9)
        stock_load(into, tmp_path / f"root/step-{step:08d}")
        assert equal(into, replicas(step))


def _shrinking(root: str) -> None:
    """Save the same state by two ranks, then by each rank alone, because each group has its own plan."""
    state = {f"of{dist.get_rank()}": torch.full((10,), float(dist.get_rank())), "both": torch.ones(3)}
    dcp.async_save(state, checkpoint_id=f"{root}/two").result(60)
    dcp.async_save(state, checkpoint_id=f"{root}/one{dist.get_rank()}", no_dist=True).result(60)
    engines.shared.close()


def test_a_smaller_world_has_only_its_own_tensors(tmp_path: Path) -> None:
    run(2, _shrinking, str(tmp_path), folder=tmp_path)
    for name, expected in {"two": {"of0", "of1", "both"}, "one0": {"of0", "both"}, "one1": {"of1", "both"}}.items():
        assert set(FileSystemReader(tmp_path / name).read_metadata().state_dict_metadata) == expected


def test_metadata_is_of_one_save_alone(tmp_path: Path) -> None:
    # DCP returns the metadata of its cache, and the next save writes into the same object.
    first = asyncckpt.save(replicas(1), checkpoint_id=tmp_path / "a")
    before = pickle.dumps(first)
    second = asyncckpt.save(replicas(2), checkpoint_id=tmp_path / "b")
    assert first is not second and pickle.dumps(first) == before
    read, other = (FileSystemReader(tmp_path / name).read_metadata() for name in ("a", "b"))
    assert read.state_dict_metadata == other.state_dict_metadata and read.storage_data == other.storage_data
    assert read.storage_meta != other.storage_meta


def _save_on_one_rank(root: str) -> None:
    with Checkpointer(root, QUICK) as checkpointer:
        checkpointer.save(1, replicas(1) if dist.get_rank() == 0 else {}).result(60)


def test_a_rank_that_writes_nothing_takes_no_time(tmp_path: Path) -> None:
    run(2, _save_on_one_rank, str(tmp_path / "root"), folder=tmp_path)
    write_s = read_manifest(str(tmp_path / "root/step-00000001")).timings["write_s"]
    assert len(write_s) == 2 and all(seconds is not None and seconds < 60 for seconds in write_s)
