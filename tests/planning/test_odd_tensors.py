"""Tensors that are not what their shape says: saved rightly, or refused by name, never saved wrongly."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard
from torch.utils._python_dispatch import return_and_correct_aliasing

from asyncckpt import Checkpointer
from asyncckpt.errors import UnsavableStateError


class Pair(torch.Tensor):
    """A wrapper of two tensors, as quantised parameters are: it has no bytes of its own."""

    @staticmethod
    def __new__(cls, one: torch.Tensor, other: torch.Tensor) -> Pair:
        return torch.Tensor._make_wrapper_subclass(cls, one.shape, dtype=one.dtype)

    def __init__(self, one: torch.Tensor, other: torch.Tensor) -> None:
        self.one, self.other = one, other

    def __tensor_flatten__(self) -> tuple[list[str], None]:
        return ["one", "other"], None

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        def apply(part: str) -> Any:
            return func(*[getattr(each, part) if isinstance(each, Pair) else each for each in args], **(kwargs or {}))

        made = Pair(apply("one"), apply("other"))
        return return_and_correct_aliasing(func, args, kwargs or {}, made)  # type: ignore[no-untyped-call]


@pytest.fixture
def mesh(tmp_path: Path) -> Any:
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/meeting", rank=0, world_size=1)
    yield init_device_mesh("cpu", (1,))
    dist.destroy_process_group()


def test_a_dtensor_with_a_subclass_in_it_is_refused_by_name(mesh: Any, root: Path) -> None:
    local = Pair(torch.ones(8), torch.zeros(8))
    sharded = DTensor.from_local(local, mesh, [Shard(0)], run_check=False)
    with Checkpointer(root) as checkpointer:
        with pytest.raises(UnsavableStateError, match=r"'weight'.*Pair"):
            checkpointer.save(1, {"weight": sharded})
        assert checkpointer.steps() == []


def test_a_dtensor_that_becomes_one_is_refused(mesh: Any, root: Path) -> None:
    plain = DTensor.from_local(torch.ones(8), mesh, [Shard(0)], run_check=False)
    sharded = DTensor.from_local(Pair(torch.ones(8), torch.zeros(8)), mesh, [Shard(0)], run_check=False)
    with Checkpointer(root) as checkpointer:
        checkpointer.save(1, {"weight": plain}).result(60)
        with pytest.raises(UnsavableStateError, match=r"'weight'.*Pair"):
            checkpointer.save(2, {"weight": sharded})
        checkpointer.save(3, {"weight": plain}).result(60)
        assert checkpointer.steps() == [1, 3]


@pytest.mark.parametrize("planned", [False, True])
def test_a_tensor_whose_storage_was_freed_is_refused(root: Path, planned: bool) -> None:
    """As FSDP does between uses: the shape stays, the bytes are gone."""
    state = {"model": {"kept": torch.ones(8), "freed": torch.ones(1000)}}
    with Checkpointer(root) as checkpointer:
        if planned:
            checkpointer.save(1, state).result(60)
        state["model"]["freed"].untyped_storage().resize_(0)
        with pytest.raises(UnsavableStateError, match=r"'model.freed'"):
            checkpointer.save(2, state)
        state["model"]["freed"] = torch.ones(1000)
        checkpointer.save(3, state).result(60)
