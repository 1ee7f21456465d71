"""The header page: which state each slot of a segment is in.

A slot holds one image. Its life is FREE -> STAGING -> STAGED -> WRITING -> FREE. The states stand in shared memory so
that the worker knows them when the trainer is gone: a slot that is STAGED holds a whole state and is written out, one
that is STAGING does not and is thrown away.

While a slot is STAGING, a third word says how much of its image is there, from the first byte on, and stays as it is:
the trainer tells it, and the worker writes that much.

Who may change a state: the trainer FREE -> STAGING -> STAGED, and STAGING -> FREE when staging failed; the worker
STAGED -> WRITING -> FREE, and any -> FREE for a save that is given up. Each change is one aligned 8-byte store, the
last one of its step: a process killed between two stores leaves one of the states above, never a mixture.
"""

from __future__ import annotations

import enum

from asyncckpt.shm.segment import PAGE

HEADER_BYTES = PAGE
_WORDS_PER_SLOT = 3
MAX_SLOTS = HEADER_BYTES // (8 * _WORDS_PER_SLOT)


class State(enum.IntEnum):
    """What a slot holds."""

    FREE = 0
    STAGING = 1
    STAGED = 2
    WRITING = 3


class SlotTable:
    """The states of the slots of one segment, over its header page. A fresh (zeroed) page says all are FREE."""

    def __init__(self, header: memoryview) -> None:
        """``header``: the first ``HEADER_BYTES`` of the segment."""
        self._words = header[:HEADER_BYTES].cast("Q")

    def state(self, slot: int) -> State:
        """The state of ``slot``."""
        return State(self._words[slot * _WORDS_PER_SLOT])

    def save_id(self, slot: int) -> int:
        """The save that ``slot`` was last taken for."""
        return self._words[slot * _WORDS_PER_SLOT + 1]

    def take(self, slot: int, save_id: int) -> None:
        """Trainer: ``slot`` is being staged for ``save_id``."""
        self._words[slot * _WORDS_PER_SLOT + 1] = save_id
        self._words[slot * _WORDS_PER_SLOT + 2] = 0
        self.set(slot, State.STAGING)

    def set(self, slot: int, state: State) -> None:
        """Change the state of ``slot``; see the module for who may."""
        self._words[slot * _WORDS_PER_SLOT] = state

    def arrived(self, slot: int, nbytes: int) -> None:
        """Trainer: the first ``nbytes`` of the image being staged in ``slot`` are there, and stay as they are."""
        self._words[slot * _WORDS_PER_SLOT + 2] = nbytes

    def nbytes(self, slot: int) -> int:
        """How many bytes of the image that ``slot`` was last taken for have arrived."""
        return self._words[slot * _WORDS_PER_SLOT + 2]

    def close(self) -> None:
        """Let go of the header page."""
        self._words.release()
