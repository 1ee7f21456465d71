"""Threads, in a process that may have no more of them."""

from __future__ import annotations

import resource
import threading
from concurrent.futures import ThreadPoolExecutor

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
