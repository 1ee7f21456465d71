"""The handle of one save, and what is known of that save: its operation changes it, the handle reads it."""

from __future__ import annotations

import atexit
import contextlib
import logging
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, InvalidStateError
from functools import partial

from asyncckpt.errors import SaveTimeoutError
from asyncckpt.threads import Flag

logger = logging.getLogger(__name__)

# How long somebody may look at a future, so that it is locked: longer has only who was interrupted at that.
_LOCKED_S = 1.0


class _Calls:
    """Makes calls at the ends of saves, one after the other, on a thread that is there while there are any.

    Not on the thread that learns of the ends of saves: while that is kept, all saves are, and the training with them.
    """

    def __init__(self, name: str, *, daemon: bool) -> None:
        self._name, self._daemon = name, daemon
        self._lock = threading.RLock()
        self._waiting: deque[Callable[[], object]] = deque()
        self._runs = False
        self._runner = 0

    def add(self, call: Callable[[], object]) -> bool:
        """Have it called after all that were added before. Returns whether that will be soon."""
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
            # None can be started; as the interpreter ends, all is called when everything is closed.
        return self._runs

    def wait(self, timeout: float) -> bool:
        """Wait until all that was added before has been called; one of these calls does not wait for itself.

        Returns whether that is so after ``timeout`` seconds.
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
        """Call what waits."""
        while True:
            with self._lock:
                self._runs = bool(self._waiting)
                self._runner = threading.get_ident() if self._runs else 0
                if not self._runs:
                    return
                call = self._waiting.popleft()
            try:
                call()
            except Exception:
                logger.exception("a callback at the end of a save has failed")


def _new_calls() -> tuple[_Calls, _Calls, _Calls]:
    """To complete futures, to call their callbacks, which may wait for other futures, and to act on durable saves.
    Nobody waits for the first at the end of the process.
    """
    return (
        _Calls("asyncckpt-futures", daemon=True),
        _Calls("asyncckpt-callbacks", daemon=False),
        _Calls("asyncckpt-actions", daemon=False),
    )


_completions, _callbacks, _actions = _new_calls()


def wait_for_actions(timeout: float) -> None:
    """Wait until all is done that ``Save.when_durable`` was given for saves that have ended.

    Raises ``SaveTimeoutError`` after ``timeout`` seconds.
    """
    if not _actions.wait(timeout):
        raise SaveTimeoutError(f"what was to follow saves that are durable is not done after {timeout:g} s")


@atexit.register  # before the supervisor's, which so comes first
def _call_what_is_left() -> None:
    _completions.run()
    _actions.run()
    _callbacks.run()


def _after_fork_in_child() -> None:
    global _completions, _callbacks, _actions  # the threads of the other process are not here
    _completions, _callbacks, _actions = _new_calls()


os.register_at_fork(after_in_child=_after_fork_in_child)


class _SaveFuture(Future[str]):
    def add_done_callback(self, fn: Callable[[Future[str]], object]) -> None:
        super().add_done_callback(lambda done: _callbacks.add(partial(fn, done)))

    def end(self, state: SaveState) -> None:
        """``state`` has ended, and so does this."""
        with contextlib.suppress(InvalidStateError):  # two have seen that it has ended
            if state.failure is None:
                self.set_result(state.path)
            else:
                self.set_exception(state.failure)

    def complete(self, state: SaveState) -> None:
        """As ``end``; but where this was left locked, that keeps no other future: it waits on a thread of its own."""
        if self._condition.acquire(timeout=_LOCKED_S):
            try:
                self.end(state)
            finally:
                self._condition.release()
        else:
            threading.Thread(target=self.end, args=[state], name="asyncckpt-future", daemon=True).start()


class SaveState:
    """What is known of one save, from the call until it has ended.

    Its tensors are first *queued* for copying (those of the host are copied then), then *staged*; in the end it is
    *done*, well or badly. A save may be done, badly, while its tensors are still being copied.
    """

    def __init__(self, path: str | os.PathLike[str], step: int | None) -> None:
        self.path = os.fspath(path)
        self.step = step
        self.begun, self.called_at = time.perf_counter(), time.time()
        self.timings: dict[str, float] = {}
        self.failure: BaseException | None = None
        """What went wrong, if it has ended badly."""
        self.is_reported = False
        """Somebody was told of its failure, or will be."""
        self.queued, self.staged, self.done, self.replicated = Flag(), Flag(), Flag(), Flag()
        self.is_copied = False
        """Other hosts are to have copies of it."""
        self.replication_failure: BaseException | None = None
        """Why they have none, and will not."""
        self.fences: Sequence[Callable[[], None]] = ()
        self._future: _SaveFuture | None = None
        self._following: list[Callable[[], None]] | None = []  # what its end is followed by; None: that has begun
        self._lock = threading.Lock()

    def copies_queued(self, fences: Sequence[Callable[[], None]]) -> None:
        """The host's tensors are copied; those of devices are, beyond ``fences``."""
        self.fences = fences
        self.queued.set()

    def release_tensors(self) -> None:
        """Nobody reads them (any more): they are staged, or never will be."""
        self.queued.set()
        self.staged.set()

    def end(self, error: BaseException | None, timings: Mapping[str, float] | None = None) -> None:
        """It has ended: committed, after ``timings`` (seconds of the worker), or failed with ``error``."""
        if error is None:
            for name, seconds in (timings or {}).items():
                self.timings.setdefault(name, seconds)
            self.timings["durable_s"] = time.perf_counter() - self.begun
        if not self.done.is_set():  # it may fail in the call and, a moment later, in the worker
            self.failure = error
        with self._lock:
            following, self._following = self._following or [], None
        for call in following:  # before anybody sees that it has ended, and may wait for these
            _actions.add(call)
        self.done.set()
        # Not here: whoever waits for the future may have been interrupted, and have left it locked.
        if (future := self._future) is not None and not _completions.add(partial(future.complete, self)):
            future.end(self)

    @property
    def future(self) -> Future[str]:
        """A future with its outcome, the same one for all who ask."""
        if self._future is None:
            future = _SaveFuture()
            future.set_running_or_notify_cancel()  # nobody can cancel it
            with self._lock:
                self._future = self._future or future
        if self.done.is_set() and not self._future.done():
            self._future.end(self)
        return self._future

    def when_durable(self, action: Callable[[], object], what: str) -> Future[None]:
        """As of ``Save``."""
        outcome: Future[None] = Future()
        act = partial(self._act, action, what, outcome)
        with self._lock:
            if self._following is not None:
                self._following.append(act)
                return outcome
        _actions.add(act)
        return outcome

    def _act(self, action: Callable[[], object], what: str, outcome: Future[None]) -> None:
        self.done.wait()  # what is added while it ends comes a moment before
        if not outcome.set_running_or_notify_cancel():
            return
        try:
            if self.failure is None:
                action()
            else:
                logger.warning("not done: %s, as %s is not saved", what, self.path)
            outcome.set_result(None)
        except Exception as error:
            logger.error("%s failed: %s", what, error)
            outcome.set_exception(error)


class Save:
    """A save under way: first its tensors are staged, then, in the worker, it is written and committed."""

    def __init__(self, state: SaveState) -> None:
        self._state = state

    @classmethod
    def finished(
        cls, path: str | os.PathLike[str], error: BaseException | None = None, *, step: int | None = None
    ) -> Save:
        """The handle of a save that has ended already.

        Args:
            path: Where it stands, or would.
            error: What it failed with; None: it is complete. Nobody but the handle tells of it.
            step: The training step it is of.
        """
        state = SaveState(path, step)
        state.is_reported = True
        state.release_tensors()
        state.end(error)
        return cls(state)

    @property
    def path(self) -> str:
        """Where the checkpoint, or the file, will stand."""
        return self._state.path

    @property
    def step(self) -> int | None:
        """The training step it is of; None where it has none."""
        return self._state.step

    @property
    def future(self) -> Future[str]:
        """The same outcome, for code that waits on futures.

        Its callbacks are called one after the other on a thread of their own. They may save, and take their time.
        """
        return self._state.future

    def result(self, timeout: float | None = None) -> str:
        """Wait until the checkpoint is committed, complete and durable, and return its path.

        Raises what went wrong with it, or ``SaveTimeoutError`` after ``timeout`` seconds (None: as long as it takes;
        the death of the worker ends the wait in any case); then the save is still under way.
        """
        if not self._state.done.wait(timeout):
            raise SaveTimeoutError(
                f"not committed after {timeout:g} s; it is still under way", path=self.path, step=self.step
            )
        self._state.is_reported = True
        if self._state.failure is not None:
            try:
                raise self._state.failure
            finally:
                del self  # or the error would hold on to this, and so to itself
        return self.path

    def when_durable(self, action: Callable[[], object], what: str) -> Future[None]:
        """Have something done when this is durable, such as the removal of older checkpoints; not if it fails.

        Args:
            action: Is called on a thread for such calls alone, one after the other in the order in which saves end.
                ``wait`` and ``close`` of an engine or a checkpointer wait for it.
            what: In words, for the log: "removing older checkpoints".

        Returns:
            When it is done, or is not to be done; with what it raised, which is also logged. Until it is begun it can
            be cancelled.
        """
        return self._state.when_durable(action, what)

    def done(self) -> bool:
        """Whether it has ended: committed or failed."""
        return self._state.done.is_set()

    def staged(self) -> bool:
        """Whether the tensors are copied, so that the caller may change them; or, of a save that has failed, nobody
        copies them any more.
        """
        return self._state.staged.is_set()

    def wait_staged(self, timeout: float | None = None) -> None:
        """Wait until ``staged()``. Raises ``SaveTimeoutError`` after ``timeout`` seconds."""
        if not self._state.staged.wait(timeout):
            raise SaveTimeoutError(f"not staged after {timeout:g} s", path=self.path, step=self.step)

    def replicated(self) -> bool:
        """Whether as many other hosts as ``Config.replicas`` says have copies, in memory, of what all ranks have saved.

        That may be before the checkpoint is durable, or after it.
        """
        return self._state.replicated.is_set() and self._state.replication_failure is None

    def wait_replicated(self, timeout: float | None = None) -> None:
        """Wait until ``replicated()``.

        Raises what went wrong with the copies (the checkpoint may come to be all the same), ``SaveTimeoutError`` after
        ``timeout`` seconds, and ``ValueError`` where there are to be none: ``Config.replicas`` is 0, or this is no
        state dict.
        """
        if not self._state.is_copied:
            if self._state.failure is not None:
                raise self._state.failure
            raise ValueError("there are no copies of this save: Config.replicas is 0, or it is no state dict")
        if not self._state.replicated.wait(timeout):
            raise SaveTimeoutError(f"not replicated after {timeout:g} s", path=self.path, step=self.step)
        if self._state.replication_failure is not None:
            raise self._state.replication_failure

    def synchronize_staging(self, timeout: float | None = None) -> None:
        """As ``wait_staged``, but on devices it is their current streams that wait, from here on, not the host.

        The caller may change tensors of the host at once, and those of devices by what it queues after this. Raises
        ``SaveTimeoutError`` where the copies are not even queued after ``timeout`` seconds.
        """
        if not self._state.queued.wait(timeout):
            raise SaveTimeoutError(f"copies are not queued after {timeout:g} s", path=self.path, step=self.step)
        if not self._state.fences:
            self.wait_staged(timeout)
        for fence in self._state.fences:
            fence()

    def mark_reported(self) -> None:
        """Whoever holds the handle asks for a failure: no later call of the engine raises it."""
        self._state.is_reported = True

    @property
    def timings(self) -> dict[str, float]:
        """Seconds by phase, as far as it has come.

        The trainer's: ``plan_s`` (seeing that the structure is as planned, or planning), ``slot_s`` (waiting for a free
        slot), ``copy_s``, and ``stall_s``, all that the call of ``save`` took. The worker's: ``write_s``, and in it
        ``checksum_s`` and ``sync_s`` (``fsync``, say), then ``commit_s``. ``copy_from_s``, ``write_from_s`` and so on:
        how long after the call these began. ``durable_s`` is from the call until the trainer learned of the commit.
        """
        return dict(self._state.timings)

    @property
    def failure(self) -> BaseException | None:
        """What went wrong, if it has ended badly."""
        return self._state.failure

    def is_of(self, state: object) -> bool:
        """Whether this is the handle of the save with that state."""
        return state is self._state

    def __repr__(self) -> str:
        outcome = "under way" if not self._state.done.is_set() else "committed" if self.failure is None else "failed"
        return f"<Save {self.path} {outcome}>"
