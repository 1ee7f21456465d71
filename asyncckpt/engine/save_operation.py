"""One save, from the call until it has ended on all ranks."""

from __future__ import annotations

import contextlib
import logging
import math
import os
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import TypeAlias

import torch

from asyncckpt.engine.copier import Copier
from asyncckpt.engine.plan_selection import Captured
from asyncckpt.errors import CheckpointError, SaveTimeoutError, StorageError, WorkerDiedError
from asyncckpt.ranks.group import Group
from asyncckpt.save_handle import SaveState
from asyncckpt.shm.slots import State
from asyncckpt.staging.buffer import StagingBuffer
from asyncckpt.staging.devices import ReadyEvents, ready_events
from asyncckpt.worker.messages import Committed, Existing, WriteRequest
from asyncckpt.worker.open_saves import overdue_at
from asyncckpt.worker.storage import storage_for

logger = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class Retention:
    """What is to become of what stands at the place of a save, and beside it; see ``Engine.save``."""

    existing: Existing = "refuse"
    keep_last: int | None = None
    keep: Callable[[], bool] | None = None


Failure: TypeAlias = "BaseException | None"


class SaveOperation(SaveState):
    """All that is known of a save on this rank. Its life:

        planned      the plan that fits the state is found or made, and the tensors are captured
        staging      a slot is its own, the worker was told of it (``is_begun``), and the tensors are being copied
        staged       all is copied (``is_whole``): the caller may change its tensors, and the slot is the worker's
        written      the worker lets go of the slot (``is_written``)
        committed    on all ranks alike; or failed, or withdrawn, which may happen at any time before (``has_ended``)

    Its slot is free when the worker has let go of it and nobody copies into it (``copied``), however the save ends.
    """

    request: WriteRequest
    buffer: StagingBuffer

    def __init__(self, path: str, step: int | None, group: Group, number: int, answer_s: float) -> None:
        """Plan nothing yet.

        Args:
            path: Where the checkpoint, or the file, is to stand, absolute.
            step: The training step it is of, if it is of one.
            group: The ranks that save together.
            number: Of this save, the same on all ranks.
            answer_s: Seconds that the worker may take to answer.
        """
        super().__init__(path, step)
        self.group, self.number, self._answer_s = group, number, answer_s
        self.is_begun = False
        self.is_whole = False
        self.is_written = False
        self.has_ended = False
        self.is_given_up = False
        """The engine is aborted: no other rank is told anything."""
        self.copied = threading.Event()
        self.inode: int | None = None
        self.overdue_at = math.inf
        self._on_outcome: Callable[[SaveOperation, Failure], object] = _forget
        self._beginning = threading.Lock()
        self._early: tuple[Committed | CheckpointError, bool] | None = None

    def take(self, captured: Captured, slot: int, retention: Retention, timeout: float) -> None:
        """A slot is its own from now on.

        Args:
            captured: What is to be staged there.
            slot: Of its staging buffer, nobody's until now.
            retention: What is to become of other checkpoints.
            timeout: Seconds until the save has to be committed.
        """
        group = self.group
        self.buffer = captured.buffer
        self.request = WriteRequest(
            save_id=self.number,
            segment=self.buffer.number,
            slot=slot,
            path=os.fspath(self.path),
            attempt=group.attempt(self.number),
            step=self.step,
            rank=group.rank,
            world_size=group.world_size,
            existing=retention.existing,
            keep_last=retention.keep_last,
            keep=group.rank == 0 and retention.keep is not None and retention.keep(),
            timeout=timeout,
            pickle_bytes=captured.pickle_bytes,
            umask=_umask(),
        )
        self.overdue_at = overdue_at(self.request)

    def stage(
        self, tensors: Sequence[torch.Tensor], copier: Copier, on_outcome: Callable[[SaveOperation, Failure], object]
    ) -> None:
        """Copy the state into the slot and hand that over to the worker.

        Args:
            tensors: Of the plan, in its order. They must stay as they are until ``staged`` is set.
            copier: Who copies. With overlap this returns before that is done.
            on_outcome: Told what the save failed with (None: it is committed), before the handle is.

        Raises:
            CheckpointError: What the save fails with, unless the copy overlaps.
        """
        self._on_outcome = on_outcome
        ready = ready_events(tensors)
        # In this order: from when the save is begun, the worker may read of the slot what it is told has arrived.
        self.buffer.slots.take(self.request.slot, self.number)
        self.buffer.write_objects(self.request.slot)
        self._begin()
        try:
            self.buffer.begin(self.request.slot, self)
            failure = copier.run(partial(self._copy, tensors, ready, copier.pool))
        except BaseException as error:  # an interrupt: nobody else would ever call it off
            if not self.copied.is_set():
                self._call_off(error)
            raise
        if failure is not None:
            raise failure

    def _begin(self) -> None:
        # Of the worker whose memory this is: should it have died since, this says so, and nothing has begun.
        self.buffer.client.begin(self)
        with self._beginning:
            self.is_begun, early = True, self._early
        if early is not None:
            self._finish(*early)

    def _copy(
        self, tensors: Sequence[torch.Tensor], ready: ReadyEvents, pool: ThreadPoolExecutor
    ) -> CheckpointError | None:
        """Copy, and hand the slot over. What goes wrong is returned, and is the outcome of the save."""
        begun = time.perf_counter()
        buffer, slot = self.buffer, self.request.slot
        try:
            buffer.copy(slot, tensors, ready, pool, self.copies_queued)
            self.timings["copy_s"] = time.perf_counter() - begun
            buffer.slots.set(slot, State.STAGED)
            buffer.client.saves.on_copied(self)
            self.is_whole = True
            buffer.client.staged(self.number, dict(self.timings))
            self.staged.set()
        except BaseException as error:
            failure = self._call_off(error)
            if not isinstance(error, Exception):
                raise
            return failure
        return None

    def _call_off(self, error: BaseException) -> CheckpointError:
        """Staging has come to nothing. Returns what the save fails with."""
        failure = error if isinstance(error, CheckpointError) else self._error("staging failed", error)
        client = self.buffer.client
        client.saves.on_copied(self)
        if client.alive:
            client.cancel(self, failure, self._answer_s)
        return failure

    def revoke(self) -> None:
        """The worker is dead, and the engine aborted: on the first rank, whose worker would have finalized the save,
        take the attempt away. Only so may anybody remove what is of all ranks.
        """
        if self.group.rank == 0:
            storage = storage_for(path := os.fspath(self.path))
            with contextlib.suppress(StorageError):
                storage.remove(storage.revoke(path, self.group.attempt(self.number)))

    def on_written(self, inode: int | None) -> None:
        """The worker lets go of the slot. ``inode``: of a single file, by which it is known when it has its name."""
        self.is_written = True
        self.inode = self.inode if inode is None else inode

    def on_end(self, outcome: Committed | CheckpointError, *, heard: bool = True) -> None:
        """The worker's part has ended, or, not ``heard``, the worker has. First the engine learns of it, then the
        handle, on which somebody may be waiting.
        """
        self.has_ended = True
        with self._beginning:
            if not self.is_begun:  # the worker died while it was told of the save
                self._early = outcome, heard
                return
        self._finish(outcome, heard)

    def _finish(self, outcome: Committed | CheckpointError, heard: bool) -> None:
        failure = outcome if isinstance(outcome, CheckpointError) else None
        try:
            # What is raised here is for the log: whoever calls has other saves to end.
            if failure is not None and not heard and not self.is_given_up:
                with _logged("finding out how a save has ended"):
                    failure = self._resolve(failure)
            with _logged("taking note of the end of a save"):
                self._on_outcome(self, failure)
        finally:
            self._on_outcome = _forget  # a handle that is kept shall not keep the engine
            self.end(failure, outcome.timings if isinstance(outcome, Committed) else None)

    def _resolve(self, failure: CheckpointError) -> CheckpointError | None:
        """How a save has ended on all ranks, of which this rank's worker, dead, says nothing."""
        tell = partial(self.group.report_failure, self.number, failure, begun=True)
        if self.group.rank > 0:
            tell()
        try:
            if self.group.is_committed(self.request, self.inode):
                return None  # its part was done, and it could not say so any more
        except SaveTimeoutError as error:
            return error
        if self.group.rank == 0 and isinstance(failure, WorkerDiedError):
            tell()
        return failure

    def _error(self, doing: str, error: BaseException) -> CheckpointError:
        failure = CheckpointError(
            f"{doing}: {type(error).__name__}: {error}", path=self.path, rank=self.group.rank, step=self.step
        )
        failure.__cause__ = error
        return failure


@contextlib.contextmanager
def _logged(doing: str) -> Iterator[None]:
    try:
        yield
    except Exception:
        logger.exception("%s failed", doing)


def _forget(*_: object) -> None:
    pass


def _umask() -> int:
    """This process's, which can be changed by whoever asks for it in any other way."""
    try:
        with open("/proc/self/status") as file:
            return next(int(line.split()[1], 8) for line in file if line.startswith("Umask:"))
    except (OSError, StopIteration):  # a kernel before 4.7
        return 0o022
