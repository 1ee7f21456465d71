"""A seeded order of events: one seed is one history, so every failure can be replayed."""

from __future__ import annotations

import heapq
import random
from collections.abc import Callable, Iterator
from typing import Any


class Violation(AssertionError):
    """A promise is broken."""


class Schedule:
    """The events of a history, by time. ``end_s``: the maximum length of a history, in seconds."""

    def __init__(self, seed: int, end_s: float) -> None:
        self.random = random.Random(seed)
        self.now, self._end_s, self._order = 0.0, end_s, 0
        self._queue: list[tuple[float, int, Callable[..., None], tuple[Any, ...]]] = []

    def after(self, delay: float, what: Callable[..., None], *arguments: Any) -> None:
        self.at(self.now + delay, what, *arguments)

    def at(self, when: float, what: Callable[..., None], *arguments: Any) -> None:
        self._order += 1
        heapq.heappush(self._queue, (when, self._order, what, arguments))

    def happen(self) -> Iterator[None]:
        """Carry out one thing after the other. Yield after each. Raises ``Violation``."""
        while self._queue:
            self.now, _, what, arguments = heapq.heappop(self._queue)
            if self.now > self._end_s:
                raise Violation("this never ends")
            what(*arguments)
            yield
