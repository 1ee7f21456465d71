"""What the worker of a dead trainer holds in memory: a checkpoint of torchtitan's folder, if it is the newest."""

from __future__ import annotations

import logging
import os
from collections.abc import Sequence, Set
from functools import partial

from asyncckpt.engine.engine import Engine
from asyncckpt.errors import CheckpointError
from asyncckpt.integrations.torchtitan.steps import complete_steps
from asyncckpt.loading.memory_source import HeldImages, agreed_image
from asyncckpt.worker.held_image import HeldImage
from asyncckpt.worker.storage import storage_for
from asyncckpt.worker.write_request import WriteRequest

logger = logging.getLogger(__name__)


def newest_held(engine: Engine, folder: str) -> tuple[HeldImages, HeldImage] | None:
    """This rank's part of the newest checkpoint, the same one on all ranks; None: memory does not have it.

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
    return agreed_image(memory, partial(_choose, folder))


def _choose(folder: str, offers: Sequence[Sequence[WriteRequest]], committed: Set[str]) -> str | None:
    """The attempt that all ranks offer, and that nothing in storage is newer than."""
    newest = max(complete_steps(folder), default=-1)
    for request in reversed(offers[0]):
        step, attempt = request.step or 0, request.attempt
        is_whole = request.world_size == len(offers) and all(
            any((other.attempt, other.plan) == (attempt, request.plan) for other in offer) for offer in offers
        )
        if not is_whole or step < newest or request.path != os.path.join(folder, f"step-{step}"):
            continue
        if storage_for(request.path).is_finalized(request.path, attempt):
            return attempt
        if step > newest and attempt not in committed:  # else somebody has removed it, or replaced it
            return attempt
    return None
