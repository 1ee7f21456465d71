"""Private views: mappings of a segment to which whoever has one may write, and nobody else sees it."""

from __future__ import annotations

import numpy as np

from asyncckpt.shm.memcpy import address_of
from asyncckpt.shm.segment import PAGE, Segment, forget_written

# Of an entry of /proc/self/pagemap (Documentation/admin-guide/mm/pagemap.rst): the page is the file's, and not a copy
# that a write has made; it is in memory, or swapped out.
_IS_OF_FILE, _IS_THERE = 1 << 61, 0b11 << 62
_ENTRY_BYTES = 8
# Looked at at once.
_MOST_PAGES = 1 << 20


class PrivateViews:
    """Those of one segment, which are used again: to map all its pages anew costs half as much as to copy them."""

    def __init__(self, segment: Segment) -> None:
        self._segment = segment
        self._free: list[memoryview] | None = []

    def take(self) -> memoryview:
        """One that nobody has, and in which nothing was written."""
        try:
            return (self._free or []).pop()
        except IndexError:
            return self._segment.private_view()

    def give_back(self, view: memoryview) -> None:
        """Nobody uses ``view`` any more: what was written there goes. On any thread."""
        free = self._free
        if free is not None and _forget_written(view):
            free.append(view)  # which may have been closed meanwhile

    def close(self) -> None:
        """Unmap those that nobody has, and the others once they are given back."""
        self._free = None


def _forget_written(view: memoryview) -> bool:
    """Make ``view`` as the segment is. Returns whether that was possible."""
    first, count = address_of(view) // PAGE, -(-len(view) // PAGE)
    try:
        with open("/proc/self/pagemap", "rb", buffering=0) as pages:
            for at in range(0, count, _MOST_PAGES):
                pages.seek((first + at) * _ENTRY_BYTES)
                found = np.frombuffer(pages.read(min(_MOST_PAGES, count - at) * _ENTRY_BYTES), np.uint64)
                written = np.flatnonzero((found & np.uint64(_IS_OF_FILE) == 0) & (found & np.uint64(_IS_THERE) != 0))
                if len(written):
                    begin, end = at + int(written[0]), at + int(written[-1]) + 1
                    forget_written(view, begin * PAGE, end * PAGE)
    except OSError:
        return False
    return True
