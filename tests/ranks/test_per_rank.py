"""``PerRank`` values: each rank loads its own value. For another number of ranks the caller decides."""

from __future__ import annotations

import copy
import logging
import pickle
import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from support.ranks import QUICK, run
from torch.distributed.checkpoint import state_dict_loader

from asyncckpt import Checkpointer, Config, PerRank
from asyncckpt.errors import MismatchError, UnsavableStateError

pytestmark = pytest.mark.usefixtures("forkserver")


class _Loader:
    """A data loader that knows its position."""

    def __init__(self, at: int) -> None:
        self.at = at

    def state_dict(self) -> dict[str, Any]:
        return {"at": self.at, "seen": torch.full((3,), self.at)}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.at = state_dict["at"]
        assert state_dict["seen"].tolist() == [self.at] * 3


def _state(rank: int, missing: Any = "error") -> dict[str, Any]:
    """Return a state with a different form on each rank."""
    torch.manual_seed(rank)
    form = {"t": [torch.full((rank + 2,), float(rank))], 3: "x"}
    return {
        "rng": PerRank(torch.get_rng_state(), missing=missing),
        "all": torch.arange(4.0),
        "a.b": [PerRank(rank, missing=missing), {"form": PerRank(form)}],
        "loader": PerRank(_Loader(rank), missing=missing),
        "none": PerRank({}),
    }


def _save(root: str) -> None:
    with Checkpointer(root, QUICK) as checkpointer:
        for step in (1, 2):
            checkpointer.save(step, _state(dist.get_rank() + 10 * step)).result(30)


def _check(state: dict[str, Any], rank: int) -> None:
    wanted = _state(rank)
    assert torch.equal(state["rng"].value, wanted["rng"].value)
    assert state["a.b"][0].value == rank and state["loader"].value.at == rank
    (found,), (sought,) = state["a.b"][1]["form"].value["t"], wanted["a.b"][1]["form"].value["t"]
    assert torch.equal(found, sought) and state["a.b"][1]["form"].value[3] == "x"


def _load(root: str, memory: bool) -> None:
    logging.getLogger("asyncckpt").addHandler(heard := _Handler())
    mine = 20 + dist.get_rank()
    with Checkpointer(root, QUICK) as checkpointer:
        into = _state(mine)
        into["a.b"][0].value, into["loader"].value.at = -1, -1
        into["rng"].value.zero_()
        into["a.b"][1]["form"].value["t"][0].zero_()
        assert checkpointer.load(into, memory=memory) == 2
        _check(into, mine)
    assert not heard.messages  # no warning about values of other ranks that are not loaded


def test_each_rank_gets_its_own(tmp_path: Path) -> None:
    root = str(tmp_path / "root")
    run(2, _save, root, folder=tmp_path)
    run(2, _load, root, True, folder=tmp_path)
    run(2, _load_by_dcp, root, folder=tmp_path)


def _load_by_dcp(root: str) -> None:
    """Load by stock DCP, which needs only the ``PerRank`` objects in the state."""
    into = {"rng": PerRank(torch.zeros_like(torch.get_rng_state())), "all": torch.zeros(4)}
    state_dict_loader.load(into, checkpoint_id=f"{root}/step-00000002")
    assert torch.equal(into["rng"].value, _state(20 + dist.get_rank())["rng"].value)  # type: ignore[attr-defined]


def _load_on_others(root: str) -> None:
    checkpointer = Checkpointer(root, QUICK)
    with pytest.raises(MismatchError, match=r"'rng' is of each rank, was saved by 2 ranks, and this job has 3"):
        checkpointer.load({"rng": PerRank(torch.get_rng_state())})
    into: dict[str, Any] = {
        "rng": PerRank(torch.zeros_like(torch.get_rng_state()), missing="rank0"),
        "a.b": [PerRank(None, missing=sum), {"form": PerRank(None, missing=lambda values: copy.copy(values))}],
        "loader": PerRank(None, missing=lambda values: [each["at"] for each in values]),
        "all": torch.zeros(4),
    }
    checkpointer.load(into)
    assert torch.equal(into["rng"].value, _state(20)["rng"].value) and torch.equal(into["all"], torch.arange(4.0))
    twice = PerRank(None, missing="rank0")
    with pytest.raises(MismatchError, match="under another name, too"):
        checkpointer.load({"rng": twice, "loader": twice})
    assert into["a.b"][0].value == 20 + 21 and into["loader"].value == [20, 21]
    forms = into["a.b"][1]["form"].value
    assert [each["t"][0].tolist() for each in forms] == [[20.0] * 22, [21.0] * 23]
    assert [each["3"] for each in forms] == ["x", "x"]
    checkpointer.save(3, into | {"rng": PerRank(into["rng"].value)}).result(30)
    with pytest.raises(MismatchError, match="rank-"):  # only values of single ranks were saved
        checkpointer.load({"not saved": PerRank(1)})
    checkpointer.close()


def test_another_number_of_ranks_gets_what_the_caller_says(tmp_path: Path) -> None:
    root = str(tmp_path / "root")
    run(2, _save, root, folder=tmp_path)
    run(3, _load_on_others, root, folder=tmp_path)


def test_what_it_takes(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="missing='rank1'"):
        PerRank(1, missing="rank1")  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="belongs in a state dict"):
        pickle.dumps(PerRank(1))
    with Checkpointer(tmp_path / "root", QUICK) as checkpointer:
        with pytest.raises(UnsavableStateError, match="belongs in a state dict"):
            checkpointer.save(1, {"in a tuple": (PerRank(1),)})
        checkpointer.save(1, {"seed": PerRank(7)}).result(30)
        checkpointer.load(into := {"seed": PerRank(0)})
        assert into["seed"].value == 7 and "7" in repr(into["seed"])


def _lazy() -> Any:
    """Return an object that raises when its size is read."""

    class Lazy:
        @property
        def nbytes(self) -> int:
            raise RuntimeError("it is on a disk")

        def __reduce__(self) -> Any:
            return (int, ())

    return Lazy()


class _Handler(logging.Handler):
    def __init__(self) -> None:
        super().__init__()
        self.messages: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        if "weights_only=False" not in record.getMessage():  # a warning about values that a load would refuse
            self.messages.append(record.getMessage())


def _save_what_differs(root: str) -> list[str]:
    logging.getLogger("asyncckpt").addHandler(heard := _Handler())
    rank = dist.get_rank()
    torch.manual_seed(rank)
    random.seed(rank)
    np.random.seed(rank)
    same: dict[str, Any] = {
        "model": {"w": torch.arange(9.0), "statistics": torch.full((4,), float(rank)), "count": torch.tensor(3)},
        "lr": 0.1,
        "names": ["a", "b"],
        "place": {"epoch": 3, 4: None},
        "own": PerRank(rank),
        "of a class": Path("x"),
        "objects": np.array(["a", str(rank)], dtype=object),
        "many": [np.full(50_000, rank)],
        "lazy": _lazy(),
    }
    different = {
        "rng": torch.get_rng_state(),
        "python": random.getstate(),
        "numpy": np.random.get_state(),
        "rank": rank,
        "shape": torch.zeros(rank + 1),
        "at": {"position": 100 * rank},
    }
    later = same | {"later": {"position": 0}}
    with Checkpointer(root, QUICK) as checkpointer:
        checkpointer.save(1, same).result(30)
        checkpointer.prepare(later)
        for step in (2, 3):
            checkpointer.save(step, same | different).result(30)
        for step in (4, 5, 6, 7):
            later["later"]["position"] = step * rank
            checkpointer.save(step, later).result(30)
    return heard.messages


def test_values_that_differ_are_named(tmp_path: Path) -> None:
    first, *others = run(3, _save_what_differs, str(tmp_path / "root"), folder=tmp_path)
    assert len(first) == 3 and not any(others)
    assert "1 values differ from rank to rank" in first[0] and "'model.statistics' (ranks 0 and 1)" in first[0]
    assert "6 values differ from rank to rank" in first[1] and "'rng' (ranks 0 and 1)" in first[1]
    assert "and 1 more; wrap what is of each rank's own in asyncckpt.PerRank" in first[1]
    assert "1 values differ from rank to rank" in first[2] and "'later.position' (ranks 0 and 1)" in first[2]


def _experts(of: int, dtype: torch.dtype = torch.float32) -> dict[str, Any]:
    """Return weights of rank ``of``, under names that all ranks have."""
    torch.manual_seed(of)
    own = {f"experts.{number}": torch.randn(96, 40).to(dtype) for number in range(7)}
    own |= {"moments": torch.nn.Parameter(torch.randn(30, 9)).t(), "scale": torch.randn((), dtype=torch.float64)}
    return {"model": {"shared": torch.ones(1000), "empty": torch.empty(0), **own}}


def _save_experts(root: str, config: Config) -> list[str]:
    logging.getLogger("asyncckpt").addHandler(heard := _Handler())
    dtype = torch.bfloat16
    with Checkpointer(root, config) as checkpointer:
        checkpointer.prepare(_experts(0, dtype))
        if config.differing_replicas == "raise":
            for step in (1, 2, 3, 4, 5, 6):
                save = checkpointer.save(step, _experts(dist.get_rank(), dtype))
                with pytest.raises(UnsavableStateError, match="9 values differ from rank to rank.*nothing is saved"):
                    save.result(30)
            assert checkpointer.latest() is None
            heard.messages.clear()
        checkpointer.save(7, _experts(0, dtype)).result(30)
        assert not heard.messages
        for step in range(8, 40):
            checkpointer.save(step, _experts(0, dtype))
        if config.differing_replicas == "raise":
            with pytest.raises(UnsavableStateError):
                for step in range(40, 51):
                    checkpointer.save(step, _experts(dist.get_rank(), dtype)).result(30)
        else:
            for step in range(40, 72):
                checkpointer.save(step, _experts(dist.get_rank(), dtype)).result(30)
    return heard.messages


@pytest.mark.parametrize("constant", [False, True])
def test_weights_of_each_rank_under_equal_names_are_named(tmp_path: Path, constant: bool) -> None:
    config = replace(QUICK, keep_last=1, assume_constant_structure=constant)
    first, other = run(2, _save_experts, str(tmp_path / "root"), config, folder=tmp_path)
    assert not other and len(first) == 1  # each name is reported once
    assert "9 values differ from rank to rank" in first[0] and "'model.experts.0' (ranks 0 and 1)" in first[0]
    assert "give it a name of its own on each rank" in first[0] and str(tmp_path / "root") in first[0]


def test_weights_of_each_rank_under_equal_names_can_be_refused(tmp_path: Path) -> None:
    config = replace(QUICK, keep_last=1, differing_replicas="raise", overlap=True)
    run(2, _save_experts, str(tmp_path / "root"), config, folder=tmp_path)
