"""Locks on the slots of a segment: *leases* of those who read, *claims* of the one who writes.

They are locks of the kernel on the segment's own file (``F_OFD_SETLK``, Linux 3.15), two bytes a slot: one for those
who read what is published there, one for those who read the image of a save. Readers share a lock, the writer's is
exclusive. A lock belongs to an open file description, and each lease has one of its own, so it ends when that is closed
or its process dies, however it dies. There is no count that a dead reader could leave behind.
"""

from __future__ import annotations

import errno
import fcntl
import os
import struct
import weakref
from enum import IntEnum

from asyncckpt.shm.descriptor import Descriptor
from asyncckpt.shm.segment import Segment


class Readers(IntEnum):
    """Who reads a slot: what is published there, or the image of a save, to load it or to keep a copy."""

    OF_PUBLISHED = 0
    OF_IMAGE = 1


def reopen(fd: int, flags: int) -> int:
    """The same memory file, by an open file description of its own. With ``O_RDONLY`` it cannot be written through."""
    return os.open(*_same_file(fd, flags))


def _same_file(fd: int, flags: int) -> tuple[str, int]:
    return f"/proc/self/fd/{fd}", flags | os.O_CLOEXEC


class Claims:
    """The writer's locks on the slots of one segment."""

    def __init__(self, segment: Segment) -> None:
        self._file = Descriptor.of(os.open, *_same_file(segment.fileno(), os.O_RDWR))
        _all_claims.add(self)

    def __del__(self) -> None:
        """Whoever was dropped without being closed keeps no slot from others of the same process."""
        if hasattr(self, "_file"):
            self.close()

    def claim(self, slot: int, *readers: Readers) -> bool:
        """Whether none of those ``readers`` (by default: nobody) reads ``slot``, and none begins to from now on.

        True where it is claimed already.
        """
        return _lock(self._file.fileno(), fcntl.F_WRLCK, slot, readers or tuple(Readers))

    def offer(self, slot: int, readers: Readers) -> None:
        """End the claim on ``slot``: those ``readers`` may take a lease."""
        _lock(self._file.fileno(), fcntl.F_UNLCK, slot, (readers,))

    def close(self) -> None:
        """End all claims. Safe to call twice."""
        self._file.close()


def lease(fd: int, slot: int, readers: Readers = Readers.OF_PUBLISHED) -> Descriptor | None:
    """A reader's lock: a descriptor that keeps ``slot`` of the segment ``fd`` as it is, until it is closed.

    None where the writer has claimed the slot.
    """
    own = Descriptor.of(os.open, *_same_file(fd, os.O_RDONLY))
    if _lock(own.fileno(), fcntl.F_RDLCK, slot, (readers,)):
        return own
    own.close()
    return None


def _lock(fd: int, kind: int, slot: int, readers: tuple[Readers, ...]) -> bool:
    # struct flock: type, whence, start, length, and a process id that has to be 0. All of it is locked, or none.
    first = slot * len(Readers) + readers[0]
    try:
        fcntl.fcntl(fd, fcntl.F_OFD_SETLK, struct.pack("hhqqi4x", kind, os.SEEK_SET, first, len(readers), 0))
    except OSError as error:
        if error.errno in (errno.EAGAIN, errno.EACCES):
            return False
        raise
    return True


_all_claims: weakref.WeakSet[Claims] = weakref.WeakSet()


def _after_fork_in_child() -> None:
    """A fork (a data loader's worker, say) must not keep a claim of a trainer that has died."""
    for claims in list(_all_claims):
        claims.close()


os.register_at_fork(after_in_child=_after_fork_in_child)
