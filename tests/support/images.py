"""Tensors of all kinds, and an image of them in a slot, for tests of copying."""

from __future__ import annotations

import random
from collections.abc import Sequence

import torch

from asyncckpt.planning.layout import DataLayout, TensorSpec
from asyncckpt.shm.segment import Segment
from asyncckpt.staging.host_copy import SlotViews
from support.checkpoints import PAGE

DTYPES = [
    *(torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.complex64, torch.complex128, torch.complex32),
    *(torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.bool, torch.uint16, torch.uint32),
    *(torch.uint64, torch.float8_e4m3fn, torch.float8_e5m2),
]


def any_bits(dtype: torch.dtype, shape: tuple[int, ...]) -> torch.Tensor:
    """Return a tensor of random bytes. NaNs of every bit pattern and denormal numbers are among its values."""
    elements = int(torch.Size(shape).numel())
    if dtype == torch.bool:
        return torch.randint(0, 2, shape, dtype=torch.uint8).view(dtype)
    raw = torch.randint(0, 256, (elements * dtype.itemsize,), dtype=torch.uint8)
    return raw.view(dtype).view(shape) if elements else torch.empty(shape, dtype=dtype)


def tensors_of_all_kinds() -> list[torch.Tensor]:
    """Return small and large tensors of all kinds, mixed."""
    chance = random.Random(7)
    shapes: list[tuple[int, ...]] = [(), (1,), (3,), (0,), (5, 7), (64, 33), (1, 1, 17), (1000, 9), (2, 0, 3)]
    found: list[torch.Tensor] = []
    for _ in range(300):
        tensor = any_bits(chance.choice(DTYPES), chance.choice(shapes))
        if tensor.dim() > 1 and chance.random() < 0.3:
            tensor = tensor.transpose(0, 1)
        found.append(tensor)
    numbers = torch.randn(40, 3, dtype=torch.complex64)
    found += [
        numbers.conj(),
        numbers.conj().imag,
        numbers.t().conj(),
        torch.randn(9, dtype=torch.complex128).conj().imag,
    ]
    found += [torch.zeros(3).neg(), torch._neg_view(torch.randn(5, 3).bfloat16()), torch.randn(50)[::2]]
    for at in (3, 40, 41, 140, 200, 250):  # includes the first tensor of each of two devices
        found.insert(at, any_bits(torch.float32, (300, 400)))
    found.insert(100, torch.randn(700, 900).t())
    return found


def refill(tensors: Sequence[torch.Tensor]) -> None:
    """Give the tensors other values, except conjugate and negative views of other tensors."""
    for tensor in tensors:
        if not tensor.is_conj() and not tensor.is_neg():
            tensor.copy_(any_bits(tensor.dtype, tuple(tensor.shape)))


def _raw(tensor: torch.Tensor) -> bytes:
    plain = tensor.detach().resolve_conj().resolve_neg().contiguous().reshape(-1)
    return bytes(plain.view(torch.uint8).numpy().data) if plain.numel() else b""


class Slot:
    """An image of ``tensors`` with headers, at the second page of a segment. The test closes the segment."""

    def __init__(
        self,
        tensors: Sequence[torch.Tensor],
        aliases: dict[int, int] | None = None,
        counts: Sequence[tuple[int, int]] = (),
    ) -> None:
        aliases = aliases or {}
        specs = [TensorSpec(each.dtype, tuple(each.shape), aliases.get(number)) for number, each in enumerate(tensors)]
        self.layout = DataLayout.lay_out(specs, [100] * (len(counts) or 1), counts)
        self.segment = Segment.create("asyncckpt-test", PAGE + self.layout.nbytes)
        for at, data in self.layout.constants:
            self.segment.view[PAGE + at : PAGE + at + len(data)] = data

    def own(self) -> tuple[list[int], SlotViews]:
        """Return the numbers of the tensors with bytes of their own, and views of their places, as in the stager."""
        mine = [
            number
            for number, (spec, place) in enumerate(zip(self.layout.specs, self.layout.tensors, strict=True))
            if spec.alias is None and place.payload_bytes
        ]
        specs = [self.layout.specs[number] for number in mine]
        places = [self.layout.tensors[number] for number in mine]
        return mine, SlotViews(specs, places, self.segment, PAGE, self.layout.begins)

    def image_bytes(self) -> bytes:
        return bytes(self.segment.view[PAGE:])

    def expected(self, tensors: Sequence[torch.Tensor]) -> bytes:
        whole = bytearray(self.layout.nbytes)
        for at, data in self.layout.constants:
            whole[at : at + len(data)] = data
        for place, spec, tensor in zip(self.layout.tensors, self.layout.specs, tensors, strict=True):
            if spec.alias is None:
                whole[place.payload_at : place.payload_at + place.payload_bytes] = _raw(tensor)
        return bytes(whole)
