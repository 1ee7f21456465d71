"""What the workers of dead trainers hold in memory: a checkpoint of torchtitan's folder, if it is the newest."""

from __future__ import annotations

import logging
import os
from functools import partial

from asyncckpt.engine.engine import Engine
from asyncckpt.errors import CheckpointError
from asyncckpt.integrations.torchtitan.steps import complete_steps
from asyncckpt.loading.memory_search import FoundImages, HeldAttempt, find_images
from asyncckpt.loading.memory_source import MemorySource, chosen_source
from asyncckpt.storage import storage_for

logger = logging.getLogger(__name__)


def newest_held(engine: Engine, folder: str) -> MemorySource | None:
    """The newest checkpoint, the same one on all ranks, to be closed; None: memory does not have it.

    Args:
        engine: Of the manager.
        folder: The checkpoints'.

    Raises:
        CheckpointError: What is in storage cannot be seen.
    """
    try:
        memory = engine.held()
    except CheckpointError as error:
        logger.warning("not loaded from memory: %s", error)
        memory = None
    if engine.job is None:
        return None
    found = find_images(engine.job, memory, engine.config.address)
    return chosen_source(found, partial(_choose, folder), engine.config.transport)


def _choose(folder: str, found: FoundImages) -> HeldAttempt | None:
    """The newest that is whole, and that nothing in storage is newer than."""
    newest = max(complete_steps(folder), default=-1)
    for each in found.attempts():
        request, step = each.request, each.request.step or 0
        if not each.is_whole or step < newest or request.path != os.path.join(folder, f"step-{step}"):
            continue
        if storage_for(request.path).is_finalized(request.path, request.attempt):
            return each
        if step > newest and not each.committed:  # else somebody has removed it, or replaced it
            return each
    return None
