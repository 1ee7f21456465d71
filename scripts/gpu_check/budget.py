"""The seconds that a part has, and the limit of a single call within it."""

from __future__ import annotations

import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType


class Budget:
    """A span of time that has begun. Its owner asks before anything long, so that nobody has to kill it."""

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds
        self._end = time.monotonic() + seconds

    @property
    def left(self) -> float:
        """Return the seconds that are left, at least 0."""
        return max(0.0, self._end - time.monotonic())

    def share(self, fraction: float) -> Budget:
        """Return a budget of a fraction of the seconds left. The new budget begins now."""
        return Budget(self.left * fraction)

    @contextmanager
    def limit(self) -> Iterator[None]:
        """Raise ``TimeoutError`` in this block when nothing is left. Only the main thread may enter it.

        A signal raises it, so that it also ends the waits of peers that have no timeout of their own.
        """

        def expire(number: int, frame: FrameType | None) -> None:
            raise TimeoutError(f"cut short: its budget of {self.seconds:.0f} s is used up")

        before = signal.signal(signal.SIGALRM, expire)
        signal.setitimer(signal.ITIMER_REAL, max(0.01, self.left))
        try:
            yield
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)
            signal.signal(signal.SIGALRM, before)
