"""A file to be written: where each tensor goes in it, as which dtype, and what stands around them."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch

from asyncckpt.exporting.stored import StoredTensor


class PlacedTensor(NamedTuple):
    """A tensor in a file: its elements, as ``dtype``, begin at the byte ``payload_at``.

    All that is written up to ``end`` belongs to it.
    """

    tensor: StoredTensor
    dtype: torch.dtype
    payload_at: int
    end: int

    @property
    def payload_end(self) -> int:
        """Where its elements end, in bytes."""
        return self.payload_at + math.prod(self.tensor.shape) * self.dtype.itemsize


class Window:
    """A part of a file in memory, of which the byte ``begin`` stands at the start of ``data``; set by its offsets."""

    def __init__(self, begin: int, data: memoryview) -> None:
        self.begin = begin
        self.data = data

    @property
    def end(self) -> int:
        """Where it ends in the file, in bytes."""
        return self.begin + len(self.data)

    def __getitem__(self, where: slice) -> memoryview:
        return self.data[where.start - self.begin : where.stop - self.begin]

    def __setitem__(self, where: slice, data: bytes | bytearray | memoryview) -> None:
        self.data[where.start - self.begin : where.stop - self.begin] = data


Complete = Callable[[Window], None]
"""Given all of a file, part by part and in its order, before they are written: takes checksums, and may put them in."""


@dataclass
class FilePlan:
    """A file: its ``tensors`` in their order, and the bytes around them, each with its offset, in their order.

    ``nbytes`` are written; ``length`` says, when all is complete, of how many the file consists.
    """

    name: str
    tensors: Sequence[PlacedTensor]
    constants: Sequence[tuple[int, bytes]]
    nbytes: int
    complete: Complete | None = None
    length: Callable[[], int] | None = None
