"""Requests to read a data file: fill tensors in place, and read objects."""

from __future__ import annotations

import functools
import logging
import math
from collections import Counter, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import compress, islice
from operator import add, ge
from typing import Any, NamedTuple

import torch
from torch.autograd.graph import increment_version

from asyncckpt.devices.captures import is_capturing
from asyncckpt.devices.kinds import kind_of
from asyncckpt.errors import CheckpointError, MismatchError
from asyncckpt.format.index import Item
from asyncckpt.loading.data_file import ChecksummedFile, FileReading
from asyncckpt.loading.device_buffers import ALIGNMENT, BUFFERS, DeviceBuffer, DeviceBuffers
from asyncckpt.planning.forms import plain_addresses
from asyncckpt.planning.layout import contiguous_strides
from asyncckpt.planning.structure import PLAIN
from asyncckpt.shm.memcpy import Destinations, address_of
from asyncckpt.shm.segment import round_up

logger = logging.getLogger(__name__)

_INTEGERS = frozenset(
    {*(torch.int8, torch.int16, torch.int32, torch.int64), *(torch.uint8, torch.uint16, torch.uint32, torch.uint64)}
)


def is_lossy(stored: torch.dtype, wanted: torch.dtype) -> bool:
    """Return whether a conversion loses more than precision: float to integer, complex to real, smaller integers."""
    if stored in _INTEGERS and wanted in _INTEGERS:
        has, takes = torch.iinfo(stored), torch.iinfo(wanted)
        return has.min < takes.min or has.max > takes.max
    return not torch.can_cast(stored, wanted)


def copy_converted(into: torch.Tensor, stored: torch.Tensor) -> int:
    """Copy ``stored`` into a tensor of the same shape. Return the number of values that the other dtype cannot hold."""
    into.copy_(stored)
    if into.dtype == stored.dtype or type(into) not in PLAIN or not (into.is_floating_point() or into.is_complex()):
        return 0
    limits = torch.finfo(into.dtype)
    # Values below this limit are rounded to finite values. All other values are out of range.
    limit = limits.max + limits.eps * 2.0 ** (math.frexp(limits.max)[1] - 2)
    source, found = _real(stored), _real(into)
    if into.is_complex() and not stored.is_complex():
        found = found[..., 0]
    beyond = source.abs() >= limit
    if limits.min > 0:  # the dtype has no sign
        beyond |= source < 0
    if not beyond.any():
        return 0
    return int((source[beyond].double() != found.to(source.device)[beyond].double()).sum())


def _real(tensor: torch.Tensor) -> torch.Tensor:
    """Return the values as real numbers, in a dtype that can be compared."""
    tensor = torch.view_as_real(tensor.resolve_conj()) if tensor.is_complex() else tensor
    return tensor.float() if tensor.is_floating_point() and tensor.itemsize == 1 else tensor


def warn_out_of_range(counts: Mapping[str, int], path: str) -> None:
    """Warn about tensors with values out of the range of their dtype, with the count of each tensor."""
    if counts:
        some = ", ".join(f"{name!r} ({count:,})" for name, count in islice(counts.items(), 5))
        logger.warning(
            "%d values of %s are out of the range of the dtype that they were loaded into, and are infinite or other"
            " numbers there: %s%s; load them into the dtype that is stored",
            sum(counts.values()),
            path,
            some,
            f" and {len(counts) - 5} more" if len(counts) > 5 else "",
        )


# Maximum bytes of a batch, which are collected before they are copied to their tensors. One tensor may be larger. The
# link to a device takes about a millisecond for a batch.
_BATCH_BYTES = 64 << 20
_BATCHES_AT_ONCE = BUFFERS - 1


class BoxCopy(NamedTuple):
    """Collected bytes to copy to ``tensor``: a box of ``lengths`` of the stored ``item``, first element to last."""

    tensor: torch.Tensor
    item: Item
    lengths: Sequence[int]

    def fill(self, data: memoryview) -> int:
        """Copy ``data``, the bytes of the box, into the tensor. Return the number of values out of its range.

        Raises ``MismatchError`` if the tensor cannot be filled.
        """
        if data:
            source = torch.frombuffer(data, dtype=torch.uint8).view(dtype_named(self.item.dtype))
            try:
                with torch.no_grad():
                    source = source.as_strided(tuple(self.lengths), contiguous_strides(self.item.shape))
                    return copy_converted(self.tensor, source)
            except RuntimeError as error:
                raise MismatchError(f"{self.item.name!r} cannot be filled: {error}") from error
        return 0


class _Batch(NamedTuple):
    """Rows that are read together.

    The memory of ``buffer`` is sent to the tensors ``to_devices``. ``collected`` has the requests for all other
    collected bytes, each with its memory.
    """

    reading: FileReading
    buffer: DeviceBuffer | None
    to_devices: list[torch.Tensor]
    collected: list[tuple[Any, memoryview]]


class DeviceFill(NamedTuple):
    """Collected bytes to send unchanged to ``tensor``, which is on a device and has one dimension."""

    tensor: torch.Tensor


class ReadRequests:
    """The bytes to read from one data file, as rows. Rows may overlap.

    The bytes of a row either go straight to an address in this process, or are collected. Once collected bytes are
    complete and their checksums match, they are copied to a tensor (``DeviceFill``, ``BoxCopy``), or yielded with a
    key.
    """

    def __init__(self) -> None:
        # The rows are stored as columns, because there may be very many.
        self._begins: list[int] = []
        self._ends: list[int] = []
        self._addresses: list[int] = []  # 0 if the row is collected, or empty
        self._filled: list[torch.Tensor] = []  # the tensors at the addresses other than 0
        self.out_of_range: Counter[str] = Counter()
        """Number of values of each stored tensor that are out of range in the tensor to fill."""
        self._collected: dict[int, Any] = {}  # by row number: the request, or the key of an object

    def rows(self, tensors: Sequence[torch.Tensor], items: Sequence[Item]) -> bool:
        """Request plain ``tensors`` on the host, if each tensor takes the bytes of its item in a row.

        Return False, and request nothing, if any tensor does not. This works on columns: for 100,000 tensors, one
        microsecond a tensor adds up to a tenth of a second.
        """
        _, kinds, dtypes, shapes, *_, begins, sizes = zip(*items, strict=True)
        # Check each form once. Items of one form share the shape object.
        keys = list(zip(kinds, dtypes, map(id, shapes), sizes, strict=True))
        forms = {}
        for (kind, dtype, _, nbytes), shape in dict(zip(keys, shapes, strict=True)).items():
            if kind != "tensor" or nbytes != dtype_named(dtype).itemsize * math.prod(shape):
                return False
            forms[kind, dtype, id(shape), nbytes] = dtype_named(dtype), tuple(shape)
        addresses = plain_addresses(tensors, list(map(forms.__getitem__, keys)))
        if addresses is None or 0 in compress(addresses, sizes):  # the memory of a tensor was freed
            return False
        self._begins += begins
        self._ends += map(add, begins, sizes)
        self._addresses += addresses
        self._filled += tensors
        return True

    def whole(self, tensor: torch.Tensor, item: Item) -> None:
        """Fill ``tensor`` with the stored tensor ``item``, of the same dtype and shape."""
        if _is_filled_by_bytes(tensor):
            self._fill(tensor, item, item.payload_at, item.payload_bytes)
        else:
            self._collect(item.payload_at, item.payload_bytes, BoxCopy(tensor, item, item.shape))

    def box(self, tensor: torch.Tensor, item: Item, offsets: Sequence[int], lengths: Sequence[int]) -> None:
        """Fill ``tensor`` with a box of a stored tensor.

        Args:
            tensor: The tensor, of the shape ``lengths``, of any dtype, on any device.
            item: The stored tensor.
            offsets: The offsets of the box in the stored tensor, in elements, for each dimension.
            lengths: The lengths of the box, in elements, for each dimension.
        """
        first, count = _extent(item.shape, offsets, lengths)
        dtype = dtype_named(item.dtype)
        begin, nbytes = item.payload_at + first * dtype.itemsize, count * dtype.itemsize
        is_a_row = tensor.dtype == dtype and tensor.numel() == count
        is_plain = type(tensor) in PLAIN and tensor.layout == torch.strided
        if is_a_row and is_plain and _is_filled_by_bytes(tensor):
            self._fill(tensor, item, begin, nbytes)
        else:
            self._collect(begin, nbytes, BoxCopy(tensor, item, lengths))

    def object(self, item: Item, key: Any) -> None:
        """Collect the stored object ``item``, and the zeros behind it. ``read`` yields it with ``key``."""
        self._collect(item.at, item.nbytes, key)

    def nbytes_read(self, file: ChecksummedFile) -> int:
        """Return the number of bytes that ``read`` reads: the requested bytes, and the rest of their spans."""
        return sum(map(file.nbytes_read, self.ranges()))

    def ranges(self) -> Iterator[list[tuple[int, int]]]:
        """Yield the ranges of the file that ``read`` reads together: first byte and end of each row."""
        return map(self._ranges, self._batches())

    def read(
        self,
        file: ChecksummedFile,
        pool: ThreadPoolExecutor,
        buffers: DeviceBuffers,
        progress: Callable[[int], None] = lambda nbytes: None,
        *,
        verify: bool,
    ) -> Iterator[tuple[Any, memoryview]]:
        """Read all requested bytes, and fill the tensors. Tensors on devices are filled when ``buffers`` are closed.

        Args:
            file: The file to read.
            pool: The threads that read.
            buffers: The buffers for bytes that are sent to devices.
            progress: Called with the number of bytes read since the last call.
            verify: Whether to compare the checksums.

        Yields:
            The key of each object, with its bytes, which are valid until the next object.

        Raises:
            DamagedCheckpointError: Bytes are damaged. Tensors may have been filled, with bad bytes too, but not tensors
                that were collected together with the damaged bytes.
            StorageError: The file cannot be read.
            CheckpointError: A copy to a device would be captured into a graph.
        """
        becoming = (each for each in self._collected.values() if isinstance(each, DeviceFill | BoxCopy))
        if is_capturing() and not all(each.tensor.is_cpu for each in becoming):
            raise CheckpointError("a graph is being captured on this stream, and each replay would load: load before")
        increment_version(self._filled)
        # Collected bytes are read in batches, to limit the memory. While one batch is sent, the threads read the next
        # batches, so that neither the disk nor the link waits for the last run of a batch.
        batches = list(self._batches())
        # Tensors may share memory in the state dict without sharing bytes in the checkpoint. Then read one batch at a
        # time, so that the last tensor wins as a whole.
        is_tied = len(batches) > 1 and self._destinations(range(len(self._begins))).tied
        under_way: deque[_Batch] = deque()
        try:
            for rows in batches:
                if len(under_way) == (1 if is_tied else _BATCHES_AT_ONCE):
                    yield from self._finish(under_way.popleft(), file, progress)
                under_way.append(self._begin(rows, file, pool, buffers, verify))
            while under_way:
                yield from self._finish(under_way.popleft(), file, progress)
        finally:
            for batch in under_way:
                batch.reading.close()

    def _begin(
        self, rows: Sequence[int], file: ChecksummedFile, pool: ThreadPoolExecutor, buffers: DeviceBuffers, verify: bool
    ) -> _Batch:
        buffer, to_devices = self._take_buffer(rows, buffers)
        collected = self._take_memory(rows, file)
        destinations = self._destinations(rows)
        reading = file.read(
            self._ranges(rows), pool, destinations, verify=verify, at_once=1 if destinations.tied else None
        )
        return _Batch(reading, buffer, to_devices, collected)

    def _finish(
        self, batch: _Batch, file: ChecksummedFile, progress: Callable[[int], None]
    ) -> Iterator[tuple[Any, memoryview]]:
        with batch.reading as reading:
            for run in reading:
                if run.damages:
                    raise file.explained(run.damages[0])
                progress(run.nbytes)
        if batch.buffer is not None:
            batch.buffer.send(batch.to_devices)
        for becomes, data in batch.collected:
            if isinstance(becomes, BoxCopy):
                if out_of_range := becomes.fill(data):
                    self.out_of_range[becomes.item.name] += out_of_range
            else:
                yield becomes, data

    def _fill(self, tensor: torch.Tensor, item: Item, begin: int, nbytes: int) -> None:
        """Request to fill a contiguous plain tensor with the bytes of ``item`` from ``begin`` on."""
        if tensor.is_cpu:
            self._add(begin, nbytes, tensor.data_ptr())
            self._filled.append(tensor)
            return
        flat, size = tensor.detach().view(-1), tensor.itemsize
        while len(flat):
            # Cut at a boundary between spans of the item, so that no span is read twice.
            left = _BATCH_BYTES - (begin - item.at) % _BATCH_BYTES
            some, flat = flat[: max(1, left // size)], flat[max(1, left // size) :]
            self._collect(begin, some.nbytes, DeviceFill(some))
            begin += some.nbytes

    def _add(self, begin: int, nbytes: int, address: int) -> None:
        self._begins.append(begin)
        self._ends.append(begin + nbytes)
        self._addresses.append(address)

    def _collect(self, begin: int, nbytes: int, becomes: Any) -> None:
        self._collected[len(self._begins)] = becomes
        self._add(begin, nbytes, 0)

    def _batches(self) -> Iterator[Sequence[int]]:
        """Yield the rows that are read together, in the order of the file."""
        begins, ends = self._begins, self._ends
        rows: Sequence[int] = range(len(begins))
        if begins != sorted(begins):
            rows = sorted(rows, key=begins.__getitem__)
        first = size = 0
        for number, row in enumerate(rows) if self._collected else ():
            if row not in self._collected:
                continue
            nbytes = round_up(ends[row] - begins[row], ALIGNMENT)
            if number > first and size + nbytes > _BATCH_BYTES:
                yield rows[first:number]
                first, size = number, 0
            size += nbytes
        yield rows[first:]

    def _ranges(self, rows: Sequence[int]) -> list[tuple[int, int]]:
        return [(self._begins[row], self._ends[row]) for row in rows]

    def _take_buffer(
        self, rows: Sequence[int], buffers: DeviceBuffers
    ) -> tuple[DeviceBuffer | None, list[torch.Tensor]]:
        """Return the tensors of ``rows`` to send to devices, and the buffer with their memory.

        The buffer is None if there are no such tensors.
        """
        its = [row for row in rows if isinstance(self._collected.get(row), DeviceFill)] if self._collected else []
        tensors = [self._collected[row].tensor for row in its]
        if not tensors:
            return None, tensors
        buffer = buffers.take(tensors[0].device, [tensor.nbytes for tensor in tensors])
        for row, view in zip(its, buffer.views, strict=True):
            self._addresses[row] = address_of(view)
        return buffer, tensors

    def _take_memory(self, rows: Sequence[int], file: ChecksummedFile) -> list[tuple[Any, memoryview]]:
        """Return the requests of ``rows`` that collect bytes outside of a device buffer, each with its memory.

        If the file is in memory, the memory is a view of the file.
        """
        collected = []
        for row in rows if self._collected else ():
            if row not in self._collected or isinstance(self._collected[row], DeviceFill):
                continue
            begin, end = self._begins[row], self._ends[row]
            data = file.in_place(begin, end)
            if data is None:
                data = memoryview(bytearray(end - begin))
                self._addresses[row] = address_of(data) if data else 0
            collected.append((self._collected[row], data))
        return collected

    def _destinations(self, rows: Sequence[int]) -> Destinations:
        """Return the destinations of the rows that have an address. Bytes are copied there, or read in place."""
        begins, ends, addresses = self._begins, self._ends, self._addresses
        columns: Sequence[Sequence[int]] = (begins, ends, addresses)
        if rows != range(len(begins)) or not all(addresses) or any(map(ge, begins, ends)):
            to = [row for row in rows if addresses[row] and begins[row] < ends[row]]
            columns = [[column[row] for row in to] for column in columns]
        destinations = Destinations(*columns)
        if destinations.tied:  # rows with the same source and the same destination are copied once
            destinations = Destinations(*map(list, zip(*sorted(set(zip(*columns, strict=True))), strict=True)))
        return destinations


@functools.cache
def dtype_named(name: str) -> torch.dtype:
    """Return the dtype with that ``name`` in an index."""
    dtype: torch.dtype = getattr(torch, name)
    return dtype


def has_room(tensor: torch.Tensor) -> bool:
    """Return whether each element of a plain tensor has its own memory: the tensor is not expanded, and not freed."""
    if tensor.numel() == 0:
        return True
    if (tensor.is_cpu or tensor.is_cuda) and tensor.data_ptr() == 0:
        return False
    return tensor.is_contiguous() or all(
        stride or length == 1 for stride, length in zip(tensor.stride(), tensor.shape, strict=True)
    )


def _is_filled_by_bytes(tensor: torch.Tensor) -> bool:
    """Return whether copying bytes can fill a plain tensor.

    The tensor must be contiguous, and on the host or on a device with a known kind.
    """
    is_reached = tensor.is_cpu or kind_of(tensor.device) is not None
    return is_reached and tensor.is_contiguous() and not (tensor.is_conj() or tensor.is_neg())


def _extent(shape: Sequence[int], offsets: Sequence[int], lengths: Sequence[int]) -> tuple[int, int]:
    """Return the first element of a box in a contiguous tensor, and the number of elements up to its last one."""
    if 0 in lengths:
        return 0, 0
    strides = contiguous_strides(shape)
    first = sum(offset * stride for offset, stride in zip(offsets, strides, strict=True))
    return first, sum((length - 1) * stride for length, stride in zip(lengths, strides, strict=True)) + 1
