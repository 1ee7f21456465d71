"""The checkpoints in torchtitan's folder: which can be loaded, and which go."""

from __future__ import annotations

import logging
import os
import re

from asyncckpt.errors import StorageError
from asyncckpt.format.manifest import METADATA_NAME
from asyncckpt.storage import remove_old_checkpoint, storage_for

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


def remove_older(folder: str, step: int, keep: int) -> None:
    """Leave the newest checkpoints up to ``step``, which is durable. Raises nothing.

    Later ones, of before the training went back, stay: torchtitan resumes from the highest step.

    Args:
        folder: Where they are.
        step: The newest that is durable.
        keep: How many stay.
    """
    try:
        kept = [each for each in complete_steps(folder) if each <= step][-keep:]
        old = [path for each, path in _named_steps(folder) if kept and each < kept[0]]
    except StorageError as error:
        logger.warning("old checkpoints could not be looked through: %s", error)
        return
    for path in old:
        remove_old_checkpoint(path)


def _named_steps(folder: str) -> list[tuple[int, str]]:
    found = [(_STEP.fullmatch(name), name) for name in storage_for(folder).names_in(folder)]
    return sorted((int(step[1]), os.path.join(folder, name)) for step, name in found if step)
