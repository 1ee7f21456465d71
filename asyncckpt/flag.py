"""A flag that one thread sets and others wait for, whatever signal handlers do meanwhile."""

from __future__ import annotations

import contextlib
import threading
import time

# For a waiter whose predecessor was interrupted just when it was to let this one in.
_LOOK_AGAIN_S = 1.0


class Flag:
    """What ``threading.Event`` is for. But an exception out of a signal handler (Ctrl-C) may come at any instant of any
    call: that class takes its lock by a method written in Python, and may be interrupted before it can leave it again;
    then all who come later wait for ever.
    """

    def __init__(self) -> None:
        self._is_set = False
        self._gate = threading.Lock()  # open once the flag is set
        self._gate.acquire()

    def is_set(self) -> bool:
        """Whether it is set."""
        return self._is_set

    def set(self) -> None:
        """Set it, for good."""
        self._is_set = True
        with contextlib.suppress(RuntimeError):  # it is open already
            self._gate.release()

    def wait(self, timeout: float | None = None) -> bool:
        """Wait until it is set, or ``timeout`` seconds have passed (None: for ever). Returns whether it is."""
        deadline = None if timeout is None else time.monotonic() + timeout
        while not self._is_set:
            left = _LOOK_AGAIN_S if deadline is None else deadline - time.monotonic()
            if left <= 0:
                return False
            if self._gate.acquire(timeout=min(left, _LOOK_AGAIN_S)):
                self.set()  # which lets the next one in
        return True
