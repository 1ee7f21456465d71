"""Where checkpoints are kept: the kind of storage that a path is in, the steps of a root, and how a save has ended.

``storage.py`` is the interface of all kinds. A root has a folder for each step, ``root/step-00000100``.
"""

from __future__ import annotations

import logging
import os
import re
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeoutError

from asyncckpt.errors import DamagedCheckpointError, SaveTimeoutError, StorageError
from asyncckpt.worker.manifest import MANIFEST_NAME, Manifest
from asyncckpt.worker.messages import WriteRequest
from asyncckpt.worker.storage.local import LocalStorage
from asyncckpt.worker.storage.storage import Storage

logger = logging.getLogger(__name__)

_STEP = re.compile(r"step-(\d{8,})")


def storage_for(path: str, *, direct_io: bool = True) -> Storage:
    """The kind of storage that ``path`` is in; today there is one. ``direct_io``: write past the page cache."""
    return LocalStorage(direct_io)


def step_folder(root: str, step: int) -> str:
    """Where the checkpoint of ``step`` stands."""
    return os.path.join(root, f"step-{step:08d}")


def step_of(path: str) -> int | None:
    """The step that the folder ``path`` has its name from; None: it is no folder of a step."""
    name = _STEP.fullmatch(os.path.basename(path))
    return int(name[1]) if name else None


def complete_steps(root: str) -> list[int]:
    """The steps with a committed checkpoint under ``root``, ascending; none where there is no such folder.

    Raises ``StorageError``.
    """
    storage = storage_for(root)
    return [step for step in _named_steps(root) if storage.exists(os.path.join(step_folder(root, step), MANIFEST_NAME))]


def newest_step(root: str) -> int | None:
    """The newest step under ``root`` with anything in its folder, complete or not. Raises ``StorageError``.

    A folder has the name of a step only when its checkpoint is complete: what is missing there was lost later, and
    whoever wants the newest has to be told.
    """
    storage = storage_for(root)
    return next((step for step in reversed(_named_steps(root)) if storage.names_in(step_folder(root, step))), None)


def prune(root: str, keep_last: int, is_recent: Callable[[int], bool]) -> None:
    """Remove old checkpoints. One whose manifest says that it is to be kept, or cannot be read, stays.

    One that cannot be removed, or is being read, is left for the next time. Raises nothing.

    Args:
        root: The folder of the steps.
        keep_last: How many of the newest steps stay.
        is_recent: Whether a step was just committed; it stays in any case, whatever its number.
    """
    storage = storage_for(root)
    try:
        steps = complete_steps(root)
    except StorageError as error:  # what was to be removed stays; nothing is lost
        logger.warning("old checkpoints could not be looked through: %s", error)
        return
    for step in steps[:-keep_last]:
        path = step_folder(root, step)
        if is_recent(step) or _is_kept(storage, path):
            continue
        try:
            if not storage.remove_checkpoint(path):
                logger.info("%s is being read and stays for now", path)
        except StorageError as error:
            logger.warning("an old checkpoint could not be removed: %s", error)


def set_aside(root: str, step: int) -> None:
    """Take the name from a damaged checkpoint, so that its step can be saved again. Nothing of it is removed."""
    try:
        storage_for(root).set_aside(step_folder(root, step))
    except StorageError as error:
        logger.warning("a damaged checkpoint could not be set aside: %s", error)


def resolve(request: WriteRequest, timeout: float, inode: int | None = None) -> bool:
    """Whether a save is finalized; if it is not, it never will be.

    For a rank that has written its part and cannot learn the outcome, or whose part nobody is writing any more, because
    its worker is dead. The answer is the same for all ranks and does not change any more.

    Args:
        request: The save.
        timeout: How many seconds storage may take.
        inode: Of a single file, what it was written to (see ``OpenAttempt``).

    Raises:
        SaveTimeoutError: Storage fails, or does not answer in time. Then, and only then, nobody can say.
    """
    storage = storage_for(request.path)
    outcome: Future[bool] = Future()

    def find_out() -> None:
        try:
            is_finalized, leftover = storage.resolve(request.path, request.attempt, request.existing, inode)
        except StorageError as error:
            outcome.set_exception(error)
            return
        outcome.set_result(is_finalized)
        storage.remove(leftover)

    begun = time.monotonic()
    thread = threading.Thread(target=find_out, name="asyncckpt-resolve", daemon=True)
    thread.start()
    try:
        is_finalized = outcome.result(timeout)
    except (FutureTimeoutError, StorageError) as error:
        why = f"fails ({error})" if isinstance(error, StorageError) else f"has not answered for {timeout:g} s"
        raise SaveTimeoutError(
            f"storage {why}, and nobody can say whether this was saved",
            path=request.path,
            rank=request.rank,
            step=request.step,
        ) from error
    thread.join(max(0.0, begun + timeout - time.monotonic()))  # so that what was revoked takes no more space
    return is_finalized


def _named_steps(root: str) -> list[int]:
    """The steps under ``root`` by the names of the folders, ascending."""
    steps = map(step_of, storage_for(root).names_in(root))
    return sorted(step for step in steps if step is not None)


def _is_kept(storage: Storage, path: str) -> bool:
    name = os.path.join(path, MANIFEST_NAME)
    try:
        return Manifest.parse(storage.read(name), name).keep
    except (StorageError, DamagedCheckpointError) as error:
        logger.warning("an old checkpoint is not removed, because its manifest cannot be read: %s", error)
        return True
