"""What of a data file is wanted, and the way of its bytes to where they belong."""

from __future__ import annotations

import functools
import operator
from bisect import bisect_left, bisect_right
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from itertools import accumulate, pairwise

import torch

from asyncckpt.shm.memcpy import address_of, memcpy, memcpy_holding
from asyncckpt.spans import Destination, SpanFile, Tell, raise_damage
from asyncckpt.structure import PLAIN
from asyncckpt.worker.manifest import Item

# Bytes that are brought together before they can be copied to where they belong, at most, but for one larger tensor.
_BATCH_BYTES = 256 << 20
# Copies of so many bytes let go of Python's lock, so that several threads copy.
_COPY_ALONE_BYTES = 256 << 10
# Copied one by one.
_FEW = 8


Finish = Callable[[memoryview], None]


class Wanted:
    """The bytes that are wanted of one data file.

    They may overlap. They go straight to memory of this process, or else are given to a function once they are all
    there, and good; it must not keep them.
    """

    def __init__(self) -> None:
        # A row for each: columns, because there may be a great many.
        self._begins: list[int] = []
        self._ends: list[int] = []
        self._addresses: list[int] = []
        self._finish: dict[int, Finish] = {}  # by the number of the row

    def whole(self, tensor: torch.Tensor, item: Item) -> None:
        """All of the stored tensor ``item``, for one of its dtype and shape."""
        if tensor.is_cpu and _is_filled_by_bytes(tensor):
            self._add(item.payload_at, item.payload_at + item.payload_bytes, tensor.data_ptr())
        else:
            self._bring(item.payload_at, item.payload_bytes, partial(_copy_box, tensor, item, item.shape))

    def box(self, tensor: torch.Tensor, item: Item, offsets: Sequence[int], lengths: Sequence[int]) -> None:
        """The box of ``lengths`` at ``offsets`` of the stored tensor ``item``, for one of its shape."""
        first, count = _extent(item.shape, offsets, lengths)
        dtype = dtype_of(item)
        begin = item.payload_at + first * dtype.itemsize
        nbytes = count * dtype.itemsize
        in_a_row = tensor.dtype == dtype and tensor.numel() == count
        if (
            in_a_row
            and type(tensor) in PLAIN
            and tensor.layout == torch.strided
            and tensor.is_cpu
            and _is_filled_by_bytes(tensor)
        ):
            self._add(begin, begin + nbytes, tensor.data_ptr())
        else:
            self._bring(begin, nbytes, partial(_copy_box, tensor, item, lengths))

    def object(self, item: Item, finish: Finish) -> None:
        """The stored object ``item``, and the zeros behind it."""
        self._bring(item.at, item.nbytes, finish)

    def nbytes_read(self, file: SpanFile) -> int:
        """How many bytes ``read`` reads, with all that stands around what is wanted."""
        return sum(file.nbytes_read(self._ranges(batch)) for batch in self._batches(self._rows()))

    def read(self, file: SpanFile, pool: ThreadPoolExecutor, *, verify: bool, tell: Tell | None = None) -> None:
        """Read all that is wanted of ``file``, and ``tell`` how far it is.

        Raises ``DamagedCheckpointError``, ``StorageError``; then part of it may have been read, but none was finished
        that is damaged.
        """
        # Values whose bytes must be brought together first are read a batch at a time, to bound that memory.
        for batch in self._batches(self._rows()):
            self._read_batch(file, batch, pool, verify, tell)

    def _add(self, begin: int, end: int, address: int) -> None:
        self._begins.append(begin)
        self._ends.append(end)
        self._addresses.append(address)

    def _bring(self, begin: int, nbytes: int, finish: Finish) -> None:
        """Together, for ``finish``."""
        self._finish[len(self._begins)] = finish
        self._add(begin, begin + nbytes, 0)

    def _rows(self) -> Sequence[int]:
        """In the order of the file."""
        rows = range(len(self._begins))
        begins = self._begins
        return rows if begins == sorted(begins) else sorted(rows, key=begins.__getitem__)

    def _ranges(self, rows: Sequence[int]) -> list[tuple[int, int]]:
        return [(self._begins[row], self._ends[row]) for row in rows]

    def _batches(self, rows: Sequence[int]) -> Iterator[Sequence[int]]:
        first = size = 0
        for number in range(len(rows)) if self._finish else ():
            row = rows[number]
            if row not in self._finish:
                continue
            nbytes = self._ends[row] - self._begins[row]
            if number > first and size + nbytes > _BATCH_BYTES:
                yield rows[first:number]
                first, size = number, 0
            size += nbytes
        yield rows[first:]

    def _read_batch(
        self, file: SpanFile, rows: Sequence[int], pool: ThreadPoolExecutor, verify: bool, tell: Tell | None
    ) -> None:
        finishing: list[tuple[Finish, memoryview]] = []
        for row in rows if self._finish else ():
            finish = self._finish.get(row)
            if finish is None:
                continue
            begin, end = self._begins[row], self._ends[row]
            data = file.in_place(begin, end)
            if data is None:
                data = memoryview(bytearray(end - begin))
                self._addresses[row] = address_of(data) if data else 0
            finishing.append((finish, data))
        # Those that have an address: to copy, or to read there.
        to = [row for row in rows if self._addresses[row] and self._begins[row] < self._ends[row]]
        targets = _Targets(*([column[row] for row in to] for column in (self._begins, self._ends, self._addresses)))
        on_damage = raise_damage if verify else None
        file.read(self._ranges(rows), targets.fill, pool, on_damage, targets.find, tell)
        for finish, data in finishing:
            finish(data)


def dtype_of(item: Item) -> torch.dtype:
    """The dtype of a stored tensor."""
    return _dtype(item.dtype)


@functools.cache
def _dtype(name: str) -> torch.dtype:
    dtype: torch.dtype = getattr(torch, name)
    return dtype


def _is_filled_by_bytes(tensor: torch.Tensor) -> bool:
    """Whether a plain tensor is just its elements in a row."""
    return tensor.is_contiguous() and not (tensor.is_conj() or tensor.is_neg())


def _copy_box(tensor: torch.Tensor, item: Item, lengths: Sequence[int], data: memoryview) -> None:
    """Copy a box of ``item``, whose bytes are ``data`` from its first element to its last, into ``tensor``."""
    if data:
        source = torch.frombuffer(data, dtype=torch.uint8).view(dtype_of(item))
        with torch.no_grad():
            tensor.copy_(source.as_strided(tuple(lengths), _strides(item.shape)))


def _extent(shape: Sequence[int], offsets: Sequence[int], lengths: Sequence[int]) -> tuple[int, int]:
    """The first element of a box in a contiguous tensor, and how many there are up to its last one."""
    if 0 in lengths:
        return 0, 0
    strides = _strides(shape)
    first = sum(offset * stride for offset, stride in zip(offsets, strides, strict=True))
    return first, sum((length - 1) * stride for length, stride in zip(lengths, strides, strict=True)) + 1


def _strides(shape: Sequence[int]) -> tuple[int, ...]:
    strides: list[int] = []
    step = 1
    for length in reversed(shape):
        strides.insert(0, step)
        step *= max(length, 1)
    return tuple(strides)


class _Targets:
    """The memory that parts of a file go to, in the order of the file."""

    def __init__(self, begins: list[int], ends: list[int], addresses: list[int]) -> None:
        self._begins = begins
        self._ends = ends
        self._addresses = addresses
        # Tied tensors have the same bytes, and boxes may lie in each other: then what is between two may stick out.
        self._overlap = any(map(operator.lt, begins[1:], ends))
        self._reach = list(accumulate(ends, max)) if self._overlap else ends
        # Others may be tied where they are wanted, and were not when they were stored: the last one wins.
        order = sorted(range(len(begins)), key=addresses.__getitem__)
        self._tied = any(addresses[b] < addresses[a] + ends[a] - begins[a] for a, b in pairwise(order))

    def find(self, begin: int, end: int) -> Destination | None:
        """The only one that has to do with a part of the file."""
        first, last = self._meeting(begin, end)
        if self._tied or last != first + 1:  # what is checked there must not be written by others
            return None
        return Destination(self._begins[first], self._ends[first], self._addresses[first])

    def fill(self, begin: int, data: memoryview) -> None:
        """Copy what is wanted of the ``data`` that stands at ``begin``."""
        if not data:
            return
        begins, ends, addresses = self._begins, self._ends, self._addresses
        end = begin + len(data)
        source = address_of(data) - begin
        first, last = self._meeting(begin, end)
        # In C all that can be: of 100,000 small ones each microsecond would be a tenth of a second.
        low = first if self._overlap or last - first < _FEW else first + 1
        high = low if self._overlap or last - first < _FEW else last - 1
        deque(
            map(
                memcpy_holding,
                addresses[low:high],
                map(source.__add__, begins[low:high]),
                map(operator.sub, ends[low:high], begins[low:high]),
            ),
            maxlen=0,
        )
        for number in (*range(first, low), *range(high, last)):
            inner_begin, inner_end = max(begins[number], begin), min(ends[number], end)
            nbytes = inner_end - inner_begin
            if nbytes > 0:
                copy = memcpy if nbytes >= _COPY_ALONE_BYTES else memcpy_holding
                copy(addresses[number] + inner_begin - begins[number], source + inner_begin, nbytes)

    def _meeting(self, begin: int, end: int) -> tuple[int, int]:
        """Those that have to do with a part of the file, first and last + 1; with an overlap, some that have not."""
        return bisect_right(self._reach, begin), bisect_left(self._begins, end)
