"""The pool of staging buffers that an engine keeps."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from asyncckpt.config import Config
from asyncckpt.errors import OutOfMemoryError
from asyncckpt.link.api import SessionApi
from asyncckpt.link.client import WorkerClient
from asyncckpt.link.takeover import Takeover
from asyncckpt.planning.plan import Plan
from asyncckpt.planning.structure import StructureChanged
from asyncckpt.save_handle import Save
from asyncckpt.staging.buffer import InheritedMemory, StagingBuffer

logger = logging.getLogger(__name__)

# Slots of a buffer, unless ``Config.slots`` is set. The second slot gets memory when saves overlap.
_MOST_SLOTS = 2
# Maximum number of structures with memory. A model, an optimizer and an average can be saved in turns.
_MAX_PLANS = 4


@dataclass
class CachedPlan:
    """A plan under its ``key``. ``buffer``: its memory, while a worker holds the memory."""

    key: Any
    plan: Plan
    buffer: StagingBuffer | None = None


class BufferPool:
    """The plans of an engine and their memory.

    ``known``: the plans, the most recently used first. ``inherited``: memory of the trainer before this one.
    """

    def __init__(self, config: Config) -> None:
        self._config = config
        self.known: list[CachedPlan] = []
        self.inherited: list[InheritedMemory] = []

    def find(
        self, key: Any, capture: Callable[[Plan], Sequence[torch.Tensor]], client: WorkerClient
    ) -> tuple[StagingBuffer, Sequence[torch.Tensor]] | None:
        """Find the memory for a state, if the state has a plan.

        Args:
            key: Equal for states that may fit the same plan.
            capture: Returns the tensors of the state for a plan; raises ``StructureChanged`` if the plan does not fit.
            client: The worker.

        Returns:
            The buffer, and the captured tensors; None: there is no such plan.
        """
        for known in self.known:
            if known.key != key:
                continue
            try:
                tensors = capture(known.plan)
            except StructureChanged as error:
                logger.debug("the state does not have the structure of plan %d: %s", known.plan.number, error)
                continue
            self.known = [known, *(other for other in self.known if other is not known)]
            if known.buffer is not None and known.buffer.is_closed:
                known.buffer.close()
                known.buffer = None
            if known.buffer is None:  # its worker died, and its memory is gone
                known.buffer = self._allocate(known.plan, client)
            return known.buffer, tensors
        return None

    def make(self, key: Any, plan: Plan, client: WorkerClient) -> StagingBuffer:
        """Take memory for a new plan.

        Args:
            key: As in ``find``.
            plan: The plan; it replaces a plan for the same names, or the oldest of many.
            client: The worker.

        Returns:
            The buffer; ``keep`` it.
        """
        outdated = [known for known in self.known if known.key == key and known.plan.names == plan.names]
        for known in outdated or self.known[_MAX_PLANS - 1 :]:
            self._give_back(known, client, "writing the save before the structure changed")
            self.known.remove(known)
        return self._allocate(plan, client)

    def keep(self, key: Any, buffer: StagingBuffer) -> None:
        """Let ``find`` return ``buffer`` for ``key`` from now on."""
        self.known.insert(0, CachedPlan(key, buffer.plan, buffer))

    def image_of(self, save: Save) -> tuple[StagingBuffer, int] | None:
        """Return the buffer and the slot with the whole image of ``save``; None: the image is gone."""
        for buffer in (known.buffer for known in self.known if known.buffer is not None):
            for slot, tracked in enumerate(buffer.saves):
                if tracked is not None and tracked.is_whole and save.is_of(tracked):
                    return buffer, slot
        return None

    def inherit(self, predecessor: Takeover, *, is_attached: bool) -> None:
        """Go on in the memory of the trainer before this one.

        Args:
            predecessor: The segments and images that the trainer has left.
            is_attached: Whether that trainer's worker now works for this trainer. If not, the memory is only read.
        """
        for each in self.inherited:  # left by an interrupted call
            if each.segment not in predecessor.segments.values():
                each.segment.close()
        self.inherited = []
        layouts = predecessor.layouts()
        for number, segment in list(predecessor.segments.items()):
            if number in layouts:
                held = predecessor.images_in(number)
                self.inherited.append(InheritedMemory(segment, layouts[number], held, number if is_attached else 0))
            else:  # memory for copies of other hosts' images, which only the worker uses
                predecessor.segments.pop(number).close()

    def on_worker_lost(self) -> None:
        """Note that the worker with the inherited memory is gone."""
        for each in self.inherited:
            each.number = 0

    def renew(self, client: WorkerClient) -> None:
        """Take memory for the plan used last, if the worker that had it has died. Raises as ``find`` does."""
        if self.known and self.known[0].buffer is None:
            self.known[0].buffer = self._allocate(self.known[0].plan, client)

    def close(self) -> None:
        """Release all memory, because its worker has died or leaves. Safe to call twice."""
        for known in self.known:
            if known.buffer is not None:
                known.buffer.close()
                known.buffer = None
        for each in self.inherited:
            each.segment.close()
        self.inherited = []

    def _allocate(self, plan: Plan, client: WorkerClient) -> StagingBuffer:
        """Take memory for ``plan``. If the host has too little, first give back the memory used least recently."""
        slots, taken = (_MOST_SLOTS, 1) if self._config.slots is None else (self._config.slots, None)
        while True:
            try:
                buffer = StagingBuffer(plan, client, slots, self._config.timeout, self.inherited, taken)
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
                logger.info("the memory of another structure is reused: %s", error)
                self._give_back(placed[-1], client, "writing what is in memory that is needed")

    def _keep_copies(self, plan: Plan, client: WorkerClient) -> None:
        """Ask the worker to keep copies of images that ranks on other hosts stage for ``plan``."""
        if not self._config.replicas or not plan.is_state:
            return
        plans = (plan.number, *(known.plan.number for known in self.known))
        how = self._config.transport, self._config.replica_rate
        client.call(self._config.timeout, SessionApi.keep_copies, plan.number, plan.copied_ranks, plans, *how)

    def _give_back(self, known: CachedPlan, client: WorkerClient, doing: str) -> None:
        """Give back the memory of a plan, after all saves in it have ended."""
        if known.buffer is not None:
            known.buffer.wait_idle(self._config.timeout, doing)
            known.buffer.close()
            known.buffer = None
