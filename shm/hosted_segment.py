"""A segment that the worker hosts, with its layout, its slot table and its checksums."""

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
    """A segment with a count of its users. The memory stays until the last user calls ``close``."""

    def __init__(self, segment: Segment) -> None:
        self._lock = threading.Lock()
        self._users = 1  # the owner, until ``close``
        self._slots: SlotTable | None = None
        self._looked_at, self._is_huge = -1, False
        self.closed = threading.Event()
        self.segment = segment
        self.layout: SegmentLayout | None = None
        self.taken_end = 0
        """End of the memory taken after the trainer asked for more, in bytes."""
        self.constants: tuple[int, ...] = ()
        """Checksums of the layout's constant regions."""

    @property
    def slots(self) -> SlotTable:
        """The slot states. Only a segment with a header page has them."""
        with self._lock:
            if self._slots is None:
                self._slots = SlotTable(self.segment.view)
            return self._slots

    @property
    def is_huge(self) -> bool:
        """Whether the memory is on huge pages."""
        if (taken := self.segment.taken_bytes) != self._looked_at:
            self._looked_at, self._is_huge = taken, is_huge(self.segment)
        return self._is_huge

    def describe(self, layout: SegmentLayout) -> None:
        """Set the layout. The constant bytes must be in place."""
        self.layout = layout
        self.constants = tuple(checksum(self.region(region)) for region in layout.constants())

    def region(self, region: Region) -> memoryview:
        """Return a view of the bytes of ``region``."""
        return self.segment.view[region.offset : region.offset + region.nbytes]

    @contextlib.contextmanager
    def used(self) -> Iterator[None]:
        """Keep the memory during a ``with`` block, even if another thread calls ``close`` meanwhile."""
        self.use()
        try:
            yield
        finally:
            self.close()

    def use(self) -> None:
        """Add a user. The memory stays until this user calls ``close``."""
        with self._lock:
            self._users += 1

    def close(self) -> None:
        """Release one user's hold, and the memory with the last hold. Each user calls this once."""
        with self._lock:
            self._users -= 1
            if self._users:
                return
        if self._slots is not None:
            self._slots.close()
        self.segment.close()
        self.closed.set()
