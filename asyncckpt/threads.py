"""Threads, in a process that may have no more of them."""

from __future__ import annotations

import contextlib
import functools
import gc
import resource
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import ParamSpec, TypeVar

from asyncckpt.errors import CheckpointError


def process_limit() -> str:
    """Return what limits the threads and processes of this one, and how to look at that, for an error."""
    limit, _ = resource.getrlimit(resource.RLIMIT_NPROC)
    number = "no number" if limit == resource.RLIM_INFINITY else f"{limit:,}"
    return (
        f"see the limit of processes and threads of this user (RLIMIT_NPROC, ulimit -u), which says {number}, and that"
        " of the container (pids.max)"
    )


def no_thread(error: RuntimeError) -> CheckpointError:
    """Return what to raise for ``error``, with which a thread could not be started."""
    return CheckpointError(f"no thread can be started: {error}; {process_limit()}")


def start(thread: threading.Thread) -> None:
    """Start a thread. Raises ``CheckpointError`` if the process may have no more."""
    try:
        thread.start()
    except RuntimeError as error:
        raise no_thread(error) from error


class Pool(ThreadPoolExecutor):
    """A pool of as many threads as can be started. ``submit`` raises ``CheckpointError`` if that is none."""

    _has_threads = False

    def _adjust_thread_count(self) -> None:
        try:
            super()._adjust_thread_count()
            self._has_threads = True
        except RuntimeError as error:
            if not self._has_threads:
                raise no_thread(error) from error


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


P = ParamSpec("P")
T = TypeVar("T")


def without_gc(function: Callable[P, T]) -> Callable[P, T]:
    """``function``, while which no garbage is collected.

    Planning makes some ten objects for each tensor, none of them garbage. To look for it among them takes longer than
    all else: of the 62 us that the first rank spent on each shard of another, 41. Not for what waits beside a training,
    which may make garbage meanwhile (a load is before one).

    No context manager: an exception out of a signal handler (Ctrl-C) may come before the first line of what ends one.
    """

    @functools.wraps(function)
    def pausing(*args: P.args, **named: P.kwargs) -> T:
        was_enabled = gc.isenabled()
        try:
            try:
                gc.disable()
                return function(*args, **named)
            finally:
                if was_enabled:
                    gc.enable()
        finally:  # such an exception may have cut the first short
            if was_enabled:
                gc.enable()

    return pausing
