"""The saves that a worker was told of, as its trainer sees them, until they have ended and their slots are free."""

from __future__ import annotations

import threading
import time
from collections.abc import Mapping
from types import MappingProxyType
from typing import Protocol

from asyncckpt.errors import CheckpointError, WorkerDiedError
from asyncckpt.flag import Flag
from asyncckpt.format.write_request import WriteRequest
from asyncckpt.link import messages

# What a worker needs at the end, when the first rank says nothing: a last question, and a look at what is in storage.
_LAST_LOOK_S = 5.0


def longest(timeout: float) -> float:
    """Seconds after which a save has ended that has to be committed after ``timeout``: its worker says so by then."""
    return timeout + 2 * grace(timeout) + _LAST_LOOK_S


class TrackedSave(Protocol):
    """A save that the worker was told of; its own calls come on whatever thread learns of it."""

    request: WriteRequest
    begun_at: float  # when the worker was told, by time.monotonic
    copied: Flag  # nobody copies into its slot (any more)
    is_whole: bool  # its image is complete
    is_written: bool  # the worker has no more to do with its slot
    is_withdrawn: bool  # it will fail, on all ranks, for a newer one
    is_durable: bool  # it is committed
    is_replicated: bool  # other hosts have copies of it
    has_ended: bool  # the worker's part has ended, well or badly

    def on_written(self, inode: int | None, timings: Mapping[str, float]) -> None:
        """The worker lets go of the slot. ``inode``: of a single file, by which it is known when it has its name.
        ``timings``: all so far; ``write_s`` where it was written.
        """

    def on_replicated(self, failure: CheckpointError | None) -> None:
        """Other hosts have copies of its image; for ``failure`` they do not, and will not."""

    def on_end(self, outcome: messages.Committed | CheckpointError, *, heard: bool = True) -> None:
        """Its end. Not ``heard``: the worker is dead, and has not said how the save ended."""


class OpenSaves:
    """Those that the worker was told of, by their numbers, until they have ended and their slots are free."""

    def __init__(self) -> None:
        # Taken by itself: an exception of a signal handler can keep a condition, but not a lock, from being left.
        self.lock = threading.RLock()
        """Guards them."""
        self.changed = threading.Condition(self.lock)
        """Notified whenever a save gets on."""
        self._open: dict[int, TrackedSave] = {}
        self._copied: dict[int, TrackedSave] = {}  # those that are to be, until it is known whether they are
        self._progress_at = 0.0  # when some save last got on, by time.monotonic

    def __bool__(self) -> bool:
        return bool(self._open)

    def add(self, save: TrackedSave) -> None:
        """The worker is told of it."""
        save.begun_at = time.monotonic()
        with self.lock:
            self._open[save.request.save_id] = save
            if save.request.is_copied:
                self._copied[save.request.save_id] = save

    def discard(self, save: TrackedSave) -> None:
        """The worker was not told of it."""
        with self.lock:
            self._open.pop(save.request.save_id, None)
            self._copied.pop(save.request.save_id, None)

    def any_overdue(self) -> bool:
        """Whether the worker has not said in time how a save ended. It may be stopped, and go on at any moment."""
        with self.lock:
            return any(self.is_overdue(save) for save in self._open.values() if not save.has_ended)

    def is_overdue(self, save: TrackedSave) -> bool:
        """Whether a worker that says nothing, of it or of others, has stopped: its own limit ends a save earlier."""
        return time.monotonic() >= max(save.begun_at, self._progress_at) + longest(save.request.timeout)

    def on_copied(self, save: TrackedSave) -> None:
        """Nobody copies into its slot any more."""
        with self.lock:
            save.copied.set()
            self.changed.notify_all()

    def on_written(
        self, save_id: int, inode: int | None = None, timings: Mapping[str, float] = MappingProxyType({})
    ) -> None:
        """The worker lets go of its slot."""
        with self.lock:
            if (save := self._open.get(save_id)) is not None:  # else the worker died meanwhile
                save.on_written(inode, timings)
                self._changed(save)

    def on_end(self, save_id: int, outcome: messages.Committed | CheckpointError) -> None:
        """It has ended. Where another rank has failed it, its slot may still be being written."""
        with self.lock:
            save = self._open.get(save_id)
            if save is not None and not save.has_ended:  # else it was cancelled, or the worker died and took it along
                save.on_end(outcome)
                self._changed(save)

    def on_replicated(self, save_id: int, failure: CheckpointError | None) -> None:
        """Other hosts have copies of it, or, for ``failure``, will not. It may have ended by then."""
        with self.lock:
            save = self._copied.pop(save_id, None)
            self.changed.notify_all()  # a slot may be free that was being read
        if save is not None:
            save.on_replicated(failure)

    def look_again(self) -> None:
        """Something that is waited for may be there."""
        with self.lock:
            self.changed.notify_all()

    def close(self) -> list[TrackedSave]:
        """The worker is gone: all slots are free. Returns those that were open."""
        with self.lock:
            saves, self._open = list(self._open.values()), {}
            copied, self._copied = list(self._copied.values()), {}
            for save in saves:
                save.on_written(None, {})
            self.changed.notify_all()
        for save in copied:
            save.on_replicated(WorkerDiedError("the worker ended before other hosts had copies"))
        return saves

    def _changed(self, save: TrackedSave) -> None:
        self._progress_at = time.monotonic()
        if save.has_ended and save.is_written:
            del self._open[save.request.save_id]
        self.changed.notify_all()


def grace(timeout: float) -> float:
    """Seconds beyond ``timeout``, the limit of the rank that collects, for its conclusion to get to the others."""
    return min(5.0, timeout / 4)
