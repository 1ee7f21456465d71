"""The part of an image that all slots share: what has settled is copied once, and from then on only looked at.

Each save makes a digest of 128 bits of it anew, from the caller's tensors, and writes nothing to memory: it costs a
fifth of a copy. What is found to have changed has its plan made anew; not one byte that other saves refer to changes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
import xxhash

from asyncckpt.devices.kinds import ReadyEvents
from asyncckpt.planning.layout import DataLayout
from asyncckpt.shm.memcpy import memory_at
from asyncckpt.shm.segment import Segment
from asyncckpt.staging.copy_threads import CopyThreads
from asyncckpt.staging.host_copy import checked_addresses, copy_units
from asyncckpt.staging.slot_copy import SlotStager

# What one unit looks at: so little that the threads end together.
_UNIT_BYTES = 8 << 20


class SharedPart:
    """What all slots of a staging buffer share. The methods are for one thread at a time."""

    def __init__(
        self, layout: DataLayout, segment: Segment, offset: int, is_promised: Callable[[str], bool] = lambda _: False
    ) -> None:
        """Nothing is in it yet.

        Args:
            layout: That of the image.
            segment: The memory; it cannot be unmapped until ``close``.
            offset: Where this begins in the segment, in bytes; its size is ``layout.shared_bytes``.
            is_promised: Whether somebody has promised that the tensor of a name does not change.
        """
        self._begin = offset - layout.slot_bytes  # where an image would begin that had it in one piece
        self._layout, self._segment = layout, segment
        self._stager = SlotStager(layout, segment, self._begin, layout.converted, shared=True)
        self._numbers = self._stager.numbers
        self._unpromised = [number for number in self._numbers if not is_promised(layout.specs[number].name)]
        self._digests: dict[_Piece, bytes] = {}

    @property
    def is_filled(self) -> bool:
        """Whether everything is in it."""
        return bool(self._digests) or not self._numbers

    def fill(self, tensors: Sequence[torch.Tensor], ready: ReadyEvents, threads: CopyThreads) -> None:
        """Copy the tensors that it is for, of all of the plan; nobody may look there. Args: as of ``SlotStager``."""
        self._digests = {}
        self._stager.copy(tensors, ready, threads, lambda _: None, lambda _: None)
        self.recognize(threads)

    def recognize(self, threads: CopyThreads) -> None:
        """It is filled: see what is there."""
        memory = torch.frombuffer(self._segment.view, dtype=torch.uint8)
        staged = [memory[:0]] * len(self._layout.specs)
        for number in self._numbers:
            place = self._layout.tensors[number]
            begin = self._begin + place.payload_at
            staged[number] = memory[begin : begin + place.payload_bytes]
        self._digests = self._look(self._numbers, staged, threads)

    def changed(
        self, tensors: Sequence[torch.Tensor], threads: CopyThreads, *, with_promised: bool = True
    ) -> list[str]:
        """The names of the tensors that are not as they are here; ``with_promised``: those are looked at, too.

        Args: ``tensors`` and ``threads`` as of ``fill``. Raises ``UnsavableStateError`` where one has no memory.
        """
        specs = self._layout.specs
        found = self._look(self._numbers if with_promised else self._unpromised, tensors, threads)
        names = (specs[piece.number].name for piece, digest in found.items() if digest != self._digests[piece])
        return list(dict.fromkeys(names))

    def close(self) -> None:
        """Let go of the memory."""
        self._stager.close()

    def _look(
        self, numbers: Sequence[int], tensors: Sequence[torch.Tensor], threads: CopyThreads
    ) -> dict[_Piece, bytes]:
        found: dict[_Piece, bytes] = {}
        units: list[_Look] = []
        nbytes = _UNIT_BYTES
        for number in numbers:
            whole = self._layout.tensors[number].payload_bytes
            if not tensors[number].is_cpu:  # on this thread, whose streams the caller's values are on
                unit = _Look(self._layout, found)
                unit.pieces.append(_Piece(number, 0, min(_UNIT_BYTES, whole)))
                unit.copy(tensors)
                continue
            for begin in range(0, whole, _UNIT_BYTES):
                if nbytes >= _UNIT_BYTES:
                    units.append(_Look(self._layout, found))
                    nbytes = 0
                units[-1].pieces.append(piece := _Piece(number, begin, min(_UNIT_BYTES, whole - begin)))
                nbytes += piece.nbytes
        copy_units(units, tensors, threads, lambda _: None)
        return found


class _Piece(NamedTuple):
    """``nbytes`` of the tensor of a ``number``, from byte ``begin`` on."""

    number: int
    begin: int
    nbytes: int


class _Look:
    """A unit of looking: makes digests of ``pieces``, into ``found``. As ``CopyUnit``, but that it writes nothing."""

    begin = 0

    def __init__(self, layout: DataLayout, found: dict[_Piece, bytes]) -> None:
        self.pieces: list[_Piece] = []
        self._layout, self._found = layout, found

    def copy(self, tensors: Sequence[torch.Tensor]) -> None:
        for piece in self.pieces:
            tensor, spec = tensors[piece.number], self._layout.specs[piece.number]
            if not tensor.is_cpu or not tensor.is_contiguous() or tensor.is_neg() or tensor.is_conj():
                if piece.begin == 0:  # all pieces of it
                    self._look_at_copy(piece, tensor)
                continue
            (address,) = checked_addresses([tensor], [spec])
            self._found[piece] = xxhash.xxh3_128_digest(memory_at(address + piece.begin, piece.nbytes))

    def _look_at_copy(self, first: _Piece, tensor: torch.Tensor) -> None:
        plain = tensor.detach().resolve_conj().resolve_neg().to("cpu").contiguous()
        whole = self._layout.tensors[first.number].payload_bytes
        for begin in range(0, whole, _UNIT_BYTES):
            piece = _Piece(first.number, begin, min(_UNIT_BYTES, whole - begin))
            self._found[piece] = xxhash.xxh3_128_digest(memory_at(plain.data_ptr() + begin, piece.nbytes))
