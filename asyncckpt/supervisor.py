"""The supervisor of workers: it starts one, has it take over from a dead trainer's, and starts another with a limit.

An orderly end of the process is no death: whatever still has a worker then is closed, and no worker lingers. After an
error that nobody has caught the workers linger, as the training is likely to be started again.
"""

from __future__ import annotations

import atexit
import contextlib
import logging
import os
import sys
import time
import warnings
import weakref
from collections.abc import Callable
from functools import partial

from asyncckpt.config import Config
from asyncckpt.errors import CheckpointError, ClosedError, JobTakenError, SaveTimeoutError, WorkerDiedError
from asyncckpt.events import Event, EventPhase, Listeners
from asyncckpt.worker.client import WorkerClient
from asyncckpt.worker.endpoint import endpoint_name, take_log
from asyncckpt.worker.open_saves import longest
from asyncckpt.worker.process import WorkerOptions, detached_workers
from asyncckpt.worker.root_claim import Claim
from asyncckpt.worker.root_lock import take_root
from asyncckpt.worker.takeover import Takeover

logger = logging.getLogger(__name__)

_open: weakref.WeakSet[Supervisor] = weakref.WeakSet()


class Supervisor:
    """Keeps one worker running for a trainer, from the first call of ``running`` on."""

    def __init__(
        self,
        config: Config,
        job: str | None,
        on_death: Callable[[], object],
        hand_over: Callable[[WorkerClient, Takeover | None], object],
        close: Callable[[bool], object],
        claim: Claim | None = None,
    ) -> None:
        """Start nothing yet.

        Args:
            config: What the workers are to be like, and how many may die in a row.
            job: A text by which a trainer finds the worker of the one before it; None: the worker leaves with its
                trainer, and nobody finds it.
            on_death: Told that the worker has died, before another is started: its memory is nobody's.
            hand_over: Gives a new worker the memory that outlived the one before it, or that of the worker which the
                trainer before this one has left.
            close: Closes all that this worker is for, once the process ends, or something else in it wants a worker for
                the same job. Told whether the worker is to linger. May raise ``CheckpointError``.
            claim: The folder that the first rank's worker is to lock; None: there is none.
        """
        self._config = config
        self._job = job
        self._claim = claim
        self._on_death, self._hand_over, self._close_owner = on_death, hand_over, close
        self._predecessor: Takeover | None = None
        self._has_looked = self._closed = self._is_warned = False
        self._owner = os.getpid()
        self._deaths = 0  # of workers, since a save was committed
        self._restart_at = 0.0
        self.listeners = Listeners(config.listeners)
        """Who is told what becomes of all that this worker is for."""
        self.client: WorkerClient | None = None
        """The worker, once there is one; it may have died."""
        _open.add(self)

    def running(self, rank: int) -> WorkerClient:
        """The worker of ``rank``; a new one where there is none yet, or it has died.

        Raises ``JobTakenError``, ``SaveTimeoutError``, ``WorkerDiedError`` (also where too many have died in a row).
        """
        self.check_usable()
        if self.client is not None and not self.client.alive:
            self._on_death()
            self.client.close(self._config.timeout)
            self.client = None
            self._record_death()
        if self.client is None:
            self._check_limit(rank)
            begun = time.perf_counter()
            try:
                self.client = self._start(rank)
            except WorkerDiedError:
                self._record_death()
                raise
            phase: EventPhase = "worker restarted" if self._deaths else "worker started"
            self._tell(phase, rank, time.perf_counter() - begun)
        return self.client

    def find_predecessor(self, rank: int) -> Takeover | None:
        """The worker that the trainer before this one has left, as long as its memory is not taken over.

        Raises ``JobTakenError`` where that trainer lives, ``SaveTimeoutError`` where its worker does not answer.
        """
        if self._job is not None and not self._has_looked and self.client is None:
            self._predecessor = Takeover.find(endpoint_name(self._job, rank), self._config.timeout, detached_workers())
            self._has_looked, self._owner = True, os.getpid()
        return self._predecessor

    def record_commit(self) -> None:
        """A save is committed: workers do not die in a row."""
        self._deaths = 0

    def check_usable(self) -> None:
        """Raise ``ClosedError`` once this is closed, and in a fork of the process that the worker was started by."""
        if self._closed:
            raise ClosedError("this checkpointer is closed; make a new one")
        if self.client is not None:
            self.client.check_owner()
        elif self._predecessor is not None and self._owner != os.getpid():
            raise ClosedError("this checkpointer has looked for its worker in another process: make one in each fork")

    def leave(self, *, linger: bool) -> None:
        """End the worker when it has written what it has; with ``linger`` it stays as if this process had died.

        Raises ``SaveTimeoutError`` where it is still writing after ``Config.timeout`` seconds.
        """
        self._closed = True
        _open.discard(self)
        if self.client is not None:
            if linger:
                self.client.detach()
            else:
                self.client.close(self._config.timeout)

    def close(self) -> None:
        """Let go of a predecessor's memory that no worker has taken over, and of those who listen."""
        if self._predecessor is not None:
            self._predecessor.close()
            self._predecessor = None
        self.listeners.close()

    def _tell(self, phase: EventPhase, rank: int, seconds: float, nbytes: int | None = None) -> None:
        path = "" if self._claim is None else self._claim.root
        self.listeners.tell(Event(phase=phase, rank=rank, path=path, seconds=seconds, nbytes=nbytes))

    def __del__(self) -> None:
        if not getattr(self, "_closed", True) and self.client is not None:
            self.client.abandon()
            warnings.warn("what saves or publishes was not closed", ResourceWarning, stacklevel=2, source=self)

    def _check_limit(self, rank: int) -> None:
        died = f"the worker has died {self._deaths} times in a row, and"
        if self._deaths > self._config.worker_restarts:
            raise WorkerDiedError(
                f"{died} no other is started (see Config.worker_restarts); look at what is in the log, then make a new"
                " checkpointer",
                rank=rank,
            )
        if (left := self._restart_at - time.monotonic()) > 0:
            raise WorkerDiedError(f"{died} another is started in {left:.1f} s", rank=rank)

    def _record_death(self) -> None:
        """The next may be started at once, but not one after the other."""
        self._deaths += 1
        if self._deaths > 1:
            self._restart_at = time.monotonic() + self._config.restart_pause * 2 ** (self._deaths - 2)

    def _start(self, rank: int) -> WorkerClient:
        config = self._config
        self._close_forgotten()
        endpoint = None if self._job is None else endpoint_name(self._job, rank)
        predecessor, listeners = self.find_predecessor(rank), self.listeners
        begun = time.perf_counter()
        client = WorkerClient(
            WorkerOptions(
                direct_io=config.direct_io,
                io_threads=config.io_threads,
                nice=config.nice,
                io_class=config.io_class,
                start_timeout=config.start_timeout,
                linger=config.linger,
                endpoint=endpoint,
                job=self._job,
                rank=rank,
                metrics_folder=config.metrics_folder and os.path.abspath(config.metrics_folder),
            ),
            lambda uploaded: listeners.tell(uploaded.event(rank)),  # it shall not keep this object
        )
        try:
            # First the memory: until this one has it, the worker before it must stay.
            self._hand_over(client, predecessor)
            if predecessor is not None:
                predecessor.retire(config.timeout, longest(config.commit_timeout))
                self._predecessor = None
                nbytes = sum(segment.nbytes for segment in predecessor.segments.values())
                self._tell("memory taken over", rank, time.perf_counter() - begun, nbytes)
            self._take_endpoint(client, endpoint)
            if rank == 0 and self._claim is not None:
                self._take_root(client, self._claim)
            if endpoint is not None and (words := take_log(endpoint)):
                logger.warning("what the worker of the trainer before this one had to say: %s", words)
        except BaseException:
            with contextlib.suppress(SaveTimeoutError):  # it ends by itself; what is raised says why it has to
                client.close(config.timeout)
            raise
        return client

    def _take_root(self, client: WorkerClient, claim: Claim) -> None:
        timeout = self._config.timeout
        trouble = take_root(claim, partial(client.claim, claim, timeout), timeout)
        if trouble is not None and not self._is_warned:
            self._is_warned = True
            logger.warning("%s is not locked, and another job can save there: %s", claim.root, trouble)

    def _close_forgotten(self) -> None:
        """A cell of a notebook that is run again makes another one, and nobody has closed the one before."""
        for other in list(_open):
            if other is not self and other.client is not None and other._job == self._job is not None:
                logger.warning("what this process had for the same folder or address is closed: it is used anew")
                other.close_owner(linger=True)

    def close_owner(self, *, linger: bool) -> None:
        """Close all that the worker is for. What goes wrong is logged: there is nobody to be told."""
        try:
            self._close_owner(linger)
        except CheckpointError as error:
            logger.error("while closing at the end of the process: %s", str(error))

    def _take_endpoint(self, client: WorkerClient, endpoint: str | None) -> None:
        """Have the worker take its endpoint, which may be that of one whose trainer died while it took over."""
        timeout = self._config.timeout
        deadline = time.monotonic() + timeout
        while True:
            try:
                return client.listen(timeout)
            except JobTakenError:
                if endpoint is None or time.monotonic() > deadline:
                    raise
            if (left := Takeover.find(endpoint, timeout, detached_workers())) is not None:
                with left:
                    left.retire(timeout, longest(self._config.commit_timeout))


@atexit.register
def _close_all() -> None:
    # A shell, or a notebook, goes on after an error.
    by_error = isinstance(getattr(sys, "last_value", None), Exception) and not hasattr(sys, "ps1")
    for each in list(_open):
        each.close_owner(linger=by_error)


os.register_at_fork(after_in_child=_open.clear)
