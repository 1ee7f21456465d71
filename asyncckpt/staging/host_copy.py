"""Copy out of the host's memory into a slot, in units for a few threads.

Small tensors are copied in batches, large ones some bytes at a time, each by one call that lets go of Python's lock.
What is not contiguous goes through ``Tensor.copy_``, which knows every layout.
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
from asyncckpt.threads import Flag, start

logger = logging.getLogger(__name__)


class CopyThreads:
    """A few threads that carry out calls, in the order in which they are given.

    They run from the beginning: no thread has to be started in a save, which may fail. Calls are handed over by a queue
    written in C: an exception out of a signal handler cannot leave it locked, as it can ``ThreadPoolExecutor``. They
    end with the process, when all that was given to them is done.
    """

    def __init__(self, threads: int, name: str) -> None:
        """Start ``threads`` of them. Raises ``CheckpointError`` where the process may have no more."""
        self._calls: SimpleQueue[Callable[[], object] | None] = SimpleQueue()
        self._owner, self._is_closed = os.getpid(), False
        self._threads = [
            threading.Thread(target=_work, args=(self._calls,), name=f"{name}-{number}", daemon=True)
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
        """Have ``call`` called by one of them; where they have ended, or are another process's, here and now.

        What it raises is logged, and nobody is told.
        """
        if self._is_closed or self._owner != os.getpid():
            _make(call)
        else:
            self._calls.put(call)

    def wait(self) -> None:
        """Return when all is done that was given before, where there is one thread."""
        if self._is_closed:
            self._join()
        else:
            self.run((done := Flag()).set)
            done.wait()

    def close(self) -> None:
        """End them, once all that was given to them is done."""
        self._is_closed = True
        self._end()
        self._join()

    def __del__(self) -> None:
        self._end()

    def _end(self) -> None:
        for _ in getattr(self, "_threads", ()):  # none where the making was interrupted
            self._calls.put(None)

    def _join(self) -> None:
        for thread in self._threads:
            if thread.ident is not None:  # else its start was interrupted
                thread.join()


_open: weakref.WeakSet[CopyThreads] = weakref.WeakSet()


def _close_all() -> None:
    for threads in list(_open):
        threads.close()


# Where Python ends its own pools: before other threads are stopped in the midst of a copy, and in processes of
# multiprocessing too, which call nothing of atexit.
threading._register_atexit(_close_all)  # type: ignore[attr-defined]


def _work(calls: SimpleQueue[Callable[[], object] | None]) -> None:
    while (call := calls.get()) is not None:
        _make(call)
        del call


def _make(call: Callable[[], object]) -> None:
    try:
        call()
    except BaseException:  # the thread is there for the next call too
        logger.exception("a copy failed, and nobody was told")


# What one call copies: so little that the threads end together, so much that the call is no matter.
_BATCH_TENSORS = 1000
_BATCH_BYTES = 4 << 20
# Below most of a host's memory. What lies lower (a heap at a fixed address, say) is only looked at more closely.
_LOWEST_ADDRESS = 1 << 40
_THREADS = max(1, min(4, os.cpu_count() or 1))
_LOOK_AGAIN_S = 0.1  # for an end whose message an interrupted wait has taken


class SlotViews:
    """Views of a slot: where each tensor of a plan goes, by the number that it has in the layout."""

    def __init__(
        self,
        specs: Sequence[TensorSpec],
        places: Sequence[Place],
        segment: Segment,
        offset: int,
        begins: Sequence[int] = (0,),
    ) -> None:
        """The views are made when they are asked for.

        Args:
            specs: What each tensor looks like.
            places: Where each stands, in bytes from the start of the slot.
            segment: The memory; it cannot be unmapped while there are views.
            offset: Where the slot begins in the segment, in bytes.
            begins: Where the files in the slot begin.
        """
        self.specs = specs
        self.places = places
        self._begins = begins
        self._view = segment.view
        self._address = segment.address + offset
        self._offset = offset

    def file_of(self, number: int) -> int:
        """The number of the file that a tensor is in."""
        return bisect_right(self._begins, self.places[number].payload_at) - 1

    def address(self, number: int) -> int:
        """Where the first byte of a tensor goes."""
        return self._address + self.places[number].payload_at

    def tensor(self, number: int) -> torch.Tensor:
        """The memory of a tensor, as a tensor of its dtype and shape."""
        spec, place = self.specs[number], self.places[number]
        return self.raw(place.payload_at, place.payload_bytes).view(spec.dtype).view(spec.shape)

    def raw(self, begin: int, nbytes: int) -> torch.Tensor:
        """The ``nbytes`` from byte ``begin`` of the slot on, whatever they are."""
        if not nbytes:
            return torch.empty(0, dtype=torch.uint8, device="cpu")  # frombuffer takes none
        begin += self._offset
        return torch.frombuffer(self._view[begin : begin + nbytes], dtype=torch.uint8)


def checked_addresses(tensors: Sequence[torch.Tensor], specs: Sequence[TensorSpec]) -> list[int]:
    """Where ``tensors``, of these ``specs``, are. Raises ``UnsavableStateError`` if the storage of one was freed."""
    addresses = list(map(torch.Tensor.data_ptr, tensors))
    check_addresses(addresses, tensors, specs)
    return addresses


def check_addresses(addresses: Sequence[int], tensors: Sequence[torch.Tensor], specs: Sequence[TensorSpec]) -> None:
    """Raise ``UnsavableStateError`` if the storage of one of ``tensors``, which are there, was freed.

    Done just before the copy, which touches the same memory: there it costs next to nothing, and 0.2 us a tensor where
    it is a pass over all.
    """
    # A view's address is its offset then. What is that low may be memory all the same: its storage says so.
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
    """A unit of copying: what is copied by one call, and reported as copied at once."""

    begin: int
    """The first byte of the image that it writes."""

    def copy(self, tensors: Sequence[torch.Tensor]) -> None:
        """Copy from ``tensors``, those of the plan, which may be others on every call."""


class _ByteCopy:
    """Tensors on the host, or some bytes of one, which are stored as they are."""

    def __init__(self, numbers: Sequence[int], views: SlotViews, offset: int = 0) -> None:
        """Describe the copy.

        Args:
            numbers: The numbers of the tensors.
            views: Where they go.
            offset: Of a large one, the byte to begin with; the end is a unit later.
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
        """Of ``tensors`` those that were picked, of which some are not plain."""
        if self._offset:  # the first unit of a large one copies all of it
            return
        plain = [tensor.is_contiguous() and are_plain([tensor], may_be_conjugate=self._is_complex) for tensor in picked]
        addresses = checked_addresses(picked, self._specs)
        copy_many(*(array("Q", compress(each, plain)) for each in (self._to, addresses, self._sizes)))
        others = list(compress(self._numbers, map(operator.not_, plain)))
        BatchCopy(others, self._views).copy(tensors)


class BatchCopy:
    """Tensors that are copied by one call of torch, whatever device they are on."""

    def __init__(self, numbers: Sequence[int], views: SlotViews, non_blocking: bool = False) -> None:
        """Describe the copy.

        Args:
            numbers: The numbers of the tensors.
            views: Where they go.
            non_blocking: The copies are only queued, on the current stream of the device that the tensors are on.
        """
        self.begin, self.commands = views.places[numbers[0]].payload_at, len(numbers)
        self._non_blocking = non_blocking
        self._pick = picker(numbers)
        self._into = list(map(views.tensor, numbers))
        self._specs = [views.specs[number] for number in numbers]

    def copy(self, tensors: Sequence[torch.Tensor]) -> None:
        picked = self._pick(tensors)
        if picked[0].is_cpu or self._non_blocking:  # a device that we know nothing of may have no addresses
            checked_addresses(picked, self._specs)
        with torch.inference_mode():  # which spares each copy the way through autograd
            torch._foreach_copy_(self._into, picked, non_blocking=self._non_blocking)


def host_units(numbers: Sequence[int], views: SlotViews) -> list[CopyUnit]:
    """The units of tensors on the host whose bytes are stored as they are."""
    units: list[CopyUnit] = []
    for batch in batches(numbers, views.places, _BATCH_BYTES):
        nbytes = views.places[batch[0]].payload_bytes if len(batch) == 1 else 0
        units += (_ByteCopy(batch, views, offset) for offset in range(0, max(nbytes, 1), _BATCH_BYTES))
    return units


def batch_units(numbers: Sequence[int], views: SlotViews) -> list[CopyUnit]:
    """The units of tensors that torch copies, and awaits, whatever device they are on."""
    return [BatchCopy(batch, views) for batch in batches(numbers, views.places, _BATCH_BYTES)]


def batches(
    numbers: Sequence[int], places: Sequence[Place], most_bytes: int, most_tensors: int = _BATCH_TENSORS
) -> Iterator[list[int]]:
    """Divide tensors into batches that are copied by one call each.

    Args:
        numbers: The numbers of the tensors, in the order in which they are to be copied.
        places: Where each tensor of the plan stands.
        most_bytes: The most bytes of one batch. A tensor that has more is a batch by itself.
        most_tensors: The most tensors of one batch.

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
    """Units that several threads copy, each the next one that is left."""

    def __init__(
        self, units: Sequence[CopyUnit], tensors: Sequence[torch.Tensor], done: Callable[[CopyUnit], object]
    ) -> None:
        self._left = deque(units)
        self._tensors, self._done = tensors, done
        self._helping: set[int] = set()
        self._one_has_ended: SimpleQueue[None] = SimpleQueue()
        self.errors: list[BaseException] = []

    def copy(self) -> None:
        """Copy until none is left."""
        while True:
            try:
                unit = self._left.popleft()
            except IndexError:
                return
            unit.copy(self._tensors)
            self._done(unit)

    def help_copying(self) -> None:
        """As ``copy``, on another thread than the caller's."""
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
        """Have no unit begun any more, and wait until none is being copied."""
        self._left.clear()
        while self._helping:
            with contextlib.suppress(Empty):
                self._one_has_ended.get(timeout=_LOOK_AGAIN_S)


def copy_units(
    units: Sequence[CopyUnit],
    tensors: Sequence[torch.Tensor],
    threads: CopyThreads,
    done: Callable[[CopyUnit], object],
) -> None:
    """Copy all ``units``, on this thread and on ``threads``, in about their order.

    Args:
        units: What is to be copied.
        tensors: Those of the plan. No thread reads them any more when this returns or raises.
        threads: Those that take part.
        done: Told of each unit when it is copied, by the thread that copied it.
    """
    shared = _SharedUnits(units, tensors, done)
    try:
        try:
            for _ in range(min(_THREADS, len(units)) - 1):
                threads.run(shared.help_copying)
            shared.copy()
        finally:
            shared.settle()
    finally:
        shared.settle()  # an exception out of a signal handler may have cut the first short
        error = shared.errors[0] if shared.errors else None
        shared.errors.clear()  # or they would hold on to what they have seen, and so to themselves
    try:
        if error is not None:
            raise error
    finally:
        del error


def copy_threads() -> CopyThreads:
    """The threads that copy beside the caller's own. Raises ``CheckpointError`` where there may be no more."""
    return CopyThreads(max(1, _THREADS - 1), "asyncckpt-copy")
