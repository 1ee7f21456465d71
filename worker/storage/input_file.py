"""A file being read on a local or shared file system, past the page cache where that is possible."""

from __future__ import annotations

import ctypes
import errno
import fcntl
import os
from collections.abc import Sequence

from asyncckpt.shm.segment import PAGE
from asyncckpt.worker.storage.file_system import translated
from asyncckpt.worker.storage.storage import InputFile

# From linux/stat.h and linux/fcntl.h; Python has no statx before 3.15.
_AT_EMPTY_PATH = 0x1000
_STATX_DIOALIGN = 0x2000
_STATX_BYTES = 256
_STX_MASK_AT = 0
_STX_DIO_MEM_ALIGN_AT = 152

_libc = ctypes.CDLL(None, use_errno=True)


class LocalInputFile(InputFile):
    """A file, open. If the process forks during a read, what is read may end up in the child, see open(2)."""

    def __init__(self, path: str) -> None:
        """Raises ``StorageError``."""
        self.path = path
        self.alignment = 0
        with translated("opening", path):
            try:
                self._fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_DIRECT)
                self.alignment = memory_alignment(self._fd)
            except OSError as error:
                if error.errno != errno.EINVAL:
                    raise
                self._fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)

    def read(self, views: Sequence[memoryview], offset: int) -> int:
        with translated("reading", self.path):
            try:
                return self._read(views, offset)
            except OSError as error:
                if error.errno != errno.EINVAL:
                    raise
                # Some file systems refuse direct I/O only now, or want other blocks than ours.
                self.alignment = 0
                fcntl.fcntl(self._fd, fcntl.F_SETFL, fcntl.fcntl(self._fd, fcntl.F_GETFL) & ~os.O_DIRECT)
                return self._read(views, offset)

    def read_in_place(self, views: Sequence[memoryview], offset: int) -> int | None:
        with translated("reading", self.path):
            try:
                return self._read(views, offset)
            except OSError as error:
                if error.errno not in (errno.EINVAL, errno.EFAULT):  # of memory that no device may write to
                    raise
                self.alignment = 0
                return None

    def close(self) -> None:
        os.close(self._fd)

    def _read(self, views: Sequence[memoryview], offset: int) -> int:
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


def memory_alignment(fd: int) -> int:
    """What addresses have to be a multiple of for direct reads of the file ``fd``, in bytes; 0: nobody says.

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
