"""The handle of one save."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, InvalidStateError
from concurrent.futures import TimeoutError as FutureTimeoutError
from pathlib import Path

from asyncckpt.errors import SaveTimeoutError
from asyncckpt.worker.messages import Committed


class Save:
    """A save under way: first its tensors are staged, then, in the worker, it is written and committed.

    ``path`` is where the checkpoint will stand, ``step`` the training step it is of (None where it has none).
    """

    def __init__(self, path: str, step: int | None, number: int = 0) -> None:
        self.path = Path(path)
        self.step = step
        self._number = number
        self._begun = time.perf_counter()
        self._timings: dict[str, float] = {}
        self._staged = threading.Event()
        self._queued = threading.Event()
        self._fences: Sequence[Callable[[], None]] = ()
        self._reported = False
        self._begun_in_worker = False
        self.future: Future[Path] = Future()
        """The same outcome, for code that waits on futures."""

    def result(self, timeout: float | None = None) -> Path:
        """Wait until the checkpoint is committed, complete and durable, and return its path.

        Raises what went wrong with it, or ``SaveTimeoutError`` after ``timeout`` seconds (None: as long as it takes;
        the death of the worker ends the wait in any case); then the save is still under way.
        """
        try:
            path = self.future.result(timeout)
        except (TimeoutError, FutureTimeoutError) as error:
            if self.future.done():  # it was the save itself that ran out of time
                self._reported = True
                raise
            raise SaveTimeoutError(
                f"not committed after {timeout:g} s; it is still under way", path=self.path, step=self.step
            ) from error
        except BaseException:
            self._reported = True
            raise
        return path

    def done(self) -> bool:
        """Whether it has ended: committed or failed."""
        return self.future.done()

    def staged(self) -> bool:
        """Whether the tensors are copied, so that the caller may change them (or the save has failed)."""
        return self._staged.is_set()

    def wait_staged(self, timeout: float | None = None) -> None:
        """Wait until ``staged()``. Raises ``SaveTimeoutError`` after ``timeout`` seconds."""
        if not self._staged.wait(timeout):
            raise SaveTimeoutError(f"not staged after {timeout:g} s", path=self.path, step=self.step)

    def hold_back(self, timeout: float | None = None) -> None:
        """As ``wait_staged``, but on CUDA devices it is their current streams that wait, from here on, not the host.

        What the caller queues there after this may change the tensors. Those of the host it may change at once.
        """
        if not self._queued.wait(timeout):
            raise SaveTimeoutError(f"copies are not queued after {timeout:g} s", path=self.path, step=self.step)
        if not self._fences:
            self.wait_staged(timeout)
        for fence in self._fences:
            fence()

    @property
    def timings(self) -> dict[str, float]:
        """Seconds by phase, as far as it has come.

        Of the trainer: ``plan_s`` (seeing that the structure is as planned, or planning), ``slot_s`` (waiting for a
        free slot), ``copy_s``, and ``stall_s``, all that the call of ``save`` took. Of the worker: ``write_s``,
        ``commit_s``. ``durable_s`` is from the call until the trainer learned of the commit.
        """
        return dict(self._timings)

    @property
    def failure(self) -> BaseException | None:
        """What went wrong, if it has ended badly."""
        return self.future.exception() if self.future.done() else None

    # For the engine.

    def _copies_queued(self, fences: Sequence[Callable[[], None]]) -> None:
        """The host's tensors are copied; those of devices are, beyond ``fences``."""
        self._fences = fences
        self._queued.set()

    def _unreported_failure(self) -> BaseException | None:
        """A failure that nobody was told of yet; asking counts as being told."""
        if self._reported or self.failure is None:
            return None
        self._reported = True
        return self.failure

    def _end(self, error: BaseException | None, committed: Committed | None) -> None:
        """Take over how the worker's part ended."""
        if error is None:
            self._timings.update(committed.timings if committed is not None else {})
            self._timings["durable_s"] = time.perf_counter() - self._begun
        self._resolve(error)

    def _resolve(self, error: BaseException | None) -> None:
        self._staged.set()
        self._queued.set()
        with contextlib.suppress(InvalidStateError):  # it may fail in the call and, a moment later, in the worker
            if error is None:
                self.future.set_result(self.path)
            else:
                self.future.set_exception(error)

    def __repr__(self) -> str:
        state = "under way" if not self.done() else "committed" if self.failure is None else "failed"
        return f"<Save {self.path} {state}>"
