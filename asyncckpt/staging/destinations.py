"""Where the tensors of a plan go in one slot."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from asyncckpt.planning.layout import Place, TensorSpec
from asyncckpt.shm.segment import Segment


class SlotViews:
    """Views of a slot: the memory of each tensor, by the number that it has in the layout."""

    def __init__(self, specs: Sequence[TensorSpec], places: Sequence[Place], segment: Segment, offset: int) -> None:
        """The views are made when they are asked for.

        Args:
            specs: What each tensor looks like.
            places: Where each stands, in bytes from the start of the slot.
            segment: The memory; it cannot be unmapped while there are views.
            offset: Where the slot begins in the segment, in bytes.
        """
        self.specs = specs
        self.places = places
        self._view = segment.view
        self._address = segment.address + offset
        self._offset = offset

    def address(self, number: int) -> int:
        """Where the first byte of a tensor goes."""
        return self._address + self.places[number].payload_at

    def tensor(self, number: int) -> torch.Tensor:
        """The memory of a tensor, as a tensor of its dtype and shape."""
        spec, place = self.specs[number], self.places[number]
        return self.raw(place.payload_at, place.payload_bytes).view(spec.dtype).view(spec.shape)

    def raw(self, begin: int, nbytes: int) -> torch.Tensor:
        """The ``nbytes`` from byte ``begin`` of the slot on, whatever they are."""
        if not nbytes:
            return torch.empty(0, dtype=torch.uint8)  # frombuffer takes none
        begin += self._offset
        return torch.frombuffer(self._view[begin : begin + nbytes], dtype=torch.uint8)
