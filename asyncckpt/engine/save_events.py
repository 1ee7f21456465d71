"""What becomes of one save, as events, in their order."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from asyncckpt.events import Event, EventPhase, end_of_save


class EventsOfSave:
    """Tells them; none before the call of ``save`` is over, as who listens would take a core from the caller.

    Any thread may call.
    """

    def __init__(self, tell: Callable[[Event], object], *, path: str, step: int | None, rank: int) -> None:
        """``tell`` is given each; the rest is as of an event."""
        self._tell = tell
        self._about: dict[str, Any] = {"path": path, "step": step, "rank": rank}
        self._early: list[Event] | None = []
        self._plan: tuple[str, float] | None = None
        self._lock = threading.RLock()

    def planned(self, *, is_new: bool, nbytes: int) -> None:
        """Its plan is known: one made for it, or kept; and the bytes of its image."""
        self._plan = "new" if is_new else "kept", time.time()
        self._about["nbytes"] = nbytes

    def on_return(self, timings: Mapping[str, float]) -> None:
        """The call is over: tell what has happened in it, and from now on all at once."""
        with self._lock:
            early, self._early = self._early or [], None
            if self._plan is not None:
                source, at = self._plan
                self.tell("planned", timings, timings.get("plan_s"), source=source, at=at)
            for event in early:
                self._tell(replace(event, timings={**event.timings, "stall_s": timings["stall_s"]}))

    def tell(self, phase: EventPhase, timings: Mapping[str, float], seconds: float | None, **more: Any) -> None:
        """It is in ``phase`` now, which took so many ``seconds``. Waits for nothing, and raises nothing."""
        event = Event(phase=phase, seconds=seconds, timings=dict(timings), **self._about, **more)
        with self._lock:
            if self._early is None:
                self._tell(event)
            else:
                self._early.append(event)

    def end(self, failure: BaseException | None, timings: Mapping[str, float], seconds: float) -> None:
        """It has ended, so many ``seconds`` after the call."""
        error = None if failure is None else f"{type(failure).__name__}: {failure}"
        self.tell(end_of_save(failure), timings, seconds, error=error)
