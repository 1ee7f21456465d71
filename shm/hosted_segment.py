"""A segment that the worker hosts, with what it knows of it."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator

from asyncckpt.format.manifest import checksum
from asyncckpt.format.segment_layout import Region, SegmentLayout
from asyncckpt.shm.huge import is_huge
from asyncckpt.shm.segment import Segment
from asyncckpt.shm.slots import SlotTable


class HostedSegment:
    """It is kept as long as anybody uses it."""

    def __init__(self, segment: Segment) -> None:
        self._lock = threading.Lock()
        self._users = 1  # its owner, until ``close``
        self._slots: SlotTable | None = None
        self._looked_at, self._is_huge = -1, False
        self.closed = threading.Event()
        self.segment = segment
        self.layout: SegmentLayout | None = None
        self.taken_end = 0
        """Up to where more of its memory was taken, in bytes, when its trainer asked for that."""
        self.constants: tuple[int, ...] = ()
        """Checksums of the layout's constant regions."""

    @property
    def slots(self) -> SlotTable:
        """The states of its slots; only for a segment with a header page."""
        with self._lock:
            if self._slots is None:
                self._slots = SlotTable(self.segment.view)
            return self._slots

    @property
    def is_huge(self) -> bool:
        """Whether its memory is on huge pages."""
        if (taken := self.segment.taken_bytes) != self._looked_at:
            self._looked_at, self._is_huge = taken, is_huge(self.segment)
        return self._is_huge

    def describe(self, layout: SegmentLayout) -> None:
        """Set its layout; the constant bytes are in place."""
        self.layout = layout
        self.constants = tuple(checksum(self.region(region)) for region in layout.constants())

    def region(self, region: Region) -> memoryview:
        """Some of its bytes."""
        return self.segment.view[region.offset : region.offset + region.nbytes]

    @contextlib.contextmanager
    def used(self) -> Iterator[None]:
        """Keep the memory, even if this is closed meanwhile."""
        self.use()
        try:
            yield
        finally:
            self.close()

    def use(self) -> None:
        """One more uses the memory, until it calls ``close``."""
        with self._lock:
            self._users += 1

    def close(self) -> None:
        """Let go of the memory, as soon as nobody uses it. To be called once by each that does."""
        with self._lock:
            self._users -= 1
            if self._users:
                return
        if self._slots is not None:
            self._slots.close()
        self.segment.close()
        self.closed.set()
