"""Copies from a device into a slot: queued on side streams, behind what the compute stream was given before.

Two streams a device. All that goes to the host goes through the first: slabs, then large tensors, both in the order of
the image. The second coalesces small tensors in slab buffers on the device, up to two ahead:

    coalescing   fetch, coalesce 0 | fetch, coalesce 1 | wait until buffer 0 is free, fetch, coalesce 2 | ...
    copying      wait for 0, copy it out | wait for 1, copy it out | ... | large | large | ...

The slabs come first so that none waits for a large copy. Where all streams share one queue of the hardware
(``CUDA_DEVICE_MAX_CONNECTIONS=1``, as Megatron-LM has it) the training, too, would wait for what a slab waits for.

The host waits for events only, asleep, never for the device. It does not queue all at once. A stream takes about a
thousand calls, and a thread that gives it more waits inside the driver. On an H200, 1,160 copies of 16 GB were queued
at once, and the launches of the training took 150 ms longer: probably they waited for that thread.

The tensors must not be given back to the allocator while a side stream reads them: whoever queues holds on to them
until the events are past. So ``Tensor.record_stream`` is not needed, which would keep their memory for longer. Memory
that is taken here is taken on the stream that uses it; the allocator orders it there.

A slab is a run of small tensors that are copied to the host by one copy. A copy from a device to the host costs the
host some 6 us whatever its size, in which a PCIe link moves 150 KB (at 25 GB/s) to 300 KB (at 50 GB/s), and NVLink to a
Grace host a megabyte: smaller tensors keep the link waiting. On the device itself ``torch._foreach_copy_`` copies 64
tensors and more with one launch, 0.1 us each, and some tenths of a microsecond a tensor beside. So tensors that stand
next to each other in the image are first coalesced in a slab buffer, memory on the device that looks like that part of
the image, and then copied out at once. By this reckoning 8,000 tensors of 50 kB are 50 ms of calls one by one; as 25
slabs they are some 4 ms of calls, hidden by the 8 ms of their bytes.

The slab buffer needs the bytes between the tensors too, their headers. They are fetched out of the slot, where they
stand from the beginning: in the other direction of the link, and by one call more for a slab.
"""

from __future__ import annotations

import logging
import threading
import weakref
from array import array
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import compress
from typing import Protocol

import torch

from asyncckpt.devices.kinds import DeviceEvent, DeviceKind, ReadyEvents
from asyncckpt.planning.forms import plain_addresses
from asyncckpt.planning.layout import PAGE_ALIGNED_FROM, Place
from asyncckpt.planning.structure import picker
from asyncckpt.shm.segment import PAGE
from asyncckpt.staging.host_copy import BatchCopy, CopyUnit, SlotViews, batches, check_addresses, checked_addresses

logger = logging.getLogger(__name__)

# Tensors of fewer bytes are coalesced; see above.
_SMALL_BYTES = 1 << 20
# What one slab covers at most: so much that its calls (some 50 us) are beneath its bytes (300 us), so little that two
# slab buffers are no matter on any device.
SLAB_BYTES = 16 << 20
# Fewer tensors cost less one by one.
_LEAST_TENSORS = 8

# Through torch._foreach_copy_, elements go by way of the type that torch computes in, float for the halves, and come
# out of that with another pattern of bits where they are not numbers; and it does not know every type. Those below are
# copied as what they are, all others as integers.
_COPIED_AS_THEY_ARE = frozenset(
    {
        *(torch.float64, torch.float32, torch.complex64, torch.complex128),
        *(torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8),
    }
)
_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


@dataclass
class SlabBuffer:
    """``SLAB_BYTES`` on a device, for one slab after the other; ``free``: when the last one has been copied out."""

    memory: torch.Tensor
    free: DeviceEvent | None = None


class Slab:
    """Tensors with consecutive numbers, and the part of the image from the first byte of the first to the last's last.

    Nobody else may write there meanwhile: all the bytes between are written too, as they are.
    """

    calls = 8

    def __init__(
        self, numbers: Sequence[int], views: SlotViews, buffer: SlabBuffer, converted: Sequence[bool] = ()
    ) -> None:
        """Describe the slab.

        Args:
            numbers: The numbers of the tensors.
            views: Where they go.
            buffer: By way of which they go there; other slabs may use it too.
            converted: As of ``DeviceCopy``.
        """
        first, last = views.places[numbers[0]], views.places[numbers[-1]]
        self.begin = first.payload_at
        self.buffer = buffer
        nbytes = last.payload_at + last.payload_bytes - self.begin
        self._image = views.raw(self.begin, nbytes)
        self._memory = buffer.memory[:nbytes]
        alike: dict[tuple[torch.dtype, bool], list[int]] = {}
        for number in numbers:
            alike.setdefault((views.specs[number].dtype, bool(converted) and converted[number]), []).append(number)
        self._groups = [
            _SameDtype(each, views, self._memory, self.begin, as_bits=not is_converted)
            for (_, is_converted), each in alike.items()
        ]

    def coalesce(self, tensors: Sequence[torch.Tensor]) -> None:
        """Make the slab buffer what the image is to be."""
        with torch.inference_mode():
            self._memory.copy_(self._image, non_blocking=True)
            for group in self._groups:
                group.copy(tensors)

    def copy_out(self) -> None:
        """Copy the slab buffer into the image."""
        with torch.inference_mode():
            self._image.copy_(self._memory, non_blocking=True)

    def copy(self, tensors: Sequence[torch.Tensor]) -> None:
        """Both, one after the other."""
        self.coalesce(tensors)
        self.copy_out()


class _SameDtype:
    """The tensors of one dtype in a slab. Where they go is kept: to make a view costs more than to copy into it.

    ``as_bits``: they come in that dtype, and no bit of them may change.
    """

    def __init__(
        self, numbers: Sequence[int], views: SlotViews, memory: torch.Tensor, begin: int, *, as_bits: bool
    ) -> None:
        self._pick = picker(numbers)
        dtype = views.specs[numbers[0]].dtype
        self._integer = _INTEGERS[dtype.itemsize] if as_bits and dtype not in _COPIED_AS_THEY_ARE else None
        self._specs = [views.specs[number] for number in numbers]
        self._is_complex = dtype.is_complex
        self._were_at = array("Q")
        self._integers: list[torch.Tensor] = []  # of the tensors that were at these addresses; they own no memory
        self._into: list[torch.Tensor] = []
        for number in numbers:
            place = views.places[number]
            raw = memory[place.payload_at - begin :][: place.payload_bytes]
            self._into.append(raw.view(self._integer or dtype).view(views.specs[number].shape))

    def copy(self, tensors: Sequence[torch.Tensor]) -> None:
        picked = self._pick(tensors)
        addresses = plain_addresses(picked, on_host=False, may_be_conjugate=self._is_complex)
        if addresses is None:
            self._copy_odd(picked)
            return
        check_addresses(addresses, picked, self._specs)
        if self._integer is not None:
            picked = self._as_integers(picked, self._integer, addresses)
        torch._foreach_copy_(self._into, picked)

    def _as_integers(
        self, tensors: Sequence[torch.Tensor], dtype: torch.dtype, addresses: array[int]
    ) -> list[torch.Tensor]:
        """The bits of ``tensors``. To view one as integers takes 2 us under Python's lock: from the second time on that
        all are at the same addresses, the views are kept.
        """
        if addresses != self._were_at:
            self._were_at, self._integers = addresses, []
            return [each.view(dtype) for each in tensors]
        if not self._integers:
            self._integers = [_unowned(tensor, dtype) for tensor in tensors]
        return self._integers

    def _copy_odd(self, picked: Sequence[torch.Tensor]) -> None:
        """Those that were ``picked``, of which some have no elements in a row, or a lazy sign."""
        checked_addresses(picked, self._specs)
        regular = list(map(torch.Tensor.is_contiguous, picked))
        if self._integer is not None:  # a lazy sign has to be carried out on what it is a sign of
            picked = [each.resolve_conj().resolve_neg().view(self._integer) for each in picked]
        # One that is not regular would have the whole call copy one by one.
        if any(regular):
            torch._foreach_copy_(list(compress(self._into, regular)), list(compress(picked, regular)))
        for into, tensor, is_regular in zip(self._into, picked, regular, strict=True):
            if not is_regular:
                into.copy_(tensor)


def _unowned(tensor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """The bits of ``tensor``, good as long as that is there; it does not keep the memory."""
    storage = torch._C._construct_storage_from_data_pointer(tensor.data_ptr(), tensor.device, tensor.nbytes)
    return torch.empty(0, dtype=dtype, device=tensor.device).set_(storage, 0, tensor.shape, tensor.stride())


def group_by_slab(numbers: Sequence[int], views: SlotViews) -> Iterator[tuple[bool, list[int]]]:
    """All of ``numbers``, in their order, in groups: with True those that make a slab.

    A slab has no number between that is not of ``numbers``: its bytes would be somebody else's to write. So are
    the objects at the end of a file. Nor has it a tensor of a megabyte or more, where a range of pinned memory may end,
    which no copy may cross.
    """
    group: list[int] = []
    for number in numbers:
        place = views.places[number]
        joins = (
            bool(group)
            and number == group[-1] + 1
            and views.file_of(number) == views.file_of(group[0])
            and place.payload_bytes < _SMALL_BYTES
            and views.places[group[0]].payload_bytes < _SMALL_BYTES
            and place.payload_at + place.payload_bytes - views.places[group[0]].payload_at <= SLAB_BYTES
        )
        if group and not joins:
            yield len(group) >= _LEAST_TENSORS, group
            group = []
        group.append(number)
    if group:
        yield len(group) >= _LEAST_TENSORS, group


def allocate_slab_buffers(device: torch.device) -> list[SlabBuffer]:
    """Two, so that one is filled while the other is copied out; none where the device has no memory left for them."""
    try:
        return [SlabBuffer(torch.empty(SLAB_BYTES, dtype=torch.uint8, device=device)) for _ in range(2)]
    except torch.OutOfMemoryError:
        logger.warning(
            "%s has no %d bytes left to coalesce small tensors in: they are copied one by one", device, 2 * SLAB_BYTES
        )
        return []


# What is reported as arrived at once: 1 to 3 ms on the link, so that an event (some us) does not count, and the
# worker's writes, far slower, begin early.
_CHUNK_BYTES = 64 << 20
# Calls that one stream is given before the first of them are done, and copies of one unit: a part of those.
_MOST_CALLS = 512
_UNIT_COPIES = 128

Fence = Callable[[], None]
"""Has the current stream of a device wait, from here on, until the tensors there are copied. The host goes on."""


class DeviceUnit(CopyUnit, Protocol):
    """A unit that is queued on streams of a device."""

    calls: int
    """About how many calls it gives one stream."""


class DeviceCopy:
    """The copies of those tensors of a plan that are on one device. Any thread may call."""

    def __init__(
        self,
        device: torch.device,
        kind: DeviceKind,
        numbers: Sequence[int],
        views: SlotViews,
        converted: Sequence[bool] = (),
    ) -> None:
        """Divide the tensors into units, and take the slab buffers that they need.

        Args:
            device: The device that the tensors are on.
            kind: Its kind.
            numbers: The numbers of the tensors, in ascending order.
            views: Where they go. Written only between ``queue`` and the end of ``wait``.
            converted: Of all tensors of the plan, which come in another dtype than they go; that is changed on the
                device, which is faster than the host. Empty: none.
        """
        self._device, self._kind = device, kind
        self._streams = _side_streams(device, kind)
        has_slabs = any(is_slab for is_slab, _ in group_by_slab(numbers, views))
        buffers = self._streams.slab_buffers() if has_slabs else []
        self.units = device_units(numbers, views, buffers, converted)

    def queue(self, tensors: Sequence[torch.Tensor], ready: ReadyEvents) -> QueuedCopies:
        """Queue copies, as many as the stream takes. If this raises, call ``settle``."""
        streams, queued = self._streams, QueuedCopies(tensors, deque(self.units))
        with self._kind.use(self._device, streams.copying):
            streams.copying.wait_event(ready[self._device])
            streams.coalescing.wait_event(ready[self._device])
            self._queue_some(queued)
        return queued

    def queue_rest(self, queued: QueuedCopies, done: Callable[[CopyUnit], object]) -> None:
        """Queue the others as those before them are copied; tell ``done`` of each of these. As ``queue``, if this
        raises.
        """
        with self._kind.use(self._device, self._streams.copying):
            while queued.left:
                queued.wait_for_first(done)
                self._queue_some(queued)

    def wait(self, queued: QueuedCopies, done: Callable[[CopyUnit], object]) -> None:
        """Wait for what is queued, and tell ``done`` of each unit. As ``queue``, if this raises."""
        with self._kind.use(self._device):
            while queued.pending:
                queued.wait_for_first(done)

    def _queue_some(self, queued: QueuedCopies) -> None:
        """Queue what there is room for; ``copying`` is the current stream."""
        while queued.left and queued.has_room():
            unit = queued.left.popleft()
            if isinstance(unit, Slab):
                event = self._streams.queue_slab(unit, queued.tensors)
            else:
                unit.copy(queued.tensors)
                event = self._kind.record(self._streams.copying)
            queued.add(unit, event)

    def settle(self) -> None:
        """Return when nothing is copied any more: an exception out of a signal handler may come before it is noted what
        is.
        """
        with self._kind.use(self._device):
            self._kind.record(self._streams.coalescing).synchronize()
            self._kind.record(self._streams.copying).synchronize()

    def fence(self, queued: QueuedCopies) -> Fence:
        """Return the fence for copies of which all are queued. It keeps no slot mapped."""
        kind, device, last = self._kind, self._device, queued.last  # the last copy is behind all others
        return lambda: kind.current_stream(device).wait_event(last)


@dataclass
class QueuedCopies:
    """The copies of one save from one device: units that are ``left`` to be queued, and those that are ``pending``,
    each with the event behind it.
    """

    tensors: Sequence[torch.Tensor]
    left: deque[DeviceUnit]
    pending: deque[tuple[DeviceUnit, DeviceEvent]] = field(default_factory=deque)
    last: DeviceEvent | None = None
    _calls: int = 0

    def has_room(self) -> bool:
        """Return whether the stream takes another unit."""
        return not self.pending or self._calls + self.left[0].calls <= _MOST_CALLS

    def add(self, unit: DeviceUnit, event: DeviceEvent) -> None:
        """Note a unit that was queued, and the ``event`` behind it."""
        self.pending.append((unit, event))
        self.last, self._calls = event, self._calls + unit.calls

    def wait_for_first(self, done: Callable[[CopyUnit], object]) -> None:
        """Wait until the first of the pending is copied, and tell ``done``."""
        unit, event = self.pending[0]
        event.synchronize()
        self.pending.popleft()
        self._calls -= unit.calls
        done(unit)


class ChunkCopy:
    """Some elements of a tensor that is too large for one unit."""

    calls = 2

    def __init__(self, number: int, first: int, elements: int, views: SlotViews) -> None:
        """Describe the copy.

        Args:
            number: The number of the tensor.
            first: The first of its elements.
            elements: How many.
            views: Where they go.
        """
        place, spec = views.places[number], views.specs[number]
        self.begin = place.payload_at + first * spec.dtype.itemsize
        self._number, self._first, self._elements = number, first, elements
        self._spec, self._whole = spec, views.tensor(number)
        self._into = self._whole.view(-1)[first : first + elements]

    def copy(self, tensors: Sequence[torch.Tensor]) -> None:
        tensor = tensors[self._number]
        checked_addresses([tensor], [self._spec])
        with torch.inference_mode():
            # A conjugate that is only a flag is not left to copy_: it would carry it out on the host, at once, on
            # bytes that are still to come. (torch._foreach_copy_ is never given one, by torch's dispatcher.)
            if tensor.is_contiguous() and not tensor.is_conj() and not tensor.is_neg():
                self._into.copy_(tensor.view(-1)[self._first : self._first + self._elements], non_blocking=True)
            elif self._first == 0:  # the whole tensor, some rows at a time, so that what is made of them is short-lived
                rows, at = max(1, tensor.size(0) * self._elements // tensor.numel()), 0
                for some in torch.split(tensor, rows):
                    plain = some.resolve_conj().resolve_neg().contiguous().view(-1)
                    borders = tuple(range(-at % self._elements, len(plain), self._elements))
                    into = self._whole.view(-1)[at : at + len(plain)]
                    for mine, part in zip(*(torch.tensor_split(each, borders) for each in (into, plain)), strict=True):
                        mine.copy_(part, non_blocking=True)
                    at += len(plain)


def pinned_cuts(place: Place) -> range:
    """Return where, in the image, a range of pinned memory may end at a tensor or within it: no copy crosses that.

    Small tensors are brought over many at a time, so only large ones begin there.
    """
    if place.payload_bytes < PAGE_ALIGNED_FROM or place.payload_at % PAGE:
        return range(0)
    return range(place.payload_at, place.payload_at + place.payload_bytes, _CHUNK_BYTES)


def device_units(
    numbers: Sequence[int], views: SlotViews, buffers: Sequence[SlabBuffer], converted: Sequence[bool] = ()
) -> list[DeviceUnit]:
    """Divide the tensors on one device into units: slabs, then all others.

    Args:
        numbers: The numbers of the tensors, in ascending order.
        views: Where they go.
        buffers: The device's slab buffers; without any there are no slabs.
        converted: As of ``DeviceCopy``.
    """
    slabs: list[DeviceUnit] = []
    others: list[int] = []
    for is_slab, group in group_by_slab(numbers, views):
        if is_slab and buffers:
            slabs.append(Slab(group, views, buffers[len(slabs) % len(buffers)], converted))
        else:
            others += group
    units: list[DeviceUnit] = []
    for batch in batches(others, views.places, _CHUNK_BYTES, _UNIT_COPIES):
        nbytes, itemsize = views.places[batch[0]].payload_bytes, views.specs[batch[0]].dtype.itemsize
        if nbytes <= _CHUNK_BYTES:
            units.append(BatchCopy(batch, views, non_blocking=True))
            continue
        total, step = nbytes // itemsize, _CHUNK_BYTES // itemsize
        units += [ChunkCopy(batch[0], first, min(step, total - first), views) for first in range(0, total, step)]
    return slabs + units


class _SideStreams:
    """The side streams of one device and its slab buffers, which all copies of this process share."""

    def __init__(self, device: torch.device, kind: DeviceKind) -> None:
        self._device, self._kind = device, kind
        self.copying, self.coalescing = kind.new_stream(device), kind.new_stream(device)
        self._buffers: list[SlabBuffer] | None = None
        self._lock = threading.Lock()

    def slab_buffers(self) -> list[SlabBuffer]:
        """The slab buffers, now that somebody needs them; none where the device has no memory left."""
        with self._lock, self._kind.use(self._device, self.coalescing):
            if self._buffers is None:
                self._buffers = allocate_slab_buffers(self._device)
            return self._buffers

    def queue_slab(self, slab: Slab, tensors: Sequence[torch.Tensor]) -> DeviceEvent:
        """Queue it; returns when it is copied. ``copying`` is the current stream."""
        with self._lock:
            if slab.buffer.free is not None:
                self.coalescing.wait_event(slab.buffer.free)
            with self._kind.use(self._device, self.coalescing):
                slab.coalesce(tensors)
            self.copying.wait_event(self._kind.record(self.coalescing))
            slab.copy_out()
            slab.buffer.free = self._kind.record(self.copying)
            return slab.buffer.free


_all_side_streams: weakref.WeakValueDictionary[torch.device, _SideStreams] = weakref.WeakValueDictionary()
_all_side_streams_lock = threading.Lock()


def _side_streams(device: torch.device, kind: DeviceKind) -> _SideStreams:
    with _all_side_streams_lock:
        streams = _all_side_streams.get(device)
        if streams is None:
            streams = _all_side_streams[device] = _SideStreams(device, kind)
        return streams
