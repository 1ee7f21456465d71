"""The header page of a segment: the state of each slot, and what is published in it.

A slot holds one image. Its life is FREE -> STAGING -> STAGED -> WRITING -> FREE. The states stand in shared memory so
that the worker knows them when the trainer is gone: a slot that is STAGED holds a whole state and is written out, what
is being written is written to the end, and a slot that is STAGING is thrown away.

While a slot is STAGING, the page also says how much of its image has arrived: that many of its first bytes are there,
and stay as they are. The trainer sets that number, and the worker writes that much.

Beside that stands what is *published* in a slot (see ``slots.py``). It stays published, whatever becomes of
its save, until the trainer withdraws it to stage something else there.

Who may change a state: the trainer FREE -> STAGING -> STAGED, and STAGING -> FREE when staging failed; the worker
STAGED -> WRITING -> FREE, and any -> FREE for a save that is given up. Each change is one aligned 8-byte store, the
last one of its step: a process killed between two stores leaves one of the states above, never a mixture. What is
published is written by the trainer alone; there, too, the last store of a step decides.
"""

from __future__ import annotations

import enum
import errno
import fcntl
import os
import struct
import weakref
from enum import IntEnum
from typing import NamedTuple

from asyncckpt.shm.segment import PAGE, Descriptor, Segment

HEADER_BYTES = PAGE
# The state, its save, the bytes that have arrived; then what is published: epoch, version, rolled back, folder, ranks.
_STATE, _SAVE_ID, _ARRIVED, _EPOCH, _VERSION, _ROLLED_BACK, _FOLDER, _RANKS = range(8)
_WORDS_PER_SLOT = 8
MAX_SLOTS = HEADER_BYTES // (8 * _WORDS_PER_SLOT)


class State(enum.IntEnum):
    """What a slot holds."""

    FREE = 0
    STAGING = 1
    STAGED = 2
    WRITING = 3


class PublishedVersion(NamedTuple):
    """What is published in a slot. Ordered: the greater one is the newer."""

    epoch: int
    """The number of the publishing process: a later one has a greater number."""
    version: int
    """Grows within an epoch."""
    rolled_back: bool
    """Whether the versions of this epoch may be lower than those of the one before."""
    ranks: int
    """How many ranks publish that version, each what it has of it."""
    folder: int = 0
    """Which folder of the image it is, where that has several (see ``FileSetLayout``)."""


class SlotTable:
    """The states of the slots of one segment, over its header page. A fresh (zeroed) page says all are FREE."""

    def __init__(self, header: memoryview) -> None:
        """``header``: the first ``HEADER_BYTES`` of the segment."""
        self._words = header[:HEADER_BYTES].cast("Q")

    def state(self, slot: int) -> State:
        """The state of ``slot``."""
        return State(self._words[slot * _WORDS_PER_SLOT + _STATE])

    def save_id(self, slot: int) -> int:
        """The number of the save that ``slot`` was last taken for."""
        return self._words[slot * _WORDS_PER_SLOT + _SAVE_ID]

    def take(self, slot: int, save_id: int) -> None:
        """Trainer: begin to stage ``save_id`` in ``slot``."""
        self._words[slot * _WORDS_PER_SLOT + _SAVE_ID] = save_id
        self._words[slot * _WORDS_PER_SLOT + _ARRIVED] = 0
        self.set(slot, State.STAGING)

    def set(self, slot: int, state: State) -> None:
        """Change the state of ``slot``; see the module for who may."""
        self._words[slot * _WORDS_PER_SLOT + _STATE] = state

    def set_arrived(self, slot: int, nbytes: int) -> None:
        """Trainer: the first ``nbytes`` of the image being staged in ``slot`` are there, and stay as they are."""
        self._words[slot * _WORDS_PER_SLOT + _ARRIVED] = nbytes

    def arrived(self, slot: int) -> int:
        """How many of the first bytes are there of the image that ``slot`` was last taken for."""
        return self._words[slot * _WORDS_PER_SLOT + _ARRIVED]

    def publish(self, slot: int, published: PublishedVersion) -> None:
        """Trainer: tell readers what is in ``slot``; they may read it from now on."""
        first = slot * _WORDS_PER_SLOT
        self.withdraw(slot)  # if this process dies in between, readers must not see half of each
        self._words[first + _EPOCH] = published.epoch
        self._words[first + _VERSION] = published.version
        self._words[first + _ROLLED_BACK] = published.rolled_back
        self._words[first + _FOLDER] = published.folder
        self._words[first + _RANKS] = published.ranks

    def withdraw(self, slot: int) -> None:
        """Trainer: nothing is published in ``slot`` any more. It must be claimed before anything is written there."""
        self._words[slot * _WORDS_PER_SLOT + _RANKS] = 0

    def published(self, slot: int) -> PublishedVersion | None:
        """What is published in ``slot``; None: nothing."""
        first = slot * _WORDS_PER_SLOT
        ranks = self._words[first + _RANKS]
        if not ranks:
            return None
        epoch, version, rolled_back, folder = self._words[first + _EPOCH : first + _RANKS]
        return PublishedVersion(epoch, version, bool(rolled_back), ranks, folder)

    def publications(self, slots: int) -> dict[PublishedVersion, int]:
        """What is published in the first ``slots`` slots, each with its slot."""
        found = ((self.published(slot), slot) for slot in range(slots))
        return {published: slot for published, slot in found if published is not None}

    def close(self) -> None:
        """Let go of the header page."""
        self._words.release()


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


LASTING = 2
"""The first slots of weights keep their memory: one has the newest version, one is to publish in. Others are there for
as long as readers keep older versions, and may be given back."""


class PublishedSlots:
    """The trainer's part, for checkpoints and for weights. ``count`` slots are used; the owner may change that."""

    def __init__(self, segment: Segment, count: int) -> None:
        """``segment`` has the header page; the images may be in others."""
        self.count = count
        self._table = SlotTable(segment.view)
        self._claims = Claims(segment)

    def publications(self) -> dict[PublishedVersion, int]:
        """What is published, and in which slot, the oldest first."""
        return dict(sorted(self._table.publications(self.count).items()))

    def claim(self, slot: int) -> bool:
        """Whether nobody reads ``slot``. If so, nobody can until it is offered again: nothing is published any more."""
        if not self._claims.claim(slot):
            return False
        self._table.withdraw(slot)
        return True

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
        if not self._is_unread(slot):
            return False
        if len(others) == self.count - 1 and not any(map(self._withdraw, others)):
            self.offer(slot)
            return False
        self.publish(slot, version)
        return True

    def offer(self, slot: int) -> None:
        """End the claim on ``slot``, for those who read what is published."""
        self._claims.offer(slot, Readers.OF_PUBLISHED)

    def offer_image(self, slot: int) -> None:
        """End the claim on ``slot``, for those who read the image of a save, which is whole."""
        self._claims.offer(slot, Readers.OF_IMAGE)

    def withdraw_newer(self, version: PublishedVersion) -> None:
        """Whatever is newer than ``version`` shall not be found any more. Its slots are not claimed."""
        for other, slot in self.publications().items():
            if other > version:
                self._table.withdraw(slot)

    def withdraw_all(self) -> None:
        """Nobody shall find anything here any more. The slots are not claimed: nothing may be written there."""
        for slot in range(self.count):
            self._table.withdraw(slot)

    def close(self) -> None:
        """Let go of the header page, and give all claims back."""
        self._table.close()
        self._claims.close()

    def _is_unread(self, slot: int) -> bool:
        """Whether nobody reads what is published in ``slot``, and nobody can from now on."""
        return self._claims.claim(slot, Readers.OF_PUBLISHED)

    def _withdraw(self, slot: int) -> bool:
        """Take back what is published in ``slot``, unless somebody reads it."""
        if not self._is_unread(slot):
            return False
        self._table.withdraw(slot)
        return True


class ReadableSlots:
    """A reader's part, for ``count`` slots of a segment that is mapped for reading; the owner may change ``count``."""

    def __init__(self, segment: Segment, count: int) -> None:
        self.count = count
        self._segment = segment
        self._table = SlotTable(segment.view)

    def publications(self) -> dict[PublishedVersion, int]:
        """What is published, and in which slot."""
        return self._table.publications(self.count)

    def lease(self, slot: int, version: PublishedVersion) -> Descriptor | None:
        """A descriptor that keeps ``version`` in ``slot`` until it is closed; None where it is not there any more."""
        fd = lease(self._segment.fileno(), slot)
        if fd is not None and self._table.published(slot) != version:
            fd.close()
            return None
        return fd

    def close(self) -> None:
        """Let go of the header page. Leases last."""
        self._table.close()
