"""The pool of staging buffers that an engine keeps, and memory that outlived its worker."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from asyncckpt.config import Config
from asyncckpt.errors import OutOfMemoryError, SaveTimeoutError
from asyncckpt.link.client import WorkerClient
from asyncckpt.link.messages import CopiesKept, KeepCopies
from asyncckpt.link.takeover import Takeover
from asyncckpt.planning.plan import CheckpointPlan
from asyncckpt.planning.structure import StructureChanged
from asyncckpt.save_handle import Save
from asyncckpt.staging.buffer import DetachedBuffer, Plan, StagingBuffer

logger = logging.getLogger(__name__)

# Unless Config.slots says it: one has memory, and the other while saves overlap.
_MOST_SLOTS = 2
# Structures whose memory is kept, so that a model, an optimizer and an average can take turns.
_MAX_PLANS = 4
# How fast memory comes that is new to a process.
_NEW_BYTES_PER_S = 1e9


@dataclass
class CachedPlan:
    """A plan, kept under a ``key``, and its memory while there is a worker that holds it."""

    key: Any
    plan: Plan
    buffer: StagingBuffer | None = None


class BufferPool:
    """What an engine has planned, and where it is staged; ``known``: the most recently used first.

    ``detached`` is memory whose worker is gone, for the next one to adopt.
    """

    def __init__(self, config: Config) -> None:
        self._config = config
        self.known: list[CachedPlan] = []
        self.detached: list[DetachedBuffer] = []

    def find(
        self, key: Any, capture: Callable[[Any], Sequence[torch.Tensor]], client: WorkerClient
    ) -> tuple[StagingBuffer, Sequence[torch.Tensor]] | None:
        """Find the memory of what is to be saved, if it is as it was planned.

        Args:
            key: Equal for planners that plan alike, and for files that are laid out alike.
            capture: Takes what is to be saved by a plan; raises ``StructureChanged`` where that is not for it.
            client: The worker.

        Returns:
            The buffer, and the tensors that were captured; None: there is no such plan.
        """
        for known in self.known:
            if known.key != key:
                continue
            try:
                tensors = capture(known.plan)
            except StructureChanged as error:
                logger.debug("not the structure of plan %d: %s", known.plan.number, error)
                continue
            self.known = [known, *(other for other in self.known if other is not known)]
            if known.buffer is not None and known.buffer.is_closed:
                known.buffer.close()
                known.buffer = None
            if known.buffer is None:  # its worker died, and took the memory along
                known.buffer = self._allocate(known.plan, client)
            return known.buffer, tensors
        return None

    def make(self, key: Any, plan: Plan, client: WorkerClient) -> StagingBuffer:
        """Take memory for a new plan.

        Args:
            key: As in ``find``.
            plan: The plan; it takes the place of one for the same names, or of the oldest of many.
            client: The worker.

        Returns:
            The buffer; ``keep`` it.
        """
        outdated = [known for known in self.known if known.key == key and known.plan.names == plan.names]
        for known in outdated or self.known[_MAX_PLANS - 1 :]:
            self._give_back(known, client, "writing the save before the structure changed", for_next=bool(outdated))
            self.known.remove(known)
        return self._allocate(plan, client)

    def keep(self, key: Any, buffer: StagingBuffer) -> None:
        """``find`` it from now on."""
        self.known.insert(0, CachedPlan(key, buffer.plan, buffer))

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
            self.detached = [
                DetachedBuffer(predecessor.segments[number], layout, predecessor.images_in(number))
                for number, layout in predecessor.layouts().items()
            ]
        self.detached = [each for each in self.detached if not each.segment.closed]  # of a call that was interrupted
        if predecessor is not None:
            for number, copies in predecessor.copies_by_segment().items():
                if (segment := predecessor.segments.get(number)) is not None:  # else an interrupted call has
                    client.adopt(segment, copies, self._config.timeout)
                    predecessor.segments.pop(number).close()
        for detached in self.detached:
            detached.number = client.adopt(detached.segment, detached.held, self._config.timeout)

    def leave(self) -> None:
        """Let go of the memory of all plans, which has lost its worker."""
        for known in self.known:
            if known.buffer is not None:
                left = known.buffer.leave()
                if all(each.segment is not left.segment for each in self.detached):  # else an interrupted call has
                    self.detached.append(left)
                known.buffer = None

    def close(self) -> None:
        """Give back memory that has no worker."""
        while self.detached:
            self.detached[-1].close()  # first, for an exception may come in between
            self.detached.pop()

    def _allocate(self, plan: Plan, client: WorkerClient) -> StagingBuffer:
        """Memory for ``plan``; where there is too little, in the place of what was not used lately."""
        slots, taken = (_MOST_SLOTS, 1) if self._config.slots is None else (self._config.slots, None)
        while True:
            try:
                buffer = StagingBuffer(plan, client, slots, self._config.timeout, self.detached, taken)
                try:
                    self._keep_copies(plan, client)
                except BaseException:
                    buffer.close()
                    raise
                return buffer
            except OutOfMemoryError as error:
                placed = [known for known in self.known if known.buffer is not None]
                if not placed:
                    raise
                logger.info("another structure's memory is taken: %s", error)
                self._give_back(placed[-1], client, "writing what is in memory that is needed")

    def _keep_copies(self, plan: Plan, client: WorkerClient) -> None:
        """Have the worker keep copies of what ranks of other hosts stage by that plan."""
        if not self._config.replicas or not isinstance(plan, CheckpointPlan):
            return
        plans = (plan.number, *(known.plan.number for known in self.known))
        how = self._config.transport, self._config.replica_rate
        wanted = KeepCopies(plan.number, plan.copied_ranks, plans, *how)
        client.ask(wanted, CopiesKept, self._config.timeout, "taking memory for copies of other hosts' images")

    def _give_back(self, known: CachedPlan, client: WorkerClient, doing: str, *, for_next: bool = False) -> None:
        """Give back the memory of a plan, once nothing in it is under way; or keep it ``for_next``, which is to be
        made: memory that is new to a process takes several times as long as a copy.
        """
        if known.buffer is not None:
            client.wait_for(known.buffer.idle, self._config.timeout, doing)
            if for_next:
                # No longer than new memory would take.
                longest = known.buffer.segment.nbytes / _NEW_BYTES_PER_S
                with contextlib.suppress(SaveTimeoutError):
                    client.wait_for(known.buffer.ended, min(longest, self._config.timeout), doing)
            if for_next and (free := known.buffer.free(self._config.timeout)) is not None:
                self.detached.append(free)
            else:
                known.buffer.close()
            known.buffer = None
