"""How many of a segment's slots have memory: one, and another while saves overlap (``Config.slots``).

The slots stand at the end of the segment, so what is taken of it is its begin. The worker takes more beside all else,
while the save that wants it waits for that, or for the slot of the save before, whichever is there first.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Sequence
from functools import partial

from asyncckpt.errors import CheckpointError, OutOfMemoryError
from asyncckpt.link.client import WorkerClient
from asyncckpt.link.messages import GiveBack, Take
from asyncckpt.shm.segment import Segment

logger = logging.getLogger(__name__)

# After so many saves of which none has overlapped with another the memory goes back; and it is asked for again after
# so many, where there was none.
_LONG = 16


class SlotMemory:
    """That of one segment. All but what the worker says is for one thread at a time."""

    def __init__(self, client: WorkerClient, number: int, segment: Segment, begins: Sequence[int], taken: int) -> None:
        """All is as it is.

        Args:
            client: The worker.
            number: Of the segment there.
            segment: The segment.
            begins: Where each slot begins, and where the last one ends, in bytes.
            taken: How many slots have memory, and keep it.
        """
        self.taken = self._least = taken
        """How many slots have memory, from the first on."""
        self.is_coming = False
        """Whether the worker is taking more."""
        self._client, self._number, self._segment = client, number, segment
        self._begins = begins
        self._apart = 0  # how many saves, one after the other, have not overlapped
        self._refused: CheckpointError | None = None

    @property
    def end(self) -> int:
        """Where that ends in the segment."""
        return self._begins[self.taken]

    @property
    def ends(self) -> Sequence[int]:
        """Where that of each slot ends."""
        return self._begins[1 : self.taken + 1]

    @property
    def is_too_much(self) -> bool:
        """Whether the last slot that has memory was not needed for long."""
        return self.taken > self._least and self._apart >= _LONG and not self.is_coming

    def note(self, *, overlaps: bool) -> None:
        """A save has a slot; whether another was under way."""
        self._apart = 0 if overlaps else self._apart + 1
        self._refused = self._refused if self._apart < _LONG else None

    def take_another(self) -> None:
        """Have the worker take the memory of another slot, if there is one; ``taken`` says when it has."""
        if self.is_coming or self._refused is not None or self.taken == len(self._begins) - 1:
            return
        slot = self.taken
        request = Take(self._number, self._begins[slot], self._begins[slot + 1])
        self._apart = 0
        try:
            self.is_coming = True
            self._client.take(request, partial(self._on_taken, slot))
        except BaseException:  # an interrupt: the worker may have been told all the same
            self.is_coming = False
            raise

    def keep_two(self) -> None:
        """From now on that of another slot is always needed: readers shall find a version while the next is staged."""
        self._least = max(self._least, min(2, len(self._begins) - 1))
        if self.taken < self._least:
            self.take_another()

    def give_back_last(self) -> None:
        """Have the worker give the memory of the last slot back, in which nothing is under way."""
        self.taken -= 1
        self._client.tell(GiveBack(self._number, self.end, (self.taken,)))

    def _on_taken(self, slot: int, refused: CheckpointError | None) -> None:
        """Called by the thread that listens to the worker."""
        if refused is None:
            # The kernel's tables of this process, which the copy would wait for; of a segment that may just be closed.
            with contextlib.suppress(OutOfMemoryError, ValueError):
                self._segment.touch(self._begins[slot + 1], self._begins[slot])
            self.taken = max(self.taken, slot + 1)
        else:
            self._refused = refused
            logger.warning("one image in memory, so saves wait for each other: %s", refused)
        self.is_coming = False
