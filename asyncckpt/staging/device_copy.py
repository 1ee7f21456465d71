"""Copies from a device into a slot: queued on a side stream, behind the work that the compute stream has at the call.

From CUDA 12.8 on, the driver takes many copies by one call (``devices/runtime.py``). Elsewhere torch queues the copies
one by one, which takes 7 to 20 us each.

The host sleeps until an event, and never waits for the whole device. A stream holds about a thousand commands. A thread
that queues more commands waits in the driver, and holds a lock there, so that the training cannot launch kernels. In a
profile on an H200 with 256 units queued, a copying thread spent 198 ms of a save of 16 GB in such calls, and the
launches of the training waited 180 ms. So only a few units are queued ahead, enough to keep the link busy.

The tensors must not go back to the allocator while the side stream reads them. The caller holds references to them
until the events are past. ``Tensor.record_stream`` is not used, because it would keep the memory for longer.
"""

from __future__ import annotations

import operator
import threading
from array import array
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import compress
from operator import attrgetter
from typing import Protocol

import torch

from asyncckpt.devices.kinds import DeviceEvent, DeviceKind, DeviceStream, ReadyEvents
from asyncckpt.planning.forms import are_plain, plain_addresses
from asyncckpt.planning.layout import BLOCK_ALIGNED_FROM, Place
from asyncckpt.planning.structure import picker
from asyncckpt.shm.segment import PAGE
from asyncckpt.staging.host_copy import BatchCopy, CopyUnit, SlotViews, batches, check_addresses, checked_addresses

# Maximum bytes of one unit, which is reported as arrived as a whole. A unit takes 1 to 3 ms on the link. This is long
# compared to its event (some us), and short enough for the worker to begin to write early.
_CHUNK_BYTES = 64 << 20
# Maximum commands in the stream at a time, of the thousand that a stream holds. If the driver takes many copies by one
# call, they are 32 units. Units of large tensors then keep the link busy for 40 ms.
_MOST_COMMANDS = 128
# Commands of an event for which the host waits asleep. In a profile, an event and a copy were at least four commands.
# One call for many copies is assumed to be one command.
_EVENT_COMMANDS = 3
# Maximum copies of one unit: if torch queues them one by one, and if the driver takes them by one call (0.9 us each).
_UNIT_COPIES = 32
_CALL_COPIES = 1024

Fence = Callable[[], None]
"""Makes the current stream of a device wait until the tensors there are copied. The host does not wait."""


class DeviceUnit(CopyUnit, Protocol):
    """A unit that is queued on a stream of a device."""

    commands: int
    """The approximate number of commands that the unit adds to the stream."""


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
        """Divide the tensors into units.

        Args:
            device: The device of the tensors.
            kind: The kind of the device.
            numbers: The numbers of the tensors, in ascending order.
            views: The memory for the tensors. Written only between ``queue`` and the end of ``wait``.
            converted: Whether each tensor of the plan is stored in another dtype. The device converts it, because the
                host is slower. Empty: none is.
        """
        self._device, self._kind = device, kind
        self._stream = copy_stream(device, kind)
        copy_many = partial(kind.copy_many, device, self._stream) if kind.copies_many(device) else None
        self.units = device_units(numbers, views, converted, copy_many)

    def queue(self, tensors: Sequence[torch.Tensor], ready: ReadyEvents) -> QueuedCopies:
        """Queue the first copies. If this raises, call ``settle``."""
        queued = QueuedCopies(tensors, deque(self.units))
        with self._kind.use(self._device, self._stream):
            self._stream.wait_event(ready[self._device])
            self._queue_some(queued)
        return queued

    def queue_more(self, queued: QueuedCopies, done: Callable[[CopyUnit], object]) -> None:
        """Wait until the first queued unit is copied, call ``done`` with the unit, and queue more units.

        If this raises, call ``settle``.
        """
        with self._kind.use(self._device, self._stream):
            queued.wait_for_first(done)
            self._queue_some(queued)

    def wait(self, queued: QueuedCopies, done: Callable[[CopyUnit], object]) -> None:
        """Wait until all units are copied, and call ``done`` with each. If this raises, call ``settle``."""
        with self._kind.use(self._device):
            while queued.pending:
                queued.wait_for_first(done)

    def _queue_some(self, queued: QueuedCopies) -> None:
        """Queue units while there is room. The copy stream has to be the current stream."""
        while queued.left and queued.has_room():
            unit = queued.left.popleft()
            unit.copy(queued.tensors)
            queued.add(unit, self._kind.record(self._stream))

    def settle(self) -> None:
        """Wait until the stream has done all copies.

        An exception from a signal handler may leave queued units that are not in ``QueuedCopies``.
        """
        with self._kind.use(self._device):
            self._kind.record(self._stream).synchronize()

    def fence(self, queued: QueuedCopies) -> Fence:
        """Return the fence for copies, after all of them are queued. The fence keeps no slot mapped."""
        kind, device, last = self._kind, self._device, queued.last  # the last copy is behind all others
        return lambda: kind.current_stream(device).wait_event(last)


@dataclass
class QueuedCopies:
    """The copies of one save from one device.

    ``left``: the units still to queue. ``pending``: the queued units, each with an event for its completion.
    """

    tensors: Sequence[torch.Tensor]
    left: deque[DeviceUnit]
    pending: deque[tuple[DeviceUnit, DeviceEvent]] = field(default_factory=deque)
    last: DeviceEvent | None = None
    _commands: int = 0

    def has_room(self) -> bool:
        """Return whether the next unit can be queued now."""
        return not self.pending or self._commands + _cost(self.left[0]) <= _MOST_COMMANDS

    def add(self, unit: DeviceUnit, event: DeviceEvent) -> None:
        """Note a queued unit, and the ``event`` for its completion."""
        self.pending.append((unit, event))
        self.last, self._commands = event, self._commands + _cost(unit)

    def wait_for_first(self, done: Callable[[CopyUnit], object]) -> None:
        """Wait until the first pending unit is copied, and call ``done`` with it."""
        unit, event = self.pending[0]
        event.synchronize()
        self.pending.popleft()
        self._commands -= _cost(unit)
        done(unit)


def _cost(unit: DeviceUnit) -> int:
    return unit.commands + _EVENT_COMMANDS


class ChunkCopy:
    """Some elements of a tensor, if the tensor is too large for one unit."""

    commands = 1

    def __init__(self, number: int, first: int, elements: int, views: SlotViews) -> None:
        """Describe the copy.

        Args:
            number: The number of the tensor.
            first: The first element to copy.
            elements: The number of elements.
            views: The memory for the tensors.
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
            # copy_ would resolve a lazy conjugate on the host, at once, from bytes that have not arrived yet. Before
            # torch._foreach_copy_, torch's dispatcher resolves the conjugate.
            if tensor.is_contiguous() and not tensor.is_conj() and not tensor.is_neg():
                self._into.copy_(tensor.view(-1)[self._first : self._first + self._elements], non_blocking=True)
            elif self._first == 0:  # the whole tensor, some rows at a time, to limit the temporary memory
                rows, at = max(1, tensor.size(0) * self._elements // tensor.numel()), 0
                for some in torch.split(tensor, rows):
                    plain = some.resolve_conj().resolve_neg().contiguous().view(-1)
                    borders = tuple(range(-at % self._elements, len(plain), self._elements))
                    into = self._whole.view(-1)[at : at + len(plain)]
                    for mine, part in zip(*(torch.tensor_split(each, borders) for each in (into, plain)), strict=True):
                        mine.copy_(part, non_blocking=True)
                    at += len(plain)


CopyManyOnStream = Callable[["array[int]", "array[int]", "array[int]"], bool]
"""``DeviceKind.copy_many`` on one stream."""


class BytesCopy:
    """Tensors, or some bytes of one tensor, that the driver copies by one call."""

    commands = 1

    def __init__(
        self,
        numbers: Sequence[int],
        views: SlotViews,
        copy_many: CopyManyOnStream,
        otherwise: Callable[[], DeviceUnit],
        part: range | None = None,
    ) -> None:
        """Describe the copy.

        Args:
            numbers: The numbers of the tensors.
            views: The memory for the tensors.
            copy_many: Queues the copies.
            otherwise: Makes a unit that copies the same tensors in another way, if the driver refuses.
            part: The bytes to copy of a single tensor; None: all bytes of all tensors.
        """
        self._pick, self._copy_many = picker(numbers), copy_many
        self._numbers, self._views, self._otherwise = numbers, views, otherwise
        self._specs = [views.specs[number] for number in numbers]
        self._is_complex = any(spec.dtype.is_complex for spec in self._specs)
        self._offset = 0 if part is None else part.start
        self._to = array("Q", map(self._offset.__add__, map(views.address, numbers)))
        self._sizes = array("Q", (views.places[number].payload_bytes for number in numbers))
        if part is not None:
            self._sizes[0] = len(part)
        self.begin = views.places[numbers[0]].payload_at + self._offset

    def copy(self, tensors: Sequence[torch.Tensor]) -> None:
        picked = self._pick(tensors)
        addresses = plain_addresses(picked, on_host=False, may_be_conjugate=self._is_complex)
        if addresses is None and len(picked) > 1:
            self._copy_each(picked, tensors)
            return
        if addresses is not None:
            check_addresses(addresses, picked, self._specs)
            addresses[0] += self._offset
            if self._copy_many(self._to, addresses, self._sizes):
                return
        self._otherwise().copy(tensors)

    def _copy_each(self, picked: Sequence[torch.Tensor], tensors: Sequence[torch.Tensor]) -> None:
        """Copy the ``picked`` tensors. Some of them are not plain. ``tensors``: all tensors of the plan."""
        plain = [tensor.is_contiguous() and are_plain([tensor], may_be_conjugate=self._is_complex) for tensor in picked]
        addresses = checked_addresses(picked, self._specs)
        arrays = [array("Q", compress(each, plain)) for each in (self._to, addresses, self._sizes)]
        if any(plain) and not self._copy_many(*arrays):
            self._otherwise().copy(tensors)
            return
        if others := list(compress(self._numbers, map(operator.not_, plain))):
            BatchCopy(others, self._views, non_blocking=True).copy(tensors)


def pinned_cuts(place: Place) -> range:
    """Return the offsets in the image, within the tensor at ``place``, where a range of pinned memory may end.

    No copy crosses these offsets. A small tensor has no such offsets, nor has a tensor that begins within a page.
    """
    if place.payload_bytes < BLOCK_ALIGNED_FROM or place.payload_at % PAGE:
        return range(0)
    return range(place.payload_at, place.payload_at + place.payload_bytes, _CHUNK_BYTES)


def device_units(
    numbers: Sequence[int],
    views: SlotViews,
    converted: Sequence[bool] = (),
    copy_many: CopyManyOnStream | None = None,
) -> list[DeviceUnit]:
    """Divide the tensors on one device into units, in the order of the image.

    Args:
        numbers: The numbers of the tensors, in ascending order.
        views: The memory for the tensors.
        converted: As in ``DeviceCopy``.
        copy_many: Queues many copies by one call; None: the driver has no such call.
    """
    if copy_many is not None and any(converted and converted[number] for number in numbers):
        divided = [[number for number in numbers if converted[number] is each] for each in (True, False)]
        by_torch, by_driver = (
            device_units(each, views, (), call) for each, call in zip(divided, (None, copy_many), strict=True)
        )
        return sorted((*by_torch, *by_driver), key=attrgetter("begin"))
    units: list[DeviceUnit] = []
    for batch in batches(numbers, views.places, _CHUNK_BYTES, _UNIT_COPIES if copy_many is None else _CALL_COPIES):
        nbytes, itemsize = views.places[batch[0]].payload_bytes, views.specs[batch[0]].dtype.itemsize
        total, step = nbytes // itemsize, _CHUNK_BYTES // itemsize
        parts: list[tuple[Callable[[], DeviceUnit], range | None]] = []
        if nbytes <= _CHUNK_BYTES:
            parts.append((partial(BatchCopy, batch, views, non_blocking=True), None))
        else:
            for first in range(0, total, step):
                count = min(step, total - first)
                part = range(first * itemsize, (first + count) * itemsize)
                parts.append((partial(ChunkCopy, batch[0], first, count, views), part))
        for make, its_part in parts:
            if copy_many is None:
                units.append(make())
            else:
                units.append(BytesCopy(batch, views, copy_many, make, its_part))
    return units


_copy_streams: dict[tuple[DeviceKind, torch.device], DeviceStream] = {}
_copy_streams_lock = threading.Lock()


def copy_stream(device: torch.device, kind: DeviceKind) -> DeviceStream:
    """Return the side stream of ``device``, which all copies of this process share."""
    with _copy_streams_lock:
        if (key := (kind, device)) not in _copy_streams:
            _copy_streams[key] = kind.new_stream(device)
        return _copy_streams[key]
