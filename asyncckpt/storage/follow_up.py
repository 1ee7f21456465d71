"""The steps after a commit: advance the pointer to the new checkpoint, and remove older checkpoints.

The first rank's worker carries out these steps, so no trainer is needed. If this worker dies after the commit, the
trainer carries out the steps when storage confirms the commit. If both die in that moment, the checkpoint is complete,
but the pointer names an older checkpoint. The next save advances the pointer.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from dataclasses import replace

from asyncckpt.errors import StorageError, located
from asyncckpt.format.write_request import Pointer, WriteRequest
from asyncckpt.storage import is_address, storage_for

logger = logging.getLogger(__name__)


def dated(pointer: Pointer, called_at: float) -> Pointer:
    """Return the pointer with the time of a save that begins now, at ``called_at`` seconds since the epoch.

    The time is later than the time of the pointer's file, because the file names an older save. This holds even if the
    clock of another host has dated the file. Raises ``StorageError``.
    """
    stamp = None if is_address(pointer.path) else storage_for(pointer.path).stamp(pointer.path)
    at = int(called_at * 1e9)
    return replace(pointer, at=at if stamp is None else max(at, stamp.modified + 1))


def advance(pointer: Pointer) -> bool:
    """Write the pointer to its file, unless the file names a newer checkpoint or the pointer needs a missing path.

    A pointer without a time counts as newer than the file. Returns whether the file names this checkpoint now. Raises
    ``StorageError``.
    """
    if not all(storage_for(path).exists(path) for path in pointer.needs):
        return False
    pointer = pointer if pointer.at else dated(pointer, time.time())
    return storage_for(pointer.path).advance(pointer.path, pointer.text, pointer.at)


def follow_up(request: WriteRequest) -> Sequence[str]:
    """Advance the pointer of a committed save, then take the names from the checkpoints that its rotation removes.

    Returns the leftovers of these checkpoints, for ``remove_rest``. Raises ``StorageError`` if the pointer cannot be
    written. In this case nothing is removed.
    """
    try:
        if request.pointer is not None and not advance(request.pointer):
            return ()
    except StorageError as error:
        text = f"{request.path} is saved, but not named as the newest: {error.message}"
        raise located(StorageError(text, path=error.path), rank=request.rank, step=request.step) from error
    rotation, rest = request.rotation, []
    there = [path for path in rotation.paths if path != request.path and _exists(path)] if rotation else []
    for path in there[: len(there) - rotation.spares] if rotation and len(there) > rotation.spares else ():
        try:
            if (leftover := storage_for(path).take_name(path)) is None:
                logger.info("%s is being read and stays for now", path)
            elif leftover:
                rest.append(leftover)
        except StorageError as error:
            logger.warning("an old checkpoint could not be removed: %s", error)
    return rest


def remove_rest(leftovers: Sequence[str]) -> None:
    """Remove the files of checkpoints that have lost their names. Raises nothing."""
    for path in leftovers:
        storage_for(path).remove(path)


def _exists(path: str) -> bool:
    try:
        return storage_for(path).exists(path)
    except StorageError as error:
        logger.warning("an old checkpoint cannot be read, and stays: %s", error)
        return False
