"""Events about saves, loads and workers, for listeners (``Config.on_event``).

A listener cannot make a save fail, and cannot block it. Each listener is called on a thread of its own. For one
checkpointer the calls come one after the other.
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

from asyncckpt.budgets import NOTICE_S
from asyncckpt.errors import SaveDroppedError

logger = logging.getLogger(__name__)

# Maximum number of waiting events; later events are dropped. A listener that hangs must not fill the memory.
_MOST_WAITING = 10_000

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
"""Phase of an event.

Phases of a save, in this order:

- ``planned``. ``source`` is "kept" if the plan was reused, otherwise "new".
- ``staged``: the caller may change the tensors.
- ``written``: this rank has written its part to storage.
- ``replicated``: other hosts have copies of all ranks' images (``Config.replicas``). This may come after the end.
- The end: ``committed`` on all ranks, ``failed``, or ``skipped`` (``Config.when_busy``).

``published``: readers of weights see the image of a save. ``uploaded``: a committed checkpoint was copied from the
local folder to the root. After ``upload failed`` the upload is retried.

Phases of a load: ``loaded`` (``source``: "memory", "local" or "storage") and ``load failed``. Phases of a worker:
``worker started``; ``worker restarted`` after a crash; ``memory taken over`` from the worker of a dead trainer.
"""


def end_of_save(failure: BaseException | None) -> EventPhase:
    """Return the phase of a save that has ended with ``failure``, or without one."""
    if failure is None:
        return "committed"
    return "skipped" if isinstance(failure, SaveDroppedError) else "failed"


@dataclass(frozen=True, kw_only=True)
class Event:
    """An event that has just happened on this rank."""

    phase: EventPhase
    rank: int
    """The rank in the group that saves or loads together."""
    path: str = ""
    """The checkpoint, file or folder of the event."""
    step: int | None = None
    """The training step of the save, or of the checkpoint that was loaded."""
    version: int | None = None
    """The version of published weights."""
    seconds: float | None = None
    """Duration of the phase, in seconds.

    At the end of a save: seconds since the call of ``save``. For an upload: seconds since the commit.
    """
    nbytes: int | None = None
    """Bytes on this rank: size of the image, or bytes read. For an upload: size of the whole checkpoint."""
    source: str | None = None
    """The source, see ``EventPhase``."""
    error: str | None = None
    """The error text."""
    timings: Mapping[str, float] = field(default_factory=dict)
    """For a save: all timings known at this point, as in ``Save.timings``."""
    at: float = field(default_factory=time.time)
    """The time of the event, in seconds since the epoch."""


class Listener:
    """A listener, and the thread that calls it. The thread starts with the first event.

    The thread keeps no reference to the listener. If the listener is garbage-collected without ``close``, the thread
    ends.
    """

    def __init__(self, call: Callable[[Event], object]) -> None:
        """Start no thread yet."""
        self._call = call
        self._is_warned = self._has_failed = False
        self._begin()

    def _begin(self) -> None:
        self._owner, self._starting = os.getpid(), threading.RLock()  # a signal handler may interrupt its holder
        self._waiting: SimpleQueue[Event | None] = SimpleQueue()
        self._thread: threading.Thread | None = None
        self._has_ended = False

    def tell(self, event: Event) -> None:
        """Queue the event for the thread. Never blocks, and never raises."""
        if self._owner != os.getpid():  # after a fork there is neither the thread nor its queue
            self._begin()
        if self._has_ended:
            return
        if self._waiting.qsize() >= _MOST_WAITING:
            if not self._is_warned:
                self._is_warned = True
                logger.warning("the listener %r is slower than the events: some of them are dropped", self._call)
            return
        self._waiting.put(event)
        if self._thread is None:
            with self._starting:
                if self._thread is None and not self._has_ended:
                    self._start()

    def call(self, event: Event) -> None:
        """Call the listener now, on this thread. The first exception is logged."""
        try:
            self._call(event)
        except BaseException as error:  # also exceptions that would silently end this thread
            if not self._has_failed:
                self._has_failed = True
                logger.exception("the listener %r failed (not logged again): %r", self._call, error)

    def close(self, timeout: float) -> None:
        """Deliver the waiting events, and accept no more. Waits at most ``timeout`` seconds."""
        with self._starting:
            thread, has_ended, self._has_ended = self._thread, self._has_ended, True
        if thread is None or has_ended or self._owner != os.getpid():
            return
        self._waiting.put(None)
        if thread is not threading.current_thread():
            thread.join(timeout)
            if thread.is_alive():
                logger.warning("the listener %r is still busy: the later events are not waited for", self._call)

    def _start(self) -> None:
        told = self._waiting, weakref.ref(self)
        self._thread = threading.Thread(target=_tell_all, args=told, name="asyncckpt-events", daemon=True)
        try:
            self._thread.start()
        except RuntimeError as error:  # no thread can be started, as at the end of the process
            self._thread = None
            logger.warning("events cannot be sent to listeners: %s", error)

    def __del__(self) -> None:
        self._waiting.put(None)


def _tell_all(waiting: SimpleQueue[Event | None], listener: weakref.ref[Listener]) -> None:
    while (event := waiting.get()) is not None and (found := listener()) is not None:
        found.call(event)
        del found


class Listeners:
    """All listeners of one source of events."""

    def __init__(self, calls: Iterable[Callable[[Event], object]]) -> None:
        """Make listeners of ``calls``. Each is called with every event; the first exception is logged."""
        self._listeners = [Listener(call) for call in calls]

    def tell(self, event: Event) -> None:
        """Queue the event for all listeners. Never blocks, and never raises."""
        for each in self._listeners:
            each.tell(event)

    def close(self) -> None:
        """Wait until all events are delivered, but only a few seconds for a slow listener. Safe to call twice."""
        deadline = time.monotonic() + NOTICE_S
        for each in self._listeners:
            each.close(max(0.0, deadline - time.monotonic()))
