"""The supervisor of workers: it starts one, has it take over from a dead trainer's, and starts another with a limit.

An orderly end of the process is no death: whatever still has a worker then is closed, and no worker lingers. After an
error that nobody has caught the workers linger, as the training is likely to be started again. Where that is done in
the same process, what was there before is closed, and its workers linger, too. What is dropped while the process goes
on has ended well: its worker finishes what it was given, and leaves.

A process whose saves failed, and that was never told, ends with status 120, so that what depends on them stops.
"""

from __future__ import annotations

import atexit
import contextlib
import io
import logging
import os
import sys
import time
import warnings
import weakref
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, Protocol

from asyncckpt.config import Config
from asyncckpt.errors import (
    CheckpointError,
    ClosedError,
    JobTakenError,
    SaveTimeoutError,
    WorkerDiedError,
    is_interrupt,
    located,
)
from asyncckpt.events import Event, EventPhase, Listeners
from asyncckpt.link.client import WorkerClient, longest
from asyncckpt.link.endpoint import endpoint_name, take_log
from asyncckpt.link.messages import Claim
from asyncckpt.link.process import WorkerOptions, detached_workers
from asyncckpt.link.root_lock import take_root
from asyncckpt.link.takeover import Takeover
from asyncckpt.storage import absolute

logger = logging.getLogger(__name__)

_CLOSED = "this checkpointer is closed; make a new one"
_TAKEN_OVER = "another one of this process for the same folder or address has taken over from this one: use that"
_GIVEN_UP = "this was given up, as its process begins anew; make a new one"

# By their ids: all of them can be looked at in one step, while others come and go in other threads.
_open: weakref.WeakValueDictionary[int, Supervisor] = weakref.WeakValueDictionary()
# Whether a save has failed without an exception that told this process.
_has_lost = False
# Those that were given up, until they are closed: whoever takes over needs the locks on their memory.
_given_up: dict[int, Supervisor] = {}


class Ranks(Protocol):
    """The ranks that save together."""

    @property
    def alone(self) -> bool:
        """Whether there is but one."""

    def is_current(self) -> bool:
        """Whether their job is still there."""

    def close(self) -> None:
        """End all waits for each other at once, in whatever thread they are."""


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
        ranks: Callable[[], Ranks | None] | None = None,
    ) -> None:
        """Start nothing yet. ``register`` it.

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
            ranks: Says which it is for, if they have met; None: none, and this is never given up.
        """
        self._config = config
        self._job = job
        self._claim = claim
        self._on_death, self._hand_over, self._close_owner = on_death, hand_over, close
        self._ranks = ranks
        self._predecessor: Takeover | None = None
        self._has_looked = self._has_begun = self._is_warned = False
        self._over = ""  # why nothing can be asked any more
        self._owner = os.getpid()
        self._deaths = 0  # of workers, since a save was committed
        self._restart_at = 0.0
        self.listeners = Listeners(config.listeners)
        """Who is told what becomes of all that this worker is for."""
        self.client: WorkerClient | None = None
        """The worker, once there is one; it may have died."""
        # Begun, and not known to have ended: more than ``client`` where an exception came while one was started.
        self._begun: list[WorkerClient] = []

    def register(self) -> None:
        """Whoever this is for is made, and can be closed: from now on it is, as the head of this module says."""
        _open[id(self)] = self

    def claim(self, claim: Claim) -> None:
        """Have the first rank's worker, once it starts, lock a folder, unless it is to lock another."""
        self._claim = self._claim or claim

    def running(self, rank: int) -> WorkerClient:
        """The worker of ``rank``; a new one where there is none yet, or it has died.

        Raises ``JobTakenError``, ``SaveTimeoutError``, ``WorkerDiedError`` (also where too many have died in a row),
        ``ClosedError``.
        """
        self.check_usable()
        if self.client is not None and not self.client.alive:
            self.check_open()  # it may have been left just now, by ``give_up``, and not be dead at all
            self._on_death()
            self.client.close(self._config.timeout)
            self.client = None  # no more is known to run, see ``_leave_unfinished``
            self._record_death()
        if self.client is None:
            self._check_limit(rank)
            begun = time.perf_counter()
            try:
                self.client = self._start(rank)
            except WorkerDiedError:
                self._record_death()
                raise
            if self._over:  # it was given up meanwhile, when there was nobody to leave yet
                self.client.detach()
                self.check_open()
            phase: EventPhase = "worker restarted" if self._deaths else "worker started"
            self._tell(phase, rank, time.perf_counter() - begun)
        return self.client

    def find_predecessor(self, rank: int) -> Takeover | None:
        """The worker that the trainer before this one has left, as long as its memory is not taken over.

        Raises ``JobTakenError`` where that trainer lives, ``SaveTimeoutError`` where its worker does not answer.
        """
        if self._job is not None and not self._has_looked and self.client is None:
            self._close_others(only_stale=True)
            with self._named():
                endpoint = endpoint_name(self._job, rank)
                self._predecessor = Takeover.find(endpoint, self._config.timeout, detached_workers())
            self._has_looked, self._owner = True, os.getpid()
        return self._predecessor

    def record_commit(self) -> None:
        """A save is committed: workers do not die in a row."""
        self._deaths = 0

    def is_over(self) -> bool:
        """Whether another is to take the place: the job of its ranks is no more; or, of one process alone, this is
        closed or given up. Ranks that were given up have to be joined anew first, or each would save by itself.
        """
        ranks = self._ranks and self._ranks()
        if ranks is not None and not ranks.is_current():
            return True
        return bool(self._over) and (ranks is None or ranks.alone)

    def check_open(self) -> None:
        """Raise ``ClosedError`` once this is closed, or given up."""
        if self._over:
            raise ClosedError(self._over)

    def check_usable(self) -> None:
        """As ``check_open``; also in a fork of the process that the worker was started by."""
        self.check_open()
        if self.client is not None:
            self.client.check_owner()
        elif self._predecessor is not None and self._owner != os.getpid():
            raise ClosedError("this checkpointer has looked for its worker in another process: make one in each fork")

    def leave(self, *, linger: bool) -> CheckpointError | None:
        """End the worker when it has written what it has; with ``linger`` it stays as if this process had died.

        Returns the ``SaveTimeoutError`` where it is still writing after ``Config.timeout`` seconds.
        """
        self._over = self._over or _CLOSED
        self._leave_unfinished()
        if self.client is not None:
            try:
                if linger:
                    self.client.detach()
                else:
                    self.client.close(self._config.timeout)
            except CheckpointError as error:
                return error
        return None

    def give_up(self, timeout: float) -> None:
        """Leave the worker as if this process had died, at once, whatever its owner is doing in another thread: what
        that waits for ends, with an error. ``timeout``: seconds that this may take. The owner is still to be closed.
        """
        if self._ranks is not None:
            self._over = self._over or _GIVEN_UP
            _given_up[id(self)] = self
            if id(self) not in _open:  # closed meanwhile, by its own thread: nobody would look for it any more
                _given_up.pop(id(self), None)
            if self.client is not None:
                self.client.detach(timeout)
            if (ranks := self._ranks()) is not None:
                ranks.close()

    def close(self) -> None:
        """Let go of a predecessor's memory that no worker has taken over, and of those who listen; after ``leave``, and
        when all is closed that this is for: what an exception interrupts is found, and closed, by who takes over.
        """
        self._forget_predecessor()
        self.listeners.close()
        _open.pop(id(self), None)
        _given_up.pop(id(self), None)

    def _leave_unfinished(self) -> None:
        """Workers that nobody has come to know, as an exception came while they were started, are to linger."""
        for client in [each for each in self._begun if each is not self.client]:
            client.detach()
            self._begun.remove(client)

    def _forget_predecessor(self) -> None:
        if self._predecessor is not None:
            self._predecessor.close()
            self._predecessor, self._has_looked = None, False

    @contextlib.contextmanager
    def _named(self) -> Iterator[None]:
        """Have a ``JobTakenError`` say which folder this is for."""
        try:
            yield
        except JobTakenError as error:
            raise located(error, path=None if self._claim is None else self._claim.root) from None

    def _tell(self, phase: EventPhase, rank: int, seconds: float, nbytes: int | None = None) -> None:
        path = "" if self._claim is None else self._claim.root
        self.listeners.tell(Event(phase=phase, rank=rank, path=path, seconds=seconds, nbytes=nbytes))

    def __del__(self) -> None:
        for client in getattr(self, "_begun", ()):  # also where what closes this was interrupted
            client.abandon()
        if not getattr(self, "_over", True) and getattr(self, "client", None) is not None:
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
        config, self._has_begun = self._config, True
        self._leave_unfinished()
        self._close_others()
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
                metrics_folder=config.metrics_folder and absolute(config.metrics_folder),
            ),
            lambda uploaded: listeners.tell(uploaded.event(rank)),  # it shall not keep this object
            self._begun.append,
        )
        try:
            # First the memory: until this one has it, the worker before it must stay.
            self._hand_over(client, predecessor)
            if predecessor is not None:
                predecessor.retire(config.timeout, longest(config.commit_timeout))
                self._predecessor = None
                nbytes = sum(segment.nbytes for segment in predecessor.segments.values())
                self._tell("memory taken over", rank, time.perf_counter() - begun, nbytes)
            with self._named():
                self._take_endpoint(client, endpoint)
            if rank == 0 and self._claim is not None:
                self._take_root(client, self._claim)
            if endpoint is not None and (words := take_log(endpoint)):
                logger.warning("what the worker of the trainer before this one had to say: %s", words)
        except BaseException as error:
            if is_interrupt(error):  # it may be the only one that has the memory by now
                client.detach()
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

    def _close_others(self, *, only_stale: bool = False) -> None:
        """Close what nobody has closed: a cell of a notebook that is run again makes another one, and so does a
        training that is started again in the same process. ``only_stale``: as long as this has only loaded.
        """
        for other in known_supervisors():
            if other is self:
                continue
            is_taken_over = other._job == self._job is not None and (other.is_over() or not only_stale)
            if is_taken_over and other._has_begun and not other._over:
                logger.warning("what this process had for the same folder or address is closed: it is used anew")
                other._over = _TAKEN_OVER
            if other._over:  # also where it has only loaded: nobody else would end its threads
                other.close_owner("as another takes over", linger=True)
            elif is_taken_over:
                other._forget_predecessor()  # it has only loaded, and may go on with that

    def close_owner(self, when: str, *, linger: bool) -> None:
        """Close all that the worker is for. What goes wrong is logged, and noted for the status of the process."""
        try:
            self._close_owner(linger)
        except CheckpointError as error:
            logger.error("while closing %s: %s", when, str(error))
            if not isinstance(error, ClosedError):  # a worker that was left goes on with the saves
                note_loss()

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


def known_supervisors() -> list[Supervisor]:
    """Those of this process that are not closed."""
    return [each for ref in _open.valuerefs() if (each := ref()) is not None]


def note_loss() -> None:
    """Have this process end with status 120, because a save has failed and no call can raise the failure any more."""
    global _has_lost
    _has_lost = True


class _FailingStream:
    """A standard stream whose last flush fails.

    Python has no way to change the status of a process that is ending. But if a standard stream cannot be flushed at
    the end, Python ends with status 120 (see ``sys.exit``), after all that others have registered with ``atexit``.
    """

    closed = False

    def __init__(self, stream: Any) -> None:
        self._stream = stream

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def flush(self) -> None:
        """Raise ``OSError`` once Python is past all calls of ``atexit``."""
        self._stream.flush()
        if sys.is_finalizing():
            raise OSError("a save has failed")


@atexit.register
def _close_all() -> None:
    # A shell, or a notebook, goes on after an error.
    by_error = isinstance(getattr(sys, "last_value", None), Exception) and not hasattr(sys, "ps1")
    for each in known_supervisors():
        each.close_owner("at the end of the process", linger=by_error)
    if _has_lost and not by_error:
        sys.stderr = _FailingStream(sys.stderr or io.StringIO())


def _after_fork_in_child() -> None:
    global _has_lost
    _has_lost = False
    _open.clear()
    _given_up.clear()


os.register_at_fork(after_in_child=_after_fork_in_child)
