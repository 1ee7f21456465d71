"""Workers that the platform runs: started ahead of their trainers, and started again whenever one ends.

A worker ends with its trainer's last save, or when it is killed. The platform wants one at any time: the trainer that
comes next has to find it, and not start another one in its own container, which would die with the container.
"""

from __future__ import annotations

import logging
import os
import signal
import time
from collections.abc import Sequence

from asyncckpt.budgets import CHECK_S
from asyncckpt.link.endpoint import endpoint_name
from asyncckpt.link.process import NO_PLACE, WorkerOptions, how_it_ended, start_ahead

logger = logging.getLogger(__name__)

# The pauses before a worker is started again that did not end well: the first one, and the longest. Each is twice the
# one before. A worker that has run for the longest pause counts as a good one.
_PAUSE_S, _LONGEST_PAUSE_S = 1.0, 60.0


class _Rank:
    """One rank, and its worker if one runs."""

    def __init__(self, rank: int, options: WorkerOptions) -> None:
        self.rank = rank
        self.start = start_ahead(options)
        self.pid: int | None = None
        self._pause = _PAUSE_S
        self._started = self.start_at = 0.0

    def run(self) -> None:
        """Start the worker, unless one runs, or a pause is not over. Raises ``OSError``."""
        if self.pid is None and time.monotonic() >= self.start_at:
            self._started = time.monotonic()
            self.pid = self.start()

    def note_end(self, code: int) -> None:
        """Take note that the worker has ended. A trainer that closes ends it with code 0."""
        self.pid = None
        if code == 0 or time.monotonic() - self._started > _LONGEST_PAUSE_S:
            self._pause = _PAUSE_S
        if code != 0:
            logger.warning(
                "the worker of rank %d %s; another starts in %g s", self.rank, how_it_ended(code), self._pause
            )
            self.start_at = time.monotonic() + self._pause
            self._pause = min(2 * self._pause, _LONGEST_PAUSE_S)


def run_workers(job: str, ranks: Sequence[int]) -> int:
    """Run a worker for each of ``ranks`` until SIGTERM or SIGINT. Then let the workers write all staged saves, and end.

    This process may be the first one of a container: it reaps all processes that have lost their parent.

    Args:
        job: The description of the job, see ``job_of_checkpoints``.
        ranks: The ranks of this host, in their job.

    Returns:
        The exit status: 0 after a signal; ``NO_PLACE`` if workers cannot have an endpoint.

    Raises:
        OSError: A worker cannot be started.
    """
    ended: list[int] = []
    for each in (signal.SIGTERM, signal.SIGINT):
        signal.signal(each, lambda number, _: ended.append(number))
    for each in (signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2):  # launchers send them to all processes of a job
        signal.signal(each, signal.SIG_IGN)
    workers = [
        _Rank(
            rank,
            WorkerOptions(
                nice=0, io_class="none", linger=float("inf"), endpoint=endpoint_name(job, rank), job=job, rank=rank
            ),
        )
        for rank in ranks
    ]
    os.chdir("/")
    status = 0
    while True:
        for pid, code in _ended_children():
            for worker in workers:
                if worker.pid == pid:
                    worker.note_end(code)
                    status = code if code == NO_PLACE else status
        is_over = bool(ended) or status == NO_PLACE
        running = [worker.pid for worker in workers if worker.pid is not None]
        if is_over and not running:
            return status
        if is_over:
            # A worker with a trainer ignores the signal. It ends when its trainer has ended, and all is written.
            for pid in running:
                os.kill(pid, signal.SIGTERM)
        else:
            for worker in workers:
                worker.run()
        time.sleep(CHECK_S)


def _ended_children() -> list[tuple[int, int]]:
    """Return the process ids and the exit codes of children that have ended."""
    found: list[tuple[int, int]] = []
    while True:
        try:
            pid, status = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return found
        if pid == 0:
            return found
        found.append((pid, os.waitstatus_to_exitcode(status)))
