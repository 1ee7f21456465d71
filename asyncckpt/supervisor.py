"""Supervisor: attaches to the worker that a dead trainer has left, or starts one, and replaces it up to a limit.

An orderly end of the process is no crash: every owner that still has a worker is closed, and no worker lingers. After
an uncaught error the workers linger, because the training is likely to be restarted. If the training restarts in the
same process, the previous owner is closed, and its workers linger too. If an owner is garbage-collected while the
process goes on, its worker finishes the pending writes and exits.

A process ends with status 120 if a save has failed and the failure was never reported. Dependent jobs stop then.
"""

from __future__ import annotations

import atexit
import contextlib
import io
import logging
import os
import sys
import threading
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
from asyncckpt.link.api import Claim, SessionApi
from asyncckpt.link.client import WorkerClient, longest
from asyncckpt.link.endpoint import endpoint_name, take_log
from asyncckpt.link.process import WorkerOptions, detached_workers
from asyncckpt.link.root_lock import take_root
from asyncckpt.link.takeover import Takeover
from asyncckpt.storage import absolute
from asyncckpt.storage.uploads import Uploaded

logger = logging.getLogger(__name__)

_CLOSED = "this checkpointer is closed; make a new one"
_TAKEN_OVER = "another checkpointer or publisher of this process for this folder or address has taken over: use that"
_GIVEN_UP = "this checkpointer was closed, because its process restarts the training; make a new one"

# Keyed by id: all supervisors can be listed in one step, while other threads add and remove supervisors.
_open: weakref.WeakValueDictionary[int, Supervisor] = weakref.WeakValueDictionary()
# Whether a save has failed without an exception in this process.
_has_lost = False
# Supervisors that were given up, until they are closed. A successor needs the locks on their memory.
_given_up: dict[int, Supervisor] = {}


class RanksOfSaves(Protocol):
    """The ranks that save together."""

    @property
    def alone(self) -> bool:
        """Return whether there is only one rank."""

    def is_current(self) -> bool:
        """Return whether the job of the ranks still exists."""

    def close(self) -> None:
        """End all waits for each other at once, in whatever thread they are."""


class Supervisor:
    """Keep one worker running for a trainer, from the first call of ``running`` on."""

    def __init__(
        self,
        config: Config,
        job: str | None,
        on_death: Callable[[], object],
        hand_over: Callable[[WorkerClient, Takeover | None, bool], object],
        close: Callable[[bool], object],
        replace: Callable[[], object],
        claim: Claim | None = None,
        ranks: Callable[[], RanksOfSaves | None] | None = None,
    ) -> None:
        """Start nothing yet. The caller has to ``register`` the supervisor.

        Args:
            config: The options of the workers, and how many may die in a row.
            job: The key for finding the worker of the previous trainer; None: the worker exits with its trainer, and
                cannot be found.
            on_death: Called when the worker has died, before another is started. The memory of the dead worker has no
                owner.
            hand_over: Continues in the memory of the previous trainer. The last argument says whether the worker is the
                previous one, too.
            close: Closes the owner, at the end of the process, or when something else in the process wants a worker for
                the same job. The argument says whether the worker lingers. May raise ``CheckpointError``.
            replace: Calls ``running`` for a worker that has died, and allocates memory for the next save. Called on a
                thread of its own. May raise ``CheckpointError``.
            claim: The folder that the first rank's worker locks; None: no folder.
            ranks: Returns the ranks once they have met, or None; None: no ranks, and the supervisor is never given up.
        """
        self._config = config
        self._job = job
        self._claim = claim
        self._on_death, self._hand_over, self._close_owner, self._replace = on_death, hand_over, close, replace
        self._ranks = ranks
        self._predecessor: Takeover | None = None
        self._has_looked = self._has_begun = self._is_warned = False
        self._over = ""  # the reason why requests are refused
        self._owner = os.getpid()
        self._deaths = 0  # deaths of workers since the last committed save
        self._restart_at = 0.0
        self._replacer: threading.Thread | None = None
        self.listeners = Listeners(config.listeners)
        """The listeners for events of the owner and of the worker."""
        self.client: WorkerClient | None = None
        """The worker, once it is started. It may have died."""
        # Workers that were started and are not known to have ended. An exception during a start leaves a worker that is
        # not ``client``.
        self._begun: list[WorkerClient] = []

    def register(self) -> None:
        """Note that the owner exists and can be closed. From now on it is closed as the module docstring says."""
        _open[id(self)] = self

    def claim(self, claim: Claim) -> None:
        """Let the first rank's worker lock a folder once it starts, unless another folder was claimed before."""
        self._claim = self._claim or claim

    def running(self, rank: int) -> WorkerClient:
        """Return the worker of ``rank``. Start a worker if there is none, or if it has died.

        Raises ``JobTakenError``, ``SaveTimeoutError``, ``WorkerDiedError`` (also if too many have died in a row),
        ``ClosedError``.
        """
        self.check_usable()
        if self.client is not None and not self.client.alive:
            self.check_open()  # ``give_up`` may have left the worker just now, so that it is not dead
            self._on_death()
            self.client.close(self._config.timeout)
            self.client = None  # from here on no worker is in use, see ``_leave_unfinished``
            self._record_death()
        if self.client is None:
            self._check_limit(rank)
            begun = time.perf_counter()
            phase: EventPhase = "worker restarted" if self._deaths else "worker started"
            try:
                self.client = self._start(rank)
            except WorkerDiedError:
                self._record_death()
                raise
            if self._over:  # ``give_up`` came during the start, when there was no worker to leave
                self.client.detach()
                self.check_open()
            self._tell(phase, rank, time.perf_counter() - begun)
        return self.client

    def find_predecessor(self, rank: int) -> Takeover | None:
        """Return the worker that the previous trainer has left, as long as its memory is not taken over.

        Raises ``JobTakenError`` if that trainer is alive, ``SaveTimeoutError`` if its worker does not answer.
        """
        if self._job is not None and not self._has_looked and self.client is None:
            self._close_others(only_stale=True)
            with self._named():
                endpoint = endpoint_name(self._job, rank)
                self._predecessor = Takeover.find(endpoint, self._config.timeout, detached_workers())
            self._has_looked, self._owner = True, os.getpid()
        return self._predecessor

    def record_commit(self) -> None:
        """Note that a save is committed: the count of deaths in a row starts again at 0."""
        self._deaths = 0

    def is_over(self) -> bool:
        """Return whether a new supervisor must replace this one.

        With ranks: the job of the ranks is gone. For a process alone: this supervisor is closed or given up. Ranks that
        were given up must join again first; otherwise each rank would save by itself.
        """
        ranks = self._ranks and self._ranks()
        if ranks is not None and not ranks.is_current():
            return True
        return bool(self._over) and (ranks is None or ranks.alone)

    def check_open(self) -> None:
        """Raise ``ClosedError`` if the supervisor is closed or given up."""
        if self._over:
            raise ClosedError(self._over)

    def check_usable(self) -> None:
        """Do as ``check_open``. Also raise in a fork of the process that has started the worker."""
        self.check_open()
        if self.client is not None:
            self.client.check_owner()
        elif self.is_forked or (self._predecessor is not None and self._owner != os.getpid()):
            raise ClosedError("this checkpointer belongs to another process: make one in each fork")

    @property
    def is_forked(self) -> bool:
        """Return whether this is a fork of the process that has started the worker."""
        return self._has_begun and self._owner != os.getpid()

    def leave(self, *, linger: bool) -> CheckpointError | None:
        """End the worker when it has finished its writes. With ``linger`` the worker stays as if this process had died.

        Returns the ``SaveTimeoutError`` if the worker is still writing after ``Config.timeout`` seconds.
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
        """Leave the worker at once, as if this process had died, whatever the owner is doing in another thread.

        A wait of the owner ends with an error. The owner has to be closed afterwards. ``timeout``: maximum duration, in
        seconds.
        """
        if self._ranks is not None:
            self._over = self._over or _GIVEN_UP
            _given_up[id(self)] = self
            if id(self) not in _open:  # its own thread has closed it meanwhile; nobody closes it again
                _given_up.pop(id(self), None)
            if self.client is not None:
                self.client.detach(timeout)
            if (ranks := self._ranks()) is not None:
                ranks.close()

    def close(self) -> None:
        """Release a predecessor's memory that no worker has taken over, and the listeners.

        Call this after ``leave``, when the owner has closed everything. If an exception interrupts the close, the next
        supervisor for the job finds the rest and closes it.
        """
        self._forget_predecessor()
        self.listeners.close()
        _open.pop(id(self), None)
        _given_up.pop(id(self), None)

    def on_worker_gone(self) -> None:
        """Have the owner replace a worker that has died, beside the training.

        If workers die one after the other, the next save starts another.
        """
        is_dead = self.client is not None and not self.client.alive  # otherwise a call has reported the death
        if is_dead and self._deaths == 0 and not self._over:
            self._replacer = threading.Thread(target=self._replace_dead, name="asyncckpt-replace", daemon=True)
            with contextlib.suppress(RuntimeError):  # the process cannot start a thread now
                self._replacer.start()

    def _replace_dead(self) -> None:
        try:
            self._replace()
        except ClosedError:
            pass
        except CheckpointError as error:
            logger.info("the worker is not replaced before the next save: %s", error)

    def _leave_unfinished(self) -> None:
        """Let workers linger that are not ``client``: an exception has interrupted their start."""
        for client in [each for each in self._begun if each is not self.client]:
            client.detach()
            self._begun.remove(client)

    def _forget_predecessor(self) -> None:
        if self._predecessor is not None:
            self._predecessor.close()
            self._predecessor, self._has_looked = None, False

    @contextlib.contextmanager
    def _named(self) -> Iterator[None]:
        """Add the folder to a ``JobTakenError``."""
        try:
            yield
        except JobTakenError as error:
            raise located(error, path=None if self._claim is None else self._claim.root) from None

    def _tell(self, phase: EventPhase, rank: int, seconds: float, nbytes: int | None = None) -> None:
        path = "" if self._claim is None else self._claim.root
        self.listeners.tell(Event(phase=phase, rank=rank, path=path, seconds=seconds, nbytes=nbytes))

    def __del__(self) -> None:
        for client in getattr(self, "_begun", ()):  # even if the close was interrupted
            client.abandon()
        if not getattr(self, "_over", True) and getattr(self, "client", None) is not None:
            warnings.warn("a checkpointer or publisher was not closed", ResourceWarning, stacklevel=2, source=self)

    def _check_limit(self, rank: int) -> None:
        died = f"the worker has died {self._deaths} times in a row, and"
        if self._deaths > self._config.worker_restarts:
            raise WorkerDiedError(
                f"{died} no other is started (see Config.worker_restarts); look for the cause in the log, then make a"
                " new checkpointer",
                rank=rank,
            )
        if (left := self._restart_at - time.monotonic()) > 0:
            raise WorkerDiedError(f"{died} another is started in {left:.1f} s", rank=rank)

    def _record_death(self) -> None:
        """Count a death. The first restart may follow at once, later restarts only after a pause."""
        self._deaths += 1
        if self._deaths > 1:
            self._restart_at = time.monotonic() + self._config.restart_pause * 2 ** (self._deaths - 2)

    def _start(self, rank: int) -> WorkerClient:
        config, self._has_begun, self._owner = self._config, True, os.getpid()
        self._leave_unfinished()
        if threading.current_thread() is not self._replacer:  # the replacer must not take over from others
            self._close_others()
        options = WorkerOptions(
            direct_io=config.direct_io,
            io_threads=config.io_threads,
            nice=config.nice,
            io_class=config.io_class,
            start_timeout=config.start_timeout,
            linger=config.linger,
            endpoint=None if self._job is None else endpoint_name(self._job, rank),
            job=self._job,
            rank=rank,
            metrics_folder=config.metrics_folder and absolute(config.metrics_folder),
            ports=config.ports,
        )
        self.find_predecessor(rank)
        begun = time.perf_counter()
        client, is_attached = self._attach_or_start(options)
        try:
            self._hand_over(client, self._predecessor, is_attached)
            predecessor, self._predecessor = self._predecessor, None
            if predecessor is not None and predecessor.segments and is_attached:
                nbytes = sum(segment.nbytes for segment in predecessor.segments.values())
                self._tell("memory taken over", rank, time.perf_counter() - begun, nbytes)
            if rank == 0 and self._claim is not None:
                self._take_root(client, self._claim)
            if options.endpoint is not None and (words := take_log(options.endpoint)):
                logger.warning("the worker of the previous trainer logged: %s", words)
        except BaseException as error:
            if is_interrupt(error) or is_attached:  # the worker has the memory of the previous trainer
                client.detach()
            with contextlib.suppress(SaveTimeoutError):  # the worker exits by itself; the other error is raised
                client.close(config.timeout)
            raise
        return client

    def _attach_or_start(self, options: WorkerOptions) -> tuple[WorkerClient, bool]:
        """Return the worker that the previous trainer has left, or a new one; and whether it is the former.

        Raises as ``running``.
        """
        listeners, timeout = self.listeners, self._config.timeout

        def tell_uploaded(uploaded: Uploaded) -> None:  # must not keep ``self`` alive
            listeners.tell(uploaded.event(options.rank))

        deadline: float | None = None
        while True:
            process = None
            if self._predecessor is not None:
                process = self._predecessor.attach(options, timeout, longest(self._config.commit_timeout))
            try:
                with self._named():
                    client = WorkerClient(
                        options,
                        tell_uploaded,
                        self._begun.append,
                        partial(_on_worker_gone, weakref.ref(self)),
                        process,
                    )
                return client, process is not None
            except JobTakenError:  # another trainer was faster, or its worker is exiting
                deadline = deadline or time.monotonic() + timeout
                if options.endpoint is None or time.monotonic() > deadline:
                    raise
            with self._named():
                other = Takeover.find(options.endpoint, timeout, detached_workers())
            if other is not None:
                self._forget_predecessor()
                self._predecessor, self._has_looked = other, True

    def _take_root(self, client: WorkerClient, claim: Claim) -> None:
        timeout = self._config.timeout
        trouble = take_root(claim, partial(client.call, timeout, SessionApi.claim, claim), timeout)
        if trouble is not None and not self._is_warned:
            self._is_warned = True
            logger.warning("%s is not locked, and another job can save there: %s", claim.root, trouble)

    def _close_others(self, *, only_stale: bool = False) -> None:
        """Close other supervisors of the same job that are still open.

        A notebook cell that is run again leaves one, and so does a training that is restarted in the same process.
        ``only_stale``: close only supervisors that are over (``is_over``), because this one has only loaded.
        """
        for other in known_supervisors():
            if other is self:
                continue
            is_taken_over = other._job == self._job is not None and (other.is_over() or not only_stale)
            if is_taken_over and other._has_begun and not other._over:
                logger.warning("an earlier checkpointer or publisher of this process for this place is closed")
                other._over = _TAKEN_OVER
            if other._over:  # even if it has only loaded: nothing else would end its threads
                other.close_owner("as another takes over", linger=True)
            elif is_taken_over:
                other._forget_predecessor()  # the other has only loaded, and may load again

    def close_owner(self, when: str, *, linger: bool) -> None:
        """Close the owner of the worker. An error is logged, and noted for the exit status of the process."""
        try:
            self._close_owner(linger)
        except CheckpointError as error:
            if not error.is_logged:
                logger.error("closing a checkpointer or publisher %s failed: %s", when, str(error))
            if not isinstance(error, ClosedError):  # after a ``ClosedError`` the worker goes on with the saves
                note_loss()


def _on_worker_gone(supervisor: weakref.ref[Supervisor]) -> None:
    if (its := supervisor()) is not None:
        its.on_worker_gone()


def known_supervisors() -> list[Supervisor]:
    """Return the supervisors of this process that are not closed."""
    return [each for ref in _open.valuerefs() if (each := ref()) is not None]


def note_loss() -> None:
    """Let this process end with status 120, because a save has failed and no call can raise the failure any more."""
    global _has_lost
    _has_lost = True


class _FailingStream:
    """A standard stream that fails its last flush.

    Python has no way to change the status of a process that is ending. But if a standard stream cannot be flushed at
    the end, Python ends with status 120 (see ``sys.exit``), after all functions of ``atexit`` have run.
    """

    closed = False

    def __init__(self, stream: Any) -> None:
        self._stream = stream

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def flush(self) -> None:
        """Raise ``OSError`` if Python has run all functions of ``atexit``."""
        self._stream.flush()
        if sys.is_finalizing():
            raise OSError("a save has failed")


@atexit.register
def _close_all() -> None:
    # In a shell or a notebook, ``last_value`` is the error of an earlier command.
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
