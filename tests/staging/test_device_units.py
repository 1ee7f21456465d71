"""Test the units of device copies on the host: every bit is copied."""

from __future__ import annotations

from array import array
from typing import Any

import pytest
import torch
from support.images import Slot, tensors_of_all_kinds
from torch.utils._python_dispatch import TorchDispatchMode

from asyncckpt.shm.memcpy import copy_many
from asyncckpt.staging import device_copy
from asyncckpt.staging.device_copy import BytesCopy, ChunkCopy, CopyManyOnStream, device_units
from asyncckpt.staging.host_copy import BatchCopy


def _copies(*arrays: array[int]) -> bool:
    copy_many(*arrays)
    return True


def _refuses(*_: array[int]) -> bool:
    return False


@pytest.mark.parametrize("driver", [None, _copies, _refuses])
def test_units_bring_every_bit(monkeypatch: pytest.MonkeyPatch, driver: CopyManyOnStream | None) -> None:
    monkeypatch.setattr(device_copy, "_CHUNK_BYTES", 250_000)
    tensors = tensors_of_all_kinds()
    slot = Slot(tensors)
    try:
        numbers, views = slot.own()
        units = device_units(range(len(numbers)), views, copy_many=driver)
        kinds = [type(unit) for unit in units]
        if driver is None:
            assert kinds.count(ChunkCopy) > 5 and kinds.count(BatchCopy) > 1
        else:
            assert {*kinds} == {BytesCopy}
        begins = [unit.begin for unit in units]
        assert begins == sorted(begins)
        mine = [tensors[number] for number in numbers]
        for _ in range(2):
            for unit in units:
                unit.copy(mine)
        assert slot.image_bytes() == slot.expected(tensors)
        del units, views, unit
    finally:
        slot.segment.close()


def test_torch_resolves_lazy_signs_before_it_copies_many() -> None:
    """``BatchCopy`` and ``ChunkCopy`` rely on this: no kernel sees a conjugate that is only a flag."""
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
