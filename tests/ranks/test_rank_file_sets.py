"""File sets that all ranks of a job add to."""

from __future__ import annotations

import os
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from support.checkpoints import read_manifest, verify
from support.ranks import CONSTANT, QUICK, run
from support.states import same, stock_load
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from asyncckpt import FileSet
from asyncckpt.config import Config
from asyncckpt.errors import CheckpointError, UnsavableStateError
from asyncckpt.extension import Engine

pytestmark = pytest.mark.usefixtures("forkserver")

LARGE = 300_000


def _whole(step: int, rows: int = 8) -> torch.Tensor:
    return torch.arange(rows * 50_000.0).view(rows, -1) + step


def _sharded(step: int) -> DTensor:
    return distribute_tensor(_whole(step), init_device_mesh("cpu", (dist.get_world_size(),)), [Shard(0)])


def _files(step: int) -> FileSet:
    """Return the files of a trainer: two folders of all ranks, a file of each rank, and files of single ranks."""
    files, rank = FileSet(), dist.get_rank()
    files.add_dcp_folder("model_0", {"w": _sharded(step)})
    files.add_bytes(f"rng/state_{rank}", bytes([step, rank]))
    if rank == 0:
        files.add_safetensors("model.safetensors", {"w": _whole(step, 2)})
    if rank == 1:
        files.add_torch_file("large_1.pt", torch.full((LARGE,), float(step)))
    files.add_dcp_folder("optimizer_0", {"m": _sharded(step + 1), "step": step})
    return files


def _save(root: str, config: Config) -> None:
    with Engine(config) as engine:
        for step in range(3):
            engine.save(os.path.join(root, str(step)), _files(step), step=step).result(60)


@pytest.mark.parametrize("config", [QUICK, CONSTANT], ids=["asking", "constant"])
def test_all_ranks_add_to_it(tmp_path: Path, config: Config) -> None:
    run(3, _save, str(tmp_path / "root"), config, folder=tmp_path)
    for step in range(3):
        path = tmp_path / "root" / str(step)
        assert not verify(str(path)).damages and read_manifest(str(path)).world_size == 3
        model, optimizer = {"w": torch.zeros(8, 50_000)}, {"m": torch.zeros(8, 50_000), "step": 9}
        stock_load(model, path / "model_0")
        stock_load(optimizer, path / "optimizer_0")
        assert same(model, {"w": _whole(step)}) and same(optimizer, {"m": _whole(step + 1), "step": step})
        assert [(path / f"rng/state_{rank}").read_bytes() for rank in range(3)] == [bytes([step, r]) for r in range(3)]
        assert torch.load(path / "large_1.pt")[-1] == step
        names = {each.relative_to(path).as_posix() for each in path.rglob("*") if each.is_file()}
        assert names - {*read_manifest(str(path)).files} == {"asyncckpt.json"}


def _save_in_turns(root: str) -> list[int]:
    """Save a state, and a set with that state at its top and a file of one rank, in turns."""
    with Engine(CONSTANT) as engine:
        for step in range(4):
            state = {"w": _sharded(step)}
            files = FileSet()
            files.add_dcp_folder("", state)
            if dist.get_rank() == 0:
                files.add_torch_file("large.pt", torch.full((LARGE,), float(step)))
            engine.save(os.path.join(root, f"set {step}"), files).result(60)
            engine.save(os.path.join(root, f"state {step}"), state).result(60)
        return [len(known.plan.parts) for known in engine._buffers.known]


def test_a_set_and_the_state_at_its_top_are_saved_in_turns(tmp_path: Path) -> None:
    """Each has a plan of its own, although the names are the same."""
    assert run(2, _save_in_turns, str(tmp_path / "root"), folder=tmp_path) == [[1, 2], [1, 1]]
    for step in range(4):
        for kind in ("set", "state"):
            stock_load(into := {"w": torch.zeros(8, 50_000)}, tmp_path / "root" / f"{kind} {step}")
            assert same(into, {"w": _whole(step)})


def _save_own_weights(root: str) -> None:
    """A save is refused if ranks give different weights one name in a folder that all ranks write."""
    own = {"w": torch.full((100,), float(dist.get_rank())), "all": torch.arange(9.0)}
    with Engine(replace(QUICK, differing_replicas="raise")) as engine:
        files = FileSet()
        files.add_dcp_folder("model_0", own)
        save = engine.save(os.path.join(root, "0"), files)
        with pytest.raises(UnsavableStateError, match=r"1 values differ .*of 2 compared\): 'model.*/w'"):
            save.result(60)


def test_weights_of_each_rank_under_equal_names_are_refused(tmp_path: Path) -> None:
    run(2, _save_own_weights, str(tmp_path / "root"), folder=tmp_path)
    assert not any((tmp_path / "root").iterdir())


def _refused(root: str, how: str) -> str:
    """Return this rank's error after one rank spoils a save, and check that the next save works."""
    with Engine(QUICK) as engine:
        files, rank = FileSet(), dist.get_rank()
        files.add_bytes(f"file_{rank}", b"")
        if rank == 1:
            match how:
                case "same name":
                    files.add_bytes("file_0", b"")
                case "other folders":
                    files.add_dcp_folder("dcp", {"w": torch.ones(3)})
                case "unsavable":
                    files.add_torch_file("it.pt", lambda: None)
                case "failed":
                    files.fail(ValueError("as the test wants"))
                case "plans alone":
                    files.add_safetensors("it", {"w": torch.ones(3, 2).t()})
        try:
            engine.save(os.path.join(root, "1"), files).result(60)
        except (CheckpointError, ValueError) as error:
            said = f"{type(error).__name__}: {error}"
        else:
            said = ""
        engine.save(os.path.join(root, "2"), _files(2)).result(60)
        return said


@pytest.mark.parametrize(
    ("how", "says"),
    [
        ("same name", "file_0"),
        ("other folders", "RankFailedError: .*of which all ranks have"),
        ("unsavable", "UnsavableStateError"),
        ("failed", "as the test wants"),
        ("plans alone", "UnsavableStateError: .*not contiguous"),
    ],
)
def test_what_one_rank_cannot_add_no_rank_saves(tmp_path: Path, how: str, says: str) -> None:
    told: list[Any] = run(2, _refused, str(tmp_path / "root"), how, folder=tmp_path)
    assert all(re.search(says, each) for each in told), told
    assert os.listdir(tmp_path / "root") == ["2"] and not verify(str(tmp_path / "root" / "2")).damages


def _nothing(root: str) -> None:
    with Engine(QUICK) as engine:
        for step in range(2):
            files = FileSet()
            if dist.get_rank() == 1:
                files.add_torch_file("it.pt", torch.full((LARGE,), float(step)))
            engine.save(os.path.join(root, str(step)), files).result(60)


def _alternate(root: str, has_names: bool) -> int:
    """Save two kinds of sets in turns, and return this rank's number of plans.

    All ranks but 0 have only small files.
    """
    with Engine(CONSTANT) as engine:
        for step in range(6):
            kind, rank = str(step % 2), dist.get_rank()
            files = FileSet("" if has_names else kind)
            if rank == 0:
                name = kind if has_names else "model"
                files.add_safetensors(f"{name}.safetensors", {"w": torch.full((5 + step % 2,), float(step))})
            files.add_bytes(f"{rank}.txt", b"")
            engine.save(os.path.join(root, str(step)), files).result(60)
        return len({known.plan.number for known in engine._buffers.known})


@pytest.mark.parametrize("has_names", [True, False])
def test_kinds_of_sets_alternate(tmp_path: Path, has_names: bool) -> None:
    assert run(2, _alternate, str(tmp_path / "root"), has_names, folder=tmp_path) == [2, 1]


def test_a_rank_may_have_no_file(tmp_path: Path) -> None:
    run(2, _nothing, str(tmp_path / "root"), folder=tmp_path)
    assert torch.load(tmp_path / "root/1/it.pt").sum() == LARGE
