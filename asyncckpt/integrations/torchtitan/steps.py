"""The checkpoints in torchtitan's folder: which can be loaded, and which go."""

from __future__ import annotations

import logging
import os
import re
from collections.abc import Sequence
from typing import Any

from asyncckpt.errors import StorageError
from asyncckpt.extension import METADATA_NAME, storage_for

logger = logging.getLogger(__name__)

# Not padded, as torchtitan looks for them. It would also take hidden folders, in which nothing is complete.
_STEP = re.compile(r"step-(0|[1-9]\d*)")
_HF_INDEX = "model.safetensors.index.json"


def complete_steps(folder: str) -> list[int]:
    """The steps that torchtitan can load, ascending. Raises ``StorageError``."""
    storage = storage_for(folder)
    return [
        step
        for step, path in _named_steps(folder)
        if any(storage.exists(os.path.join(path, mark)) for mark in (METADATA_NAME, _HF_INDEX))
    ]


def older_checkpoints(folder: str, step: int, under_way: Sequence[str]) -> tuple[str, ...]:
    """Return the checkpoints before ``step`` in the order in which they go. Folders that hold no whole one go first.

    Later ones, of before the training went back, stay: torchtitan resumes from the highest step.

    Args:
        folder: The folder with the checkpoints.
        step: The one that is about to be saved.
        under_way: Paths of saves that have not ended.
    """
    try:
        complete, found = complete_steps(folder), dict(_named_steps(folder))
    except StorageError as error:
        logger.warning("old checkpoints could not be looked through: %s", error)
        return ()
    found |= {int(path.rpartition("-")[2]): path for path in under_way}
    incomplete = found.keys() - set(complete) - {number for number, path in found.items() if path in under_way}
    order = sorted(found, key=lambda number: (number not in incomplete, number))
    return tuple(found[number] for number in order if number < step)


def newest_held(folder: str, images: Sequence[Any]) -> Any:
    """Return the newest of ``images``, which memory holds, that nothing in storage is newer than; None: there is none.

    Args:
        folder: The folder with the checkpoints.
        images: As ``load_held`` gives them.

    Raises:
        StorageError: The folder cannot be looked through.
    """
    newest = max(complete_steps(folder), default=-1)
    for each in images:
        request, step = each.request, each.request.step or 0
        if step < newest or request.path != os.path.join(folder, f"step-{step}"):
            continue
        if storage_for(request.path).is_finalized(request.path, request.attempt):
            return each
        if step > newest and not each.committed:  # else somebody has removed it, or replaced it
            return each
    return None


def _named_steps(folder: str) -> list[tuple[int, str]]:
    found = [(_STEP.fullmatch(name), name) for name in storage_for(folder).names_in(folder)]
    return sorted((int(step[1]), os.path.join(folder, name)) for step, name in found if step)
