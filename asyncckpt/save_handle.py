"""The handle of one save, and the state of the save: the operation changes the state, the handle reads it."""

from __future__ import annotations

import atexit
import contextlib
import logging
import math
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, InvalidStateError
from functools import partial
from typing import Any, TypeVar

from asyncckpt.errors import SaveDroppedError, SaveTimeoutError
from asyncckpt.threads import Flag

logger = logging.getLogger(__name__)

# Maximum time to wait for a future's lock. A holder that keeps it longer was interrupted and never releases it.
_LOCKED_S = 1.0


class _Calls:
    """Run calls at the ends of saves, one after the other, on a thread that exists while calls are waiting.

    Calls never run on the thread that learns of the ends of saves: if that thread is blocked, all saves and the
    training are blocked.
    """

    def __init__(self, name: str, *, daemon: bool) -> None:
        self._name, self._daemon = name, daemon
        self._lock = threading.RLock()
        self._waiting: deque[Callable[[], object]] = deque()
        self._runs = False
        self._runner = 0

    def add(self, call: Callable[[], object]) -> bool:
        """Add a call, to run after all calls that were added before. Return True if a thread is running the calls."""
        with self._lock:
            self._waiting.append(call)
            if self._runs:
                return True
            self._runs = True
        try:
            threading.Thread(target=self.run, name=self._name, daemon=self._daemon).start()
        except BaseException as error:
            self._runs = False
            if not isinstance(error, RuntimeError):
                raise
            # No thread can be started, as at the end of the interpreter. ``_call_what_is_left`` makes the calls then.
        return self._runs

    def wait(self, timeout: float) -> bool:
        """Wait until all calls that were added before have run.

        A call of this queue that waits for the queue returns at once. Returns False if calls are left after ``timeout``
        seconds.
        """
        called = threading.Event()
        with self._lock:
            if not self._runs and not self._waiting:
                return True
        if threading.get_ident() == self._runner:
            return True
        if not self.add(called.set):
            self.run()
        return called.wait(timeout)

    def run(self) -> None:
        """Run the waiting calls."""
        while True:
            with self._lock:
                self._runs = bool(self._waiting)
                self._runner = threading.get_ident() if self._runs else 0
                if not self._runs:
                    return
                call = self._waiting.popleft()
            try:
                call()
            except (Exception, SystemExit):
                logger.exception("a callback at the end of a save has failed")


def _new_calls() -> tuple[_Calls, _Calls, _Calls]:
    """Return the queues that complete futures, run callbacks of futures, and act on durable saves.

    A callback may wait for another future, so that callbacks and completions are separate. The end of the process does
    not wait for the completions.
    """
    return (
        _Calls("asyncckpt-futures", daemon=True),
        _Calls("asyncckpt-callbacks", daemon=False),
        _Calls("asyncckpt-actions", daemon=False),
    )


_completions, _callbacks, _actions = _new_calls()


def wait_for_actions(timeout: float) -> None:
    """Wait until all actions of ``Save.when_durable`` are done for saves that have ended.

    Raises ``SaveTimeoutError`` after ``timeout`` seconds.
    """
    if not _actions.wait(timeout):
        raise SaveTimeoutError(f"the actions after durable saves are not done after {timeout:g} s")


@atexit.register  # registered before the supervisor's function, which therefore runs first
def _call_what_is_left() -> None:
    _completions.run()
    _actions.run()
    _callbacks.run()


def _after_fork_in_child() -> None:
    global _completions, _callbacks, _actions  # the threads of the parent do not exist here
    _completions, _callbacks, _actions = _new_calls()


os.register_at_fork(after_in_child=_after_fork_in_child)


class _SaveFuture(Future[str]):
    def add_done_callback(self, fn: Callable[[Future[str]], object]) -> None:
        super().add_done_callback(lambda done: _callbacks.add(partial(fn, done)))

    def end(self, state: SaveState) -> None:
        """Set the result of this future from ``state``, which has ended."""
        with contextlib.suppress(InvalidStateError):  # two threads have seen the end
            if state.failure is None:
                self.set_result(state.path)
            else:
                self.set_exception(state.failure)

    def complete(self, state: SaveState) -> None:
        """Do as ``end``. If this future was left locked, wait on a separate thread: no other future is blocked."""
        if self._condition.acquire(timeout=_LOCKED_S):
            try:
                self.end(state)
            finally:
                self._condition.release()
        else:
            threading.Thread(target=self.end, args=[state], name="asyncckpt-future", daemon=True).start()


class SaveState:
    """State of one save, from the call until it has ended.

    The tensors are first *queued* for copying, and then *staged*. Host tensors are already copied when they are queued.
    In the end the save is *done*: committed or failed. A save may fail, and so be done, while its tensors are still
    being copied.
    """

    _last_call = 0.0

    def __init__(self, path: str | os.PathLike[str], step: int | None) -> None:
        self.path = os.fspath(path)
        self.step = step
        # A later save has a later time, even if the clock was set back: pointers and images in memory go by this time.
        SaveState._last_call = max(time.time(), math.nextafter(SaveState._last_call, math.inf))
        self.begun, self.called_at = time.perf_counter(), SaveState._last_call
        self.timings: dict[str, float] = {}
        self.failure: BaseException | None = None
        """The error, if the save has failed."""
        self.is_reported = False
        """Whether the failure was reported to the caller, or will be."""
        self.queued, self.staged, self.done, self.replicated = Flag(), Flag(), Flag(), Flag()
        self.is_copied = False
        """Whether other hosts are to have copies of the save."""
        self.replication_failure: BaseException | None = None
        """The reason why other hosts have no copies, and will get none."""
        self.fences: Sequence[Callable[[], None]] = ()
        self._future: _SaveFuture | None = None
        self._following: list[Callable[[], None]] | None = []  # calls to make at the end; None: the end has begun
        self._lock = threading.Lock()

    def copies_queued(self, fences: Sequence[Callable[[], None]]) -> None:
        """Note that the host's tensors are copied. The devices' tensors are copied once ``fences`` are passed."""
        self.fences = fences
        self.queued.set()

    def release_tensors(self) -> None:
        """Note that nothing reads the tensors any more: they are staged, or never will be."""
        self.queued.set()
        self.staged.set()

    def end(self, error: BaseException | None, timings: Mapping[str, float] | None = None) -> None:
        """End the save: committed, with ``timings`` (seconds of the worker), or failed with ``error``."""
        if error is None:
            for name, seconds in (timings or {}).items():
                self.timings.setdefault(name, seconds)
            self.timings["durable_s"] = time.perf_counter() - self.begun
        if not self.done.is_set():  # a save may fail in the call and, a moment later, in the worker
            self.failure = error
        with self._lock:
            following, self._following = self._following or [], None
        for call in following:  # before ``done`` is set, because a waiter may then wait for these calls
            _actions.add(call)
        self.done.set()
        # On another thread, because an interrupted waiter may have left the future locked.
        if (future := self._future) is not None and not _completions.add(partial(future.complete, self)):
            future.end(self)

    @property
    def future(self) -> Future[str]:
        """Return the future with the outcome. Every call returns the same future."""
        if self._future is None:
            future = _SaveFuture()
            future.set_running_or_notify_cancel()  # so that it cannot be cancelled
            with self._lock:
                self._future = self._future or future
        if self.done.is_set() and not self._future.done():
            self._future.end(self)
        return self._future

    def when_durable(self, action: Callable[[], object], what: str) -> Future[None]:
        """See ``Save.when_durable``."""
        outcome: Future[None] = Future()
        act = partial(self._act, action, what, outcome)
        with self._lock:
            if self._following is not None:
                self._following.append(act)
                return outcome
        _actions.add(act)
        return outcome

    def _act(self, action: Callable[[], object], what: str, outcome: Future[None]) -> None:
        self.done.wait()  # an action that is added during ``end`` runs a moment before ``done``
        if not outcome.set_running_or_notify_cancel():
            return
        try:
            if self.failure is None:
                action()
            else:
                is_logged = not isinstance(self.failure, SaveDroppedError)
                level = logging.DEBUG if is_logged else logging.WARNING
                logger.log(level, "not done: %s, as %s is not saved", what, self.path)
            outcome.set_result(None)
        except (Exception, SystemExit) as error:  # an action that exits must not end the thread of all actions
            logger.error("%s failed: %s", what, error)
            outcome.set_exception(error)


_AnySave = TypeVar("_AnySave", bound="Save")


class Save:
    """A save under way. Its tensors are staged first; then the worker writes and commits it."""

    def __init__(self, state: SaveState) -> None:
        self._state = state

    @classmethod
    def finished(
        cls, path: str | os.PathLike[str], error: BaseException | None = None, *, step: int | None = None
    ) -> Save:
        """Return the handle of a save that has ended already.

        Args:
            path: The path of the checkpoint, whether or not there is a checkpoint.
            error: The failure; None: the save is complete. Only the handle reports the failure.
            step: The training step.
        """
        state = SaveState(path, step)
        state.is_reported = True
        state.release_tensors()
        state.end(error)
        return cls(state)

    @classmethod
    def of_another(
        cls: type[_AnySave], path: str | os.PathLike[str], upload: Future[Any], staging: Future[Any] | None = None
    ) -> _AnySave:
        """Return the handle of a save that another library makes.

        Args:
            path: The folder or the file.
            upload: A future that ends with the save.
            staging: A future that ends when the tensors are copied; None: the tensors are copied already.
        """
        state = SaveState(path, None)
        state.is_reported = True

        def on_end(done: Future[Any]) -> None:
            state.release_tensors()
            state.end(done.exception())

        if staging is None:
            state.release_tensors()
        else:
            staging.add_done_callback(lambda _: state.release_tensors())
        upload.add_done_callback(on_end)
        return cls(state)

    @property
    def path(self) -> str:
        """Return the path of the checkpoint, or of the file, once it is committed."""
        return self._state.path

    @property
    def step(self) -> int | None:
        """Return the training step; None if the save has no step."""
        return self._state.step

    @property
    def future(self) -> Future[str]:
        """Return a future with the outcome of the save, for code that waits on futures.

        Callbacks of the future run one after the other on a thread of their own. They may save, and may take long.
        """
        return self._state.future

    def result(self, timeout: float | None = None) -> str:
        """Wait until the checkpoint is committed, complete and durable, and return its path.

        Raises the failure of the save. Raises ``SaveTimeoutError`` after ``timeout`` seconds (None: no limit; the death
        of the worker ends the wait in any case); then the save is still under way.
        """
        if not self._state.done.wait(timeout):
            raise SaveTimeoutError(
                f"the save is not committed after {timeout:g} s, and is still under way", path=self.path, step=self.step
            )
        self._state.is_reported = True
        if self._state.failure is not None:
            try:
                raise self._state.failure
            finally:
                del self  # otherwise the error refers to this handle, and so to itself
        return self.path

    def when_durable(self, action: Callable[[], object], what: str) -> Future[None]:
        """Call ``action`` once the save is durable, such as a removal of older checkpoints.

        If the save fails, ``action`` is not called.

        Args:
            action: Called on a thread for such actions alone, one after the other, in the order in which saves end.
                ``wait`` and ``close`` of an engine or a checkpointer wait for it.
            what: A description for the log, such as "removing older checkpoints".

        Returns:
            A future that ends when the action is done, or when it will not be called. An error of the action is logged
                and set on the future. The future can be cancelled until the action begins.
        """
        return self._state.when_durable(action, what)

    def done(self) -> bool:
        """Return whether the save has ended: committed or failed."""
        return self._state.done.is_set()

    def staged(self) -> bool:
        """Return whether the tensors are copied, so that the caller may change them.

        For a failed save: whether nothing copies the tensors any more.
        """
        return self._state.staged.is_set()

    def wait_staged(self, timeout: float | None = None) -> None:
        """Wait until ``staged()``. Raises ``SaveTimeoutError`` after ``timeout`` seconds."""
        if not self._state.staged.wait(timeout):
            raise SaveTimeoutError(f"the save is not staged after {timeout:g} s", path=self.path, step=self.step)

    def replicated(self) -> bool:
        """Return whether ``Config.replicas`` other hosts have copies, in memory, of the images of all ranks.

        The copies may be complete before or after the checkpoint is durable.
        """
        return self._state.replicated.is_set() and self._state.replication_failure is None

    def wait_replicated(self, timeout: float | None = None) -> None:
        """Wait until ``replicated()``.

        Raises the error of the copies (the checkpoint may be committed all the same). Raises ``SaveTimeoutError`` after
        ``timeout`` seconds, and ``ValueError`` if there are no copies: ``Config.replicas`` is 0, or no state dict was
        saved.
        """
        if not self._state.is_copied:
            if self._state.failure is not None:
                raise self._state.failure
            raise ValueError("this save has no copies: Config.replicas is 0, or the save is no state dict")
        if not self._state.replicated.wait(timeout):
            raise SaveTimeoutError(f"the save is not replicated after {timeout:g} s", path=self.path, step=self.step)
        if self._state.replication_failure is not None:
            raise self._state.replication_failure

    def synchronize_staging(self, timeout: float | None = None) -> None:
        """Do as ``wait_staged``, but on devices let the current streams wait, from here on, instead of the host.

        The caller may change tensors of the host at once, and tensors of devices by work that is queued after this
        call. Raises ``SaveTimeoutError`` if the copies are not even queued after ``timeout`` seconds.
        """
        if not self._state.queued.wait(timeout):
            raise SaveTimeoutError(f"copies are not queued after {timeout:g} s", path=self.path, step=self.step)
        if not self._state.fences:
            self.wait_staged(timeout)
        for fence in self._state.fences:
            fence()

    def mark_reported(self) -> None:
        """Note that the caller asks the handle for the failure: no later call of the engine raises the failure."""
        self._state.is_reported = True

    @property
    def timings(self) -> dict[str, float]:
        """Return the seconds of each phase that the save has reached.

        Of the trainer: ``plan_s`` (comparing the structure with the plan, or planning), ``slot_s`` (waiting for a
        free slot), ``copy_s``, and ``stall_s``, the whole call of ``save``. Of the worker: ``write_s``, which includes
        ``checksum_s`` and ``sync_s`` (such as ``fsync``), then ``commit_s``. ``copy_from_s``, ``write_from_s`` and so
        on are the starts of these phases, counted from the call. ``durable_s`` is the time from the call until the
        trainer learned of the commit.
        """
        return dict(self._state.timings)

    @property
    def failure(self) -> BaseException | None:
        """Return the error, if the save has failed."""
        return self._state.failure

    def is_of(self, state: object) -> bool:
        """Return whether this is the handle of the save with that state."""
        return state is self._state

    def __repr__(self) -> str:
        outcome = "under way" if not self._state.done.is_set() else "committed" if self.failure is None else "failed"
        return f"<Save {self.path} {outcome}>"
