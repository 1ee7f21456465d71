"""The folders of a root, ``root/step-00000100``, and which of them to keep."""

from __future__ import annotations

import logging
import os
import re

from asyncckpt.errors import DamagedCheckpointError, StorageError
from asyncckpt.worker.manifest import MANIFEST_NAME, Manifest
from asyncckpt.worker.storage import storage_for

logger = logging.getLogger(__name__)

_STEP = re.compile(r"step-(\d{8,})")


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


def _named_steps(root: str) -> list[int]:
    """The steps under ``root`` by the names of the folders, ascending."""
    steps = map(step_of, storage_for(root).names_in(root))
    return sorted(step for step in steps if step is not None)


def prune(root: str, keep_last: int, written: int) -> None:
    """Remove old checkpoints, as far as storage allows.

    One whose manifest says that it is to be kept, or cannot be read, stays; one that cannot be removed, or is being
    read, is left for the next time.

    Args:
        root: The folder of the steps.
        keep_last: How many of the newest steps stay.
        written: The step that was just committed, which stays in any case.

    Raises:
        StorageError: The folder cannot be listed.
    """
    storage = storage_for(root)
    for step in complete_steps(root)[:-keep_last]:
        path = step_folder(root, step)
        if step == written or _is_kept(path):
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


def _is_kept(path: str) -> bool:
    name = os.path.join(path, MANIFEST_NAME)
    try:
        return Manifest.parse(storage_for(path).read(name), name).keep
    except (StorageError, DamagedCheckpointError) as error:
        logger.warning("an old checkpoint is not removed, because its manifest cannot be read: %s", error)
        return True
