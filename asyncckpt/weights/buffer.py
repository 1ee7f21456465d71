"""The weight buffer: a publisher's memory for weights of one structure, a segment a slot, each a file by itself."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Sequence

import torch

from asyncckpt.devices.captures import check_not_capturing
from asyncckpt.devices.kinds import first_device, kind_of, ready_events
from asyncckpt.devices.pinned import PinnedMemory
from asyncckpt.errors import OutOfMemoryError
from asyncckpt.format.segment_layout import WeightsLayout
from asyncckpt.link.client import WorkerClient
from asyncckpt.link.messages import Describe, Described, Release
from asyncckpt.link.segment_store import take_memory
from asyncckpt.shm.segment import Segment
from asyncckpt.shm.slots import HEADER_BYTES, LASTING, PublishedSlots, PublishedVersion
from asyncckpt.staging.host_copy import CopyThreads, SlotViews
from asyncckpt.staging.slot_copy import SlotStager
from asyncckpt.weights.plan import WeightPlan

logger = logging.getLogger(__name__)

# After so many publications in which a slot beyond these was not needed, its memory is given back: not at once, for
# readers that keep a version do so again and again, and fresh memory takes as long as to copy into it.
_UNUSED = 8


class WeightBuffer:
    """Slots for images of one layout. A worker holds the memory too, and shows it to readers.

    A slot is claimed, copied into, and published. Whatever asks the worker raises ``WorkerDiedError`` or
    ``SaveTimeoutError``, and ``OutOfMemoryError`` where there is no memory for even one slot.
    """

    def __init__(self, control: Segment, images: Sequence[Segment], client: WorkerClient, timeout: float) -> None:
        """What ``client`` does not hold yet is to be handed over to it.

        Args:
            control: The segment with the header page.
            images: The slots.
            client: The worker.
            timeout: Seconds that it may take.
        """
        self._published = PublishedSlots(control, len(images))
        self._control = control
        self._number = 0
        self._slots = [_Slot(image) for image in images]
        self._client = client
        self._timeout = timeout
        self._full = False

    @classmethod
    def allocate(cls, client: WorkerClient, timeout: float) -> WeightBuffer:
        """An empty one."""
        number, control = client.allocate(HEADER_BYTES, timeout)
        buffer = cls(control, [], client, timeout)
        buffer._number = number
        return buffer

    def hand_over(self, client: WorkerClient) -> None:
        """Have another worker hold the memory."""
        self._client = client
        self._number = client.adopt(self._control, (), self._timeout)
        for slot in self._slots:
            slot.number = client.adopt(slot.segment, (), self._timeout)
            if not slot.segment.is_taken:
                slot.segment.give_back()  # also what a trainer had taken of it when it died
        self._describe()

    def is_for(self, plan: WeightPlan) -> bool:
        """Whether images of ``plan`` belong here."""
        header = plan.header
        return not self._slots or self._slots[0].segment.view[: len(header)] == header

    def published(self) -> dict[PublishedVersion, int]:
        """What is published, and in which slot, the oldest first."""
        return self._published.publications()

    def claim(self, plan: WeightPlan, most: int) -> int | None:
        """Take a slot to copy images of ``plan`` into: nobody reads it, and nothing is published there any more.

        While there are fewer than ``most``, and memory for it, a new one is made, from the third on only where readers
        keep the others. None where all are being read; that of the newest version stays where it is.
        """
        published = list(self.published().values())
        slot = self._claim_first(slot for slot in self._taken() if slot not in published)
        if slot is None:
            slot = self._grow(plan, LASTING)
        if slot is None:
            # The oldest of the first two: so the others have none but old versions once nobody needs them.
            slot = self._claim_first(sorted(published[:-1] or published, key=lambda slot: max(slot, LASTING - 1)))
        return self._grow(plan, most) if slot is None else slot

    def fill(self, plan: WeightPlan) -> None:
        """Take the memory now that is taken in any case, see ``claim``."""
        while (slot := self._grow(plan, LASTING)) is not None:
            self._published.offer(slot)

    def copy(self, slot: int, plan: WeightPlan, tensors: Sequence[torch.Tensor], threads: CopyThreads) -> None:
        """Copy into a claimed slot, and return when that is done.

        Args:
            slot: A claimed slot.
            plan: How they are laid out.
            tensors: All of the plan, in its order. They must not change meanwhile.
            threads: Those that take part.
        """
        check_not_capturing()
        ready = ready_events(tensors)
        if (device := first_device(tensors, ready)) is not None:
            self._slots[slot].pin(device)
        self._slots[slot].stager_of(plan).copy(tensors, ready, threads, lambda _: None, lambda _: None)

    def views(self, slot: int, plan: WeightPlan, source: torch.device | None = None) -> Sequence[torch.Tensor]:
        """The places of all tensors in a claimed slot, to be written to.

        Args:
            slot: A claimed slot.
            plan: How they are laid out, and their order.
            source: The device that will be copied from: its driver is told of the memory (pinned).
        """
        if source is not None and kind_of(source) is not None:
            self._slots[slot].pin(source)
        return self._slots[slot].views_of(plan)

    def publish(self, slot: int, version: PublishedVersion) -> None:
        """Let readers see what was copied into a claimed ``slot``, and give back the memory that nobody has needed for
        some publications.
        """
        self._published.publish(slot, version)
        for number, each in enumerate(self._slots):
            each.unused = 0 if number == slot else each.unused + 1
        for number in self._taken()[LASTING:]:
            if self._slots[number].unused >= _UNUSED and self._published.claim(number):
                self._slots[number].give_back()
                self._published.offer(number)

    def give_back(self) -> None:
        """Have readers find nothing here any more, and the worker forget it. A reader keeps what it has leased."""
        self._published.withdraw_all()
        for number in (self._number, *(slot.number for slot in self._slots)):
            self._client.tell(Release(number))
        self.close()

    def close(self) -> None:
        """Let go of the memory, which the worker and readers may keep."""
        self._published.close()
        for slot in self._slots:
            slot.close()
        self._control.close()

    def _grow(self, plan: WeightPlan, most: int) -> int | None:
        """One slot more, claimed, if need be in memory that was given back; None where there are ``most``, or there is
        no memory for it.
        """
        taken = self._taken()
        slot = next((slot for slot in range(len(self._slots)) if slot not in taken), len(self._slots))
        if slot >= most or self._full:
            return None
        try:
            if slot == len(self._slots):
                self._add(plan)
            else:
                self._slots[slot].take(plan)
        except OutOfMemoryError as error:
            if not slot:
                raise
            logger.warning("memory for %d versions instead of %d: %s", len(taken), most, error)
            self._full = True
            return None
        return self._claim_first([slot])

    def _taken(self) -> list[int]:
        """The slots that have their memory."""
        return [number for number, slot in enumerate(self._slots) if slot.segment.is_taken]

    def _claim_first(self, slots: Iterable[int]) -> int | None:
        """The first of ``slots`` that nobody reads, claimed; None where all are being read."""
        return next(filter(self._published.claim, slots), None)

    def _add(self, plan: WeightPlan) -> None:
        number, segment = self._client.allocate(plan.places.nbytes, self._timeout)
        try:
            segment.touch()
            segment.view[: len(plan.header)] = plan.header
        except BaseException:
            segment.close()
            self._client.tell(Release(number))
            raise
        self._slots.append(_Slot(segment, number))
        self._published.count += 1
        self._describe()

    def _describe(self) -> None:
        layout = WeightsLayout(tuple(slot.number for slot in self._slots))
        self._client.ask(Describe(self._number, layout), Described, self._timeout, "describing shared memory")


class _Slot:
    """One image's memory, and the ways to copy there, which are found out by the first copy."""

    def __init__(self, segment: Segment, number: int = 0) -> None:
        self.segment = segment
        self.number = number
        self.unused = 0
        """In how many publications it was not needed."""
        self._plan: WeightPlan | None = None
        self._stager: SlotStager | None = None
        self._views: list[torch.Tensor] = []
        self._pinned: PinnedMemory | None = None

    def stager_of(self, plan: WeightPlan) -> SlotStager:
        self._use(plan)
        if self._stager is None:
            self._stager = SlotStager(plan.places, self.segment, 0, plan.converted)
        return self._stager

    def views_of(self, plan: WeightPlan) -> Sequence[torch.Tensor]:
        self._use(plan)
        if not self._views:
            places = plan.places
            views = SlotViews(places.specs, places.tensors, self.segment, 0)
            self._views = list(map(views.tensor, range(len(places.specs))))
        return self._views

    def pin(self, device: torch.device) -> None:
        if self._pinned is None:
            # In one piece: the tensors lie close together, and none may cross a cut.
            self._pinned = PinnedMemory(self.segment, [], device)

    def unpin(self) -> None:
        if self._pinned is not None:
            self._pinned.close()
            self._pinned = None

    def give_back(self) -> None:
        """Give the memory back, of which the driver must know first. The segment stays: readers have it mapped."""
        self.unpin()
        self.segment.give_back()

    def take(self, plan: WeightPlan) -> None:
        """Take the memory again. Raises ``OutOfMemoryError``."""
        # First the header: so whatever is all there has one, also if this process dies now.
        self.segment.view[: len(plan.header)] = plan.header
        try:
            take_memory(self.segment)
        except BaseException:
            self.segment.give_back()
            raise

    def close(self) -> None:
        self.unpin()
        if self._stager is not None:
            self._stager.close()
        self._views = []
        self.segment.close()

    def _use(self, plan: WeightPlan) -> None:
        """Plans of one layout differ in what dtypes the tensors come in."""
        if plan is not self._plan:
            self._plan, self._stager, self._views = plan, None, []
