"""What of a data file is wanted, and the way of its bytes to where they belong."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from operator import itemgetter
from typing import NamedTuple

import torch

from asyncckpt.memcpy import address_of, memcpy, memcpy_holding
from asyncckpt.spans import SpanFile, raise_damage
from asyncckpt.structure import PLAIN
from asyncckpt.worker.manifest import Item

# Bytes that are brought together before they can be copied to where they belong, at most, but for one larger tensor.
_BATCH_BYTES = 256 << 20
# Copies of so many bytes let go of Python's lock, so that several threads copy.
_COPY_ALONE_BYTES = 256 << 10


class Wanted(NamedTuple):
    """The bytes of a data file from ``begin`` to ``end``.

    They go to the memory at ``address``, or else are given to ``finish`` once they are all there, and good; it must not
    keep them.
    """

    begin: int
    end: int
    address: int = 0
    finish: Callable[[memoryview], None] | None = None


def want_whole(tensor: torch.Tensor, item: Item) -> Wanted:
    """All of the stored tensor ``item``, for one of its shape."""
    begin, end = item.payload_at, item.payload_at + item.payload_bytes
    if _is_filled_by_bytes(tensor) and tensor.dtype == dtype_of(item):
        return Wanted(begin, end, tensor.data_ptr())
    return Wanted(begin, end, finish=partial(_copy_box, tensor, item, item.shape))


def want_box(tensor: torch.Tensor, item: Item, offsets: Sequence[int], lengths: Sequence[int]) -> Wanted:
    """The box of ``lengths`` at ``offsets`` of the stored tensor ``item``, for one of its shape."""
    first, count = _extent(item.shape, offsets, lengths)
    dtype = dtype_of(item)
    begin = item.payload_at + first * dtype.itemsize
    end = begin + count * dtype.itemsize
    if _is_filled_by_bytes(tensor) and tensor.dtype == dtype and tensor.numel() == count:
        return Wanted(begin, end, tensor.data_ptr())
    return Wanted(begin, end, finish=partial(_copy_box, tensor, item, lengths))


def want_object(item: Item, finish: Callable[[memoryview], None]) -> Wanted:
    """The stored object ``item``, and the zeros behind it."""
    return Wanted(item.at, item.at + item.nbytes, finish=finish)


def dtype_of(item: Item) -> torch.dtype:
    """The dtype of a stored tensor."""
    dtype: torch.dtype = getattr(torch, item.dtype)
    return dtype


def _is_filled_by_bytes(tensor: torch.Tensor) -> bool:
    """Whether it is, in the memory of this process, just its elements in a row."""
    return (
        type(tensor) in PLAIN
        and tensor.is_cpu
        and tensor.layout == torch.strided
        and tensor.is_contiguous()
        and not (tensor.is_conj() or tensor.is_neg())
    )


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


def read_wanted(file: SpanFile, wanted: Iterable[Wanted], pool: ThreadPoolExecutor, *, verify: bool) -> None:
    """Read all that is ``wanted`` of ``file``: no two of them overlap, unless they are the same bytes.

    Raises ``DamagedCheckpointError``, ``StorageError``; then part of it may have been read, but none was finished that
    is damaged.
    """
    ordered = sorted(wanted, key=itemgetter(0, 1))
    # Values whose bytes must be brought together first are read a batch at a time, to bound that memory.
    for batch in _batches(ordered):
        _read_batch(file, batch, pool, verify)


def _batches(wanted: Sequence[Wanted]) -> list[list[Wanted]]:
    batches: list[list[Wanted]] = []
    size = 0
    for want in wanted:
        buffered = 0 if want.finish is None else want.end - want.begin
        if not batches or size + buffered > _BATCH_BYTES:
            batches.append([])
            size = 0
        batches[-1].append(want)
        size += buffered
    return batches


def _read_batch(file: SpanFile, batch: Sequence[Wanted], pool: ThreadPoolExecutor, verify: bool) -> None:
    targets = _Targets()
    finishing: list[tuple[Callable[[memoryview], None], memoryview]] = []
    for want in batch:
        if want.finish is None:
            targets.add(want.begin, want.end, want.address)
            continue
        data = file.in_place(want.begin, want.end)
        if data is None:
            data = memoryview(bytearray(want.end - want.begin))
            targets.add(want.begin, want.end, address_of(data) if data else 0)
        finishing.append((want.finish, data))
    file.read(
        [(want.begin, want.end) for want in batch if want.begin < want.end],
        targets.fill,
        pool,
        raise_damage if verify else None,
    )
    for finish, data in finishing:
        finish(data)


class _Targets:
    """The memory that parts of a file go to, in the order of the file."""

    def __init__(self) -> None:
        self._begins: list[int] = []
        self._ends: list[int] = []
        self._addresses: list[int] = []

    def add(self, begin: int, end: int, address: int) -> None:
        """The bytes from ``begin`` to ``end`` go to ``address``."""
        if begin < end:
            self._begins.append(begin)
            self._ends.append(end)
            self._addresses.append(address)

    def fill(self, begin: int, data: memoryview) -> None:
        """Copy what is wanted of the ``data`` that stands at ``begin``."""
        begins, ends, addresses = self._begins, self._ends, self._addresses
        end = begin + len(data)
        source = address_of(data) - begin
        first, last = bisect_right(ends, begin), bisect_right(begins, end - 1)
        for number in range(first, last):
            low, high = max(begins[number], begin), min(ends[number], end)
            copy = memcpy if high - low >= _COPY_ALONE_BYTES else memcpy_holding
            copy(addresses[number] + low - begins[number], source + low, high - low)
