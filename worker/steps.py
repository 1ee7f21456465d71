"""The folders of a root, ``root/step-00000100``, and which of them to keep."""

from __future__ import annotations

import itertools
import logging
import os
import re

from asyncckpt.errors import DamagedCheckpointError
from asyncckpt.worker.manifest import MANIFEST_NAME, Manifest
from asyncckpt.worker.storage import PARTIAL_SUFFIX, remove_checkpoint, sync_folder, under_way

logger = logging.getLogger(__name__)

_STEP = re.compile(r"step-(\d{8,})")


def step_folder(root: str, step: int) -> str:
    """Where the checkpoint of ``step`` stands."""
    return os.path.join(root, f"step-{step:08d}")


def complete_steps(root: str) -> list[int]:
    """The steps with a published checkpoint under ``root``, ascending; none where there is no such folder."""
    found = []
    for name in _names(root):
        match = _STEP.fullmatch(name)
        if match and os.path.exists(os.path.join(root, name, MANIFEST_NAME)):
            found.append(int(match[1]))
    return sorted(found)


def attempts_under_way(root: str) -> list[str]:
    """The attempts under ``root`` that some worker is still writing, as paths."""
    partial = [os.path.join(root, name) for name in _names(root) if name.endswith(PARTIAL_SUFFIX)]
    return [path for path in partial if under_way(path)]


def prune(root: str, keep_last: int, written: int) -> None:
    """Remove all but the ``keep_last`` newest steps, and never ``written``, the one just published.

    One whose manifest says that it is to be kept, or cannot be read, stays; one that cannot be removed, or is being
    read, is left for the next time.
    """
    for step in complete_steps(root)[:-keep_last]:
        path = step_folder(root, step)
        if step == written or _is_kept(path):
            continue
        try:
            if not remove_checkpoint(path):
                logger.info("%s is being read and stays for now", path)
        except OSError as error:
            logger.warning("the old checkpoint %s could not be removed: %s", path, error)


def set_aside(root: str, step: int) -> None:
    """Take the name from a damaged checkpoint, so that its step can be saved again. Nothing of it is removed."""
    path = step_folder(root, step)
    aside = next(name for number in itertools.count(1) if not os.path.lexists(name := f"{path}.damaged-{number}"))
    try:
        os.rename(path, aside)
        sync_folder(root)
    except OSError as error:
        logger.warning("the damaged checkpoint %s could not be set aside: %s", path, error)


def _is_kept(path: str) -> bool:
    name = os.path.join(path, MANIFEST_NAME)
    try:
        with open(name, "rb") as file:
            return Manifest.parse(file.read(), name).keep
    except (OSError, DamagedCheckpointError) as error:
        logger.warning("%s is not removed, because its manifest cannot be read: %s", path, error)
        return True


def _names(root: str) -> list[str]:
    try:
        with os.scandir(root) as entries:
            return [entry.name for entry in entries]
    except (FileNotFoundError, NotADirectoryError):
        return []
