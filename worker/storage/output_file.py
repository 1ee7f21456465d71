"""A file being written on a local or shared file system, past the page cache where that is possible."""

from __future__ import annotations

import errno
import fcntl
import os

from asyncckpt.worker.storage.os_errors import translated
from asyncckpt.worker.storage.storage import OutputFile


class LocalFile(OutputFile):
    """A new file; whether it is ``direct`` shows when it is open, and may change with a write."""

    def __init__(self, path: str, direct: bool) -> None:
        """Create ``path``, which must not exist. Raises ``StorageError``."""
        self.path = path
        self.direct = direct
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
        with translated("creating a file", path):
            try:
                self._fd = os.open(path, flags | (os.O_DIRECT if direct else 0), 0o644)
            except OSError as error:
                if not direct or error.errno != errno.EINVAL:
                    raise
                # The file system knows no direct I/O; whether the file was made before it said so differs.
                self.direct = False
                self._fd = os.open(path, flags & ~os.O_EXCL, 0o644)

    def write(self, data: memoryview, offset: int) -> None:
        with translated("writing", self.path):
            while data:
                try:
                    done = os.pwrite(self._fd, data, offset)
                except OSError as error:
                    if not self.direct or error.errno != errno.EINVAL:
                        raise
                    # Some file systems refuse direct I/O only now, or want another alignment after a short write.
                    self.direct = False
                    fcntl.fcntl(self._fd, fcntl.F_SETFL, fcntl.fcntl(self._fd, fcntl.F_GETFL) & ~os.O_DIRECT)
                    continue
                data = data[done:]
                offset += done

    def truncate(self, nbytes: int) -> None:
        with translated("writing", self.path):
            os.ftruncate(self._fd, nbytes)

    def sync(self) -> None:
        """What went through the page cache also leaves it."""
        with translated("flushing to storage", self.path):
            os.fsync(self._fd)
            if not self.direct:
                os.posix_fadvise(self._fd, 0, 0, os.POSIX_FADV_DONTNEED)

    def close(self) -> None:
        fd, self._fd = self._fd, -1
        if fd >= 0:
            with translated("closing", self.path):
                os.close(fd)
