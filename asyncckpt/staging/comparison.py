"""Which of the caller's tensors are, to the byte, as they were staged before."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import compress

import torch

from asyncckpt.planning.layout import DataLayout
from asyncckpt.shm.memcpy import memcmp
from asyncckpt.shm.segment import PAGE, Segment
from asyncckpt.staging.copy_threads import CopyThreads
from asyncckpt.staging.host_copy import checked_addresses, copy_units

# What one unit compares: so little that the threads end together.
_UNIT_BYTES = 8 << 20


def same_as_staged(
    tensors: Sequence[torch.Tensor], layout: DataLayout, segment: Segment, offset: int, threads: CopyThreads
) -> list[int]:
    """The numbers of the ``tensors`` that have the bytes of the image which begins at ``offset`` of a segment: of those
    that are on the host, in one piece, and not in what all slots share. Most that differ do so on their first page: no
    more of them is looked at.

    Raises ``UnsavableStateError`` where a tensor has no memory.
    """
    same = [
        spec.alias is None
        and place.payload_bytes > 0
        and place.at < layout.slot_bytes
        and tensor.is_cpu
        and tensor.is_contiguous()
        for spec, place, tensor in zip(layout.specs, layout.tensors, tensors, strict=True)
    ]
    begin = segment.address + offset
    for looks_at in (PAGE, _UNIT_BYTES):
        units: list[_Comparison] = []
        nbytes = _UNIT_BYTES
        for number in compress(range(len(tensors)), same):
            whole = layout.tensors[number].payload_bytes
            for at in range(0, min(looks_at, whole) if looks_at == PAGE else whole, looks_at):
                if nbytes >= _UNIT_BYTES:
                    units.append(_Comparison(layout, begin, same))
                    nbytes = 0
                units[-1].pieces.append((number, at, min(looks_at, whole - at)))
                nbytes += units[-1].pieces[-1][2]
        copy_units(units, tensors, threads, lambda _: None)
    return list(compress(range(len(tensors)), same))


class _Comparison:
    """A unit of comparing: as ``CopyUnit``, but that it writes nothing, and takes from ``same`` what differs."""

    begin = 0

    def __init__(self, layout: DataLayout, image: int, same: list[bool]) -> None:
        """``image``: the address at which it begins."""
        self.pieces: list[tuple[int, int, int]] = []
        self._layout, self._image, self._same = layout, image, same

    def copy(self, tensors: Sequence[torch.Tensor]) -> None:
        for number, at, nbytes in self.pieces:
            tensor = tensors[number]
            if not self._same[number]:
                continue
            (address,) = checked_addresses([tensor], [self._layout.specs[number]])
            there = self._image + self._layout.tensors[number].payload_at
            if tensor.is_neg() or tensor.is_conj() or memcmp(address + at, there + at, nbytes) != 0:
                self._same[number] = False
