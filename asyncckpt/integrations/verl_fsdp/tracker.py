"""verl's file with the latest step, advanced when all of a step is durable.

A step has several parts: the checkpoints of actor and critic, saved by different workers, and the driver's own files.
The driver ends with a note in the folder of the step, which names the parts. Each worker tries to advance the tracker
when its part is durable, and the driver when its note is. An attempt succeeds only if the note and all parts exist.
The last of them therefore advances the tracker, even if the trainers are dead.
"""

from __future__ import annotations

import contextlib
import errno
import json
import logging
import os
import re
import secrets
from collections.abc import Sequence

from asyncckpt.errors import StorageError
from asyncckpt.extension import Pointer, advance, storage_for, wait_for_attempts

logger = logging.getLogger(__name__)

_TRACKER = "latest_checkpointed_iteration.txt"
_STEP = re.compile(r"global_step_(\d+)")
_NOTE = "asyncckpt_parts.json"


def folder_of_tracker(path: str) -> str | None:
    """Return the folder with the tracker for a checkpoint of verl's; None: it has none.

    Args:
        path: Path of the checkpoint: ``folder/global_step_10``, or ``folder/global_step_10/actor``.
    """
    above = os.path.dirname(path)
    if _STEP.fullmatch(os.path.basename(path)):
        return above
    return os.path.dirname(above) if _STEP.fullmatch(os.path.basename(above)) else None


def latest_step(folder: str) -> int | None:
    """Return the step that the tracker in ``folder`` names; None where it names none. Raises ``OSError``."""
    try:
        with open(os.path.join(folder, _TRACKER), encoding="utf-8") as file:
            return int(file.read())
    except (FileNotFoundError, ValueError):
        return None


def pointer_to(step_folder: str, parts: Sequence[str]) -> Pointer:
    """Return the tracker as a pointer to a step, which advances when its note and all its ``parts`` exist."""
    folder, name = os.path.split(step_folder)
    needs = tuple(os.path.join(step_folder, each) for each in (*parts, _NOTE))
    return Pointer(os.path.join(folder, _TRACKER), name.removeprefix("global_step_"), needs)


class StepTracker:
    """The tracker of one folder, as the driver of a job advances it."""

    def __init__(self, folder: str, timeout: float) -> None:
        """Start nothing.

        Args:
            folder: With the tracker, and a folder for each step.
            timeout: Seconds to wait for the workers of a job that was killed.
        """
        self._folder, self._timeout = folder, timeout
        self._littered: list[str] = []
        """Folders of steps with remains of killed workers."""

    def step_folder(self, step: int) -> str:
        """Return the folder in which verl has the checkpoints of ``step``."""
        return os.path.join(self._folder, f"global_step_{step}")

    def complete(self, step: int, parts: Sequence[str]) -> None:
        """Advance to ``step``, now or as soon as its parts exist. The driver has written the rest of the step.

        Args:
            step: The step.
            parts: Names of folders in that of the step. They appear when they are durable.

        Raises:
            OSError: The driver's own files cannot be made durable.
            StorageError: The tracker cannot be written.
        """
        folder = self.step_folder(step)
        _sync_files(folder, parts)
        advance(Pointer(os.path.join(folder, _NOTE), json.dumps(list(parts))))
        _sync(self._folder)
        if advance(pointer_to(folder, parts)):
            logger.info("step %d is durable, and the latest", step)
        self._clean_up()

    def catch_up(self) -> None:
        """Advance to the step that became complete last, if the job before this one was killed just then.

        Waits for what its workers are still writing. Raises ``StorageError`` when that takes too long.
        """
        noted: list[tuple[int, str]] = []
        for name in filter(_STEP.fullmatch, storage_for(self._folder).names_in(self._folder)):
            folder = os.path.join(self._folder, name)
            with contextlib.suppress(OSError):
                os.remove(os.path.join(folder, f".{_NOTE}.new"))  # of a driver that was killed as it wrote its note
            if _is_littered(folder):
                self._littered.append(folder)
            if (stamp := storage_for(folder).stamp(os.path.join(folder, _NOTE))) is not None:
                noted.append((stamp.modified, folder))
        for at, folder in sorted(noted):
            wait_for_attempts(folder, self._timeout)
            parts = json.loads(storage_for(folder).read(os.path.join(folder, _NOTE)))
            its = pointer_to(folder, parts)
            advance(Pointer(its.path, its.text, its.needs, at))
        self._clean_up()

    def _clean_up(self) -> None:
        """Remove the remains of killed workers, once they are so old that nobody can be writing them.

        A save removes old remains in its own folder. The folder of a step is saved to again only if the step is.
        """
        storage, left = storage_for(self._folder), []
        for folder in self._littered:
            try:
                if _is_littered(folder):  # else it may be gone
                    # An attempt at nothing: storage removes what is left beside it.
                    path, attempt = os.path.join(folder, "nothing"), f"{secrets.token_hex(6)}-0"
                    storage.begin_checkpoint(path, attempt, 0, self._timeout).discard()
                if not _is_littered(folder):
                    continue
            except StorageError as error:
                logger.info("what was left in %s stays: %s", folder, error)
            left.append(folder)
        self._littered = left


def _is_littered(folder: str) -> bool:
    return any(name.startswith(".") for name in storage_for(folder).names_in(folder))


def _sync_files(folder: str, but: Sequence[str]) -> None:
    """Make the files in ``folder`` durable, without the folders ``but`` in it, and without hidden ones."""
    for above, folders, names in os.walk(folder):
        if above == folder:
            folders[:] = [name for name in folders if name not in but and not name.startswith(".")]
        for name in names:
            _sync(os.path.join(above, name))
        _sync(above)


def _sync(path: str) -> None:
    """Make a file durable, or the names in a folder. Raises ``OSError``."""
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    except OSError as error:
        if error.errno != errno.EINVAL:  # some network file systems have nothing to sync for a folder
            raise
    finally:
        os.close(fd)
