"""The saves that the trainer has told its worker of, until they have ended and their slots are free."""

from __future__ import annotations

import threading
import time
from typing import Protocol

from asyncckpt.errors import CheckpointError
from asyncckpt.worker.messages import Committed, WriteRequest
from asyncckpt.worker.rounds import grace


class TrackedSave(Protocol):
    """A save that the worker was told of; its own calls come on whatever thread learns of it."""

    request: WriteRequest
    overdue_at: float
    """When a worker that has said nothing of its end has stopped, by ``time.monotonic``."""
    copied: threading.Event
    """Nobody copies into its slot (any more)."""
    is_whole: bool
    """Its image is complete."""
    is_written: bool
    """The worker has no more to do with its slot."""
    has_ended: bool
    """The worker's part has ended, well or badly."""

    def on_written(self, inode: int | None) -> None:
        """The worker lets go of the slot. ``inode``: of a single file, by which it is known when it has its name."""

    def on_end(self, outcome: Committed | CheckpointError, *, heard: bool = True) -> None:
        """Its end. Not ``heard``: the worker is dead, and has not said how the save ended."""


class OpenSaves:
    """By their numbers. ``changed`` guards them, and is notified whenever a save gets on."""

    def __init__(self) -> None:
        self.changed = threading.Condition()
        self._open: dict[int, TrackedSave] = {}

    def add(self, save: TrackedSave) -> None:
        """The worker is told of it."""
        with self.changed:
            self._open[save.request.save_id] = save

    def discard(self, save: TrackedSave) -> None:
        """The worker could not be told of it."""
        with self.changed:
            self._open.pop(save.request.save_id, None)

    def any_open(self) -> bool:
        """Whether any has not ended, or has a slot that is not free."""
        return bool(self._open)

    def any_overdue(self) -> bool:
        """Whether the worker has not said in time how a save ended. It may be stopped, and go on at any moment."""
        with self.changed:
            return any(time.monotonic() >= save.overdue_at for save in self._open.values() if not save.has_ended)

    def on_copied(self, save: TrackedSave) -> None:
        """Nobody copies into its slot any more."""
        save.copied.set()
        with self.changed:
            self.changed.notify_all()

    def on_written(self, save_id: int, inode: int | None = None) -> None:
        """The worker lets go of its slot."""
        with self.changed:
            save = self._open.get(save_id)
            if save is None:  # the worker died meanwhile
                return
            save.on_written(inode)
            if save.has_ended:
                del self._open[save_id]
            self.changed.notify_all()

    def on_end(self, save_id: int, outcome: Committed | CheckpointError) -> None:
        """It has ended. Where another rank has failed it, its slot may still be being written."""
        with self.changed:
            save = self._open.get(save_id)
            if save is None or save.has_ended:  # it was cancelled, or the worker died and took it along
                return
            save.on_end(outcome)
            if save.is_written:
                del self._open[save_id]
            self.changed.notify_all()

    def close(self) -> list[TrackedSave]:
        """The worker is gone: all slots are free. Returns those that were open."""
        with self.changed:
            saves, self._open = list(self._open.values()), {}
            for save in saves:
                save.on_written(None)
            self.changed.notify_all()
        return saves


def overdue_at(request: WriteRequest) -> float:
    """When a worker that is silent has stopped: its own limit ends a save before that."""
    return time.monotonic() + request.timeout + 2 * grace(request.timeout)
