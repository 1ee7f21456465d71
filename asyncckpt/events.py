"""Events: what becomes of saves, loads and workers, told to whoever listens (``Config.on_event``).

Nobody who listens can have a save fail, or hold it up. Each is called on a thread of its own, for one checkpointer one
event after the other.
"""

from __future__ import annotations

import logging
import os
import threading
import time
import weakref
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from queue import SimpleQueue
from typing import Literal

from asyncckpt.errors import SaveDroppedError

logger = logging.getLogger(__name__)

# One who listens no more, as to a server that is gone, shall not fill the memory: events beyond these are not told.
_MOST_WAITING = 10_000
# What is left to be told when all is closed may take so long.
_CLOSE_S = 5.0

EventPhase = Literal[
    "planned",
    "staged",
    "written",
    "replicated",
    "committed",
    "failed",
    "skipped",
    "published",
    "uploaded",
    "upload failed",
    "loaded",
    "load failed",
    "worker started",
    "worker restarted",
    "memory taken over",
]
"""What has happened.

Of a save, in this order: it is ``planned`` (``source``: the plan was "kept", or is "new"); ``staged``, so that its
tensors may change; ``written`` to storage by this rank; ``replicated``, once other hosts have copies of all ranks'
images (``Config.replicas``), before or after its end; and at last ``committed`` on all ranks, ``failed``, or
``skipped`` for another (``Config.when_busy``). Its image is ``published`` to readers of weights. A committed checkpoint
is ``uploaded`` from the local folder to the root, or an attempt at that has ``failed``: it is retried.

A checkpoint is ``loaded`` (``source``: "memory", "local" or "storage"), or loading failed. The worker was ``started``,
or another one after it died (``restarted``); the memory of a dead trainer's worker was ``taken over``.
"""


def end_of_save(failure: BaseException | None) -> EventPhase:
    """The phase of a save that has ended, by what it failed with."""
    if failure is None:
        return "committed"
    return "skipped" if isinstance(failure, SaveDroppedError) else "failed"


@dataclass(frozen=True, kw_only=True)
class Event:
    """Something that has happened on this rank, just now."""

    phase: EventPhase
    rank: int
    """In the group that saves or loads together."""
    path: str = ""
    """The checkpoint, the file, or the folder that it is about."""
    step: int | None = None
    """The training step of the save, or of what was loaded."""
    version: int | None = None
    """Of weights that were published."""
    seconds: float | None = None
    """How long that took: of a save that has ended, since the call of ``save``; of what is uploaded, since it was
    committed; else the phase itself."""
    nbytes: int | None = None
    """Bytes of this rank that it is about: of the image, or those that were read; of an upload, of the checkpoint."""
    source: str | None = None
    """Where something is from, see ``EventPhase``."""
    error: str | None = None
    """What went wrong."""
    timings: Mapping[str, float] = field(default_factory=dict)
    """Of a save: all that is known by then, as ``Save.timings``."""
    at: float = field(default_factory=time.time)
    """When it happened, in seconds since the epoch."""


class Listener:
    """One who listens, and the thread on which that is told, from the first event on.

    The thread holds on to neither: what is dropped without an end is collected, and so the thread ends, too.
    """

    def __init__(self, call: Callable[[Event], object]) -> None:
        """Start nothing yet."""
        self._call = call
        self._is_warned = self._has_failed = False
        self._begin()

    def _begin(self) -> None:
        self._owner, self._starting = os.getpid(), threading.RLock()  # a signal handler may come in between
        self._waiting: SimpleQueue[Event | None] = SimpleQueue()
        self._thread: threading.Thread | None = None
        self._has_ended = False

    def tell(self, event: Event) -> None:
        """Have it told, soon. Waits for nothing, and raises nothing."""
        if self._owner != os.getpid():  # a fork has neither the thread nor what waits for it
            self._begin()
        if self._has_ended:
            return
        if self._waiting.qsize() >= _MOST_WAITING:
            if not self._is_warned:
                self._is_warned = True
                logger.warning("%r does not keep up with events, and is not told all of them", self._call)
            return
        self._waiting.put(event)
        if self._thread is None:
            with self._starting:
                if self._thread is None and not self._has_ended:
                    self._start()

    def call(self, event: Event) -> None:
        """Tell it now, on this thread. What is raised is logged once."""
        try:
            self._call(event)
        except BaseException as error:  # also what would end this thread, without a word
            if not self._has_failed:
                self._has_failed = True
                logger.exception("%r listens to events, and has failed (not logged again): %r", self._call, error)

    def close(self, timeout: float) -> None:
        """Tell what waits, and no more. Waits for that, ``timeout`` seconds at most."""
        with self._starting:
            thread, has_ended, self._has_ended = self._thread, self._has_ended, True
        if thread is None or has_ended or self._owner != os.getpid():
            return
        self._waiting.put(None)
        if thread is not threading.current_thread():
            thread.join(timeout)
            if thread.is_alive():
                logger.warning("%r is still busy with an event, and what came after is not waited for", self._call)

    def _start(self) -> None:
        told = self._waiting, weakref.ref(self)
        self._thread = threading.Thread(target=_tell_all, args=told, name="asyncckpt-events", daemon=True)
        try:
            self._thread.start()
        except RuntimeError as error:  # none can be started, as at the end of the process
            self._thread = None
            logger.warning("events are not told: %s", error)

    def __del__(self) -> None:
        self._waiting.put(None)


def _tell_all(waiting: SimpleQueue[Event | None], listener: weakref.ref[Listener]) -> None:
    while (event := waiting.get()) is not None and (found := listener()) is not None:
        found.call(event)
        del found


class Listeners:
    """All who listen to what happens in one place."""

    def __init__(self, calls: Iterable[Callable[[Event], object]]) -> None:
        """``calls`` are given each event; what they raise is logged once."""
        self._listeners = [Listener(call) for call in calls]

    def tell(self, event: Event) -> None:
        """Have all told, soon. Waits for nothing, and raises nothing."""
        for each in self._listeners:
            each.tell(event)

    def close(self) -> None:
        """Wait until all is told, but not for those who keep it waiting. Safe to call twice."""
        deadline = time.monotonic() + _CLOSE_S
        for each in self._listeners:
            each.close(max(0.0, deadline - time.monotonic()))
