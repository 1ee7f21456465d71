"""verl's file with the latest step, advanced when all of a step is durable.

A step that is being saved has a note in its folder of which parts it waits for, from when its caller has written all
of its own, to when the tracker has passed it. So a job that is started again in the place of one that was killed sees
what became durable since.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import re
import secrets
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass

from asyncckpt.errors import SaveTimeoutError, StorageError
from asyncckpt.loading.source import wait_for_attempts
from asyncckpt.storage import storage_for
from asyncckpt.storage.file_system import replace_text, sync_folder

logger = logging.getLogger(__name__)

_TRACKER = "latest_checkpointed_iteration.txt"
_STEP = re.compile(r"global_step_(\d+)")
_NOTE = "asyncckpt_parts.json"
_NEW_NOTE = f".{_NOTE}.new"  # left by a driver that was killed while it wrote its note
_POLL_S = 0.05


def folder_of_tracker(path: str) -> str | None:
    """The folder with the tracker for a checkpoint of verl's; None: it has none.

    Args:
        path: Of the checkpoint: ``folder/global_step_10``, or ``folder/global_step_10/actor``.
    """
    above = os.path.dirname(path)
    if _STEP.fullmatch(os.path.basename(path)):
        return above
    return os.path.dirname(above) if _STEP.fullmatch(os.path.basename(above)) else None


def latest_step(folder: str) -> int | None:
    """The step that the tracker in ``folder`` names; None where it names none. Raises ``OSError``."""
    try:
        with open(os.path.join(folder, _TRACKER), encoding="utf-8") as file:
            return int(file.read())
    except (FileNotFoundError, ValueError):
        return None


def advance(folder: str, step: int) -> None:
    """Have the tracker in ``folder`` name ``step``, in one step and durably. Raises ``OSError``."""
    replace_text(os.path.join(folder, _TRACKER), str(step))


@dataclass(frozen=True)
class _Step:
    number: int
    folder: str
    parts: tuple[str, ...]
    deadline: float

    def is_durable(self) -> bool:
        return all(os.path.isdir(os.path.join(self.folder, part)) for part in self.parts)

    def forget(self) -> None:
        """Remove its note: nobody waits for it any more."""
        for name in (_NOTE, _NEW_NOTE):
            with contextlib.suppress(FileNotFoundError):
                os.remove(os.path.join(self.folder, name))


class StepTracker:
    """Advances the tracker of one folder, on a thread of its own, for the steps of a job."""

    def __init__(self, folder: str, timeout: float) -> None:
        """Start nothing yet.

        Args:
            folder: With the tracker, and a folder for each step.
            timeout: Seconds after which a step that is not durable is given up: its save has failed.
        """
        self._folder, self._timeout = folder, timeout
        self._expected: list[_Step] = []
        self._passed: list[_Step] = []
        """Steps that nobody waits for any more, and whose notes are still to go."""
        self._littered: list[str] = []
        """Folders of steps in which killed workers have left something."""
        self._changed = threading.Condition()
        self._thread: threading.Thread | None = None

    def step_folder(self, step: int) -> str:
        """Where verl has the checkpoints of ``step``."""
        return os.path.join(self._folder, f"global_step_{step}")

    def expect(self, step: int, parts: Sequence[str]) -> None:
        """Advance to ``step`` as soon as its parts are there.

        All else in its folder has been written, and is made durable here.

        Args:
            step: The later ones of a job come later; they take the place of earlier ones that are still expected.
            parts: The folders in that of the step which get their names when they are durable.

        Raises:
            OSError: What is there cannot be made durable.
        """
        folder = self.step_folder(step)
        _sync_files(folder, parts)
        replace_text(os.path.join(folder, _NOTE), json.dumps(list(parts)))
        sync_folder(self._folder)
        with self._changed:
            self._expected.append(_Step(step, folder, tuple(parts), time.monotonic() + self._timeout))
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="asyncckpt-tracker", daemon=True)
                self._thread.start()

    def reach(self, step: int) -> None:
        """Advance to ``step``, all of which is there; steps that are still expected are overtaken.

        Raises ``OSError``.
        """
        reached = _Step(step, self.step_folder(step), (), 0.0)
        _sync_files(reached.folder, ())
        with self._changed:
            for each in [*self._expected, reached]:
                each.forget()
            self._expected.clear()
            self._changed.notify_all()
            self._reach(reached)
        self._clean_up()

    def wait(self) -> None:
        """Return when no step is expected any more; a step that failed has been given up by then.

        Raises:
            SaveTimeoutError: The steps take longer than the timeout of the last one.
        """
        with self._changed:
            if not self._changed.wait_for(lambda: not self._expected, self._timeout + 10):
                raise SaveTimeoutError(f"a step is not durable after {self._timeout:g} s", path=self._folder)

    def catch_up(self) -> None:
        """Advance to what became durable after the job before this one was killed.

        Waits for what its workers are still writing. Raises ``StorageError`` when that takes too long.
        """
        try:
            steps = sorted(
                (int(found[1]), found[0]) for found in map(_STEP.fullmatch, os.listdir(self._folder)) if found
            )
        except FileNotFoundError:
            return
        for number, name in steps:
            folder = os.path.join(self._folder, name)
            if _is_littered(folder):
                self._littered.append(folder)
            try:
                with open(os.path.join(folder, _NOTE), encoding="utf-8") as file:
                    parts = tuple(json.load(file))
            except (FileNotFoundError, NotADirectoryError, ValueError):
                continue  # nothing of it is expected any more, or its caller was killed before it had written its own
            wait_for_attempts(folder, self._timeout)
            if (step := _Step(number, folder, parts, 0.0)).is_durable():
                self._reach(step)
            step.forget()
        self._clean_up()

    def _run(self) -> None:
        while True:
            with self._changed:
                expected = list(self._expected)
                if not expected:
                    self._thread = None
                    return
            ended = [step for step in expected if self._has_ended(step)]
            with self._changed:
                ended = [step for step in ended if step in self._expected]
                if ended:  # and with it those before it, which failed, or were overtaken
                    passed = self._expected[: self._expected.index(ended[-1]) + 1]
                    self._expected = self._expected[len(passed) :]
                    self._passed = [step for step in self._passed + passed if not _is_forgotten(step)]
                    self._changed.notify_all()
                    continue
            time.sleep(_POLL_S)

    def _has_ended(self, step: _Step) -> bool:
        try:
            if step.is_durable():
                with self._changed:
                    if step in self._expected:
                        self._reach(step)
                self._clean_up()
                return True
        except OSError as error:
            logger.error("the tracker is not advanced to step %d: %s", step.number, error)
            return True
        if time.monotonic() < step.deadline:
            return False
        logger.error("step %d is not durable after %g s, and is not named as the latest", step.number, self._timeout)
        return True

    def _reach(self, step: _Step) -> None:
        sync_folder(step.folder)  # a name can be seen a moment before it is durable
        advance(self._folder, step.number)
        logger.info("step %d is durable, and the latest", step.number)

    def _clean_up(self) -> None:
        """Remove what killed workers left, once it is so old that nobody can be writing it.

        The workers do that beside what they write, and so in the folder of a step only if that is saved again.
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


def _is_forgotten(step: _Step) -> bool:
    """Whether the note of a step is gone now. What is wrong with that is no fault of later steps."""
    try:
        step.forget()
    except OSError as error:
        logger.warning("the note of step %d stays for now: %s", step.number, error)
        return False
    return True


def _is_littered(folder: str) -> bool:
    return any(name.startswith(".") for name in storage_for(folder).names_in(folder))


def _sync_files(folder: str, but: Sequence[str]) -> None:
    """Make durable what is in ``folder``, but for some of the folders in it, and hidden ones."""
    for above, folders, names in os.walk(folder):
        if above == folder:
            folders[:] = [name for name in folders if name not in but and not name.startswith(".")]
        for name in names:
            with open(os.path.join(above, name), "rb") as file:
                os.fsync(file.fileno())
        sync_folder(above)
