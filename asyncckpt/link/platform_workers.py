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
from dataclasses import replace

from asyncckpt.budgets import CHECK_S, NOTICE_S
from asyncckpt.link.endpoint import endpoint_name
from asyncckpt.link.process import NO_PLACE, WorkerOptions, how_it_ended, leave_folder, start_ahead

logger = logging.getLogger(__name__)

# The pauses before a worker is started again that did not end well: the first one, and the longest. Each is twice the
# one before. A worker that has run for the longest pause counts as a good one.
_PAUSE_S, _LONGEST_PAUSE_S = 1.0, 60.0


class _Rank:
    """One rank, and its worker if one runs."""

    def __init__(self, options: WorkerOptions) -> None:
        self._options = options
        self.pid: int | None = None
        self._pause = _PAUSE_S
        self._started = self._start_at = 0.0

    @property
    def has_settled(self) -> bool:
        """Whether the worker runs, and has an endpoint by now."""
        return self.pid is not None and time.monotonic() - self._started > NOTICE_S

    def run(self) -> None:
        """Start the worker, unless one runs, or a pause is not over."""
        if self.pid is None and time.monotonic() >= self._start_at:
            self._started = time.monotonic()
            try:
                self.pid = start_ahead(self._options)
            except OSError as error:
                self._wait(f"does not start: {error}")

    def note_end(self, code: int) -> None:
        """Take note that the worker has ended. A trainer that closes ends it with code 0."""
        self.pid = None
        if code == 0 or time.monotonic() - self._started > _LONGEST_PAUSE_S:
            self._pause = _PAUSE_S
        if code != 0:
            self._wait(how_it_ended(code))

    def _wait(self, why: str) -> None:
        rank, pause = self._options.rank, self._pause
        logger.warning("the worker of rank %d %s; the next one starts in %g s at the earliest", rank, why, pause)
        self._start_at = time.monotonic() + self._pause
        self._pause = min(2 * self._pause, _LONGEST_PAUSE_S)


def run_workers(job: str, ranks: Sequence[int]) -> int:
    """Run a worker for each of ``ranks`` until SIGTERM or SIGINT. Then let the workers write all staged saves, and end.

    This process may be the first one of a container: it reaps all processes that have lost their parent.

    Args:
        job: The description of the job, see ``job_of_checkpoints``.
        ranks: The ranks of this host, in their job.

    Returns:
        The exit status: 0 after a signal; ``NO_PLACE`` if no worker can have an endpoint.
    """
    ended: list[int] = []
    for each in (signal.SIGTERM, signal.SIGINT):
        signal.signal(each, lambda number, _: ended.append(number))
    for each in (signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2):  # launchers send them to all processes of a job
        signal.signal(each, signal.SIG_IGN)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # ignored, it would hide the ends of the workers
    leave_folder()
    # A trainer brings its own options.
    options = WorkerOptions(nice=0, io_class="none", linger=float("inf"), job=job)
    workers = [_Rank(replace(options, endpoint=endpoint_name(job, rank), rank=rank)) for rank in ranks]
    has_place, has_none = False, False
    while True:
        for pid, code in _ended_children():
            for worker in workers:
                if worker.pid == pid:
                    worker.note_end(code)
                    has_none = has_none or (code == NO_PLACE and not has_place)
        has_place = has_place or any(worker.has_settled for worker in workers)
        running = [worker.pid for worker in workers if worker.pid is not None]
        if (ended or has_none) and not running:
            return NO_PLACE if has_none else 0
        if ended or has_none:
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
