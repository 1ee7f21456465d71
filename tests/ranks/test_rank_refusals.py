"""A refusal or a failure on one rank raises on all ranks at once, even in the first call of a job."""

from __future__ import annotations

import collections
import dataclasses
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from support.ranks import QUICK, run
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard

from asyncckpt import Checkpointer, PerRank
from asyncckpt.errors import UnsavableStateError

pytestmark = pytest.mark.usefixtures("forkserver")


class _Sick:
    def __init__(self, is_sick: bool) -> None:
        self._is_sick, self.at = is_sick, torch.zeros(3)

    def state_dict(self) -> dict[str, Any]:
        if self._is_sick:
            raise ValueError("sick")
        return {"at": self.at}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.at = state["at"]


def _said(call: Any) -> str:
    begun = time.monotonic()
    try:
        call()
    except Exception as error:
        # Less than QUICK's timeout, so that no rank has run into it.
        return str(error) if time.monotonic() - begun < QUICK.timeout / 2 else f"late: {error}"
    return "well"


def _save_twice(root: str, bad: int) -> list[str]:
    with Checkpointer(root, config=QUICK) as checkpointer:

        def save(step: int, *, is_sick: bool) -> None:
            state = {"s": _Sick(is_sick and dist.get_rank() == bad), "t": torch.ones(2)}
            checkpointer.save(step, state).result()

        return [_said(lambda: save(1, is_sick=True)), _said(lambda: save(2, is_sick=False))]


@pytest.mark.parametrize("bad", [0, 1])
def test_a_state_that_cannot_be_had_fails_the_first_save_on_all_ranks(tmp_path: Path, bad: int) -> None:
    for first, second in run(2, _save_twice, str(tmp_path / "root"), bad, folder=tmp_path):
        assert "sick" in first and "late" not in first and second == "well"


def _load(root: str) -> list[str]:
    with Checkpointer(root, config=QUICK) as checkpointer:
        checkpointer.save(1, {"s": _Sick(False)}).result()
        said = [_said(lambda: checkpointer.load({"s": _Sick(dist.get_rank() == 1)}))]
        dist.barrier()
        return [*said, _said(lambda: checkpointer.load({"s": _Sick(False)}))]


def test_or_the_load(tmp_path: Path) -> None:
    for first, second in run(2, _load, str(tmp_path / "root"), folder=tmp_path):
        assert "sick" in first and "late" not in first and second == "well"


def _save_another_part(root: str) -> str:
    whole, rank = torch.arange(8.0), dist.get_rank()
    part = whole[:5] if rank == 0 else whole[5:]  # each of two ranks should have 4 of 8
    placed = init_device_mesh("cpu", (2,)), [Shard(0)]
    made = DTensor.from_local(part.clone(), *placed, run_check=False, shape=torch.Size([8]), stride=(1,))
    with Checkpointer(root, config=QUICK) as checkpointer:
        with pytest.raises(UnsavableStateError if rank == 0 else Exception) as refused:
            checkpointer.save(1, {"w": made}).result()
        assert not checkpointer.steps()
    return str(refused.value)


def test_a_part_that_is_not_the_one_its_placements_say_is_refused(tmp_path: Path) -> None:
    """The part would not fit its metadata, and no job could load it."""
    for said in run(2, _save_another_part, str(tmp_path / "root"), folder=tmp_path):
        assert "by its placements a part of (4,)" in said


@dataclasses.dataclass
class _Holder:
    held: Any


def _part(placement: Placement) -> DTensor:
    return DTensor.from_local(torch.full((4,), float(dist.get_rank())), init_device_mesh("cpu", (2,)), [placement])


def _save_in_objects(root: str) -> dict[str, str]:
    """Return the error for each kind, in the first save of a name and for an object that holds a part later."""
    said: dict[str, str] = {}
    with Checkpointer(root, config=QUICK) as checkpointer:
        for kind in (tuple, collections.deque, frozenset):
            state = {"a": {"held": kind([_part(Shard(0))])}, "w": torch.ones(2)}
            said[kind.__name__] = _said(lambda state=state: checkpointer.save(1, state).result())
        for placement in (Shard(0), Partial()):
            state = {"a": {"held": _Holder([_part(placement)])}, "w": torch.ones(2)}
            said[str(placement)] = _said(lambda state=state: checkpointer.save(1, state).result())
        state = {"a": {"held": _Holder(torch.ones(1))}, "w": torch.ones(2)}
        checkpointer.save(2, state).result()
        state["a"] = {"held": _Holder(_part(Shard(0)))}
        said["later"] = _said(lambda: checkpointer.save(3, state).result())
        assert checkpointer.steps() == [2]
    return said


def test_a_part_of_a_tensor_in_an_object_is_refused(tmp_path: Path) -> None:
    """All ranks would load the part of one rank."""
    for said in run(2, _save_in_objects, str(tmp_path / "root"), folder=tmp_path):
        assert len(said) == 6
        for each in said.values():
            assert "'a.held'" in each and "DTensor" in each and "full_tensor" in each


def _save_whole_in_objects(root: str) -> list[float]:
    """Save a DTensor that is whole on each rank, and ``PerRank`` parts."""
    with Checkpointer(root, config=QUICK) as checkpointer:
        checkpointer.save(1, {"a": (_part(Replicate()),), "b": PerRank((_part(Shard(0)),))}).result()
        into: dict[str, Any] = {"a": None, "b": PerRank(None)}
        checkpointer.load(into, weights_only=False)
    assert into["a"][0].placements == (Replicate(),)
    return list(into["b"].value[0].to_local().tolist())


def test_but_not_a_whole_one_or_one_of_each_rank(tmp_path: Path) -> None:
    found = run(2, _save_whole_in_objects, str(tmp_path / "root"), folder=tmp_path)
    assert found == [[0.0] * 4, [1.0] * 4]
