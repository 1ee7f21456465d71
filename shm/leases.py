"""Leases: who reads a slot that is published, so that nobody writes there meanwhile.

They are locks of the kernel on the segment's own file, one byte a slot (``F_OFD_SETLK``, Linux 3.15): readers share
one, the writer's is exclusive. A lock belongs to an open file description, and each lease has one of its own, so it
ends when that is closed or its process dies, however it dies; there is no count that a dead reader could leave behind.

The writer *claims* a slot before it takes back what is published there, and *offers* it when it has published again.
A reader looks what is published, takes its lease, and looks again. So what it sees under its lease stays as it is.
"""

from __future__ import annotations

import errno
import fcntl
import os
import struct
import weakref

from asyncckpt.shm.segment import Segment

_TAKEN = (errno.EAGAIN, errno.EACCES)


class Claims:
    """The writer's end, for one segment."""

    def __init__(self, segment: Segment) -> None:
        self._fd = reopen(segment.fileno(), os.O_RDWR)
        _all_claims.add(self)

    def claim(self, slot: int) -> bool:
        """Whether nobody reads ``slot``, and from now on nobody begins to. Claimed already: yes."""
        return _lock(self._fd, fcntl.F_WRLCK, slot)

    def offer(self, slot: int) -> None:
        """Let readers in."""
        _lock(self._fd, fcntl.F_UNLCK, slot)

    def close(self) -> None:
        """Give all claims back. Safe to call twice."""
        fd, self._fd = self._fd, -1
        if fd >= 0:
            os.close(fd)


def lease(fd: int, slot: int) -> int | None:
    """A reader's end: a descriptor that keeps ``slot`` of the segment ``fd`` as it is, until it is closed.

    None where the writer has claimed it.
    """
    own = reopen(fd, os.O_RDONLY)
    if _lock(own, fcntl.F_RDLCK, slot):
        return own
    os.close(own)
    return None


def reopen(fd: int, flags: int) -> int:
    """The same memory file, by a description of its own. With ``O_RDONLY``, nobody can write through it."""
    return os.open(f"/proc/self/fd/{fd}", flags | os.O_CLOEXEC)


def _lock(fd: int, kind: int, slot: int) -> bool:
    # struct flock: type, whence, start, length, and a process id that has to be 0.
    try:
        fcntl.fcntl(fd, fcntl.F_OFD_SETLK, struct.pack("hhqqi4x", kind, os.SEEK_SET, slot, 1, 0))
    except OSError as error:
        if error.errno in _TAKEN:
            return False
        raise
    return True


_all_claims: weakref.WeakSet[Claims] = weakref.WeakSet()


def _after_fork_in_child() -> None:
    """A fork (a data loader's worker, say) must not keep a claim of a trainer that has died."""
    for claims in list(_all_claims):
        claims.close()


os.register_at_fork(after_in_child=_after_fork_in_child)
