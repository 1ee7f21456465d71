"""Test forms of tensors: the compiled code and its fallback find the same."""

from __future__ import annotations

import shutil
from array import array
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from support.images import tensors_of_all_kinds

from asyncckpt.planning import forms
from asyncckpt.planning.forms import Forms, plain_addresses


@pytest.fixture(params=["compiled", "not compiled"])
def comparing(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    if request.param == "not compiled":
        monkeypatch.setattr(forms, "_exchange", lambda: None)
    elif forms._exchange() is None:
        pytest.skip("nothing was compiled here, or torch is older than 2.10")


def test_it_is_compiled_where_it_can_be() -> None:
    can_be = shutil.which("cc") is not None and hasattr(torch.Tensor, "__dlpack_c_exchange_api__")
    assert (forms._exchange() is not None) == can_be


def _some() -> list[torch.Tensor]:
    dtypes = [torch.float32, torch.bfloat16, torch.float16, torch.int64, torch.bool, torch.complex64, torch.float8_e5m2]
    made = [torch.zeros(3, 4, dtype=dtype) for dtype in dtypes]
    return [*made, torch.tensor(1.0), torch.zeros(0, 5), torch.nn.Parameter(torch.zeros(7)), torch.zeros(2, 3).t()]


@pytest.mark.usefixtures("comparing")
def test_the_same_forms_are_the_same() -> None:
    known = Forms(_some())
    assert known.are_those_of(_some()) and known.are_those_of(tuple(_some()))
    others = _some()
    others[0] = torch.zeros(4, 3).t()  # the strides are no part of a form
    assert known.are_those_of(others)


@pytest.mark.usefixtures("comparing")
@pytest.mark.parametrize(
    "change",
    [
        lambda its: its.__setitem__(0, torch.zeros(4, 3)),
        lambda its: its.__setitem__(0, torch.zeros(12)),
        lambda its: its.__setitem__(0, torch.zeros(3, 4, 1)),
        lambda its: its.__setitem__(0, torch.zeros(3, 4, dtype=torch.int32)),
        lambda its: its.__setitem__(1, torch.zeros(3, 4, dtype=torch.float16)),
        lambda its: its.__setitem__(6, torch.zeros(3, 4, dtype=torch.float8_e4m3fn)),
        lambda its: its.__setitem__(7, torch.zeros(1)),
        lambda its: its.__setitem__(-1, torch.zeros(3, 2).to_sparse()),
        lambda its: its.append(torch.zeros(1)),
        lambda its: its.pop(),
    ],
)
def test_what_differs_is_seen(change: Callable[[list[torch.Tensor]], object]) -> None:
    known, others = Forms(_some()), _some()
    change(others)
    assert not known.are_those_of(others)
    assert known.are_those_of(_some())  # no exception is left behind


def _part() -> torch.Tensor:
    """Return a plain tensor that claims to be a part of a larger one."""
    part: Any = torch.zeros(3, 4)
    part.global_offsets = part.global_shape = part.local_offsets = part.local_sizes = (0, 0)
    whole: torch.Tensor = part
    return whole


@pytest.mark.usefixtures("comparing")
def test_what_becomes_a_part_or_a_whole_is_seen() -> None:
    wholes, parts = [torch.zeros(3, 4), torch.zeros(3, 4)], [torch.zeros(3, 4), _part()]
    assert not Forms(wholes).are_those_of(parts) and not Forms(parts).are_those_of(wholes)
    assert Forms(parts).are_those_of([torch.zeros(3, 4), _part()]) and not Forms(parts).are_those_of(parts[::-1])
    wholes[1].global_offsets = (0, 0)  # type: ignore[attr-defined]  # this alone does not mark a part
    assert Forms(wholes).are_those_of(wholes)


@pytest.mark.usefixtures("comparing")
def test_what_dlpack_does_not_know_is_compared_all_the_same() -> None:
    strange = torch.quantize_per_tensor(torch.ones(3), 0.1, 0, torch.qint8)
    known = Forms([torch.ones(3), strange])
    assert known.are_those_of([torch.zeros(3), strange]) and not known.are_those_of([torch.zeros(4), strange])


@pytest.mark.device
def test_it_is_noted_where_tensors_are(device_type: str) -> None:
    if forms._exchange() is None:
        pytest.skip("nothing was compiled here, or torch is older than 2.10")
    here, there = [torch.zeros(3), torch.zeros(4)], [torch.zeros(3), torch.zeros(4, device=device_type)]
    known = Forms(here)
    seen = []
    for tensors in (here, _copies(here), there, _copies(there), [there[0], torch.zeros(5)], here):
        known.are_those_of(tensors)
        seen.append(known.devices)
    assert None not in (seen[0], seen[2]) and seen[0] is seen[1] and seen[2] is seen[3]
    assert len({seen[1], seen[3], seen[5]}) == 3
    strange = torch.quantize_per_tensor(torch.ones(3), 0.1, 0, torch.qint8)
    known.are_those_of([strange, here[1]])
    assert known.devices is None


def _copies(tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    return [tensor.clone() for tensor in tensors]


def _addresses(tensors: Sequence[torch.Tensor]) -> list[int] | None:
    found = plain_addresses(tensors)
    return None if found is None else found.tolist()


@pytest.mark.usefixtures("comparing")
def test_addresses_are_those_of_plain_tensors() -> None:
    strange = torch.quantize_per_tensor(torch.ones(3), 0.1, 0, torch.qint8)
    tensors = [*tensors_of_all_kinds(), *_some(), torch.zeros(4, 1, 3)[:, :, ::3], torch.zeros(9)[3:5], strange]
    plain = [each for each in tensors if each.is_contiguous() and not each.is_neg() and not each.is_conj()]
    for each in tensors:
        assert _addresses([each]) == ([each.data_ptr()] if any(each is its for its in plain) else None)
    assert _addresses(tuple(plain)) == [each.data_ptr() for each in plain]
    assert _addresses(tensors) is None and _addresses([]) == []


@pytest.mark.usefixtures("comparing")
def test_addresses_are_those_of_tensors_of_the_forms_asked_for() -> None:
    one, other = (torch.float32, (3, 4)), (torch.int64, ())
    tensors, forms_ = [torch.zeros(3, 4), torch.tensor(1), torch.zeros(3, 4)], [one, other, one]
    found = plain_addresses(tensors, forms_)
    assert found is not None and found.tolist() == [each.data_ptr() for each in tensors]
    assert plain_addresses([], []) == array("Q")
    for strange in (
        torch.zeros(4, 3),
        torch.zeros(3, 4, dtype=torch.int32),
        torch.zeros(12),
        torch.zeros(4, 3).t(),
        _negative(torch.zeros(3, 4)),
        torch.zeros(3, 4, device="meta"),
    ):
        assert plain_addresses([*tensors[:2], strange], forms_) is None
    conjugate = torch.zeros(2, dtype=torch.complex64).conj()
    assert plain_addresses([conjugate], [(torch.complex64, (2,))]) is None
    odd = torch.quantize_per_tensor(torch.ones(3), 0.1, 0, torch.qint8)
    found = plain_addresses([odd], [(torch.qint8, (3,))])
    assert found is not None and found.tolist() == [odd.data_ptr()]


def _negative(tensor: torch.Tensor) -> torch.Tensor:
    return torch._neg_view(tensor)


@pytest.mark.usefixtures("comparing")
@pytest.mark.parametrize("shape", [(), (1,), (3,), (2, 5), (0,)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64, torch.complex64, torch.complex128])
def test_what_is_plain_no_more_is_seen_at_the_same_address(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    """The change is seen even if the tensor is the same object."""
    tensor, other = torch.ones(shape, dtype=dtype), torch.zeros(3)
    tensors = [other, tensor, other]
    for _ in range(3):
        before = [each.data_ptr() for each in tensors]
        assert _addresses(tensors) == before
        assert _addresses([other, _negative(tensor)]) is None
        tensor.data = _negative(tensor)
        assert _addresses(tensors) is None
        tensor.data = _negative(tensor)
        assert _addresses(tensors) == before
        if dtype.is_complex:
            assert _addresses([other, tensor.conj()]) is None and _addresses([other, tensor.conj().imag]) is None


def test_what_is_plain_is_seen_without_asking(monkeypatch: pytest.MonkeyPatch) -> None:
    if forms._exchange() is None:
        pytest.skip("nothing was compiled here, or torch is older than 2.10")
    monkeypatch.setattr(forms, "are_plain", None)
    tensors = [torch.zeros(3), torch.zeros(1, dtype=torch.complex64), torch.nn.Parameter(torch.zeros(2, 2))]
    assert _addresses(tensors) == [each.data_ptr() for each in tensors]
