"""Test tensors that are not what their shape says: they are saved correctly, or refused by name."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
from support.ranks import run
from torch.distributed import checkpoint
from torch.distributed.checkpoint.metadata import TensorProperties
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard

from asyncckpt import Checkpointer
from asyncckpt.errors import MismatchError, UnsavableStateError
from asyncckpt.extension import METADATA_NAME

pytestmark = pytest.mark.usefixtures("forkserver")


class Pair(torch.Tensor):
    """A wrapper of two tensors without bytes of its own, like quantised parameters."""

    @staticmethod
    def __new__(cls, one: torch.Tensor, other: torch.Tensor) -> Pair:
        return torch.Tensor._make_wrapper_subclass(cls, one.shape, dtype=one.dtype)

    def __init__(self, one: torch.Tensor, other: torch.Tensor) -> None:
        self.one, self.other = one, other

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        one, other = (
            func(*[getattr(each, part) if isinstance(each, Pair) else each for each in args], **(kwargs or {}))
            for part in ("one", "other")
        )
        return Pair(one, other) if isinstance(one, torch.Tensor) else one


def _save_pairs(root: str) -> list[str]:
    """Return the errors for a DTensor of pairs: at the first save, and after a save of plain tensors."""
    mesh = init_device_mesh("cpu", (1,))
    plain, pairs = (
        DTensor.from_local(local, mesh, [Shard(0)], run_check=False)
        for local in (torch.ones(8), Pair(torch.ones(8), torch.zeros(8)))
    )
    said = []
    with Checkpointer(root) as checkpointer:
        for step, weight in enumerate((pairs, plain, pairs, plain)):
            try:
                checkpointer.save(step, {"weight": weight}).result(60)
            except UnsavableStateError as error:
                said.append(str(error))
        assert checkpointer.steps() == [1, 3]
    return said


def test_a_dtensor_with_a_subclass_in_it_is_refused_by_name(tmp_path: Path) -> None:
    ((new, changed),) = run(1, _save_pairs, str(tmp_path / "root"), folder=tmp_path)
    for said in (new, changed):
        assert "'weight'" in said and "Pair" in said


def _save_and_load_partial(root: str) -> list[str]:
    mesh = init_device_mesh("cpu", (1,))
    partial, whole = (DTensor.from_local(torch.ones(8), mesh, [each]) for each in (Partial(), Replicate()))
    with Checkpointer(root) as checkpointer:
        with pytest.raises(UnsavableStateError) as unsavable:
            checkpointer.save(1, {"a": {"weight": partial}, "w": torch.ones(2)})
        checkpointer.save(2, {"a": {"weight": whole}}).result(60)
        with pytest.raises(MismatchError) as misfit:
            checkpointer.load({"a": {"weight": partial}})
    return [str(unsavable.value), str(misfit.value)]


def test_a_partial_dtensor_is_refused_by_name(tmp_path: Path) -> None:
    for said in run(1, _save_and_load_partial, str(tmp_path / "root"), folder=tmp_path)[0]:
        assert "'a.weight' is a DTensor placed as [Partial(sum)]" in said


def test_a_parameter_that_becomes_the_negative_of_its_bytes_is_saved_as_its_values(root: Path) -> None:
    """The parameter stays the same object at the same address."""
    state = {name: torch.nn.Parameter(torch.ones(shape)) for name, shape in (("w", (300,)), ("b", (2, 3)))}
    with Checkpointer(root) as checkpointer:
        for step in range(6):
            if step % 2:
                for parameter in state.values():
                    parameter.data = torch._neg_view(parameter.data)
            checkpointer.save(step, state).result(60)
            into = {name: torch.zeros_like(parameter) for name, parameter in state.items()}
            checkpointer.load(into)
            for name, parameter in state.items():
                assert torch.equal(into[name], parameter), (step, name)


@pytest.mark.parametrize("planned", [False, True])
def test_a_tensor_whose_storage_was_freed_is_refused(root: Path, planned: bool) -> None:
    """FSDP does this between uses: the shape stays, but the bytes are gone."""
    state = {"model": {"kept": torch.ones(8), "freed": torch.ones(1000)}}
    with Checkpointer(root) as checkpointer:
        if planned:
            checkpointer.save(1, state).result(60)
        state["model"]["freed"].untyped_storage().resize_(0)
        with pytest.raises(UnsavableStateError, match=r"'model.freed'"):
            checkpointer.save(2, state)
        state["model"]["freed"] = torch.ones(1000)
        checkpointer.save(3, state).result(60)


def test_views_of_a_storage_that_was_freed_are_refused(root: Path) -> None:
    """This happens to a flat buffer of parameters: the address of each view is then its offset."""
    flat = torch.ones(300_000)
    state = {"small": flat[100:200], "large": flat[1000:200_000], "kept": torch.ones(8)}
    with Checkpointer(root) as checkpointer:
        for step in (1, 3):
            flat.untyped_storage().resize_(0)
            with pytest.raises(UnsavableStateError, match="'small'|'large'"):
                checkpointer.save(step, state)
            flat.untyped_storage().resize_(1_200_000)
            flat.fill_(step)
            checkpointer.save(step + 1, state).result(60)


def _part(values: torch.Tensor, begins: list[int], of: int) -> torch.Tensor:
    """Return ``values`` as a part of a tensor of length ``of``: two rows from each of ``begins`` on."""
    facts: dict[str, Any] = {
        "global_shape": (of,),
        "global_offsets": tuple((begin,) for begin in begins),
        "local_offsets": tuple((2 * number,) for number in range(len(begins))),
        "local_sizes": tuple((2,) for _ in begins),
    }
    for name, value in facts.items():
        setattr(values, name, value)
    return values


def test_a_part_of_a_larger_tensor_is_never_saved_as_a_whole_one(root: Path) -> None:
    knows = hasattr(checkpoint, "CheckpointableTensor")  # from torch 2.14 on
    values = torch.arange(4.0)
    with Checkpointer(root) as checkpointer:
        # The result is the same if a plain tensor of this name and shape was planned before.
        for step, weight in enumerate((_part(values, [2, 0], 4), torch.ones(4), _part(values, [2, 0], 4))):
            if knows or step == 1:
                checkpointer.save(step, {"weight": weight, "plain": torch.ones(2)}).result(60)
                continue
            with pytest.raises(UnsavableStateError, match="'weight' says .* a part of a larger tensor"):
                checkpointer.save(step, {"weight": weight, "plain": torch.ones(2)})
        assert checkpointer.steps() == ([0, 1, 2] if knows else [1])
        into = {"weight": torch.zeros(4), "plain": torch.zeros(2)}
        checkpointer.load(into)
        assert into["weight"].tolist() == ([2, 3, 0, 1] if knows else [1, 1, 1, 1])
        if knows:
            checkpointer.load({"weight": _part(into["weight"], [2, 0], 4)})
            assert into["weight"].tolist() == [0, 1, 2, 3]


def test_metadata_has_of_a_tensor_what_every_torch_reads(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    original = TensorProperties.__getstate__

    def of_a_newer_torch(self: TensorProperties) -> tuple[Any, ...]:
        return (*original(self)[:5], (3, 1))  # type: ignore[no-untyped-call]

    monkeypatch.setattr(TensorProperties, "__getstate__", of_a_newer_torch)
    with Checkpointer(root) as checkpointer:
        path = Path(checkpointer.save(1, {"weight": torch.ones(2, 3)}).result(60))
    states: list[Any] = []
    monkeypatch.setattr(TensorProperties, "__setstate__", lambda self, state: states.append(state))
    pickle.loads((path / METADATA_NAME).read_bytes())
    assert [len(state) for state in states] == [5]


@pytest.mark.parametrize("by_data", [False, True], ids=["another tensor", "the same tensor"])
def test_the_same_bytes_may_be_the_negatives_of_values_in_a_later_save(root: Path, by_data: bool) -> None:
    """The form and the address stay the same, because views that are one element wide are contiguous."""
    numbers = torch.tensor([1 + 2j, 3 + 4j])
    weight = numbers.imag[:1].clone() if by_data else numbers.imag[:1]
    state = {"w": weight}
    with Checkpointer(root) as checkpointer:
        for step, value in enumerate([2.0, 2.0, 2.0, -2.0, -2.0, 2.0]):
            view = (numbers if value > 0 else numbers.conj()).imag[:1]
            if by_data:
                weight.data = view
            else:
                state["w"] = view
            checkpointer.save(step, state).result()
            found = {"w": torch.zeros(1)}
            checkpointer.load(found, step=step)
            assert found["w"].item() == value
