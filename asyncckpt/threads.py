"""Threads in a process that may have reached its limit of threads, and locks that survive signal handlers."""

from __future__ import annotations

import contextlib
import functools
import gc
import logging
import os
import resource
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable
from concurrent.futures import CancelledError, Future, ThreadPoolExecutor
from concurrent.futures import TimeoutError as NotDoneError  # Python 3.10 has its own
from queue import Empty, SimpleQueue
from typing import Any, Generic, ParamSpec, TypeVar

from asyncckpt.budgets import POLL_S
from asyncckpt.errors import CheckpointError

logger = logging.getLogger(__name__)


def process_limit() -> str:
    """Return a part of an error text: the limit of threads and processes, and how to look it up."""
    limit, _ = resource.getrlimit(resource.RLIMIT_NPROC)
    number = "no number" if limit == resource.RLIM_INFINITY else f"{limit:,}"
    return (
        f"see the limit of processes and threads of this user (RLIMIT_NPROC, ulimit -u), which says {number}, and those"
        " of the container (pids.max) and of address space (ulimit -v)"
    )


def no_thread(error: RuntimeError) -> CheckpointError:
    """Return the error to raise if ``error`` has prevented the start of a thread."""
    return CheckpointError(f"no thread can be started: {error}; {process_limit()}")


def start(thread: threading.Thread) -> None:
    """Start a thread. Raises ``CheckpointError`` if the process has reached its limit of threads."""
    try:
        thread.start()
    except RuntimeError as error:
        raise no_thread(error) from error


# Seconds before a call is repeated that ran out of memory.
_AGAIN_S = 0.01


def make_all(calls: SimpleQueue[Callable[[], object] | None]) -> None:
    """Make the calls of a queue in their order, until None comes. Run this on a thread of its own.

    Each call is made by ``make``.
    """
    call = None
    while True:
        try:
            call = call or calls.get()
            if call is None:
                return
            make(call)
            call = None
        except MemoryError:
            pass


def make(call: Callable[[], object]) -> None:
    """Make a call. If it runs out of memory, repeat it, because another thread waits for it. Log other exceptions."""
    while True:
        try:
            call()
            return
        except MemoryError:
            time.sleep(_AGAIN_S)
        except BaseException:
            logger.exception("a call in the background failed: please report this")
            return


def settle(tasks: Iterable[Future[Any]]) -> None:
    """Cancel the tasks that have not begun, and wait until the others have ended or failed.

    ``concurrent.futures.wait`` takes the locks of all tasks, one after the other. An exception meanwhile (no memory,
    Ctrl-C) leaves some of the locks taken, and the threads of the pool wait for the locks for ever.
    """
    for task in [each for each in tasks if not each.cancel()]:
        task.exception()


def wait_done(task: Future[Any], timeout: float) -> None:
    """Wait at most ``timeout`` seconds for the end of a task. An interrupted wait leaves no lock taken."""
    with contextlib.suppress(NotDoneError, CancelledError):
        task.exception(timeout)


class Pool(ThreadPoolExecutor):
    """A pool that works with fewer threads at the limit. ``submit`` raises ``CheckpointError`` if no thread starts."""

    _has_threads = False

    def start(self, threads: int) -> None:
        """Start that many threads now, because a start may block for ever once the process has run out of memory."""
        filled = Flag()
        for _ in range(threads):
            self.submit(filled.wait)
        filled.set()

    def _adjust_thread_count(self) -> None:
        try:
            super()._adjust_thread_count()
            self._has_threads = True
        except RuntimeError as error:
            if not self._has_threads:
                raise no_thread(error) from error


# Seconds after which a waiter looks again: an interrupted waiter may not have opened the gate for the next one.
_LOOK_AGAIN_S = 1.0


class Turn:
    """A lock that lets one thread at a time into an object, and refuses calls from within a call."""

    def __init__(self) -> None:
        self._lock, self._owner = threading.RLock(), os.getpid()

    def take(self) -> threading.RLock:
        """Return the lock, for a ``with`` statement. ``RLock`` is in C, so that no interrupt leaves it locked.

        Raises ``CheckpointError`` if this thread holds the lock: the state is that of an interrupted call.
        """
        if self._owner != os.getpid():  # a thread of the parent process may hold the lock for ever
            self._lock, self._owner = threading.RLock(), os.getpid()
        if self._lock._is_owned():  # type: ignore[attr-defined]
            raise CheckpointError(
                "a call was made inside of another call of the same checkpointer, by a signal handler or while the"
                " state is asked for its values; have the handler set a flag, and save when that call has returned"
            )
        return self._lock


class Flag:
    """A replacement for ``threading.Event`` that survives an exception out of a signal handler (Ctrl-C).

    The exception may come at any instant of any call. ``threading.Event`` takes its lock in a method written in Python.
    If that method is interrupted before it releases the lock, all later waiters hang for ever.
    """

    def __init__(self) -> None:
        self._is_set = False
        self._gate = threading.Lock()  # open once the flag is set
        self._gate.acquire()

    def is_set(self) -> bool:
        """Return whether the flag is set."""
        return self._is_set

    def set(self) -> None:
        """Set the flag, for good."""
        self._is_set = True
        with contextlib.suppress(RuntimeError):  # the gate is open already
            self._gate.release()

    def wait(self, timeout: float | None = None) -> bool:
        """Wait until the flag is set, at most ``timeout`` seconds (None: no limit). Return whether it is set."""
        deadline = None if timeout is None else time.monotonic() + timeout
        while not self._is_set:
            left = _LOOK_AGAIN_S if deadline is None else deadline - time.monotonic()
            if left <= 0:
                return False
            if self._gate.acquire(timeout=min(left, _LOOK_AGAIN_S)):
                self.set()  # also opens the gate for the next waiter
        return True


P = ParamSpec("P")
T = TypeVar("T")


class Mailbox(Generic[T]):
    """A queue for one reader, which may be the main thread.

    ``SimpleQueue.get`` with a timeout waits for ever in the main thread if a signal handler runs past the timeout: it
    computes a negative rest, which means no limit (CPython 3.11; see ``simplequeue_get`` in ``_queuemodule.c``).
    """

    def __init__(self) -> None:
        self._items: deque[T] = deque()
        self._gate = threading.Lock()  # open if there may be items
        self._gate.acquire()

    def put(self, item: T) -> None:
        """Add an item. Any thread may call."""
        self._items.append(item)
        with contextlib.suppress(RuntimeError):  # the gate is open already
            self._gate.release()

    def get(self, timeout: float) -> T:
        """Wait at most ``timeout`` seconds for an item, and remove it. Raises ``queue.Empty`` after the timeout."""
        deadline = time.monotonic() + timeout
        while True:
            with contextlib.suppress(IndexError):
                return self._items.popleft()
            if not self._gate.acquire(timeout=max(0.0, deadline - time.monotonic())):
                raise Empty


def wait_until(condition: Callable[[], T], timeout: float | None, pause: float = POLL_S) -> T:
    """Wait until ``condition()`` is true, and return its last value.

    Args:
        condition: Called at once, and again after each pause.
        timeout: Maximum time in seconds; None: no limit. After that, the value is one that is not true.
        pause: The pause between two calls, in seconds.
    """
    deadline = None if timeout is None else time.monotonic() + timeout
    while not (found := condition()) and (deadline is None or time.monotonic() < deadline):
        time.sleep(pause)
    return found


def without_gc(function: Callable[P, T]) -> Callable[P, T]:
    """Return ``function`` with garbage collection disabled while it runs.

    Planning makes some ten objects for each tensor, and none of them is garbage. The search for garbage among them
    takes longer than the rest: 41 of the 62 us that the first rank spent on each shard of another rank. Do not use this
    for a function that waits beside a training, because the training may make garbage meanwhile. (A load comes before
    the training.)

    This is no context manager, because an exception out of a signal handler (Ctrl-C) may come before the first line of
    the exit of one.
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
        finally:  # a signal handler's exception may have cut the first attempt short
            if was_enabled:
                gc.enable()

    return pausing
