"""Published slots: which slots of a segment readers may look at, and which of them the trainer may write to again.

What is published stands in the header page (``slots.py``), who reads it in *leases*: locks of the kernel on the
segment's own file, one byte a slot (``F_OFD_SETLK``, Linux 3.15). Readers share one, the writer's is exclusive. A lock
belongs to an open file description, and each lease has one of its own, so it ends when that is closed or its process
dies, however it dies. There is no count that a dead reader could leave behind.

The trainer *claims* a slot, which fails while it is being read, and only then takes back what is published there; it
*offers* the slot again when it has published something else. A reader looks what is published, takes its lease, and
looks again. So what a reader sees under its lease stays as it is.
"""

from __future__ import annotations

import errno
import fcntl
import os
import struct
import weakref

from asyncckpt.shm.segment import Segment
from asyncckpt.shm.slots import PublishedVersion, SlotTable


def reopen(fd: int, flags: int) -> int:
    """The same memory file, by an open file description of its own. With ``O_RDONLY`` it cannot be written through."""
    return os.open(f"/proc/self/fd/{fd}", flags | os.O_CLOEXEC)


class PublishedSlots:
    """The trainer's part, for checkpoints and for weights. ``count`` slots are used; the owner may change that."""

    def __init__(self, segment: Segment, count: int) -> None:
        """``segment`` has the header page; the images may be in others."""
        self.count = count
        self._segment = segment
        self._table = SlotTable(segment.view)
        # Where nothing is published there is no reader, and no lock is needed: many are never published in.
        self._claims = Claims(segment) if self._table.publications(count) else None

    def publications(self) -> dict[PublishedVersion, int]:
        """What is published, and in which slot, the oldest first."""
        return dict(sorted(self._table.publications(self.count).items()))

    def claim(self, slot: int) -> bool:
        """Whether nobody reads ``slot``. If so, nobody can until it is published again: nothing is any more."""
        if self._claims is not None and not self._claims.claim(slot):
            return False
        self._table.withdraw(slot)
        return True

    def claim_unpublished(self) -> int | None:
        """A slot with nothing published in it, claimed; None where each has something, or is being read."""
        published = set(self.publications().values())
        return next((slot for slot in range(self.count) if slot not in published and self.claim(slot)), None)

    def claim_oldest(self) -> int | None:
        """The slot of the oldest version that nobody reads, claimed; None where all are being read.

        The newest version stays where it is, unless it is the only one.
        """
        slots = list(self.publications().values())
        return next(filter(self.claim, slots[:-1] or slots), None)

    def publish(self, slot: int, version: PublishedVersion) -> None:
        """Let readers see ``version`` in a ``slot`` that was claimed."""
        self._table.publish(slot, version)
        self.offer(slot)

    def publish_unless_last(self, slot: int, version: PublishedVersion) -> bool:
        """As ``publish``, if one of the other slots can be claimed then.

        Returns False, and publishes nothing, where readers have all others, so that none would be left that they cannot
        keep; or where they have this one already, as another version.
        """
        others = [other for other in self.publications().values() if other != slot]
        if not self._locks().claim(slot) or (len(others) == self.count - 1 and not any(map(self.claim, others))):
            return False
        self.publish(slot, version)
        return True

    def offer(self, slot: int) -> None:
        """End the claim on ``slot``."""
        self._locks().offer(slot)

    def withdraw_all(self) -> None:
        """Nobody shall find anything here any more. The slots are not claimed: nothing may be written there."""
        for slot in range(self.count):
            self._table.withdraw(slot)

    def close(self) -> None:
        """Let go of the header page, and give all claims back."""
        self._table.close()
        if self._claims is not None:
            self._claims.close()

    def _locks(self) -> Claims:
        if self._claims is None:
            self._claims = Claims(self._segment)
        return self._claims


class ReadableSlots:
    """A reader's part, for ``count`` slots of a segment that is mapped for reading; the owner may change ``count``."""

    def __init__(self, segment: Segment, count: int) -> None:
        self.count = count
        self._segment = segment
        self._table = SlotTable(segment.view)

    def publications(self) -> dict[PublishedVersion, int]:
        """What is published, and in which slot."""
        return self._table.publications(self.count)

    def lease(self, slot: int, version: PublishedVersion) -> int | None:
        """A descriptor that keeps ``version`` in ``slot`` until it is closed; None where it is not there any more."""
        fd = lease(self._segment.fileno(), slot)
        if fd is not None and self._table.published(slot) != version:
            os.close(fd)
            return None
        return fd

    def close(self) -> None:
        """Let go of the header page. Leases last."""
        self._table.close()


class Claims:
    """The writer's locks on the slots of one segment."""

    def __init__(self, segment: Segment) -> None:
        self._fd = reopen(segment.fileno(), os.O_RDWR)
        _all_claims.add(self)

    def claim(self, slot: int) -> bool:
        """Whether nobody reads ``slot``, and nobody begins to from now on. True where it is claimed already."""
        return _lock(self._fd, fcntl.F_WRLCK, slot)

    def offer(self, slot: int) -> None:
        """End the claim on ``slot``: readers may take a lease."""
        _lock(self._fd, fcntl.F_UNLCK, slot)

    def close(self) -> None:
        """End all claims. Safe to call twice."""
        fd, self._fd = self._fd, -1
        if fd >= 0:
            os.close(fd)


def lease(fd: int, slot: int) -> int | None:
    """A reader's lock: a descriptor that keeps ``slot`` of the segment ``fd`` as it is, until it is closed.

    None where the writer has claimed the slot.
    """
    own = reopen(fd, os.O_RDONLY)
    if _lock(own, fcntl.F_RDLCK, slot):
        return own
    os.close(own)
    return None


def _lock(fd: int, kind: int, slot: int) -> bool:
    # struct flock: type, whence, start, length, and a process id that has to be 0.
    try:
        fcntl.fcntl(fd, fcntl.F_OFD_SETLK, struct.pack("hhqqi4x", kind, os.SEEK_SET, slot, 1, 0))
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
