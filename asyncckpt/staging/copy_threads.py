"""The threads that copy beside the caller's own."""

from __future__ import annotations

import logging
import os
import threading
import weakref
from collections.abc import Callable
from queue import SimpleQueue

from asyncckpt.errors import CheckpointError
from asyncckpt.threads import Flag, start

logger = logging.getLogger(__name__)


class CopyThreads:
    """A few threads that carry out calls, in the order in which they are given.

    They run from the beginning: no thread has to be started in a save, which may fail. Calls are handed over by a queue
    written in C: an exception out of a signal handler cannot leave it locked, as it can ``ThreadPoolExecutor``. They
    end with the process, when all that was given to them is done.
    """

    def __init__(self, threads: int, name: str) -> None:
        """Start ``threads`` of them. Raises ``CheckpointError`` where the process may have no more."""
        self._calls: SimpleQueue[Callable[[], object] | None] = SimpleQueue()
        self._owner, self._is_closed = os.getpid(), False
        self._threads = [
            threading.Thread(target=_work, args=(self._calls,), name=f"{name}-{number}", daemon=True)
            for number in range(threads)
        ]
        _open.add(self)
        started = 0
        try:
            for thread in self._threads:
                start(thread)
                started += 1
        except CheckpointError:
            del self._threads[started:]
            raise

    def run(self, call: Callable[[], object]) -> None:
        """Have ``call`` called by one of them; where they have ended, or are another process's, here and now.

        What it raises is logged, and nobody is told.
        """
        if self._is_closed or self._owner != os.getpid():
            _make(call)
        else:
            self._calls.put(call)

    def wait(self) -> None:
        """Return when all is done that was given before, where there is one thread."""
        if self._is_closed:
            self._join()
        else:
            self.run((done := Flag()).set)
            done.wait()

    def close(self) -> None:
        """End them, once all that was given to them is done."""
        self._is_closed = True
        self._end()
        self._join()

    def __del__(self) -> None:
        self._end()

    def _end(self) -> None:
        for _ in getattr(self, "_threads", ()):  # none where the making was interrupted
            self._calls.put(None)

    def _join(self) -> None:
        for thread in self._threads:
            if thread.ident is not None:  # else its start was interrupted
                thread.join()


_open: weakref.WeakSet[CopyThreads] = weakref.WeakSet()


def _close_all() -> None:
    for threads in list(_open):
        threads.close()


# Where Python ends its own pools: before other threads are stopped in the midst of a copy, and in processes of
# multiprocessing too, which call nothing of atexit.
threading._register_atexit(_close_all)  # type: ignore[attr-defined]


def _work(calls: SimpleQueue[Callable[[], object] | None]) -> None:
    while (call := calls.get()) is not None:
        _make(call)
        del call


def _make(call: Callable[[], object]) -> None:
    try:
        call()
    except BaseException:  # the thread is there for the next call too
        logger.exception("a copy failed, and nobody was told")
