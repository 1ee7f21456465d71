"""What an engine shows readers of weights: the images of its saves, where they were staged."""

from __future__ import annotations

import logging

from asyncckpt.config import Config
from asyncckpt.errors import CheckpointError
from asyncckpt.publication import Publication, Versions, VersionState
from asyncckpt.ranks.group import Group
from asyncckpt.save_handle import Save
from asyncckpt.shm.slots import PublishedVersion
from asyncckpt.staging.buffer import BufferPool

logger = logging.getLogger(__name__)


class CheckpointPublications:
    """Of one engine, out of the memory in ``buffers``."""

    def __init__(self, config: Config, buffers: BufferPool) -> None:
        self._config = config
        self._buffers = buffers
        self._versions = Versions()

    def inherit(self, last: PublishedVersion | None) -> None:
        """Go on after ``last``, of a trainer before this one."""
        self._versions.inherit(last)

    def publish(self, group: Group, number: int, save: Save, version: int, *, roll_back: bool) -> Publication:
        """As ``Engine.publish``; ``number`` is that of the question to the other ranks."""

        def gather(known: VersionState) -> list[VersionState]:
            return group.ask_all("epoch", number, lambda: known, lambda all_know: [all_know] * len(all_know))

        published = self._versions.admit(version, group.world_size, gather, roll_back=roll_back)
        save.wait_staged(self._config.timeout)
        image = self._buffers.image_of(save)
        why = "its image is not in memory any more, or never was"
        if image is not None:
            buffer, slot = image
            if not buffer.client.has_endpoint:
                raise CheckpointError("readers cannot find the worker, which has no endpoint: see the log")
            if buffer.publish(slot, published):
                self._versions.note(published)
                return Publication(published.version, published.epoch, skipped=False)
            why = "readers have all slots but that; more of them would help (Config.slots)"
        logger.warning("version %d is not published: %s", version, why)
        if not group.alone:
            self._versions.note(published)  # other ranks may have published it, and all have to know the same
        return Publication(published.version, published.epoch, skipped=True)
