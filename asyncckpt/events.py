"""Events: what becomes of saves, loads and workers, told to whoever listens (``Config.on_event``).

Nobody who listens can slow a save or have it fail. Each is called on a thread of its own, one event after the other.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from queue import SimpleQueue
from typing import Literal

logger = logging.getLogger(__name__)

# One who listens no more, as to a server that is gone, shall not fill the memory: events beyond these are not told.
_MOST_WAITING = 10_000
# What is left to be told when all is closed may take so long.
_CLOSE_S = 5.0

EventPhase = Literal[
    "planned",
    "staged",
    "written",
    "committed",
    "failed",
    "skipped",
    "published",
    "uploaded",
    "upload failed",
    "loaded",
    "load failed",
    "worker restarted",
    "memory taken over",
]
"""What has happened.

Of a save, in this order: it is ``planned`` (``source``: the plan was "kept", or is "new"); ``staged``, so that its
tensors may change; ``written`` to storage by this rank; and at last ``committed`` on all ranks, ``failed``, or
``skipped`` for another (``Config.when_busy``). Its image is ``published`` to readers of weights. A committed checkpoint
is ``uploaded`` from the local folder to the root, or an attempt at that has ``failed``: it is retried.

A checkpoint is ``loaded`` (``source``: "memory", "local" or "storage"), or loading failed. A worker was ``restarted``
after one that died; the memory of a dead trainer's worker was ``taken over``.
"""


@dataclass(frozen=True, kw_only=True)
class Event:
    """Something that has happened on this rank, just now."""

    phase: EventPhase
    rank: int
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
    """Bytes of this rank that it is about: of the image, or those that were read."""
    source: str | None = None
    """Where something is from, see ``EventPhase``."""
    error: str | None = None
    """What went wrong."""
    timings: Mapping[str, float] = field(default_factory=dict)
    """Of a save: all that is known by then, as ``Save.timings``."""
    at: float = field(default_factory=time.time)
    """When it happened, in seconds since the epoch."""


class Listener:
    """One who listens, and the thread on which that is told."""

    def __init__(self, call: Callable[[Event], object]) -> None:
        """Start nothing until there is something to tell."""
        self._call = call
        self._waiting: SimpleQueue[Event | None] = SimpleQueue()
        self._thread: threading.Thread | None = None
        self._starting = threading.Lock()
        self._is_warned = self._has_failed = False

    def tell(self, event: Event) -> None:
        """Have it told, soon. Waits for nothing, and raises nothing."""
        if self._waiting.qsize() >= _MOST_WAITING:
            if not self._is_warned:
                self._is_warned = True
                logger.warning("%r does not keep up with events, and is not told all of them", self._call)
            return
        self._waiting.put(event)
        if self._thread is None:
            with self._starting:
                if self._thread is None:
                    self._start()

    def end(self) -> threading.Thread | None:
        """That was all. Returns the thread that still tells it, if there is one."""
        thread, self._thread = self._thread, None
        if thread is not None:
            self._waiting.put(None)
        return thread

    def close(self, timeout: float) -> None:
        """Wait until all is told, ``timeout`` seconds at most."""
        thread = self.end()
        if thread is None or thread is threading.current_thread():
            return
        thread.join(timeout)
        if thread.is_alive():
            logger.warning("%r is still busy with an event, and what came after is not waited for", self._call)

    def _start(self) -> None:
        thread = threading.Thread(target=self._run, name="asyncckpt-events", daemon=True)
        try:
            thread.start()
        except RuntimeError as error:  # none can be started, as at the end of the process
            logger.warning("events are not told: %s", error)
        else:
            self._thread = thread

    def _run(self) -> None:
        while (event := self._waiting.get()) is not None:
            try:
                self._call(event)
            except Exception:
                if not self._has_failed:
                    self._has_failed = True
                    logger.exception(
                        "%r, which listens to events, has failed; if it does again, that is not logged", self._call
                    )


class Listeners:
    """All who listen to what happens in one place."""

    def __init__(self, calls: Iterable[Callable[[Event], object]]) -> None:
        """``calls`` are given each event; what they raise is logged once."""
        self._listeners = [Listener(call) for call in calls]

    def tell(self, event: Event) -> None:
        """Have all told, soon. Waits for nothing, and raises nothing."""
        for each in self._listeners:
            each.tell(event)

    def end(self) -> None:
        """That was all; wait for nothing."""
        for each in self._listeners:
            each.end()

    def close(self) -> None:
        """Wait until all is told, but not for those who keep it waiting. Safe to call twice."""
        deadline = time.monotonic() + _CLOSE_S
        for each in self._listeners:
            each.close(max(0.0, deadline - time.monotonic()))
