"""Copies from the host's memory into a slot, in units for a few threads.

A unit is a batch of small tensors, or some bytes of a large tensor. One call copies a unit and releases the GIL.
``torch._foreach_copy_`` copies tensors that are not contiguous.
"""

from __future__ import annotations

import contextlib
import logging
import operator
import os
import threading
import weakref
from array import array
from bisect import bisect_right
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from itertools import compress
from queue import Empty, SimpleQueue
from typing import Protocol

import torch

from asyncckpt.errors import CheckpointError, UnsavableStateError
from asyncckpt.planning.forms import are_plain, plain_addresses
from asyncckpt.planning.layout import Place, TensorSpec
from asyncckpt.planning.structure import picker
from asyncckpt.shm.memcpy import copy_many
from asyncckpt.shm.segment import Segment
from asyncckpt.threads import Flag, Mailbox, make, make_all, start

logger = logging.getLogger(__name__)


class CopyThreads:
    """A few threads that carry out calls, in the order of ``run``.

    The threads start at once, so that no save has to start a thread, which may fail. The queue of calls is implemented
    in C, so an exception from a signal handler cannot leave it locked. (``ThreadPoolExecutor`` can stay locked.) At the
    end of the process the threads finish all calls.
    """

    def __init__(self, threads: int, name: str) -> None:
        """Start ``threads`` threads. Raises ``CheckpointError`` if the process may have no more threads."""
        self._calls: SimpleQueue[Callable[[], object] | None] = SimpleQueue()
        self._owner, self._is_closed = os.getpid(), False
        self._threads = [
            threading.Thread(target=make_all, args=(self._calls,), name=f"{name}-{number}", daemon=True)
            for number in range(threads)
        ]
        _open.add(self)
        started = 0
        try:
            for thread in self._threads:
                start(thread)
                started += 1
        except CheckpointError:
            del self._threads[started:]
            raise

    def run(self, call: Callable[[], object]) -> None:
        """Make a thread execute the ``call``. If the threads have ended or belong to another process, call it here.

        An exception of the call is logged. If there was no memory for the call, it is repeated.
        """
        if self._is_closed or self._owner != os.getpid():
            make(call)
        else:
            self._calls.put(call)

    def wait(self) -> None:
        """Return when all earlier calls are done. Works only with a single thread."""
        if self._is_closed:
            self._join()
        else:
            self.run((done := Flag()).set)
            done.wait()

    def close(self) -> None:
        """End the threads, after all calls are done."""
        self._is_closed = True
        self._end()
        self._join()

    def __del__(self) -> None:
        self._end()

    def _end(self) -> None:
        for _ in getattr(self, "_threads", ()):  # none if ``__init__`` was interrupted
            self._calls.put(None)

    def _join(self) -> None:
        for thread in self._threads:
            if thread.ident is not None:  # otherwise its start was interrupted
                thread.join()


_open: weakref.WeakSet[CopyThreads] = weakref.WeakSet()


def _close_all() -> None:
    for threads in list(_open):
        threads.close()


# Python ends its own thread pools by the same hook. The hook runs before Python stops other threads, which may be in
# the middle of a copy. The hook also runs in processes of multiprocessing, which do not use atexit.
threading._register_atexit(_close_all)  # type: ignore[attr-defined]


# Maximum work of one call: small, so that all threads end at about the same time, but large compared to a call's cost.
_BATCH_TENSORS = 1000
_BATCH_BYTES = 4 << 20
# Nearly all memory of a host is above this address. A lower address, as of a heap at a fixed address, needs a check.
_LOWEST_ADDRESS = 1 << 40
_THREADS = max(1, min(4, os.cpu_count() or 1))
_LOOK_AGAIN_S = 0.1  # an interrupted wait may have consumed the message that a thread has ended


class SlotViews:
    """Views of a slot: the memory of each tensor of a plan, by the number of the tensor in the layout."""

    def __init__(
        self,
        specs: Sequence[TensorSpec],
        places: Sequence[Place],
        segment: Segment,
        offset: int,
        begins: Sequence[int] = (0,),
    ) -> None:
        """Make no views yet.

        Args:
            specs: The form of each tensor.
            places: The place of each tensor, in bytes from the start of the slot.
            segment: The memory; it cannot be unmapped while there are views.
            offset: The start of the slot in the segment, in bytes.
            begins: The starts of the files in the slot.
        """
        self.specs = specs
        self.places = places
        self._begins = begins
        self._view = segment.view
        self._address = segment.address + offset
        self._offset = offset

    def file_of(self, number: int) -> int:
        """Return the number of the file of a tensor."""
        return bisect_right(self._begins, self.places[number].payload_at) - 1

    def address(self, number: int) -> int:
        """Return the address of the first byte of a tensor in the slot."""
        return self._address + self.places[number].payload_at

    def tensor(self, number: int) -> torch.Tensor:
        """Return the memory of a tensor, as a tensor of its dtype and shape."""
        spec, place = self.specs[number], self.places[number]
        return self.raw(place.payload_at, place.payload_bytes).view(spec.dtype).view(spec.shape)

    def raw(self, begin: int, nbytes: int) -> torch.Tensor:
        """Return ``nbytes`` bytes of the slot, from byte ``begin`` on."""
        if not nbytes:
            return torch.empty(0, dtype=torch.uint8, device="cpu")  # frombuffer refuses an empty buffer
        begin += self._offset
        return torch.frombuffer(self._view[begin : begin + nbytes], dtype=torch.uint8)


def checked_addresses(tensors: Sequence[torch.Tensor], specs: Sequence[TensorSpec]) -> list[int]:
    """Return the addresses of ``tensors``. Raises ``UnsavableStateError`` if the storage of a tensor was freed.

    ``specs``: the forms of the tensors.
    """
    addresses = list(map(torch.Tensor.data_ptr, tensors))
    check_addresses(addresses, tensors, specs)
    return addresses


def check_addresses(addresses: Sequence[int], tensors: Sequence[torch.Tensor], specs: Sequence[TensorSpec]) -> None:
    """Raise ``UnsavableStateError`` if the storage of one of ``tensors`` was freed.

    Call this just before the copy, which touches the same memory. The check then costs next to nothing. A separate pass
    over all tensors would take 0.2 us each. ``addresses``: the addresses of ``tensors``. ``specs``: their forms.
    """
    # A view into a freed storage has its offset as address. A low address may also be memory, so check the storage.
    are_low = min(addresses) < _LOWEST_ADDRESS
    for tensor, spec in zip(tensors, specs, strict=True) if are_low else ():
        check_memory(tensor, spec.name)


def check_memory(tensor: torch.Tensor, name: str) -> None:
    """Raise ``UnsavableStateError`` if the storage of ``tensor`` was freed."""
    if tensor.numel() and not tensor.untyped_storage().data_ptr():
        raise UnsavableStateError(
            f"{name!r} has no memory: its storage was freed, as FSDP does between uses of a parameter; save when it is"
            " there, or leave it out"
        )


class CopyUnit(Protocol):
    """A unit of copying. One call copies it, and it is reported as copied as a whole."""

    begin: int
    """The first byte of the unit in the image."""

    def copy(self, tensors: Sequence[torch.Tensor]) -> None:
        """Copy from ``tensors``, all tensors of the plan. Each call may have other tensors."""


class _ByteCopy:
    """A copy of tensors on the host, or of some bytes of one tensor, without a change of dtype."""

    def __init__(self, numbers: Sequence[int], views: SlotViews, offset: int = 0) -> None:
        """Describe the copy.

        Args:
            numbers: The numbers of the tensors.
            views: The memory for the tensors.
            offset: The first byte to copy of a large tensor. The unit copies at most ``_BATCH_BYTES`` from there.
        """
        places = [views.places[number] for number in numbers]
        self.begin = places[0].payload_at + offset
        self._pick, self._numbers = picker(numbers), numbers
        self._specs = [views.specs[number] for number in numbers]
        self._is_complex = any(spec.dtype.is_complex for spec in self._specs)
        self._views, self._offset = views, offset
        self._to = array("Q", map(offset.__add__, map(views.address, numbers)))
        self._sizes = array("Q", (place.payload_bytes for place in places))
        if len(numbers) == 1:
            self._sizes[0] = min(self._sizes[0] - offset, _BATCH_BYTES)

    def copy(self, tensors: Sequence[torch.Tensor]) -> None:
        picked = self._pick(tensors)
        addresses = plain_addresses(picked, may_be_conjugate=self._is_complex)
        if addresses is None:
            self._copy_each(picked, tensors)
            return
        check_addresses(addresses, picked, self._specs)
        if self._offset:
            addresses[0] += self._offset
        copy_many(self._to, addresses, self._sizes)

    def _copy_each(self, picked: Sequence[torch.Tensor], tensors: Sequence[torch.Tensor]) -> None:
        """Copy the ``picked`` tensors. Some of them are not plain. ``tensors``: all tensors of the plan."""
        if self._offset:  # the first unit of a large tensor copies the whole tensor
            return
        plain = [tensor.is_contiguous() and are_plain([tensor], may_be_conjugate=self._is_complex) for tensor in picked]
        addresses = checked_addresses(picked, self._specs)
        copy_many(*(array("Q", compress(each, plain)) for each in (self._to, addresses, self._sizes)))
        if others := list(compress(self._numbers, map(operator.not_, plain))):
            BatchCopy(others, self._views).copy(tensors)


class BatchCopy:
    """A copy of tensors on one device of any kind, by one call of torch."""

    def __init__(self, numbers: Sequence[int], views: SlotViews, non_blocking: bool = False) -> None:
        """Describe the copy.

        Args:
            numbers: The numbers of the tensors.
            views: The memory for the tensors.
            non_blocking: Whether to return as soon as the copies are queued on the current stream of the device.
        """
        self.begin, self.commands = views.places[numbers[0]].payload_at, len(numbers)
        self._non_blocking = non_blocking
        self._pick = picker(numbers)
        self._into = list(map(views.tensor, numbers))
        self._specs = [views.specs[number] for number in numbers]

    def copy(self, tensors: Sequence[torch.Tensor]) -> None:
        picked = self._pick(tensors)
        if picked[0].is_cpu or self._non_blocking:  # a device of unknown kind may have no addresses
            checked_addresses(picked, self._specs)
        with torch.inference_mode():  # faster, without autograd
            torch._foreach_copy_(self._into, picked, non_blocking=self._non_blocking)


def host_units(numbers: Sequence[int], views: SlotViews) -> list[CopyUnit]:
    """Return the units for tensors on the host that are stored without a change of dtype."""
    units: list[CopyUnit] = []
    for batch in batches(numbers, views.places, _BATCH_BYTES):
        nbytes = views.places[batch[0]].payload_bytes if len(batch) == 1 else 0
        units += (_ByteCopy(batch, views, offset) for offset in range(0, max(nbytes, 1), _BATCH_BYTES))
    return units


def batch_units(numbers: Sequence[int], views: SlotViews) -> list[CopyUnit]:
    """Return the units for tensors on any device that torch copies and waits for."""
    return [BatchCopy(batch, views) for batch in batches(numbers, views.places, _BATCH_BYTES)]


def batches(
    numbers: Sequence[int], places: Sequence[Place], most_bytes: int, most_tensors: int = _BATCH_TENSORS
) -> Iterator[list[int]]:
    """Divide tensors into batches that are copied by one call each.

    Args:
        numbers: The numbers of the tensors, in the order of copying.
        places: The place of each tensor of the plan.
        most_bytes: Maximum bytes of a batch. A larger tensor is a batch of its own.
        most_tensors: Maximum tensors of a batch.

    Yields:
        The numbers of each batch.
    """
    batch: list[int] = []
    nbytes = 0
    for number in numbers:
        its = places[number].payload_bytes
        if batch and (nbytes + its > most_bytes or len(batch) == most_tensors):
            yield batch
            batch, nbytes = [], 0
        batch.append(number)
        nbytes += its
    if batch:
        yield batch


class _SharedUnits:
    """Units for several threads. Each thread takes the next unit, until no unit is left."""

    def __init__(
        self, units: Sequence[CopyUnit], tensors: Sequence[torch.Tensor], done: Callable[[CopyUnit], object]
    ) -> None:
        self._left = deque(units)
        self._tensors, self._done = tensors, done
        self._helping: set[int] = set()
        self._one_has_ended: Mailbox[None] = Mailbox()
        self.errors: list[BaseException] = []

    def copy(self) -> None:
        """Copy units until no unit is left."""
        while True:
            try:
                unit = self._left.popleft()
            except IndexError:
                return
            unit.copy(self._tensors)
            self._done(unit)

    def help_copying(self) -> None:
        """Copy units on a thread other than the caller's. An error goes to ``errors``, and no more units begin."""
        me = threading.get_ident()
        self._helping.add(me)
        try:
            self.copy()
        except BaseException as error:
            self._left.clear()
            self.errors.append(error)
        finally:
            self._helping.discard(me)
            self._one_has_ended.put(None)

    def settle(self) -> None:
        """Begin no more units, and wait until no unit is being copied."""
        self._left.clear()
        while self._helping:
            with contextlib.suppress(Empty):
                self._one_has_ended.get(_LOOK_AGAIN_S)


def copy_units(
    units: Sequence[CopyUnit],
    tensors: Sequence[torch.Tensor],
    threads: CopyThreads,
    done: Callable[[CopyUnit], object],
    meanwhile: Callable[[], None] | None = None,
) -> None:
    """Copy all ``units``, on this thread and on ``threads``, in approximately the given order.

    Args:
        units: The units to copy.
        tensors: All tensors of the plan. No thread reads them after this returns or raises.
        threads: The threads that help.
        done: Called with each copied unit, by the thread that copied it.
        meanwhile: Other work for this thread, before it copies.
    """
    shared = _SharedUnits(units, tensors, done)
    try:
        try:
            for _ in range(min(_THREADS - 1, len(units) if meanwhile else len(units) - 1)):
                threads.run(shared.help_copying)
            if meanwhile is not None:
                meanwhile()
            shared.copy()
        finally:
            shared.settle()
    finally:
        shared.settle()  # again, because an exception from a signal handler may have ended the first call early
        error = shared.errors[0] if shared.errors else None
        shared.errors.clear()  # break the cycle: the tracebacks of the errors refer to ``shared``
    try:
        if error is not None:
            raise error
    finally:
        del error


def copy_threads() -> CopyThreads:
    """Return the threads that help the caller copy. Raises ``CheckpointError`` if there may be no more threads."""
    return CopyThreads(max(1, _THREADS - 1), "asyncckpt-copy")
