"""A file that is read past the page cache, where the file system allows: in whole blocks, into aligned memory.

Whoever forks meanwhile may have what is read end in the child, see open(2).
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import os
from collections.abc import Sequence

from asyncckpt.errors import DamagedCheckpointError
from asyncckpt.shm.huge import own_buffer
from asyncckpt.shm.segment import PAGE, round_up
from asyncckpt.worker.storage import translated

# From linux/stat.h and linux/fcntl.h; Python has no statx before 3.15.
_AT_EMPTY_PATH = 0x1000
_STATX_DIOALIGN = 0x2000
_STATX_BYTES = 256
_STX_MASK_AT = 0
_STX_DIO_MEM_ALIGN_AT = 152

# Of each thread: what is read at once, and the rest of the blocks at its ends.
_BUFFER_BYTES = (2 << 20) + 2 * PAGE

_libc = ctypes.CDLL(None, use_errno=True)


class DirectFile:
    """A file open for reading. ``path`` is for errors."""

    def __init__(self, path: str) -> None:
        """Raises ``DamagedCheckpointError`` if it is missing, else ``StorageError``."""
        self.path = path
        self._memory_alignment = 0  # of no memory but our own
        with translated("opening", path):
            try:
                self._fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_DIRECT)
                self._memory_alignment = _memory_alignment(self._fd)
            except FileNotFoundError as error:
                raise DamagedCheckpointError("a file of this checkpoint is missing", path=path) from error
            except OSError as error:
                if error.errno != errno.EINVAL:
                    raise
                self._fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)

    def close(self) -> None:
        """Give the descriptor back."""
        os.close(self._fd)

    @staticmethod
    def blocks(begin: int, end: int) -> tuple[int, int]:
        """What of the file from ``begin`` to ``end`` is whole blocks."""
        return round_up(begin), end // PAGE * PAGE

    def may_read_to(self, address: int) -> bool:
        """Whether whole blocks can be read straight into the memory there."""
        return self._memory_alignment > 0 and address % self._memory_alignment == 0

    def read(self, begin: int, end: int) -> memoryview:
        """The bytes from ``begin`` to ``end``, or as many as there are; good until this thread reads again."""
        aligned = begin // PAGE * PAGE
        buffer = _buffer(round_up(end) - aligned)
        with translated("reading", self.path):
            try:
                done = self._read([buffer], aligned)
            except OSError as error:
                if error.errno != errno.EINVAL:
                    raise
                # Some file systems refuse direct I/O only now, or want other blocks than ours.
                self._memory_alignment = 0
                fcntl.fcntl(self._fd, fcntl.F_SETFL, fcntl.fcntl(self._fd, fcntl.F_GETFL) & ~os.O_DIRECT)
                done = self._read([buffer], aligned)
        return buffer[:done][begin - aligned : end - aligned]

    def read_around(
        self, begin: int, first: int, last: int, end: int, address: int
    ) -> tuple[memoryview, memoryview, memoryview] | None:
        """As ``read``, in three: up to ``first``, up to ``last``, and the rest.

        What is between, whole blocks, is read to ``address``, where ``may_read_to`` is true. None: the kernel refuses
        that after all, and ``may_read_to`` is false from now on.
        """
        aligned = begin // PAGE * PAGE
        buffer = _buffer(first - aligned + round_up(end) - last)
        head, tail = buffer[: first - aligned], buffer[first - aligned :]
        middle = memoryview((ctypes.c_char * (last - first)).from_address(address)).cast("B")
        with translated("reading", self.path):
            try:
                done = self._read([head, middle, tail], aligned)
            except OSError as error:
                if error.errno not in (errno.EINVAL, errno.EFAULT):  # of memory that no device may write to
                    raise
                self._memory_alignment = 0
                return None
        read = [view[: max(0, done - skipped)] for view, skipped in ((head, 0), (middle, len(head)))]
        rest = tail[: max(0, done - len(head) - len(middle))]
        return read[0][begin - aligned :], read[1], rest[: end - last]

    def _read(self, views: Sequence[memoryview], offset: int) -> int:
        """Fill ``views`` one after the other with what stands from ``offset`` on; how much that is."""
        left = [view for view in views if view]
        done = 0
        while left:
            count = os.preadv(self._fd, left, offset + done)
            if count == 0:
                break
            done += count
            while left and count >= len(left[0]):
                count -= len(left.pop(0))
            if count:
                left[0] = left[0][count:]
        return done


def _memory_alignment(fd: int) -> int:
    """What addresses have to be a multiple of for direct reads of the file ``fd``; 0: nobody says.

    Linux 6.1 and later says so; it is what the device wants, from 4 bytes (most NVMe) to 512, or all of a block.
    """
    facts = (ctypes.c_uint32 * (_STATX_BYTES // 4))()
    try:
        code = _libc.statx(fd, b"", _AT_EMPTY_PATH, _STATX_DIOALIGN, facts)
    except AttributeError:  # glibc before 2.28
        return 0
    if code != 0 or not facts[_STX_MASK_AT // 4] & _STATX_DIOALIGN:
        return 0
    alignment = int(facts[_STX_DIO_MEM_ALIGN_AT // 4])
    return alignment if int(facts[_STX_DIO_MEM_ALIGN_AT // 4 + 1]) <= PAGE else 0


def _buffer(nbytes: int) -> memoryview:
    return own_buffer(max(nbytes, _BUFFER_BYTES))[:nbytes]
