"""The one copy that training waits for: from its tensors into a slot, on the thread that calls and a few beside it."""

from __future__ import annotations

import threading
import time
import weakref
from collections.abc import Callable, Sequence
from contextlib import ExitStack
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
    """A copy begins, on a thread of its own, that reads tensors until ``copied`` is set."""
    _copies[id(copied)] = copied


def held_memory(tensors: Sequence[torch.Tensor]) -> Sequence[torch.Tensor]:
    """``tensors`` as they are now, whatever becomes of them: ``parameter.data = ...`` gives one other memory.

    That is done to parameters, by ``Module.to`` for one; ``state_dict()`` has tensors of its own in their place.
    """
    if set(map(type, tensors)) <= {torch.Tensor}:  # 20 ns each, and detaching them is 500
        return tensors
    return [tensor if type(tensor) is torch.Tensor else tensor.detach() for tensor in tensors]


def wait_for_copies(timeout: float) -> None:
    """Return when no copy reads any tensor. Raises ``SaveTimeoutError`` after ``timeout`` seconds."""
    deadline = time.monotonic() + timeout
    for copied in [known() for known in _copies.valuerefs()]:
        if copied is not None and not copied.wait(max(0.0, deadline - time.monotonic())):
            raise SaveTimeoutError(f"tensors are still being copied after {timeout:g} s")


_device, _begin = attrgetter("device"), attrgetter("begin")


class SlotStager:
    """Copies the tensors of one plan into one slot. The tensors are new on every call; where they go is not."""

    def __init__(self, layout: DataLayout, segment: Segment, offset: int, converted: Sequence[bool] = ()) -> None:
        """Nothing is written before ``copy``.

        Args:
            layout: The layout of the image.
            segment: The memory; it cannot be unmapped until ``close``.
            offset: Where the slot begins in the segment, in bytes.
            converted: Which tensors come in another dtype than they are stored in. Empty: none.
        """
        # Of tensors that share their bytes the first is copied for all.
        self._own = [
            spec.alias is None and place.payload_bytes > 0
            for spec, place in zip(layout.specs, layout.tensors, strict=True)
        ]
        self._all_own = all(self._own)
        specs, places = list(compress(layout.specs, self._own)), list(compress(layout.tensors, self._own))
        self._views: SlotViews | None = SlotViews(specs, places, segment, offset, layout.begins)
        self._converted = list(compress(converted, self._own)) or [False] * len(specs)
        self._nbytes = layout.nbytes
        # How the work is divided depends on which devices the tensors are on, and is kept as long as they stay there.
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
        """Copy those of ``tensors`` that are its own into the slot, and return when that is done.

        Args:
            tensors: All of the plan, in the order of the layout. They stay as they are until this returns or raises.
            ready: What the copies from each device wait for.
            threads: Those that take part.
            arrived: Told by any thread, again and again, how many bytes are there, from the first of the image on.
            queued: Told once the fences of the devices, when all copies are queued and the host's tensors copied.
            devices: The same object as in the last call promises that they are on the same devices as then.
        """
        mine = tensors if self._all_own else list(compress(tensors, self._own))
        # Else all were on the host, and are.
        may_move = ready or self._device_copies or not self._devices or kinds.is_unknown_used()
        if may_move and (devices is None or devices is not self._divided_for):
            self._divided_for = None  # should this be interrupted
            self._divide(mine)
            self._divided_for = devices
        units = [*self._host, *(unit for each in self._device_copies for unit in each.units)]
        done = _CopiedPrefix(units, self._nbytes, arrived).add
        # The devices' copies are queued first and run while the host does its own.
        under_way: list[tuple[DeviceCopy, QueuedCopies]] = []
        try:
            for each in self._device_copies:
                under_way.append((each, each.queue(mine, ready)))
            copy_units(self._host, mine, threads, done)
            for each, copies in under_way:
                each.queue_rest(copies, done)
            queued([each.fence(copies) for each, copies in under_way])
            for each, copies in under_way:
                each.wait(copies, done)
        except BaseException:
            with ExitStack() as all_of_them:
                for each in self._device_copies:
                    all_of_them.callback(each.settle)
            raise

    def close(self) -> None:
        """Let go of the memory, whoever still holds on to this (the traceback of an error does)."""
        self._views, self._devices, self._host, self._device_copies = None, [], [], []

    def _divide(self, tensors: Sequence[torch.Tensor]) -> None:
        """Divide the work for tensors on the devices that these are on."""
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
        # All at once, and only when it is whole: an exception on the way must leave no part of it to the next save.
        self._host, self._device_copies, self._devices = sorted(host, key=_begin), device_copies, now_on


class _CopiedPrefix:
    """How much of an image is copied: all of it up to the first byte of the first unit that is not."""

    def __init__(self, units: Sequence[CopyUnit], nbytes: int, tell: Callable[[int], None]) -> None:
        """``nbytes``: of the image. ``tell`` is told with each unit."""
        ordered = sorted(units, key=_begin)
        self._number = {unit: number for number, unit in enumerate(ordered)}
        self._begins = [*map(_begin, ordered), nbytes]
        self._missing = [True] * len(ordered)
        self._first = 0
        self._tell = tell
        self._lock = threading.Lock()

    def add(self, unit: CopyUnit) -> None:
        """``unit`` is copied."""
        with self._lock:
            self._missing[self._number[unit]] = False
            while self._first < len(self._missing) and not self._missing[self._first]:
                self._first += 1
            self._tell(self._begins[self._first])
