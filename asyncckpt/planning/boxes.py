"""Stored tensors, and the parts in which they are stored."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from typing import NamedTuple

import torch

from asyncckpt.errors import DamagedCheckpointError
from asyncckpt.planning.layout import contiguous_strides


class Box(NamedTuple):
    """A stored part of a tensor. Its first element is at byte ``begin`` of ``file``.

    ``offsets`` in the whole tensor, ``shape`` and ``strides`` are in elements.
    """

    file: str
    begin: int
    offsets: tuple[int, ...]
    shape: tuple[int, ...]
    strides: tuple[int, ...]

    @property
    def extent(self) -> int:
        """Return the number of elements from the first to the last, with gaps."""
        if 0 in self.shape:
            return 0
        return 1 + sum((length - 1) * stride for length, stride in zip(self.shape, self.strides, strict=True))


@dataclass(frozen=True)
class StoredTensor:
    """A whole tensor of a stored state, with all boxes in which it is stored."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    boxes: Sequence[Box]

    @property
    def numel(self) -> int:
        """Return the number of elements."""
        return math.prod(self.shape)

    @cached_property
    def rows(self) -> Sequence[tuple[int, Box]] | None:
        """Return the boxes in order, each with the position of its first element in the tensor, if each box is a row.

        A row has consecutive elements of the tensor without gaps: the whole tensor, or a shard of its rows. If any box
        is not a row, return None: the tensor has to be gathered.
        """
        if not all(map(self._is_row, self.boxes)):
            return None
        if len(self.boxes) == 1:
            return [(0, self.boxes[0])]
        strides = contiguous_strides(self.shape)
        return sorted(
            (sum(offset * stride for offset, stride in zip(box.offsets, strides, strict=True)), box)
            for box in self.boxes
        )

    def is_whole(self) -> bool:
        """Return whether each element of the tensor is in exactly one box."""
        if len(self.boxes) == 1 and self.boxes[0].shape == self.shape and not any(self.boxes[0].offsets):
            return True
        within = all(
            len(box.shape) == len(box.offsets) == len(self.shape)
            and all(0 <= at <= at + n <= most for at, n, most in zip(box.offsets, box.shape, self.shape, strict=True))
            for box in self.boxes
        )
        return within and sum(math.prod(box.shape) for box in self.boxes) == self.numel and not self._overlap()

    def check(self, path: str) -> None:
        """Raise ``DamagedCheckpointError`` unless the boxes form the whole tensor.

        Args:
            path: The checkpoint, for the error.
        """
        if not self.is_whole():
            found = sum(math.prod(box.shape) for box in self.boxes)
            raise DamagedCheckpointError(
                f"{self.name!r} has {self.numel:,} elements, and {found:,} are stored in parts that are not the whole"
                " of it: a part is missing, or there is one too many",
                path=path,
            )

    def _overlap(self) -> bool:
        """Return whether two boxes have an element in common."""
        if self.rows is not None:
            ends = [(begin, begin + math.prod(box.shape)) for begin, box in self.rows if 0 not in box.shape]
            return any(end > begin for (_, end), (begin, _) in pairwise(ends))
        boxes = [box for box in self.boxes if 0 not in box.shape]
        first = torch.tensor([box.offsets for box in boxes], device="cpu")
        end = first + torch.tensor([box.shape for box in boxes], device="cpu")
        return any(
            bool(((first[number + 1 :] < end[number]) & (first[number] < end[number + 1 :])).all(dim=1).any())
            for number in range(len(boxes))
        )

    def _is_row(self, box: Box) -> bool:
        if 0 in box.shape:
            return True
        rows = zip(box.shape, box.strides, contiguous_strides(box.shape), strict=True)
        if any(n > 1 and stride != expected for n, stride, expected in rows):
            return False
        cut = [at for at, (n, most) in enumerate(zip(box.shape, self.shape, strict=True)) if n != most]
        return not cut or all(n == 1 for n in box.shape[: cut[-1]])
