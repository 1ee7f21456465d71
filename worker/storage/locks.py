"""Locks (``flock``) on attempts that are under way and on checkpoints that are read.

A lock belongs to an open descriptor: the kernel drops it when the process dies. So anybody can tell an attempt under
way from what a dead worker left behind.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import time
from collections.abc import Iterator

LOCK_TIMEOUT_S = 30.0
_LOCK_POLL_S = 0.01


@contextlib.contextmanager
def opened(path: str, flags: int = os.O_DIRECTORY) -> Iterator[int]:
    """A descriptor of a folder, or with other ``flags`` of a file. Raises ``OSError``."""
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | flags)
    try:
        yield fd
    finally:
        os.close(fd)


def lock_alone(fd: int) -> bool | None:
    """Lock what is open, alone; False where somebody else holds it, None where the file system has no locks."""
    return _lock(fd, fcntl.LOCK_EX)


def lock_shared(fd: int) -> None:
    """Lock what is open together with others; nothing happens on a file system without locks.

    Who removes it, or looks whether it is locked, has it alone for a moment. Raises ``TimeoutError``, an ``OSError``,
    when another process has had it alone for 30 seconds.
    """
    deadline = time.monotonic() + LOCK_TIMEOUT_S
    while _lock(fd, fcntl.LOCK_SH) is False:
        if time.monotonic() > deadline:
            raise TimeoutError(errno.ETIMEDOUT, f"another process has held it locked for {LOCK_TIMEOUT_S:g} s")
        time.sleep(_LOCK_POLL_S)


def is_locked(path: str) -> bool:
    """Whether somebody holds the folder ``path``."""
    try:
        with opened(path) as fd:
            return lock_alone(fd) is False
    except OSError:
        return False


def _lock(fd: int, how: int) -> bool | None:
    try:
        fcntl.flock(fd, how | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:
        return None
    return True
