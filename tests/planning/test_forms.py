"""Forms of tensors: what is compiled and what takes its place find the same."""

from __future__ import annotations

import shutil
from collections.abc import Callable

import pytest
import torch
from support.images import tensors_of_all_kinds

from asyncckpt.planning import forms
from asyncckpt.planning.forms import Forms, contiguous_addresses


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
    others[0] = torch.zeros(4, 3).t()  # how it lies in memory is no part of it
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
    assert known.are_those_of(_some())  # and no exception is left behind


@pytest.mark.usefixtures("comparing")
def test_what_dlpack_does_not_know_is_compared_all_the_same() -> None:
    strange = torch.quantize_per_tensor(torch.ones(3), 0.1, 0, torch.qint8)
    known = Forms([torch.ones(3), strange])
    assert known.are_those_of([torch.zeros(3), strange]) and not known.are_those_of([torch.zeros(4), strange])


@pytest.mark.usefixtures("comparing")
def test_addresses_are_those_of_contiguous_tensors() -> None:
    strange = torch.quantize_per_tensor(torch.ones(3), 0.1, 0, torch.qint8)
    tensors = [*tensors_of_all_kinds(), *_some(), torch.zeros(4, 1, 3)[:, :, ::3], torch.zeros(9)[3:5], strange]
    for each in tensors:
        found = contiguous_addresses([each])
        assert (found is not None) == each.is_contiguous()
        assert found is None or found.tolist() == [each.data_ptr()]
    plain = [each for each in tensors if each.is_contiguous()]
    found = contiguous_addresses(tuple(plain))
    assert found is not None and found.tolist() == [each.data_ptr() for each in plain]
    assert contiguous_addresses(tensors) is None and contiguous_addresses([]) is not None
