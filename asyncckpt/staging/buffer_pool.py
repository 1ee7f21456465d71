"""The plans an engine keeps, and the memory of each: found again for a state that is as planned, made for a new one."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from asyncckpt.config import Config
from asyncckpt.errors import OutOfMemoryError
from asyncckpt.planning.buffer_plan import BufferPlan
from asyncckpt.planning.structure import StructureChanged
from asyncckpt.save_handle import Save
from asyncckpt.staging.buffer import DetachedBuffer, StagingBuffer
from asyncckpt.worker.client import WorkerClient
from asyncckpt.worker.takeover import Takeover

logger = logging.getLogger(__name__)

DEFAULT_SLOTS = 2
# Structures whose memory is kept, so that a model, an optimizer and an average can take turns.
_MAX_PLANS = 4


@dataclass
class CachedPlan:
    """A plan, and its memory while there is a worker that holds it.

    ``key``: of planners that plan alike, or of files that are laid out alike.
    """

    key: Any
    plan: BufferPlan
    buffer: StagingBuffer | None = None


class BufferPool:
    """What an engine has planned, and where it is staged.

    ``known``: the most recently used first. ``detached``: memory whose worker is gone, for the next one to adopt.
    """

    def __init__(self, config: Config) -> None:
        self._config = config
        self.known: list[CachedPlan] = []
        self.detached: list[DetachedBuffer] = []

    def find(
        self, key: Any, capture: Callable[[Any], Sequence[torch.Tensor]], client: WorkerClient
    ) -> tuple[StagingBuffer, Sequence[torch.Tensor]] | None:
        """The buffer of the plan under ``key`` that can ``capture`` what is to be saved, and what that captured."""
        for known in self.known:
            if known.key != key:
                continue
            try:
                tensors = capture(known.plan)
            except StructureChanged as error:
                logger.debug("not the structure of plan %d: %s", known.plan.number, error)
                continue
            self.known.remove(known)
            self.known.insert(0, known)
            if known.buffer is None:  # its worker died, and took the memory along
                known.buffer = self._allocate(known.plan, client)
            return known.buffer, tensors
        return None

    def make(self, key: Any, plan: BufferPlan, client: WorkerClient) -> StagingBuffer:
        """Memory for a new plan, which takes the place of one for the same names, or of the oldest of many."""
        outdated = [entry for entry in self.known if entry.key == key and entry.plan.names == plan.names]
        for entry in outdated or self.known[_MAX_PLANS - 1 :]:
            if entry.buffer is not None:
                doing = "writing the save before the structure changed"
                client.wait_for(entry.buffer.idle, self._config.timeout, doing)
                entry.buffer.close()
            self.known.remove(entry)
        return self._allocate(plan, client)

    def keep(self, key: Any, plan: BufferPlan, buffer: StagingBuffer) -> None:
        """``find`` it from now on."""
        self.known.insert(0, CachedPlan(key, plan, buffer))

    def image_of(self, save: Save) -> tuple[StagingBuffer, int] | None:
        """Where what was staged for ``save`` still is, whole: the buffer and the slot."""
        for buffer in (known.buffer for known in self.known if known.buffer is not None):
            for slot, tracked in enumerate(buffer.saves):
                if tracked is not None and tracked.is_whole and save.is_of(tracked):
                    return buffer, slot
        return None

    def hand_over(self, client: WorkerClient, predecessor: Takeover | None) -> None:
        """Have ``client`` adopt memory that outlived its worker: ours, or else what a ``predecessor`` holds.

        Raises ``WorkerDiedError``, ``SaveTimeoutError``.
        """
        if predecessor is not None and not self.detached:
            for number, segment in predecessor.segments.items():
                images = tuple(each for each in predecessor.images if each.request.segment == number)
                self.detached.append(DetachedBuffer(segment, images[0].layout, images))
        for detached in self.detached:
            detached.number = client.adopt(detached.segment, detached.held, self._config.timeout)

    def leave(self) -> None:
        """Let go of the memory of all plans, which has lost its worker."""
        for known in self.known:
            if known.buffer is not None:
                self.detached.append(known.buffer.leave())
                known.buffer = None

    def close(self) -> None:
        """Give back memory that has no worker."""
        while self.detached:
            self.detached.pop().segment.close()

    def _allocate(self, plan: BufferPlan, client: WorkerClient) -> StagingBuffer:
        """Memory for ``plan``; where there is too little, for one slot, or in the place of what was not used lately."""
        slots = self._config.slots or DEFAULT_SLOTS
        while True:
            try:
                return StagingBuffer(plan, client, slots, self._config.timeout, self.detached)
            except OutOfMemoryError as error:
                if self._config.slots is None and slots > 1:
                    logger.warning("one slot instead of two, so saves will wait for each other: %s", error)
                    slots = 1
                elif not self._give_back_oldest(client):
                    raise

    def _give_back_oldest(self, client: WorkerClient) -> bool:
        """Give back the memory of the plan that was not used for longest; False if none has any."""
        placed = [known for known in self.known if known.buffer is not None]
        if not placed or placed[-1].buffer is None:
            return False
        client.wait_for(placed[-1].buffer.idle, self._config.timeout, "writing what is in memory that is needed")
        placed[-1].buffer.close()
        placed[-1].buffer = None
        return True
