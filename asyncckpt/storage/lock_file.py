"""A lock file: one process at a time holds it, and writes facts about itself there.

The kernel releases the lock when the process dies, even after a crash. Processes on any host may read the facts.
"""

from __future__ import annotations

import contextlib
import json
import os
import stat
from collections.abc import Mapping
from typing import Any

from asyncckpt.shm.segment import Descriptor
from asyncckpt.storage.file_system import is_at, lock_alone

_FACTS_BYTES = 4096
# The written length, so that a reader never gets the end of longer facts from before.
_WRITTEN_BYTES = 1000


class LockFile:
    """An open lock file. This process holds the lock, unless another process does.

    Attributes:
        is_held: True: this process holds the lock. False: another process does. None: the file system has no locks.
    """

    def __init__(self, name: str, folder: int | None = None) -> None:
        """Open the file, or make it, and try to take the lock.

        Args:
            name: The path of the file.
            folder: The open folder that ``name`` is relative to.

        Raises:
            OSError: The file cannot be opened, or is a folder or a pipe.
        """
        self._name, self._folder = name, folder
        flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
        while True:
            self._file = Descriptor(os.open(name, flags, 0o600, dir_fd=folder))
            try:
                if not stat.S_ISREG(os.fstat(self._file.fileno()).st_mode):
                    raise OSError(f"{name} is no file")
                self.is_held = lock_alone(self._file.fileno())
                if not self.is_held or is_at(self._file.fileno(), name, folder):
                    return
            except BaseException:
                self.close()
                raise
            self.close()  # the last holder has removed the file just now

    def read(self) -> dict[str, Any]:
        """Return the facts of the last holder; none if it has not written them yet. Raises ``OSError``."""
        return read_facts(self._file.fileno())

    def write(self, facts: Mapping[str, Any], *, durable: bool = False) -> None:
        """Write facts about the holder. ``durable``: sync the file, for processes on other hosts.

        If there is no space, the facts stay as they are: errors of other processes then say less.
        """
        fd, text = self._file.fileno(), json.dumps(facts).ljust(_WRITTEN_BYTES).encode()
        with contextlib.suppress(OSError):
            os.pwrite(fd, text, 0)  # in one call, because processes may read the file at any moment
            os.ftruncate(fd, len(text))
            if durable:
                os.fsync(fd)

    def remove(self) -> None:
        """Remove the file. Another process may then make it, and hold its lock."""
        with contextlib.suppress(OSError):
            os.unlink(self._name, dir_fd=self._folder)

    def close(self) -> None:
        """Release the lock."""
        self._file.close()


def read_facts(fd: int) -> dict[str, Any]:
    """Return the facts in an open lock file; none if they are incomplete. Raises ``OSError``."""
    try:
        found = json.loads(os.pread(fd, _FACTS_BYTES, 0))
    except ValueError:  # the file was made just now, or is being written
        return {}
    return found if isinstance(found, dict) else {}
