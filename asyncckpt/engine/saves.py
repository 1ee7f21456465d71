"""The saves of an engine: those under way, backpressure where no slot is free (``Config.when_busy``), and the failures
that nobody was told of yet.
"""

from __future__ import annotations

import contextlib
import logging
import os
import time

from asyncckpt.config import Config
from asyncckpt.engine.save_operation import SaveOperation
from asyncckpt.errors import (
    CheckpointExistsError,
    ClosedError,
    SaveDroppedError,
    SaveTimeoutError,
    StorageError,
    located,
)
from asyncckpt.format.write_request import Existing
from asyncckpt.link.client import TrackedSave, WorkerClient, longest
from asyncckpt.staging.buffer import StagingBuffer
from asyncckpt.storage import is_address, storage_for
from asyncckpt.storage.storage import exists_error
from asyncckpt.supervisor import note_loss

logger = logging.getLogger(__name__)


class Saves:
    """The books of one engine. Any thread may call, but slots are taken by one at a time."""

    def __init__(self, config: Config) -> None:
        self._config = config
        # Those under way, and those that failed and nobody was told of, the oldest first.
        self._saves: list[SaveOperation] = []
        self.failures = 0
        """How many have failed."""

    def __del__(self) -> None:
        """Note failures that no call has raised, for the status of the process: the engine was dropped, not closed."""
        lost = [save for save in getattr(self, "_saves", ()) if _is_untold(save)]
        if self._config.failure != "warn" and any(not isinstance(save.failure, ClosedError) for save in lost):
            note_loss()

    def add(self, save: SaveOperation) -> None:
        """It is under way from now on, until it has ended."""
        self._saves = [each for each in self._saves if not each.done.is_set() or _is_untold(each)] + [save]

    def on_failure(self, failure: BaseException) -> None:
        """One of them is about to fail with ``failure``."""
        if isinstance(failure, ClosedError):
            logger.warning("%s", str(failure))
        elif not isinstance(failure, SaveDroppedError):
            logger.error("saving failed: %s", str(failure))  # not itself: it holds on to the memory it saw
            self.failures += 1

    def check_place(self, save: SaveOperation, existing: Existing) -> None:
        """Raise ``StorageError`` if this rank cannot write where ``save`` goes. On the first rank, raise
        ``CheckpointExistsError`` where it may not go: because of what stands there, or of a save to there that is under
        way. One that replaces what is there comes after that: saves end in order. An object store is not asked: the
        worker does that, while the training goes on.
        """
        path = os.fspath(save.path)
        check_writable(path, save.step)
        if save.group.rank > 0:
            return
        if existing == "refuse" and any(other.path == save.path for other in self._under_way()):
            raise CheckpointExistsError("this checkpoint is being saved already", path=path, step=save.step)
        if not is_address(path) and not storage_for(path).may_put(path, existing):
            raise exists_error(path, existing, save.step)

    def take_slot(self, save: SaveOperation, buffer: StagingBuffer) -> int | None:
        """Find a slot of ``buffer`` to stage ``save`` in. None where the save was dropped instead: then it has ended.

        Raises ``SaveTimeoutError`` where none becomes free in time, ``WorkerDiedError`` where nobody would free one.
        """
        if self._config.when_busy != "wait" and self._is_dropped(save, buffer):
            return None
        buffer.fit_memory()
        slot: int | None = None

        def claimed() -> bool:
            nonlocal slot
            # Where the worker is gone all saves have ended; but one that was left is writing what is in their slots.
            if slot is None and buffer.client.alive:
                slot = buffer.claim_slot()
            return slot is not None

        # Saves that are in time are waited for, as long as each may take.
        limit = max(self._config.timeout, longest(self._config.commit_timeout))
        buffer.client.wait_for(claimed, limit, "waiting for a free slot", save.group.check_first)
        return slot

    def give_up(self, worker: WorkerClient | None) -> None:
        """Kill the worker, and take away what it had begun, at once and without a word to the other ranks."""
        given_up = self._under_way()
        for save in given_up:
            save.is_given_up = save.is_reported = True
        if worker is not None:
            worker.kill()
        for save in given_up:
            # Only the first rank, whose worker would have finalized the save, may remove what is of all ranks.
            if save.group.rank == 0:
                path = os.fspath(save.path)
                with contextlib.suppress(StorageError):
                    storage = storage_for(path)
                    storage.remove(storage.revoke(path, save.group.attempt(save.number)))

    def wait(self, timeout: float | None) -> None:
        """Wait until all have ended. Raises ``SaveTimeoutError`` after ``timeout`` seconds."""
        deadline = None if timeout is None else time.monotonic() + timeout
        for save in self._under_way():
            if not save.done.wait(None if deadline is None else deadline - time.monotonic()):
                raise SaveTimeoutError(f"saves are still under way after {timeout:g} s")

    def raise_failure(self, after: SaveOperation | None = None) -> None:
        """Raise the first failure nobody was told of, unless a line in the log is enough.

        Args:
            after: A save that was called just now. It has to be staged first, as its caller gets no handle by which to
                wait for that; and a failure of it is for the next call.
        """
        untold = [save for save in self._saves if save is not after and _is_untold(save)]
        for save in untold:
            save.is_reported = True
        if untold and untold[0].failure is not None and self._config.failure != "warn":
            if after is not None and not after.staged.wait(self._config.timeout):
                logger.error("the tensors of %s are still being copied", after.path)
            raise untold[0].failure

    def _under_way(self) -> list[SaveOperation]:
        return [save for save in self._saves if not save.done.is_set()]

    def _is_dropped(self, save: SaveOperation, buffer: StagingBuffer) -> bool:
        """Make room as ``when_busy`` says. The first rank decides for all. Returns whether ``save`` was skipped."""
        group = save.group
        skips, replaced = group.follow_first("slot", save.number, lambda: self._decide(save, buffer))
        if skips:
            buffer.fit_memory()
            dropped = "skipped: all slots were being written"
            save.is_reported = True
            save.end(SaveDroppedError(dropped, path=save.path, rank=group.rank, step=save.step))
        elif replaced is not None and group.rank > 0:
            self._drop(replaced, save, buffer)
        return skips

    def _decide(self, save: SaveOperation, buffer: StagingBuffer) -> tuple[bool, int | None]:
        """First rank: whether to skip ``save``, and which one it replaces."""
        skip = self._config.when_busy == "skip"
        # Until a save has ended, some rank may not have a free slot yet.
        under_way = [other for other in buffer.saves if other is not None and not other.has_ended]
        if len(under_way) < len(buffer.saves):
            # Unless all but those under way are being read: then another is free soon.
            return skip and buffer.claim_slot() is None, None
        if skip:
            return True, None
        for other in sorted(under_way, key=lambda other: -other.request.save_id):
            if other.is_written or not other.copied.is_set():
                continue  # it is about to be committed, or is being copied
            if buffer.client.cancel(other, _replaced(other, save), self._config.timeout):
                return False, other.request.save_id
        if len(under_way) > 1 and not save.group.alone:
            # Written here, but not yet everywhere. The oldest is spared, or slow ranks would never finish any.
            newest = max(under_way, key=lambda other: other.request.save_id)
            newest.is_withdrawn = True
            save.group.report_failure(newest.request.save_id, _replaced(newest, save), begun=True)
            return False, newest.request.save_id
        return False, None

    def _drop(self, replaced: int, save: SaveOperation, buffer: StagingBuffer) -> None:
        """The first rank has taken back the save of that number; here it may be being written, and is so in vain."""
        timeout = self._config.timeout
        for other in filter(None, buffer.saves):
            if other.request.save_id != replaced:
                continue
            other.is_withdrawn = True
            if other.is_written:
                continue
            if not other.copied.wait(timeout):
                raise SaveTimeoutError(
                    f"the copy of what is to be replaced has taken {timeout:g} s so far",
                    path=other.request.path,
                    rank=other.request.rank,
                    step=other.request.step,
                )
            buffer.client.cancel(other, _replaced(other, save), timeout)


def check_writable(path: str, step: int | None = None) -> None:
    """Raise ``StorageError`` if this process cannot create ``path``. An object store is not asked."""
    if not is_address(path):
        try:
            storage_for(path).check_writable(path)
        except StorageError as error:
            raise located(error, step=step) from error


def _is_untold(save: SaveOperation) -> bool:
    """Whether it has failed, and nobody was told."""
    return not save.is_reported and save.failure is not None and not isinstance(save.failure, SaveDroppedError)


def _replaced(other: TrackedSave, save: SaveOperation) -> SaveDroppedError:
    return SaveDroppedError(
        f"replaced by the newer save of step {save.step} before it was written",
        path=other.request.path,
        rank=other.request.rank,
        step=other.request.step,
    )
