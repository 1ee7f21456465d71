"""Memory on huge pages: what direct I/O wants.

A device takes a limited number of physical pages in a request, and the kernel looks at each. Writing 1 GiB from pages
of 4 KiB took 0.38 s and 44 ms of a core, and from huge ones 0.23 s and 8 ms. Memory files have huge pages only where
the host says so (``shmem_enabled``) or where somebody asks for each (``MADV_COLLAPSE``, Linux 6.1); private memory has
them nearly everywhere.
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
from asyncckpt.shm.segment import HUGE_PAGE, MADV_HUGEPAGE, MADV_POPULATE_WRITE, PAGE, Segment, refusal, round_up

_SETTINGS = "/sys/kernel/mm/transparent_hugepage"
# From asm-generic/mman-common.h.
_MADV_WIPEONFORK, _MADV_COLLAPSE = 18, 25
# Collapsed by one call, and how long that may take: where the kernel has to search for huge pages, small ones will do.
_AT_ONCE_BYTES = 128 << 20
_LONG_S = 1.0

_libc = ctypes.CDLL(None, use_errno=True)
_own = threading.local()


def take_huge(segment: Segment, begin: int, end: int) -> None:
    """Take the memory of a segment from ``begin`` up to ``end`` on huge pages, as far as the host has them.

    What is left, ``touch`` takes. A huge page is taken in the time of a few small ones.
    """
    address = segment.address
    for first, last in _parts(begin, end):
        # It wants a page that is there: of one in each, it makes the whole.
        for at in range(first, last, HUGE_PAGE):
            _advise(address + at, PAGE, MADV_POPULATE_WRITE)
        if not _collapse(address + first, last - first):
            return


def is_huge(segment: Segment) -> bool:
    """Whether what is taken of a segment is on huge pages. What is not is moved there, if it can be."""
    address, fd, end = segment.address, segment.fileno(), 0
    while True:
        try:
            begin = os.lseek(fd, end, os.SEEK_DATA)
        except OSError as error:
            if error.errno == errno.ENXIO:  # there is no more
                return True
            raise
        end = os.lseek(fd, begin, os.SEEK_HOLE)
        if not all(_collapse(address + first, last - first) for first, last in _parts(begin, end)):
            return False


def _parts(begin: int, end: int) -> Iterator[tuple[int, int]]:
    """The whole huge pages there, as many at once as are collapsed by one call."""
    begin, end = round_up(begin, HUGE_PAGE), end // HUGE_PAGE * HUGE_PAGE
    return ((at, min(at + _AT_ONCE_BYTES, end)) for at in range(begin, end, _AT_ONCE_BYTES))


def _collapse(address: int, nbytes: int) -> bool:
    """Have memory that is taken on huge pages; whether it is, and did not take long."""
    begun = time.monotonic()
    return _advise(address, nbytes, _MADV_COLLAPSE) and time.monotonic() - begun < _LONG_S


def _advise(address: int, nbytes: int, advice: int) -> bool:
    return bool(_libc.madvise(ctypes.c_void_p(address), ctypes.c_size_t(nbytes), advice) == 0)


def huge_buffer(nbytes: int) -> memoryview:
    """New memory of ``nbytes`` bytes, touched, that begins on a page (a huge one if there are any).

    It is freed with the last view of it.
    """
    mapping = mmap.mmap(-1, round_up(nbytes) + HUGE_PAGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    address = ctypes.addressof(ctypes.c_char.from_buffer(mapping))
    begin = -address % HUGE_PAGE
    length = min(round_up(nbytes, HUGE_PAGE), len(mapping) - begin)
    _advise(address + begin, length, MADV_HUGEPAGE)
    # A fork made while a device writes here must not share these pages. The child has others: its thread has this
    # buffer, too.
    if not _advise(address + begin, length, _MADV_WIPEONFORK):
        _advise(address + begin, length, mmap.MADV_DONTFORK)
    buffer = memoryview(mapping)[begin : begin + nbytes]
    for page in range(0, nbytes, mmap.PAGESIZE):
        buffer[page] = 0
    return buffer


class HostMemory(NamedTuple):
    """Private memory of this process, freed with the last view of it."""

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
    """The buffer of this thread, of ``nbytes`` bytes or more. It is kept for the next call, until the thread ends."""
    buffer: memoryview | None = getattr(_own, "buffer", None)
    if buffer is None or len(buffer) < nbytes:
        buffer = _own.buffer = huge_buffer(round_up(nbytes))
    return buffer


@functools.cache
def only_private() -> bool:
    """Whether this host gives huge pages to private memory alone, not to memory files that ask for them."""
    return _setting("shmem_enabled") in ("never", "deny") and _setting("enabled") != "never"


def _setting(name: str) -> str:
    """The choice of the host, which stands in brackets."""
    try:
        with open(f"{_SETTINGS}/{name}") as file:
            return file.read().partition("[")[2].partition("]")[0]
    except OSError:
        return "never"
