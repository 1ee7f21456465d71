"""Copy the trainer's tensors into a slot, on a thread of the engine and a few others. The training waits for this."""

from __future__ import annotations

import threading
import time
import weakref
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from functools import partial
from itertools import compress
from operator import attrgetter, eq

import torch

from asyncckpt.devices import kinds
from asyncckpt.devices.kinds import ReadyEvents
from asyncckpt.errors import SaveTimeoutError
from asyncckpt.planning.layout import DataLayout
from asyncckpt.shm.segment import Segment
from asyncckpt.staging.device_copy import DeviceCopy, Fence, QueuedCopies
from asyncckpt.staging.host_copy import CopyThreads, CopyUnit, SlotViews, batch_units, copy_units, host_units
from asyncckpt.threads import Flag

_copies: weakref.WeakValueDictionary[int, Flag] = weakref.WeakValueDictionary()


def note_copy(copied: Flag) -> None:
    """Note that a copy begins on a separate thread. The copy reads tensors until ``copied`` is set."""
    _copies[id(copied)] = copied


def held_memory(tensors: Sequence[torch.Tensor]) -> Sequence[torch.Tensor]:
    """Return tensors with the memory that ``tensors`` have now.

    ``parameter.data = ...`` gives a parameter other memory, as ``Module.to`` does. The returned tensors then keep the
    memory of now. Plain tensors, as in a ``state_dict()``, are returned themselves.
    """
    if set(map(type, tensors)) <= {torch.Tensor}:  # takes 20 ns each; detaching takes 500 ns
        return tensors
    return [tensor if type(tensor) is torch.Tensor else tensor.detach() for tensor in tensors]


def wait_for_copies(timeout: float) -> None:
    """Wait until no copy reads any tensor. Raises ``SaveTimeoutError`` after ``timeout`` seconds."""
    deadline = time.monotonic() + timeout
    for copied in [known() for known in _copies.valuerefs()]:
        if copied is not None and not copied.wait(max(0.0, deadline - time.monotonic())):
            raise SaveTimeoutError(f"tensors are still being copied after {timeout:g} s")


_device, _begin = attrgetter("device"), attrgetter("begin")


class SlotStager:
    """Copies the tensors of a plan into a slot. Each call has new tensors, for the same places."""

    def __init__(self, layout: DataLayout, segment: Segment, offset: int, converted: Sequence[bool] = ()) -> None:
        """Write nothing yet.

        Args:
            layout: The layout of the image.
            segment: The memory; it cannot be unmapped until ``close``.
            offset: The start of the slot in the segment, in bytes.
            converted: Whether each tensor is stored in another dtype. Empty: none is.
        """
        # If several tensors share their bytes, copy only the first one.
        self._own = [
            spec.alias is None and place.payload_bytes > 0
            for spec, place in zip(layout.specs, layout.tensors, strict=True)
        ]
        self._all_own = all(self._own)
        specs, places = list(compress(layout.specs, self._own)), list(compress(layout.tensors, self._own))
        self._views: SlotViews | None = SlotViews(specs, places, segment, offset, layout.begins)
        self._converted = list(compress(converted, self._own)) or [False] * len(specs)
        self._nbytes = layout.nbytes
        # The units depend on the devices of the tensors, and are reused until a tensor moves to another device.
        self._devices: list[torch.device] = []
        self._divided_for: object | None = None
        self._host: list[CopyUnit] = []
        self._device_copies: list[DeviceCopy] = []

    def copy(
        self,
        tensors: Sequence[torch.Tensor],
        ready: ReadyEvents,
        threads: CopyThreads,
        arrived: Callable[[int], None],
        queued: Callable[[Sequence[Fence]], None],
        devices: object | None = None,
    ) -> None:
        """Copy ``tensors`` into the slot, and return when that is done.

        Args:
            tensors: All tensors of the plan, in the order of the layout. Do not change them until this returns or
                raises.
            ready: The event that the copies from each device wait for.
            threads: The threads that help.
            arrived: Called by any thread, many times, with the number of bytes that are complete from the start of the
                image.
            queued: Called once with the fences of the devices, when all copies are queued and the tensors on the host
                are copied.
            devices: A token (``Forms.devices``). If it is the object of the last call, the tensors are on the same
                devices as then. None: unknown.
        """
        mine = tensors if self._all_own else list(compress(tensors, self._own))
        # If this is false, all tensors were on the host, and still are.
        may_move = ready or self._device_copies or not self._devices or kinds.is_unknown_used()
        if may_move and (devices is None or devices is not self._divided_for):
            self._divided_for = None  # cleared first, because ``_divide`` may be interrupted
            self._divide(mine)
            self._divided_for = devices
        units = [*self._host, *(unit for each in self._device_copies for unit in each.units)]
        done = _CopiedPrefix(units, self._nbytes, arrived).add
        # Queue the copies from devices first, so that they run while the host copies.
        under_way: list[tuple[DeviceCopy, QueuedCopies]] = []
        try:
            for each in self._device_copies:
                under_way.append((each, each.queue(mine, ready)))
            rest = partial(_queue_rest, under_way, done) if under_way else None
            copy_units(self._host, mine, threads, done, meanwhile=rest)
            queued([each.fence(copies) for each, copies in under_way])
            for each, copies in under_way:
                each.wait(copies, done)
        except BaseException:
            with ExitStack() as all_of_them:
                for each in self._device_copies:
                    all_of_them.callback(each.settle)
            raise

    def close(self) -> None:
        """Release the memory, even if the traceback of an error still refers to this object."""
        self._views, self._devices, self._host, self._device_copies = None, [], [], []

    def _divide(self, tensors: Sequence[torch.Tensor]) -> None:
        """Divide the work into units, for the devices of ``tensors``."""
        if self._views is None or (self._devices and all(map(eq, map(_device, tensors), self._devices))):
            return
        now_on = list(map(_device, tensors))
        numbers: dict[torch.device, list[int]] = {}
        for number, device in enumerate(now_on):
            numbers.setdefault(device, []).append(number)
        host: list[CopyUnit] = []
        device_copies: list[DeviceCopy] = []
        for device, its in numbers.items():
            kind = kinds.kind_of(device)
            if kind is not None:
                device_copies.append(DeviceCopy(device, kind, its, self._views, self._converted))
                continue
            plain = [number for number in its if device.type == "cpu" and not self._converted[number]]
            others = [number for number in its if device.type != "cpu" or self._converted[number]]
            host += host_units(plain, self._views) + batch_units(others, self._views)
        # Assign all results together at the end, so that after an exception the next save finds no partial result.
        self._host, self._device_copies, self._devices = sorted(host, key=_begin), device_copies, now_on


def _queue_rest(under_way: Sequence[tuple[DeviceCopy, QueuedCopies]], done: Callable[[CopyUnit], object]) -> None:
    """Queue all remaining copies from devices, by turns for each device."""
    while unfinished := [(each, copies) for each, copies in under_way if copies.left]:
        for each, copies in unfinished:
            each.queue_more(copies, done)


class _CopiedPrefix:
    """The copied part of an image, from the start up to the first missing unit."""

    def __init__(self, units: Sequence[CopyUnit], nbytes: int, tell: Callable[[int], None]) -> None:
        """Begin with nothing.

        Args:
            units: All units of the copy.
            nbytes: Size of the image, in bytes.
            tell: Called after each unit with the end of the copied part, in bytes.
        """
        ordered = sorted(units, key=_begin)
        self._number = {unit: number for number, unit in enumerate(ordered)}
        self._begins = [*map(_begin, ordered), nbytes]
        self._missing = [True] * len(ordered)
        self._first = 0
        self._tell = tell
        self._lock = threading.Lock()

    def add(self, unit: CopyUnit) -> None:
        """Note that ``unit`` is copied."""
        with self._lock:
            self._missing[self._number[unit]] = False
            while self._first < len(self._missing) and not self._missing[self._first]:
                self._first += 1
            self._tell(self._begins[self._first])
