"""The header page of a segment: the state of each slot, and what is published in it.

A slot holds one image. Its life is FREE -> STAGING -> STAGED -> WRITING -> FREE. The states stand in shared memory so
that the worker knows them when the trainer is gone: a slot that is STAGED holds a whole state and is written out, what
is being written is written to the end, and a slot that is STAGING is thrown away.

While a slot is STAGING, the page also says how much of its image has arrived: that many of its first bytes are there,
and stay as they are. The trainer sets that number, and the worker writes that much.

Beside that stands what is *published* in a slot (see ``published_slots.py``). It stays published, whatever becomes of
its save, until the trainer withdraws it to stage something else there.

Who may change a state: the trainer FREE -> STAGING -> STAGED, and STAGING -> FREE when staging failed; the worker
STAGED -> WRITING -> FREE, and any -> FREE for a save that is given up. Each change is one aligned 8-byte store, the
last one of its step: a process killed between two stores leaves one of the states above, never a mixture. What is
published is written by the trainer alone; there, too, the last store of a step decides.
"""

from __future__ import annotations

import enum
from typing import NamedTuple

from asyncckpt.shm.segment import PAGE

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
