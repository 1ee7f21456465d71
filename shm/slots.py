"""The header page of a segment: the state of each slot, and the version published in it.

A slot holds one image. Its states are FREE -> STAGING -> STAGED -> WRITING -> FREE. The states are in shared memory, so
that the worker still knows them after the trainer has died. A STAGED slot holds a whole state, and the worker writes
this state. After the trainer's death the worker finishes a WRITING slot and discards a STAGING slot
(``worker/saves.py``, ``finish``). A FREE slot keeps its image, which a new trainer may load, until the slot is taken
again.

While a slot is STAGING, the page also has the number of bytes of its image that have arrived. Arrived bytes do not
change any more. The trainer sets the number, and the worker writes the image up to this number.

The page also holds the version that is *published* in a slot (see ``OwnedSlots``). The version stays published, even if
its save fails, until the owner of the slots withdraws it to write another image there. The owner is a trainer, or a
worker that keeps images of other hosts.

The trainer may change FREE -> STAGING -> STAGED, and STAGING -> FREE if staging failed. The worker may change STAGED ->
WRITING -> FREE, and any state -> FREE for a save that is given up. Each change is one aligned 8-byte store, the last
store of its step. A process killed between two stores leaves one of the states above, never a mixture. Only the owner
writes the published version, and the last store of that step makes the version valid.
"""

from __future__ import annotations

import enum
import errno
import fcntl
import logging
import os
import struct
import weakref
from collections.abc import Callable, Iterable, Sequence
from enum import IntEnum
from typing import NamedTuple

from asyncckpt.errors import CheckpointError, OutOfMemoryError
from asyncckpt.shm.segment import Descriptor, Segment

logger = logging.getLogger(__name__)

# The words of a slot: its state, the save, the number of bytes that have arrived. Then the published version: epoch,
# version, rolled back, folder, ranks.
_STATE, _SAVE_ID, _ARRIVED, _EPOCH, _VERSION, _ROLLED_BACK, _FOLDER, _RANKS = range(8)
_WORDS_PER_SLOT = 8
MAX_SLOTS = 64
HEADER_BYTES = MAX_SLOTS * 8 * _WORDS_PER_SLOT


class State(enum.IntEnum):
    """The state of a slot."""

    FREE = 0
    STAGING = 1
    STAGED = 2
    WRITING = 3


class VersionKey(NamedTuple):
    """The key of a published version, the same on all hosts."""

    epoch: int
    version: int


class PublishedVersion(NamedTuple):
    """A version that is published in a slot. A greater version is newer."""

    epoch: int
    """The number of the publishing process. A later process has a greater number."""
    version: int
    """The number of the version, which grows within an epoch."""
    rolled_back: bool
    """Whether the versions of this epoch may be lower than the versions of the previous epoch."""
    ranks: int
    """The number of ranks that publish this version, each its own part."""
    folder: int = 0
    """The number of the image's folder, if the image has several (see ``ImageLayout.metadata``)."""

    @property
    def key(self) -> VersionKey:
        """The key of this version. The number of ranks differs from host to host."""
        return VersionKey(self.epoch, self.version)


class SlotTable:
    """The slot states of one segment, on its header page. On a fresh (zeroed) page all slots are FREE."""

    def __init__(self, header: memoryview) -> None:
        """Use ``header``, the first ``HEADER_BYTES`` of the segment."""
        self._words = header[:HEADER_BYTES].cast("Q")

    def state(self, slot: int) -> State:
        """Return the state of ``slot``."""
        return State(self._words[slot * _WORDS_PER_SLOT + _STATE])

    def save_id(self, slot: int) -> int:
        """Return the number of the save that ``slot`` was last taken for."""
        return self._words[slot * _WORDS_PER_SLOT + _SAVE_ID]

    def take(self, slot: int, save_id: int) -> None:
        """Trainer: begin to stage ``save_id`` in ``slot``."""
        self._words[slot * _WORDS_PER_SLOT + _SAVE_ID] = save_id
        self._words[slot * _WORDS_PER_SLOT + _ARRIVED] = 0
        self.set(slot, State.STAGING)

    def set(self, slot: int, state: State) -> None:
        """Change the state of ``slot``. The module docstring says which process may make which change."""
        self._words[slot * _WORDS_PER_SLOT + _STATE] = state

    def set_arrived(self, slot: int, nbytes: int) -> None:
        """Trainer: announce that the first ``nbytes`` of the image in ``slot`` are staged and will not change."""
        self._words[slot * _WORDS_PER_SLOT + _ARRIVED] = nbytes

    def arrived(self, slot: int) -> int:
        """Return the number of bytes that have arrived of the image that ``slot`` was last taken for."""
        return self._words[slot * _WORDS_PER_SLOT + _ARRIVED]

    def publish(self, slot: int, published: PublishedVersion) -> None:
        """Owner: publish a version in ``slot``. Readers may read the slot from now on."""
        first = slot * _WORDS_PER_SLOT
        self.withdraw(slot)  # if this process dies before the last store, readers must not see a mixture
        self._words[first + _EPOCH] = published.epoch
        self._words[first + _VERSION] = published.version
        self._words[first + _ROLLED_BACK] = published.rolled_back
        self._words[first + _FOLDER] = published.folder
        self._words[first + _RANKS] = published.ranks

    def withdraw(self, slot: int) -> None:
        """Owner: publish nothing in ``slot`` any more. The slot must be claimed before anything is written to it."""
        self._words[slot * _WORDS_PER_SLOT + _RANKS] = 0

    def published(self, slot: int) -> PublishedVersion | None:
        """Return the version published in ``slot``; None if there is none."""
        first = slot * _WORDS_PER_SLOT
        ranks = self._words[first + _RANKS]
        if not ranks:
            return None
        epoch, version, rolled_back, folder = self._words[first + _EPOCH : first + _RANKS]
        return PublishedVersion(epoch, version, bool(rolled_back), ranks, folder)

    def publications(self, slots: int) -> dict[PublishedVersion, int]:
        """Return the versions published in the first ``slots`` slots, each with its slot."""
        found = ((self.published(slot), slot) for slot in range(slots))
        return {published: slot for published, slot in found if published is not None}

    def close(self) -> None:
        """Release the header page."""
        self._words.release()


class Readers(IntEnum):
    """The kinds of readers of a slot: of its published version, or of the image of a save, to load or copy it."""

    OF_PUBLISHED = 0
    OF_IMAGE = 1


def reopen(fd: int, flags: int) -> int:
    """Reopen a memory file as an open file description of its own. With ``O_RDONLY`` it does not allow writes."""
    return os.open(*_same_file(fd, flags))


def _same_file(fd: int, flags: int) -> tuple[str, int]:
    return f"/proc/self/fd/{fd}", flags | os.O_CLOEXEC


class Claims:
    """The writer's locks on the slots of one segment."""

    def __init__(self, segment: Segment) -> None:
        """Open the segment once more, because a lock belongs to an open file. Raises ``CheckpointError``."""
        try:
            self._file = Descriptor.of(os.open, *_same_file(segment.fileno(), os.O_RDWR))
        except OSError as error:
            raise CheckpointError(f"the shared memory of saves cannot be locked: {error}") from error
        _all_claims.add(self)

    def __del__(self) -> None:
        """Close claims that were dropped without ``close``, so that they lock no slot for others in this process."""
        if hasattr(self, "_file"):
            self.close()

    def claim(self, slot: int, *readers: Readers) -> bool:
        """Claim ``slot`` against ``readers`` (by default all kinds). Return False if such a reader has a lease on it.

        While the slot is claimed, these readers get no lease. Returns True if the slot is claimed already.
        """
        return _lock(self._file.fileno(), fcntl.F_WRLCK, slot, readers or tuple(Readers))

    def offer(self, slot: int, readers: Readers) -> None:
        """End the claim on ``slot``, so that these ``readers`` may take a lease."""
        _lock(self._file.fileno(), fcntl.F_UNLCK, slot, (readers,))

    def close(self) -> None:
        """End all claims. Safe to call twice."""
        self._file.close()


def lease(fd: int, slot: int, readers: Readers = Readers.OF_PUBLISHED) -> Descriptor | None:
    """Take a reader's lock on ``slot`` of the segment ``fd``: a descriptor that keeps the slot unchanged until closed.

    Returns None if the writer has claimed the slot.
    """
    own = Descriptor.of(os.open, *_same_file(fd, os.O_RDONLY))
    if _lock(own.fileno(), fcntl.F_RDLCK, slot, (readers,)):
        return own
    own.close()
    return None


def _lock(fd: int, kind: int, slot: int, readers: tuple[Readers, ...]) -> bool:
    # struct flock: type, whence, start, length, and a process id that has to be 0. The range is locked as a whole or
    # not at all.
    first = slot * len(Readers) + readers[0]
    try:
        fcntl.fcntl(fd, fcntl.F_OFD_SETLK, struct.pack("hhqqi4x", kind, os.SEEK_SET, first, len(readers), 0))
    except OSError as error:
        if error.errno in (errno.EAGAIN, errno.EACCES):
            return False
        raise CheckpointError(
            f"a slot of shared memory cannot be locked: {error.strerror}; fcntl(F_OFD_SETLK) must be allowed (look at"
            " the seccomp profile), because nothing else keeps a slot unchanged while it is read"
        ) from error
    return True


_all_claims: weakref.WeakSet[Claims] = weakref.WeakSet()


def _after_fork_in_child() -> None:
    """Close all claims. A fork (e.g. a data loader's worker) must not keep the claims of a dead trainer."""
    for claims in list(_all_claims):
        claims.close()


os.register_at_fork(after_in_child=_after_fork_in_child)


LASTING = 2
"""Number of slots of weights that always keep their memory: the newest version, and the slot to publish next. Further
slots exist while readers keep older versions. The memory of further slots may be given back."""


class OwnedSlots:
    """The slots of a segment, as their owner sees them. The owner writes to a slot only while it has claimed it.

    The owner lists the slots to claim in its own order, with protected slots last or left out. The owner uses ``count``
    slots, and may change this number.
    """

    def __init__(self, segment: Segment, count: int, *, tries_again: bool = False) -> None:
        """Use the header page of ``segment``. The images may be in other segments.

        ``tries_again``: whether ``grow`` asks for memory again after a refusal. The new request may take seconds.
        """
        self.count = count
        self._table = SlotTable(segment.view)
        self._claims = Claims(segment)
        self._tries_again, self._is_refused = tries_again, False

    def publications(self) -> dict[PublishedVersion, int]:
        """Return the published versions, each with its slot, the oldest first."""
        return dict(sorted(self._table.publications(self.count).items()))

    def claim(self, slot: int) -> bool:
        """Claim ``slot`` and withdraw its version. Return False, without a claim, if a reader has a lease on the slot.

        No reader gets a lease until the slot is offered again.
        """
        if not self._claims.claim(slot):
            return False
        self._table.withdraw(slot)
        return True

    def claim_first(self, slots: Iterable[int]) -> int | None:
        """Claim the first of ``slots`` without a reader, and return it; None if all are being read."""
        return next(filter(self.claim, slots), None)

    def claim_next(
        self,
        taken: Sequence[int],
        take: Callable[[int], object],
        most: int,
        is_free: Callable[[int], bool] = lambda _: True,
        preference: Callable[[int], int] = lambda _: 0,
    ) -> int | None:
        """Claim a slot for the next version to publish. Return None if all slots are being read.

        The slot of the newest version is claimed only if no other slot is published. A third slot, and each slot after
        it, gets memory only if readers keep all slots before it.

        Args:
            taken: The slots that have memory.
            take: Takes memory for a slot. Raises ``OutOfMemoryError``.
            most: The maximum number of slots with memory.
            is_free: Returns False for a slot that is in use without a lease.
            preference: Returns a number for a published slot. The slot with the least number is claimed first; of
                equal numbers the oldest slot.

        Raises:
            OutOfMemoryError: There is no memory for even one slot.
        """
        published = list(self.publications().values())
        slot = self.claim_first(slot for slot in taken if slot not in published and is_free(slot))
        slot = self.grow(taken, take, LASTING) if slot is None else slot
        if slot is None:
            slot = self.claim_first(filter(is_free, sorted(published[:-1] or published, key=preference)))
        return self.grow(taken, take, most) if slot is None else slot

    def grow(self, taken: Sequence[int], take: Callable[[int], object], most: int) -> int | None:
        """Take memory for one more slot, and claim the slot. The arguments are those of ``claim_next``.

        Return None if there are ``most`` slots, or if there is no memory.
        """
        slot = next((slot for slot in range(self.count) if slot not in taken), self.count)
        if slot >= most or (self._is_refused and not self._tries_again):
            return None
        self.count = max(self.count, slot + 1)  # set first, because an exception may come after the memory is taken
        try:
            take(slot)
        except OutOfMemoryError as error:
            if not slot:
                raise
            if not self._is_refused:
                logger.warning("memory for %d versions instead of %d: %s", len(taken), most, error)
            self._is_refused = True
            return None
        return self.claim_first([slot])

    def publish(self, slot: int, version: PublishedVersion) -> None:
        """Publish ``version`` in a ``slot`` that was claimed."""
        self._table.publish(slot, version)
        self.offer(slot)

    def publish_unless_last(self, slot: int, version: PublishedVersion) -> bool:
        """Publish ``version`` as ``publish`` does, if at least one other slot can then be claimed.

        Return False, and publish nothing, if readers hold every other slot, or if they already hold this slot.
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
        """End the claim on ``slot`` for readers of the published version."""
        self._claims.offer(slot, Readers.OF_PUBLISHED)

    def offer_image(self, slot: int) -> None:
        """End the claim on ``slot`` for readers of the image of a save. The image must be whole."""
        self._claims.offer(slot, Readers.OF_IMAGE)

    def withdraw_newer(self, version: PublishedVersion) -> None:
        """Withdraw every version newer than ``version``. The slots are not claimed."""
        for other, slot in self.publications().items():
            if other > version:
                self._table.withdraw(slot)

    def withdraw_all(self) -> None:
        """Withdraw every version. The slots are not claimed, so nothing may be written to them."""
        for slot in range(self.count):
            self._table.withdraw(slot)

    def close(self) -> None:
        """Release the header page, and end all claims."""
        self._table.close()
        self._claims.close()

    def _is_unread(self, slot: int) -> bool:
        """Claim ``slot`` against readers of the published version. Return False if there is a reader."""
        return self._claims.claim(slot, Readers.OF_PUBLISHED)

    def _withdraw(self, slot: int) -> bool:
        """Withdraw the version in ``slot``. Return False if there is a reader."""
        if not self._is_unread(slot):
            return False
        self._table.withdraw(slot)
        return True


class ReadableSlots:
    """A reader's side of published slots. The segment is mapped for reading; the owner may change ``count``."""

    def __init__(self, segment: Segment, count: int) -> None:
        self.count = count
        self._segment = segment
        self._table = SlotTable(segment.view)

    def publications(self) -> dict[PublishedVersion, int]:
        """Return the published versions, each with its slot."""
        return self._table.publications(self.count)

    def lease(self, slot: int, version: PublishedVersion) -> Descriptor | None:
        """Return a descriptor that keeps ``version`` in ``slot`` until closed; None if the version is gone."""
        fd = lease(self._segment.fileno(), slot)
        if fd is not None and self._table.published(slot) != version:
            fd.close()
            return None
        return fd

    def close(self) -> None:
        """Release the header page. Leases outlive this."""
        self._table.close()
