"""Buffers on huge pages, for direct I/O: large ones of this process alone.

A device is given the physical pages of a request, so many of them at most. With pages of 4 KiB that cuts requests into
pieces of half a megabyte or so, and a virtual disk wrote at 2.1 GB/s where it wrote 3.4, and read at 1.1 to 3 where it
read 3.9. Anonymous memory files have small pages unless the host says otherwise (``shmem_enabled``); private memory has
huge ones nearly everywhere.
"""

from __future__ import annotations

import ctypes
import functools
import mmap
import threading

from asyncckpt.shm.segment import MADV_HUGEPAGE, round_up

_HUGE_PAGE = 2 << 20
_SETTINGS = "/sys/kernel/mm/transparent_hugepage"

_libc = ctypes.CDLL(None, use_errno=True)
_own = threading.local()


def huge_buffer(nbytes: int) -> memoryview:
    """New memory of ``nbytes`` that begins on a page, a huge one if there are any, and is touched.

    It is given back when nobody holds on to it any more.
    """
    mapping = mmap.mmap(-1, round_up(nbytes) + _HUGE_PAGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    address = ctypes.addressof(ctypes.c_char.from_buffer(mapping))
    begin = -address % _HUGE_PAGE
    length = min(round_up(nbytes, _HUGE_PAGE), len(mapping) - begin)
    # A process that is forked while a device writes here must not have a part in these pages.
    for advice in (MADV_HUGEPAGE, mmap.MADV_DONTFORK):
        _libc.madvise(ctypes.c_void_p(address + begin), ctypes.c_size_t(length), advice)
    buffer = memoryview(mapping)[begin : begin + nbytes]
    for page in range(0, nbytes, mmap.PAGESIZE):
        buffer[page] = 0
    return buffer


def own_buffer(nbytes: int) -> memoryview:
    """One of this thread's own, of ``nbytes`` or more: the same on every call, if it will do. It goes with it."""
    buffer: memoryview | None = getattr(_own, "buffer", None)
    if buffer is None or len(buffer) < nbytes:
        buffer = _own.buffer = huge_buffer(round_up(nbytes))
    return buffer


@functools.cache
def only_private() -> bool:
    """Whether this host gives huge pages to private memory alone, and not to memory files that ask for them."""
    return _setting("shmem_enabled") in ("never", "deny") and _setting("enabled") != "never"


def _setting(name: str) -> str:
    """The one in brackets."""
    try:
        with open(f"{_SETTINGS}/{name}") as file:
            return file.read().partition("[")[2].partition("]")[0]
    except OSError:
        return "never"
