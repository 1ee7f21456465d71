"""A file to be written, cut into batches: what of it is read at once, and then written.

No span of a source is read twice: where tensors stand in the source as they will in the output, or are only converted,
batches begin where spans do. A tensor of which the shards lie across its rows is gathered whole: it is one batch.
"""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch

from asyncckpt.exporting.stored import Box, StoredTensor
from asyncckpt.loading.data_file import ChecksummedFile
from asyncckpt.planning.layout import contiguous_strides


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


BATCH_BYTES = 8 << 20
"""Of a batch, unless it is a tensor that has to be gathered; and of what is read before it is converted."""


class Move(NamedTuple):
    """The bytes from ``begin`` to ``end`` of a source ``file``, as they are, to the byte ``to`` of the output."""

    file: str
    begin: int
    end: int
    to: int


class StridedCopy(NamedTuple):
    """Elements that are copied one by one: from element ``first`` of what was read, with these ``strides``, to the byte
    ``to`` of the output, with strides in elements there.
    """

    shape: tuple[int, ...]
    first: int
    strides: tuple[int, ...]
    to: int
    to_strides: tuple[int, ...]


class Conversion(NamedTuple):
    """The bytes from ``begin`` to ``end`` of a source ``file``: elements of ``dtype`` that become ``to_dtype``, or are
    not in a row in the output.
    """

    file: str
    begin: int
    end: int
    dtype: torch.dtype
    to_dtype: torch.dtype
    copies: Sequence[StridedCopy]


@dataclass
class Batch:
    """The bytes of the output from ``begin`` to ``end``: what is read for it, and the tensors that it is for."""

    begin: int
    end: int
    moves: list[Move] = field(default_factory=list)
    conversions: list[Conversion] = field(default_factory=list)
    names: list[str] = field(default_factory=list)

    @property
    def what(self) -> str:
        """The tensors, for errors."""
        if not self.names:
            return "what stands around the tensors"
        first, last = self.names[0], self.names[-1]
        return repr(first) if first == last else f"{first!r} to {last!r}"


class _Piece(NamedTuple):
    """What ends at the byte ``end`` of the output and is not cut. ``nbytes``: of memory that it needs."""

    name: str
    end: int
    nbytes: int
    moves: Sequence[Move]
    conversions: Sequence[Conversion]


def batches(plan: FilePlan, files: Mapping[str, ChecksummedFile]) -> Iterator[Batch]:
    """The batches of a file, in its order; together they are all of it.

    Args:
        plan: The file.
        files: Those that are read.
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
    if batch.end < plan.nbytes:  # what may only be known when all else has been read stands there in one
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
    """A box whose elements are in a row, each of ``size`` bytes, cut where spans begin: of each part, how many elements
    come before it, and how many it has.
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
    """What brings a box to its place."""
    if 0 in box.shape:
        return
    tensor, strides = placed.tensor, contiguous_strides(placed.tensor.shape)
    size = tensor.dtype.itemsize
    to = placed.payload_at + placed.dtype.itemsize * sum(
        offset * stride for offset, stride in zip(box.offsets, strides, strict=True)
    )
    # As it is stored: the dimension first along which the elements are furthest from each other.
    order = sorted((dim for dim, n in enumerate(box.shape) if n > 1), key=lambda dim: -box.strides[dim])
    shape, its_strides, to_strides = (tuple(each[dim] for dim in order) for each in (box.shape, box.strides, strides))
    if its_strides != contiguous_strides(shape):  # a view with gaps: at once
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
    """The elements ``first`` to ``first + count`` of a tensor of ``shape`` in a row, as blocks: a part of a row, whole
    rows, a part of a row, and so on within a part. ``to`` is in elements here.
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
