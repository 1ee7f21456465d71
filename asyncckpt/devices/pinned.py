"""Pinned memory: host memory registered with a device's driver, so that the device accesses the memory directly."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Sequence
from typing import Protocol

import torch

from asyncckpt.devices import kinds
from asyncckpt.devices.pinners import Pinner
from asyncckpt.errors import CheckpointError
from asyncckpt.shm.segment import PAGE

logger = logging.getLogger(__name__)

_MOST_REFUSALS = 64
_PAUSE_S = 0.001
"""Seconds between two registrations.

Without the pause, a kernel launch of another thread would wait for several registrations in a row.
"""


class Memory(Protocol):
    """A mapping of this process: a segment, or private memory."""

    @property
    def view(self) -> memoryview:
        """Return a view of all bytes. The memory stays mapped as long as the view exists."""

    @property
    def address(self) -> int:
        """Return the address of the first byte, a multiple of the page."""

    @property
    def nbytes(self) -> int:
        """Return the size in bytes."""


class PinnedMemory:
    """Memory registered with a driver, in several ranges. No copy may cross two ranges, because the driver refuses it.

    If the driver refuses to register memory, this is logged, and copies go through the driver's own buffers, which is
    slower but correct.
    """

    def __init__(self, memory: Memory, cuts: Sequence[int], device: torch.device, end: int | None = None) -> None:
        """Register ``memory``, if the kind of ``device`` supports pinning.

        Args:
            memory: The memory. It has to stay mapped until ``close`` is called.
            cuts: Offsets in bytes where a range may end. They are rounded down to pages.
            device: Any device that this process uses. The calls run in its context, and open no other context.
            end: End of the memory to register, in bytes: one of ``cuts``, and a multiple of the page. None: all.

        Raises:
            CheckpointError: The driver mistakes the memory for other memory, so that copies would be lost.
        """
        self.end = 0
        """The end of the memory that is registered, or was refused, in bytes."""
        self._memory, self._cuts = memory, cuts
        self.addresses: list[int] = []  # the starts of the registered ranges
        self._refusals = 0
        self._device = device
        self._owner = os.getpid()
        self._view: memoryview | None = None
        kind = kinds.kind_of(device)
        self._pinner = None if kind is None else kind.pinner
        self.extend(memory.nbytes if end is None else end)

    def extend(self, end: int) -> None:
        """Register more memory, up to byte ``end``. Do nothing if the memory is registered already.

        ``end`` and the errors are as in ``__init__``. After an error no memory is registered, and the next call begins
        at 0.
        """
        if self._pinner is None or end <= self.end:
            return
        begin, self.end = self.end, end
        self._view = self._memory.view  # keeps the memory mapped while the driver knows it
        first, refused = begin, 0
        cuts = [cut for cut in self._cuts if begin <= cut <= end]
        started = time.perf_counter()
        try:
            with kinds.use(self._device):
                for stop in _range_ends(cuts, begin, end, self._pinner.limit):
                    if first > begin:
                        time.sleep(_PAUSE_S)
                    refused += self._pin(self._pinner, self._memory, range(first, stop), cuts)
                    first = stop
        except BaseException:
            self.close()
            raise
        if refused:
            logger.warning(
                "%d of %d bytes of memory are not pinned (%s error %d): copies are slower",
                refused,
                end - begin,
                self._device.type,
                self._code,
            )
        logger.info("memory was pinned: %d bytes in %.2f s", end - begin - refused, time.perf_counter() - started)

    def cut_back(self, end: int) -> None:
        """Unregister the memory from byte ``end`` on. A range has to end at ``end``."""
        self.end = min(self.end, end)
        self._unpin(self._memory.address + end)

    def close(self) -> None:
        """Unregister all memory. Call this before the segment is unmapped."""
        self.end = 0
        self._unpin(0)
        self._view = None

    def __del__(self) -> None:
        """Unregister the memory of an object that was dropped without ``close``.

        The system cannot reuse registered memory.
        """
        if getattr(self, "addresses", ()) and self._owner == os.getpid():
            self.close()

    def _unpin(self, begin: int) -> None:
        """Unregister the ranges from the address ``begin`` on."""
        with kinds.use(self._device):
            while self._pinner is not None and self.addresses and self.addresses[-1] >= begin:
                code = self._pinner.unregister(self.addresses.pop())
                if code != 0:  # usually because the device is lost, so that all calls fail
                    logger.warning("unpinning memory failed with %s error %d", self._device.type, code)

    def _pin(self, pinner: Pinner, memory: Memory, span: range, cuts: Sequence[int]) -> int:
        """Register a part of ``memory``. If the driver refuses the whole, register its halves.

        Return the number of refused bytes.
        """
        code = self._register(pinner, memory.address + span.start, len(span))
        if code == 0:
            return 0
        self._refusals += 1
        # If the driver has refused this often, it refuses all ranges, so stop halving.
        within = [cut // PAGE * PAGE for cut in cuts] if self._refusals < _MOST_REFUSALS else []
        within = [cut for cut in within if span.start < cut < span.stop]
        if not within:
            logger.debug("pinning %d bytes failed with %s error %d", len(span), self._device.type, code)
            self._code = code
            return len(span)
        half = min(within, key=lambda cut: abs(cut - (span.start + span.stop) // 2))
        return self._pin(pinner, memory, range(span.start, half), cuts) + self._pin(
            pinner, memory, range(half, span.stop), cuts
        )

    def _register(self, pinner: Pinner, address: int, nbytes: int) -> int:
        code = pinner.register(address, nbytes)
        if code == pinner.already_registered:
            # Other memory at this address was unmapped without telling the driver. The driver still knows the previous
            # pages, and a copy to this address would go to them.
            pinner.unregister(address)
            code = pinner.register(address, nbytes)
        if code == pinner.already_registered:
            raise CheckpointError(
                "the driver has this memory registered for memory that was unmapped while pinned; nothing is copied,"
                " because copies would be lost: find the library that unmaps pinned memory"
            )
        if code == 0:
            self.addresses.append(address)
        return code


def _range_ends(cuts: Sequence[int], begin: int, stop: int, limit: int) -> list[int]:
    """Return the ends of ranges of at most ``limit`` bytes, in whole pages, from ``begin`` up to ``stop``.

    Ranges end at ``cuts``, so a range may be longer than ``limit`` if there is no cut within it.
    """
    ends: list[int] = []
    last = begin
    for cut in [*sorted(cut // PAGE * PAGE for cut in cuts), stop]:
        if cut - begin > limit and last > begin:
            ends.append(last)
            begin = last
        last = cut
    return [*ends, stop]
