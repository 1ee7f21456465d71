"""A shelf: a publisher's memory for weights of one structure, a segment a slot, each a file by itself."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

import torch

from asyncckpt.device_copy import Ready, ready_events
from asyncckpt.errors import OutOfMemoryError
from asyncckpt.pinned import PinnedMemory
from asyncckpt.shm.leases import Claims
from asyncckpt.shm.segment import Segment
from asyncckpt.shm.slots import HEADER_BYTES, Published, SlotTable
from asyncckpt.staging import SlotStager
from asyncckpt.targets import Targets
from asyncckpt.weights.plan import WeightPlan
from asyncckpt.worker.client import WorkerClient
from asyncckpt.worker.messages import WeightLayout

logger = logging.getLogger(__name__)


class Shelf:
    """Slots for images of one form, and what is published in them. A worker holds the memory too, and shows it."""

    def __init__(self, control: Segment, images: Sequence[Segment]) -> None:
        """``control`` has the header page, ``images`` are the slots. ``hand_over`` comes first then."""
        self._control = control
        self._slots = [_Slot(image) for image in images]
        self._table = SlotTable(control.view)
        self._claims = Claims(control)
        self._number = 0
        self._full = False

    @classmethod
    def make(cls, client: WorkerClient, timeout: float) -> Shelf:
        """An empty one. Raises ``OutOfMemoryError``, ``WorkerDiedError``, ``SaveTimeoutError``."""
        number, control = client.allocate(HEADER_BYTES, timeout)
        shelf = cls(control, [])
        shelf._number = number
        return shelf

    def hand_over(self, client: WorkerClient, timeout: float) -> None:
        """Have another worker hold the memory. Raises ``WorkerDiedError``, ``SaveTimeoutError``."""
        self._number = client.adopt(self._control, (), timeout)
        for slot in self._slots:
            slot.number = client.adopt(slot.segment, (), timeout)
        self._describe(client, timeout)

    def is_for(self, plan: WeightPlan) -> bool:
        """Whether images of ``plan`` belong here."""
        header = plan.image.header
        return not self._slots or self._slots[0].segment.view[: len(header)] == header

    def published(self) -> dict[Published, int]:
        """What is published, and in which slot."""
        return self._table.publications(len(self._slots))

    def claim(self, plan: WeightPlan, client: WorkerClient, most: int, timeout: float) -> int | None:
        """A slot that nobody reads, with nothing published in it any more; None where all others are being read.

        Of ``most`` slots at the most; a new one, while there are fewer, and memory for it. The newest version stays
        where it is. Raises ``OutOfMemoryError`` where there is not even one slot, ``WorkerDiedError``,
        ``SaveTimeoutError``.
        """
        published = self.published()
        for slot in set(range(len(self._slots))) - set(published.values()):
            if self._claims.claim(slot):
                return slot
        if (new := self._grow(plan, client, most, timeout)) is not None:
            return new
        for version in sorted(published)[: -1 if len(published) > 1 else None]:
            if self._claims.claim(published[version]):
                self._table.withdraw(published[version])
                return published[version]
        return None

    def fill(self, plan: WeightPlan, client: WorkerClient, most: int, timeout: float) -> None:
        """Take the memory of all ``most`` slots now. Raises as ``claim`` does, where there is none for even one."""
        while (slot := self._grow(plan, client, most, timeout)) is not None:
            self._claims.offer(slot)

    def copy(self, slot: int, plan: WeightPlan, tensors: Sequence[torch.Tensor], pool: ThreadPoolExecutor) -> None:
        """Copy ``tensors`` (all of ``plan``, in the order of its image) into a claimed ``slot``."""
        ready = ready_events(tensors)
        if ready and any(plan.converted):
            # On the device first, one by one: a copy of all of them may not fit there.
            for number, tensor in enumerate(tensors):
                self.targets(slot, plan, tensor.device)[number].copy_(tensor)
            return
        self._slots[slot].stager_of(plan, ready).copy(tensors, ready, pool, lambda _: None, lambda _: None)

    def targets(self, slot: int, plan: WeightPlan, source: torch.device | None = None) -> Sequence[torch.Tensor]:
        """The places in a claimed ``slot`` of all tensors of ``plan``, in the order of its image, to be written to.

        ``source``: where what is copied there comes from, if that is another device.
        """
        return self._slots[slot].targets_of(plan, source)

    def publish(self, slot: int, published: Published) -> None:
        """Let readers see what was copied into a claimed ``slot``."""
        self._table.publish(slot, published)
        self._claims.offer(slot)

    def give_back(self, client: WorkerClient) -> None:
        """Nobody shall find anything here any more; who reads it keeps it."""
        for slot in range(len(self._slots)):
            self._table.withdraw(slot)  # not claimed: nothing will be written there either
        for number in (self._number, *(slot.number for slot in self._slots)):
            client.release(number)
        self.close()

    def close(self) -> None:
        """Let go of the memory, which the worker, and who reads it, may keep."""
        self._table.close()
        self._claims.close()
        for slot in self._slots:
            slot.close()
        self._control.close()

    def _grow(self, plan: WeightPlan, client: WorkerClient, most: int, timeout: float) -> int | None:
        """One slot more, claimed; None where there are ``most``, or there is no memory for it."""
        if len(self._slots) >= most or self._full:
            return None
        try:
            number, segment = client.allocate(plan.image.nbytes, timeout)
        except OutOfMemoryError as error:
            if not self._slots:
                raise
            self._full = True
            logger.warning("room for %d versions in memory instead of %d: %s", len(self._slots), most, error)
            return None
        segment.touch()
        segment.view[: len(plan.image.header)] = plan.image.header
        self._slots.append(_Slot(segment, number))
        self._claims.claim(len(self._slots) - 1)
        self._describe(client, timeout)
        return len(self._slots) - 1

    def _describe(self, client: WorkerClient, timeout: float) -> None:
        client.describe(self._number, WeightLayout(tuple(slot.number for slot in self._slots)), timeout)


class _Slot:
    """One image's memory, and the ways to copy there, which are found out by the first copy."""

    def __init__(self, segment: Segment, number: int = 0) -> None:
        self.segment = segment
        self.number = number
        self._plan: WeightPlan | None = None
        self._stager: SlotStager | None = None
        self._targets: list[torch.Tensor] | None = None
        self._pinned: PinnedMemory | None = None

    def stager_of(self, plan: WeightPlan, ready: Ready) -> SlotStager:
        for device in ready:
            self._pin(device)
        self._turn_to(plan)
        if self._stager is None:
            self._stager = SlotStager(plan.image.places, self.segment, 0, plan.converted)
        return self._stager

    def targets_of(self, plan: WeightPlan, source: torch.device | None) -> Sequence[torch.Tensor]:
        if source is not None and source.type == "cuda":
            self._pin(source)
        self._turn_to(plan)
        if self._targets is None:
            places = plan.image.places
            targets = Targets(places.specs, places.tensors, self.segment, 0)
            self._targets = list(map(targets.tensor, range(len(places.specs))))
        return self._targets

    def close(self) -> None:
        if self._pinned is not None:
            self._pinned.close()
        if self._stager is not None:
            self._stager.close()
        self._targets = None
        self.segment.close()

    def _turn_to(self, plan: WeightPlan) -> None:
        """Plans of one image differ in what dtypes the tensors come in."""
        if plan is not self._plan:
            self._plan, self._stager, self._targets = plan, None, None

    def _pin(self, device: torch.device) -> None:
        if self._pinned is None:
            # In one piece: the tensors lie close together, and none may cross a cut.
            self._pinned = PinnedMemory(self.segment, [], device)
