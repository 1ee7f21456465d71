"""Files of a file system, written and read past the page cache if the file system supports direct I/O."""

from __future__ import annotations

import ctypes
import errno
import fcntl
import os
from collections.abc import Sequence

from asyncckpt.shm.segment import BLOCK, close
from asyncckpt.storage.file_system import open_regular, translated
from asyncckpt.storage.storage import InputFile, OutputFile

# From linux/stat.h and linux/fcntl.h. Python has no statx before 3.15.
_AT_EMPTY_PATH = 0x1000
_STATX_DIOALIGN = 0x2000
_STATX_BYTES = 256
_STX_MASK_AT = 0
_STX_DIO_MEM_ALIGN_AT = 152
_libc = ctypes.CDLL(None, use_errno=True)


class LocalFile(OutputFile):
    """A new file. ``direct`` is known after opening the file, and may become False during a write."""

    def __init__(self, path: str, direct: bool, within: tuple[int | None, str] | None = None) -> None:
        """Create ``path``. Raises ``StorageError``.

        Args:
            path: The file.
            direct: Write past the page cache, if the file system can.
            within: An open folder, and the file's name in this folder. The file is created there even if the folder's
                path has changed meanwhile. If None, create the file by its path.
        """
        self.path = path
        self.direct = direct
        folder, name = within or (None, path)
        flags = os.O_WRONLY | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_EXCL
        with translated("creating a file", path):
            try:
                self._fd = os.open(name, flags | (os.O_DIRECT if direct else 0), 0o644, dir_fd=folder)
            except OSError as error:
                if not direct or error.errno != errno.EINVAL:
                    raise
                # The file system has no direct I/O. Some create the file before they refuse, some do not.
                self.direct = False
                self._fd = os.open(name, flags & ~os.O_EXCL, 0o644, dir_fd=folder)
        if self.direct:
            _, self.block_bytes = direct_alignments(self._fd)

    def write(self, data: memoryview, offset: int) -> None:
        with translated("writing", self.path):
            while data:
                direct = self.direct  # read once, because a refused write of another thread may change it
                try:
                    done = os.pwrite(self._fd, data, offset)
                except OSError as error:
                    if not direct or error.errno != errno.EINVAL:
                        raise
                    # Some file systems refuse direct I/O only now, or want another alignment after a short write.
                    fcntl.fcntl(self._fd, fcntl.F_SETFL, fcntl.fcntl(self._fd, fcntl.F_GETFL) & ~os.O_DIRECT)
                    self.direct = False  # set last: threads that see False write without alignment
                    continue
                data = data[done:]
                offset += done

    def truncate(self, nbytes: int) -> None:
        with translated("writing", self.path):
            os.ftruncate(self._fd, nbytes)

    def sync(self) -> None:
        """Flush the file, and drop its bytes from the page cache."""
        with translated("flushing to storage", self.path):
            os.fsync(self._fd)
            if not self.direct:
                os.posix_fadvise(self._fd, 0, 0, os.POSIX_FADV_DONTNEED)

    def close(self) -> None:
        fd, self._fd = self._fd, -1
        if fd >= 0:
            with translated("closing", self.path):
                os.close(fd)


class LocalInputFile(InputFile):
    """An open file. If the process forks during a direct read, the bytes may end up in the child, see open(2)."""

    def __init__(self, path: str) -> None:
        """Open ``path``. Raises ``StorageError``, and ``DamagedCheckpointError`` if it is not a regular file."""
        self.path = path
        self.alignment = 0
        with translated("opening", path):
            try:
                self._fd = open_regular(path, os.O_DIRECT)
                self.alignment, self.block_bytes = direct_alignments(self._fd)
            except OSError as error:
                if error.errno != errno.EINVAL:
                    raise
                self._fd = open_regular(path)

    def read(self, views: Sequence[memoryview], offset: int) -> int:
        with translated("reading", self.path):
            try:
                return self._read(views, offset)
            except OSError as error:
                if error.errno != errno.EINVAL:
                    raise
                # Some file systems refuse direct I/O only now, or want other block sizes.
                self.alignment = 0
                fcntl.fcntl(self._fd, fcntl.F_SETFL, fcntl.fcntl(self._fd, fcntl.F_GETFL) & ~os.O_DIRECT)
                return self._read(views, offset)

    def read_in_place(self, views: Sequence[memoryview], offset: int) -> int | None:
        with translated("reading", self.path):
            try:
                return self._read(views, offset)
            except OSError as error:
                if error.errno not in (errno.EINVAL, errno.EFAULT):  # otherwise the device cannot write to this memory
                    raise
                self.alignment = 0
                return None

    def close(self) -> None:
        close(self._fd)

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


def direct_alignments(fd: int) -> tuple[int, int]:
    """Return two alignments of direct reads of the file ``fd``, in bytes: of addresses (0: unknown), and of offsets.

    Linux 6.1 and later report the alignments that the device needs: of addresses from 4 bytes (most NVMe) to 512 bytes
    or a whole block, of offsets a block.
    """
    facts = (ctypes.c_uint32 * (_STATX_BYTES // 4))()
    try:
        code = _libc.statx(fd, b"", _AT_EMPTY_PATH, _STATX_DIOALIGN, facts)
    except AttributeError:  # glibc before 2.28
        return 0, BLOCK
    if code != 0 or not facts[_STX_MASK_AT // 4] & _STATX_DIOALIGN:
        return 0, BLOCK
    of_memory, of_offset = facts[_STX_DIO_MEM_ALIGN_AT // 4 : _STX_DIO_MEM_ALIGN_AT // 4 + 2]
    return of_memory, max(of_offset, BLOCK)
