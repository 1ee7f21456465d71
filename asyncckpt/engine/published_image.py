"""The image of a save, shown to readers of weights as a version."""

from __future__ import annotations

import logging

from asyncckpt.errors import CheckpointError
from asyncckpt.planning.plan import CheckpointPlan
from asyncckpt.publication import VersionState
from asyncckpt.ranks.group import Group
from asyncckpt.shm.slots import PublishedVersion
from asyncckpt.staging.buffer import StagingBuffer

logger = logging.getLogger(__name__)


def known_by_all(group: Group, number: int, known: VersionState) -> list[VersionState]:
    """What each rank knows of versions. ``number``: of this question, the same on all ranks."""
    return group.ask_all("epoch", number, lambda: known, lambda all_know: [all_know] * len(all_know))


def show(image: tuple[StagingBuffer, int] | None, version: PublishedVersion) -> bool:
    """Let readers see ``version`` in that slot. Returns whether they do."""
    if image is not None:
        buffer, slot = image
        if not isinstance(buffer.plan, CheckpointPlan):
            raise CheckpointError("files cannot be published, only state dicts; a WeightPublisher publishes tensors")
        if not buffer.client.has_endpoint:
            raise CheckpointError("readers cannot find the worker, which has no endpoint: see the log")
        if buffer.publish(slot, version):
            return True
        why_not = "readers have all slots but that; more of them would help (Config.slots)"
    else:
        why_not = "its image is not in memory any more, or never was"
    logger.warning("version %d is not published: %s", version.version, why_not)
    return False
