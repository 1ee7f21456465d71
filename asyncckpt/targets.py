"""Where the tensors of a plan go in one slot."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from asyncckpt.image import Place, TensorSpec
from asyncckpt.shm.segment import Segment


class Targets:
    """The places of tensors of ``specs``, by number, in the slot at ``offset`` of ``segment``."""

    def __init__(self, specs: Sequence[TensorSpec], places: Sequence[Place], segment: Segment, offset: int) -> None:
        self.specs = specs
        self.places = places
        self._view = segment.view
        self._address = segment.address + offset
        self._offset = offset

    def address(self, number: int) -> int:
        """Of the first byte."""
        return self._address + self.places[number].payload_at

    def tensor(self, number: int) -> torch.Tensor:
        """The place as a tensor."""
        spec, place = self.specs[number], self.places[number]
        return self.raw(place.payload_at, place.payload_bytes).view(spec.dtype).view(spec.shape)

    def raw(self, begin: int, nbytes: int) -> torch.Tensor:
        """These bytes of the image, whatever they are."""
        if not nbytes:
            return torch.empty(0, dtype=torch.uint8)  # frombuffer takes none
        begin += self._offset
        return torch.frombuffer(self._view[begin : begin + nbytes], dtype=torch.uint8)
