"""Test that ``torch.load`` reads a header followed by a tensor's bytes."""

from __future__ import annotations

import io
import sys

import pytest
import torch
from support.images import DTYPES, any_bits
from support.states import same
from torch._subclasses.fake_tensor import FakeTensorMode

from asyncckpt.errors import UnsavableStateError
from asyncckpt.planning.layout import tensor_header

SHAPES: list[tuple[int, ...]] = [(), (0,), (1,), (5, 7), (3, 0, 2), (300, 400), (1, 1, 70_000)]


@pytest.mark.parametrize("weights_only", [True, False])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_torch_reads_it(dtype: torch.dtype, weights_only: bool) -> None:
    for shape in SHAPES:
        tensor = any_bits(dtype, shape)
        header = tensor_header(dtype, shape)
        stored = io.BytesIO(
            header + bytes(tensor.reshape(-1).view(torch.uint8).numpy().data if tensor.numel() else b"")
        )
        loaded = torch.load(stored, weights_only=weights_only)
        assert same(loaded, tensor) and loaded.stride() == tensor.stride()
        assert not loaded.requires_grad and loaded.untyped_storage().nbytes() == tensor.nbytes
        assert stored.tell() == len(stored.getvalue()) and len(header) < 200


def test_a_tensor_of_many_gigabytes() -> None:
    """The numbers in the header do not fit in 32 bits."""
    elements = (4 << 30) + 3
    header = tensor_header(torch.float64, (elements, 2))
    with FakeTensorMode():
        loaded = torch.load(io.BytesIO(header))
    assert loaded.shape == (elements, 2) and loaded.dtype == torch.float64
    assert header.endswith((2 * elements).to_bytes(8, "little"))


def test_a_machine_with_the_other_order_of_bytes_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "byteorder", "big")
    with pytest.raises(UnsavableStateError, match="lowest byte first"):
        tensor_header(torch.float32, (12_345, 6))
