"""Memory that a device's driver knows as pinned, so that the device copies to it and from it directly."""

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
"""Between two registrations: without it, a launch of another thread waits for several of them in a row."""


class Memory(Protocol):
    """A mapping of this process: a segment, or private memory."""

    @property
    def view(self) -> memoryview:
        """Return all its bytes; the memory stays mapped as long as this is there."""

    @property
    def address(self) -> int:
        """Return where it begins, a page."""

    @property
    def nbytes(self) -> int:
        """Return its size in bytes."""


class PinnedMemory:
    """Memory registered with a driver, in ranges that no tensor crosses: a copy into two of them is refused.

    What cannot be registered is copied through the driver's own buffers, which is slower but right; that is logged.
    """

    def __init__(self, memory: Memory, cuts: Sequence[int], device: torch.device, end: int | None = None) -> None:
        """Register ``memory``, if the kind of ``device`` has such a thing.

        Args:
            memory: It stays mapped until ``close`` has been called.
            cuts: The offsets in bytes between which a range may end; rounded down to pages.
            device: Any that this process uses: the calls are made in its context, and open no other.
            end: Up to which byte; None: all. It is one of ``cuts``, a multiple of the page.

        Raises:
            CheckpointError: The driver takes the memory for other memory, so that copies would be lost.
        """
        self.end = 0
        """Up to where the memory is registered."""
        self._memory, self._cuts = memory, cuts
        self.addresses: list[int] = []  # where the registered ranges begin
        self._refusals = 0
        self._device = device
        self._owner = os.getpid()
        self._view: memoryview | None = None
        kind = kinds.kind_of(device)
        self._pinner = None if kind is None else kind.pinner
        self.extend(memory.nbytes if end is None else end)

    def extend(self, end: int) -> None:
        """Register what follows, up to byte ``end``, if any does. Args, and raises, as ``__init__``; then nothing is
        registered, and the next call is to begin anew.
        """
        if self._pinner is None or end <= self.end:
            return
        begin, self.end = self.end, end
        self._view = self._memory.view  # mapped for as long as the driver knows it
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
        logger.info("pinned %d bytes in %.2f s", end - begin - refused, time.perf_counter() - started)

    def cut_back(self, end: int) -> None:
        """Take the registrations from byte ``end`` on back, at which one ends."""
        self.end = min(self.end, end)
        self._unpin(self._memory.address + end)

    def close(self) -> None:
        """Take the registrations back; before the segment is unmapped."""
        self.end = 0
        self._unpin(0)
        self._view = None

    def __del__(self) -> None:
        """Of an owner that was dropped without being closed: what is registered, the system cannot have back."""
        if getattr(self, "addresses", ()) and self._owner == os.getpid():
            self.close()

    def _unpin(self, begin: int) -> None:
        """What is registered from that address on."""
        with kinds.use(self._device):
            while self._pinner is not None and self.addresses and self.addresses[-1] >= begin:
                code = self._pinner.unregister(self.addresses.pop())
                if code != 0:  # of a device that is lost, as a rule; then all its calls fail
                    logger.warning("unpinning memory failed with %s error %d", self._device.type, code)

    def _pin(self, pinner: Pinner, memory: Memory, span: range, cuts: Sequence[int]) -> int:
        """Register a part of ``memory``, in halves where the driver refuses it whole. Returns the bytes it refused."""
        code = self._register(pinner, memory.address + span.start, len(span))
        if code == 0:
            return 0
        self._refusals += 1
        # A driver that refuses so often refuses all.
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
            # Memory that was here was unmapped, and the driver was not told: the pages that it knows are no longer
            # these, and a copy to here would end in those.
            pinner.unregister(address)
            code = pinner.register(address, nbytes)
        if code == pinner.already_registered:
            raise CheckpointError(
                "the driver takes this memory for other memory, which was unmapped while it was pinned; copies would"
                " be lost, so nothing is copied: look for who pins memory and does not take that back"
            )
        if code == 0:
            self.addresses.append(address)
        return code


def _range_ends(cuts: Sequence[int], begin: int, stop: int, limit: int) -> list[int]:
    """Where ranges of at most ``limit`` bytes end, from ``begin`` up to ``stop``, where ``cuts`` allow that, in whole
    pages.
    """
    ends: list[int] = []
    last = begin
    for cut in [*sorted(cut // PAGE * PAGE for cut in cuts), stop]:
        if cut - begin > limit and last > begin:
            ends.append(last)
            begin = last
        last = cut
    return [*ends, stop]
