"""Cut an output file into batches. Each batch is read as a whole, and then written.

If elements have the same order in source and output, batches are cut where spans of the source begin, so that no span
is read twice. A tensor with shards across its rows is *gathered*: the whole tensor is one batch.
"""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch

from asyncckpt.loading.data_file import ChecksummedFile
from asyncckpt.planning.boxes import Box, StoredTensor
from asyncckpt.planning.layout import contiguous_strides


class PlacedTensor(NamedTuple):
    """A tensor in an output file. Its elements, as ``dtype``, begin at the byte ``payload_at``.

    All bytes up to ``end`` belong to the tensor.
    """

    tensor: StoredTensor
    dtype: torch.dtype
    payload_at: int
    end: int

    @property
    def payload_end(self) -> int:
        """Return the end of the elements, in bytes."""
        return self.payload_at + math.prod(self.tensor.shape) * self.dtype.itemsize


class Window:
    """A part of a file in memory. ``data`` begins at byte ``begin`` of the file. Slices take offsets of the file."""

    def __init__(self, begin: int, data: memoryview) -> None:
        self.begin = begin
        self.data = data

    @property
    def end(self) -> int:
        """Return the end of the part in the file, in bytes."""
        return self.begin + len(self.data)

    def __getitem__(self, where: slice) -> memoryview:
        return self.data[where.start - self.begin : where.stop - self.begin]

    def __setitem__(self, where: slice, data: bytes | bytearray | memoryview) -> None:
        self.data[where.start - self.begin : where.stop - self.begin] = data


Complete = Callable[[Window], None]
"""A function that computes checksums, and may write them into the file.

The writer calls it with each part of a file, in order, before it writes the part.
"""


@dataclass
class FilePlan:
    """An output file: its ``tensors`` in order, and ``constants``, the bytes around them with their offsets, in order.

    ``nbytes`` is the number of bytes to write. If there is a function ``length``, the file is then truncated to the
    number of bytes that it returns.
    """

    name: str
    tensors: Sequence[PlacedTensor]
    constants: Sequence[tuple[int, bytes]]
    nbytes: int
    complete: Complete | None = None
    length: Callable[[], int] | None = None


BATCH_BYTES = 8 << 20
"""Maximum bytes of a batch, unless it is one gathered tensor. Also the maximum to read before a conversion."""


class Move(NamedTuple):
    """The bytes from ``begin`` to ``end`` of a source ``file``, copied unchanged to the byte ``to`` of the output."""

    file: str
    begin: int
    end: int
    to: int


class StridedCopy(NamedTuple):
    """A copy of single elements.

    The elements begin at element ``first`` of the bytes read, with ``strides``. They go to the byte ``to`` of the
    output, with ``to_strides``. Strides are in elements.
    """

    shape: tuple[int, ...]
    first: int
    strides: tuple[int, ...]
    to: int
    to_strides: tuple[int, ...]


class Conversion(NamedTuple):
    """The bytes from ``begin`` to ``end`` of a source ``file``: elements of ``dtype`` that are copied as ``to_dtype``.

    The elements have another dtype in the output, or are not in a row there.
    """

    file: str
    begin: int
    end: int
    dtype: torch.dtype
    to_dtype: torch.dtype
    copies: Sequence[StridedCopy]


@dataclass
class Batch:
    """The bytes of the output from ``begin`` to ``end``: the parts to read for them, and the names of their tensors."""

    begin: int
    end: int
    moves: list[Move] = field(default_factory=list)
    conversions: list[Conversion] = field(default_factory=list)
    names: list[str] = field(default_factory=list)

    @property
    def what(self) -> str:
        """Return the names of the tensors, for errors."""
        if not self.names:
            return "the bytes around the tensors"
        first, last = self.names[0], self.names[-1]
        return repr(first) if first == last else f"{first!r} to {last!r}"


class _Piece(NamedTuple):
    """A part of the output, up to ``end``, that is never cut. Its bytes need ``nbytes`` of memory."""

    name: str
    end: int
    nbytes: int
    moves: Sequence[Move]
    conversions: Sequence[Conversion]


def batches(plan: FilePlan, files: Mapping[str, ChecksummedFile]) -> Iterator[Batch]:
    """Yield the batches of a file, in order. Together they cover the file.

    Args:
        plan: The output file.
        files: The source files.
    """
    first = plan.tensors[0].payload_at if plan.tensors else plan.nbytes
    batch = Batch(0, first)
    nbytes = first
    for placed in plan.tensors:
        for piece in _pieces(placed, files):
            if nbytes and nbytes + piece.nbytes > BATCH_BYTES:
                yield batch
                batch, nbytes = Batch(batch.end, batch.end), 0
            batch.end = piece.end
            batch.moves += piece.moves
            batch.conversions += piece.conversions
            batch.names.append(piece.name)
            nbytes += piece.nbytes
    yield batch
    if batch.end < plan.nbytes:  # the bytes behind all tensors are one batch, because they may depend on all others
        yield Batch(batch.end, plan.nbytes)


def _pieces(placed: PlacedTensor, files: Mapping[str, ChecksummedFile]) -> Iterator[_Piece]:
    tensor = placed.tensor
    if tensor.rows is None:
        conversions = [each for box in tensor.boxes for each in _gathered(placed, box, files[box.file])]
        yield _Piece(tensor.name, placed.end, placed.payload_end - placed.payload_at, (), conversions)
        return
    size, to_size = tensor.dtype.itemsize, placed.dtype.itemsize
    parts = [(at, box, *part) for at, box in tensor.rows for part in _cut(box, size, files[box.file])]
    end = placed.payload_at
    for number, (at, box, skipped, count) in enumerate(parts):
        begin, to = box.begin + skipped * size, placed.payload_at + (at + skipped) * to_size
        end = placed.end if number == len(parts) - 1 else to + count * to_size
        moves, conversions = [], []
        if tensor.dtype == placed.dtype:
            moves.append(Move(box.file, begin, begin + count * size, to))
        else:
            copy = StridedCopy((count,), 0, (1,), to, (1,))
            conversions.append(Conversion(box.file, begin, begin + count * size, tensor.dtype, placed.dtype, [copy]))
        yield _Piece(tensor.name, end, count * max(size, to_size), moves, conversions)
    if end < placed.end:
        yield _Piece(tensor.name, placed.end, 0, (), ())


def _cut(box: Box, size: int, file: ChecksummedFile) -> Iterator[tuple[int, int]]:
    """Cut a box of elements in a row, ``size`` bytes each, where spans begin.

    Yield for each part the number of elements before the part, and the number of elements in the part.
    """
    bounds, count = file.index.bounds, math.prod(box.shape)
    end = box.begin + count * size
    done = 0
    for bound in bounds[bisect_right(bounds, box.begin) : bisect_left(bounds, end)]:
        if (upto := (bound - box.begin) // size) > done:
            yield done, upto - done
            done = upto
    if done < count:
        yield done, count - done


def _gathered(placed: PlacedTensor, box: Box, file: ChecksummedFile) -> Iterator[Conversion]:
    """Yield the conversions that copy a box to its place."""
    if 0 in box.shape:
        return
    tensor, strides = placed.tensor, contiguous_strides(placed.tensor.shape)
    size = tensor.dtype.itemsize
    to = placed.payload_at + placed.dtype.itemsize * sum(
        offset * stride for offset, stride in zip(box.offsets, strides, strict=True)
    )
    # Sort the dimensions in the order in which the box is stored: the largest stride first.
    order = sorted((dim for dim, n in enumerate(box.shape) if n > 1), key=lambda dim: -box.strides[dim])
    shape, its_strides, to_strides = (tuple(each[dim] for dim in order) for each in (box.shape, box.strides, strides))
    if its_strides != contiguous_strides(shape):  # a view with gaps is copied as a whole
        end = box.begin + box.extent * size
        copy = StridedCopy(shape, 0, its_strides, to, to_strides)
        yield Conversion(box.file, box.begin, end, tensor.dtype, placed.dtype, [copy])
        return
    for skipped, count in _cut(box, size, file):
        copies = [
            StridedCopy(each.shape, each.first, each.strides, to + each.to * placed.dtype.itemsize, to_strides)
            for each in _blocks(shape, to_strides, skipped, count)
        ]
        begin = box.begin + skipped * size
        yield Conversion(box.file, begin, begin + count * size, tensor.dtype, placed.dtype, copies)


def _blocks(shape: tuple[int, ...], to_strides: tuple[int, ...], first: int, count: int) -> Iterator[StridedCopy]:
    """Yield the elements ``first`` to ``first + count`` of a tensor of ``shape`` as blocks.

    The elements are contiguous in the source. The blocks are a part of a row, whole rows, and a part of a row. Parts of
    rows are cut in the same way, recursively. ``to`` is in elements here.
    """
    strides = contiguous_strides(shape)

    def blocks(dim: int, begin: int, end: int, done: int, to: int) -> Iterator[StridedCopy]:
        if begin >= end:
            return
        ones = (1,) * dim
        if dim == len(shape) - 1 or not shape:
            rest = (end - begin,) if shape else ()
            at = to + begin * to_strides[dim] if shape else to
            yield StridedCopy((*ones, *rest), done, strides, at, to_strides)
            return
        row = strides[dim]
        low, high = -(-begin // row), end // row
        if low > high:  # within one row
            yield from blocks(dim + 1, begin - high * row, end - high * row, done, to + high * to_strides[dim])
            return
        head = low * row - begin
        if head:
            inside = begin - (low - 1) * row
            yield from blocks(dim + 1, inside, row, done, to + (low - 1) * to_strides[dim])
        if low < high:
            at = to + low * to_strides[dim]
            yield StridedCopy((*ones, high - low, *shape[dim + 1 :]), done + head, strides, at, to_strides)
        yield from blocks(dim + 1, 0, end - high * row, done + high * row - begin, to + high * to_strides[dim])

    yield from blocks(0, first, first + count, 0, 0)
