"""The saves of an engine that are under way, and the failures of those that nobody was told of yet."""

from __future__ import annotations

import logging
import os
from concurrent.futures import wait

from asyncckpt.config import Failure
from asyncckpt.engine.save_operation import SaveOperation
from asyncckpt.errors import CheckpointExistsError, SaveDroppedError, SaveTimeoutError
from asyncckpt.worker.client import WorkerClient
from asyncckpt.worker.messages import Existing
from asyncckpt.worker.storage import storage_for

logger = logging.getLogger(__name__)


class Saves:
    """The books of one engine. Any thread may call."""

    def __init__(self, policy: Failure) -> None:
        """``policy``: whether a failure is raised by the next call, or a line in the log is enough."""
        self._policy = policy
        self._under_way: dict[SaveOperation, None] = {}
        self._failed: list[tuple[SaveOperation, BaseException]] = []
        self.failures = 0
        """How many have failed."""

    def add(self, save: SaveOperation) -> None:
        """It is under way from now on."""
        self._under_way[save] = None

    def discard(self, save: SaveOperation) -> None:
        """It never was."""
        self._under_way.pop(save, None)

    def end(self, save: SaveOperation, failure: BaseException | None) -> None:
        """It has ended, well or with ``failure``."""
        self.discard(save)
        if failure is not None and not isinstance(failure, SaveDroppedError):
            logger.error("saving failed: %s", str(failure))  # not itself: it holds on to the memory it saw
            self._failed = [each for each in self._failed if not each[0].is_reported] + [(save, failure)]
            self.failures += 1

    def under_way(self) -> list[SaveOperation]:
        """Those that have not ended, the oldest first."""
        return list(self._under_way)

    def check_place(self, save: SaveOperation, existing: Existing) -> None:
        """On the first rank, raise ``CheckpointExistsError`` where ``save`` may not go: because of what stands there,
        or of a save to there that is under way.
        """
        path = os.fspath(save.path)
        if save.group.rank > 0:
            return
        if any(other.path == save.path for other in self.under_way()):
            raise CheckpointExistsError("this checkpoint is being saved already", path=path, step=save.step)
        storage_for(path).check_place(path, existing, save.step)

    def give_up(self, worker: WorkerClient | None) -> None:
        """Kill the worker, and take away what it had begun, at once and without a word to the other ranks."""
        given_up = self.under_way()
        for save in given_up:
            save.is_given_up = save.is_reported = True
        if worker is not None:
            worker.kill()
        for save in given_up:
            save.revoke()

    def wait(self, timeout: float | None) -> None:
        """Wait until all have ended. Raises ``SaveTimeoutError`` after ``timeout`` seconds."""
        if wait([save.future for save in self.under_way()], timeout).not_done:
            raise SaveTimeoutError(f"saves are still under way after {timeout:g} s")

    def raise_failure(self) -> None:
        """Raise the first failure nobody was told of, unless a line in the log is enough."""
        failed, self._failed = self._failed, []
        if self._policy == "warn":
            return
        unreported = [(save, failure) for save, failure in failed if not save.is_reported]
        for save, _ in unreported:
            save.is_reported = True
        if unreported:
            raise unreported[0][1]
