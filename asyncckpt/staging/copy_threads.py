"""The threads that copy beside the caller's own."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from queue import SimpleQueue

from asyncckpt.errors import CheckpointError

logger = logging.getLogger(__name__)


class CopyThreads:
    """A few threads that carry out calls, in the order in which they are given.

    They run from the beginning: no thread has to be started in a save, which may fail. Calls are handed over by a queue
    written in C: an exception out of a signal handler cannot leave it locked, as it can ``ThreadPoolExecutor``.
    """

    def __init__(self, threads: int, name: str) -> None:
        """Start ``threads`` of them. Raises ``CheckpointError`` where the process may have no more."""
        self._calls: SimpleQueue[Callable[[], object] | None] = SimpleQueue()
        self._threads = [
            threading.Thread(target=_work, args=(self._calls,), name=f"{name}-{number}", daemon=True)
            for number in range(threads)
        ]
        started = 0
        try:
            for thread in self._threads:
                thread.start()
                started += 1
        except RuntimeError as error:
            del self._threads[started:]
            raise CheckpointError(f"no thread can be started that copies: {error}") from error

    def run(self, call: Callable[[], object]) -> None:
        """Have ``call`` called by one of them. What it raises is logged, and nobody is told."""
        self._calls.put(call)

    def close(self) -> None:
        """End them, once all that was given to them is done."""
        self._end()
        for thread in self._threads:
            thread.join()

    def __del__(self) -> None:
        self._end()

    def _end(self) -> None:
        for _ in self._threads:
            self._calls.put(None)


def _work(calls: SimpleQueue[Callable[[], object] | None]) -> None:
    while (call := calls.get()) is not None:
        try:
            call()
        except BaseException:  # this thread is there for the next call too
            logger.exception("a copy failed, and nobody was told")
        del call
