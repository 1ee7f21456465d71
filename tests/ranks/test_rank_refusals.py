"""What one rank alone refuses, or cannot give, is told to all at once, also at the first call of a job."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from support.ranks import QUICK, run
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard

from asyncckpt import Checkpointer
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
        # Less than QUICK's timeout: nobody has run into that.
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
    part = whole[:5] if rank == 0 else whole[5:]  # of 8 each of two ranks has 4
    placed = init_device_mesh("cpu", (2,)), [Shard(0)]
    made = DTensor.from_local(part.clone(), *placed, run_check=False, shape=torch.Size([8]), stride=(1,))
    with Checkpointer(root, config=QUICK) as checkpointer:
        with pytest.raises(UnsavableStateError if rank == 0 else Exception) as refused:
            checkpointer.save(1, {"w": made}).result()
        assert not checkpointer.steps()
    return str(refused.value)


def test_a_part_that_is_not_the_one_its_placements_say_is_refused(tmp_path: Path) -> None:
    """Its metadata would not fit, and nobody could load it."""
    for said in run(2, _save_another_part, str(tmp_path / "root"), folder=tmp_path):
        assert "by its placements a part of (4,)" in said
