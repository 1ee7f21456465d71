"""Memory on huge pages, for fast direct I/O.

A request to a device has a limited number of physical pages, and the kernel looks at each page. Writing 1 GiB from
pages of 4 KiB took 0.38 s and 44 ms of a core. From huge pages it took 0.23 s and 8 ms. Nearly every host gives huge
pages to private memory. Memory files get them only if the host is configured for them (``shmem_enabled``), or if a
process asks for each page (``MADV_COLLAPSE``, Linux 6.1).
"""

from __future__ import annotations

import ctypes
import errno
import functools
import mmap
import os
import threading
import time
from collections.abc import Iterator
from typing import NamedTuple

from asyncckpt.errors import OutOfMemoryError
from asyncckpt.shm.memcpy import address_of
from asyncckpt.shm.segment import (
    HUGE_PAGE,
    HUGE_SETTINGS,
    MADV_POPULATE_WRITE,
    PAGE,
    Segment,
    alignment_of,
    refusal,
    round_up,
)

# From asm-generic/mman-common.h.
_MADV_HUGEPAGE, _MADV_WIPEONFORK, _MADV_COLLAPSE = 14, 18, 25
# Bytes to collapse in one call, and the maximum time for that call. If the kernel has to search longer for huge pages,
# small pages are good enough.
_AT_ONCE_BYTES = max(128 << 20, HUGE_PAGE)
_LONG_S = 1.0

_libc = ctypes.CDLL(None, use_errno=True)
_own = threading.local()


def take_huge(segment: Segment, begin: int, end: int) -> None:
    """Take the memory of a segment from ``begin`` up to ``end`` on huge pages, as far as the host has them.

    ``touch`` takes the rest. Taking a huge page takes as long as taking a few small pages.
    """
    address = segment.address
    for first, last in _parts(begin, end):
        # The kernel gives a huge page at once if the host has them for shared memory (shmem_enabled: advise).
        _advise(address + first, last - first, _MADV_HUGEPAGE)
        # MADV_COLLAPSE needs one resident page in each huge page, and fills in the rest.
        for at in range(first, last, HUGE_PAGE):
            _advise(address + at, PAGE, MADV_POPULATE_WRITE)
        if not _collapse(address + first, last - first):
            return


def is_huge(segment: Segment) -> bool:
    """Return whether all taken memory of a segment is on huge pages, after moving it there if possible."""
    address, fd, end = segment.address, segment.fileno(), 0
    while True:
        try:
            begin = os.lseek(fd, end, os.SEEK_DATA)
        except OSError as error:
            if error.errno == errno.ENXIO:  # no more data
                return True
            raise
        end = os.lseek(fd, begin, os.SEEK_HOLE)
        if not all(_collapse(address + first, last - first) for first, last in _parts(begin, end)):
            return False


def _parts(begin: int, end: int) -> Iterator[tuple[int, int]]:
    """Return the ranges of whole huge pages between ``begin`` and ``end``, each as long as one call collapses."""
    begin, end = round_up(begin, HUGE_PAGE), end // HUGE_PAGE * HUGE_PAGE
    return ((at, min(at + _AT_ONCE_BYTES, end)) for at in range(begin, end, _AT_ONCE_BYTES))


def _collapse(address: int, nbytes: int) -> bool:
    """Move taken memory to huge pages. Return True if that worked and took less than ``_LONG_S``."""
    begun = time.monotonic()
    return _advise(address, nbytes, _MADV_COLLAPSE) and time.monotonic() - begun < _LONG_S


def _advise(address: int, nbytes: int, advice: int) -> bool:
    return bool(_libc.madvise(ctypes.c_void_p(address), ctypes.c_size_t(nbytes), advice) == 0)


def huge_buffer(nbytes: int) -> memoryview:
    """Return ``nbytes`` bytes of new, touched memory that begins on a page.

    All whole huge pages of the memory are huge, if the host has any. The memory is freed with its last view.
    """
    length, unit = round_up(nbytes, PAGE), alignment_of(nbytes)
    mapping = mmap.mmap(-1, length + unit, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    address = ctypes.addressof(ctypes.c_char.from_buffer(mapping))
    begin = -address % unit
    _advise(address + begin, length, _MADV_HUGEPAGE)
    # A forked child must not share these pages while a device writes to them. The child gets zeroed pages instead,
    # because its copy of this thread has the buffer, too.
    if not _advise(address + begin, length, _MADV_WIPEONFORK):
        _advise(address + begin, length, mmap.MADV_DONTFORK)
    buffer = memoryview(mapping)[begin : begin + nbytes]
    for page in range(0, nbytes, PAGE):
        buffer[page] = 0
    return buffer


class HostMemory(NamedTuple):
    """Private memory of this process, freed with its last view."""

    view: memoryview
    address: int
    nbytes: int

    @classmethod
    def take(cls, nbytes: int) -> HostMemory:
        """Take ``nbytes`` bytes, as ``huge_buffer`` does. Raises ``OutOfMemoryError``."""
        try:
            view = huge_buffer(nbytes)
        except (MemoryError, OSError) as error:
            raise OutOfMemoryError(f"no {nbytes:,} bytes of memory: {refusal(error)}") from error
        return cls(view, address_of(view), nbytes)


def own_buffer(nbytes: int) -> memoryview:
    """Return this thread's buffer, of at least ``nbytes`` bytes. Later calls in this thread may reuse the buffer."""
    buffer: memoryview | None = getattr(_own, "buffer", None)
    if buffer is None or len(buffer) < nbytes:
        buffer = _own.buffer = huge_buffer(nbytes)
    return buffer


@functools.cache
def only_private() -> bool:
    """Return whether this host gives huge pages to private memory only, and not to memory files that ask for them."""
    return _setting("shmem_enabled") in ("never", "deny") and _setting("enabled") != "never"


def _setting(name: str) -> str:
    """Return the host's choice for a setting. The kernel marks the choice by brackets."""
    try:
        with open(f"{HUGE_SETTINGS}/{name}") as file:
            return file.read().partition("[")[2].partition("]")[0]
    except OSError:
        return "never"
