"""Slabs and the other units of copying from a device, as far as they run without one: every bit is brought over."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from support.images import Slot, tensors_of_all_kinds
from torch.utils._python_dispatch import TorchDispatchMode

from asyncckpt.staging import device_copy
from asyncckpt.staging.device_copy import ChunkCopy, Slab, allocate_slab_buffers, device_units, group_by_slab
from asyncckpt.staging.host_copy import BatchCopy


@pytest.mark.parametrize("with_slabs", [True, False])
def test_units_bring_every_bit(monkeypatch: pytest.MonkeyPatch, with_slabs: bool) -> None:
    monkeypatch.setattr(device_copy, "_SMALL_BYTES", 100_000)
    monkeypatch.setattr(device_copy, "SLAB_BYTES", 400_000)
    monkeypatch.setattr(device_copy, "_CHUNK_BYTES", 250_000)
    tensors = tensors_of_all_kinds()
    slot = Slot(tensors)
    try:
        numbers, views = slot.own()
        buffers = allocate_slab_buffers(torch.device("cpu")) if with_slabs else []
        units = device_units(range(len(numbers)), views, buffers)
        kinds = [type(unit) for unit in units]
        assert (kinds.count(Slab) > 3) == with_slabs and kinds.count(ChunkCopy) > 5 and kinds.count(BatchCopy) > 1
        begins = [(kind is not Slab, unit.begin) for kind, unit in zip(kinds, units, strict=True)]
        assert begins == sorted(begins)
        mine = [tensors[number] for number in numbers]
        for _ in range(2):
            for unit in units:
                unit.copy(mine)
        assert slot.image_bytes() == slot.expected(tensors)
        del units, views, unit
    finally:
        slot.segment.close()


def test_no_slab_is_of_two_files() -> None:
    """Between them are the objects of the first, which the host writes."""
    tensors = [torch.zeros(3) for _ in range(100)]
    slot = Slot(tensors, counts=[(37, 1), (63, 1)])
    try:
        _, views = slot.own()
        assert list(group_by_slab(range(100), views)) == [(True, list(range(37))), (True, list(range(37, 100)))]
    finally:
        slot.segment.close()


def test_a_slab_has_only_what_is_its_devices(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is all small, without a gap, at least so many, and no longer than a slab buffer."""
    monkeypatch.setattr(device_copy, "SLAB_BYTES", 60_000)
    tensors = [torch.zeros(100) for _ in range(100)]
    tensors[30] = torch.zeros(1 << 17)
    slot = Slot(tensors)
    try:
        _, views = slot.own()
        theirs = [number for number in range(100) if number not in (50, 57)]
        found = list(group_by_slab(theirs, views))
        assert [number for _, group in found for number in group] == theirs
        for is_slab, group in found:
            last = views.places[group[-1]]
            assert group == list(range(group[0], group[-1] + 1))
            assert is_slab == (len(group) >= 8)
            if is_slab:
                assert 30 not in group
                assert last.payload_at + last.payload_bytes - views.places[group[0]].payload_at <= 60_000
        assert (False, [30]) in found and (False, list(range(51, 57))) in found
        del views
    finally:
        slot.segment.close()


def test_torch_resolves_lazy_signs_before_it_copies_many() -> None:
    """What ``BatchCopy`` and ``ChunkCopy`` rely on: no kernel sees a conjugate that is only a flag."""
    seen: list[bool] = []

    class Watch(TorchDispatchMode):  # type: ignore[no-untyped-call]
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            if "foreach" in str(func):
                seen.extend(tensor.is_conj() or tensor.is_neg() for tensor in args[1])
            return func(*args, **(kwargs or {}))

    lazy = torch.randn(4, dtype=torch.complex64).conj()
    with Watch(), torch.inference_mode():  # type: ignore[no-untyped-call]
        torch._foreach_copy_([torch.empty(4, dtype=torch.complex64), torch.empty(4)], [lazy, lazy.imag])
    assert seen == [False, False]
