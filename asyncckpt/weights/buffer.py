"""The weight buffer: a publisher's memory for weights of one structure. Each slot is a segment and a complete file."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import torch

from asyncckpt.devices.captures import check_not_capturing
from asyncckpt.devices.kinds import first_device, kind_of, ready_events
from asyncckpt.devices.pinned import PinnedMemory
from asyncckpt.format.segment_layout import WeightsLayout
from asyncckpt.link.api import SessionApi
from asyncckpt.link.client import WorkerClient
from asyncckpt.link.segment_store import take_memory
from asyncckpt.shm.segment import Segment
from asyncckpt.shm.slots import HEADER_BYTES, LASTING, OwnedSlots, PublishedVersion
from asyncckpt.staging.host_copy import CopyThreads, SlotViews
from asyncckpt.staging.slot_copy import SlotStager
from asyncckpt.weights.plan import WeightPlan

# Number of publications without use after which an extra slot gives back its memory. It keeps the memory for a while,
# because readers that keep a version tend to do so again. Allocating memory takes as long as copying into it.
_UNUSED = 8


class WeightBuffer:
    """Slots for images of one layout. A worker also holds the memory, and offers it to readers.

    The order of calls for a slot is ``claim``, ``copy``, ``publish``. Methods that ask the worker raise
    ``WorkerDiedError`` or ``SaveTimeoutError``, and ``OutOfMemoryError`` if there is no memory for even one slot.
    """

    def __init__(self, control: Segment, images: Sequence[Segment], client: WorkerClient, timeout: float) -> None:
        """Take over memory. Call ``hand_over`` for memory that ``client`` does not hold yet.

        Args:
            control: The segment with the header page.
            images: The slots.
            client: The worker.
            timeout: Timeout in seconds for each request to the worker.
        """
        self._owned = OwnedSlots(control, len(images))
        self._control = control
        self._number = 0
        self._slots = [_Slot(image) for image in images]
        self._client = client
        self._timeout = timeout

    @classmethod
    def allocate(cls, client: WorkerClient, timeout: float) -> WeightBuffer:
        """Create an empty buffer."""
        number, control = client.allocate(HEADER_BYTES, timeout)
        buffer = cls(control, [], client, timeout)
        buffer._number = number
        return buffer

    def hand_over(self, client: WorkerClient) -> None:
        """Let another worker hold the memory."""
        self._client = client
        number = client.adopt(self._control, self._timeout)
        self.stay(number, [client.adopt(slot.segment, self._timeout) for slot in self._slots])
        self._describe()

    def stay(self, number: int, slots: Sequence[int]) -> None:
        """Continue with a worker that already holds the memory.

        Args:
            number: The number of the segment with the header page.
            slots: The numbers of the slots.
        """
        self._number = number
        for slot, its in zip(self._slots, slots, strict=True):
            slot.number = its
            if not slot.segment.is_taken:
                slot.segment.give_back()  # a trainer may have died during the allocation

    def is_for(self, plan: WeightPlan) -> bool:
        """Return whether this buffer fits images of ``plan``."""
        header = plan.header
        return not self._slots or self._slots[0].segment.view[: len(header)] == header

    def published(self) -> dict[PublishedVersion, int]:
        """Return the published versions, oldest first, with their slots."""
        return self._owned.publications()

    def claim(self, plan: WeightPlan, most: int) -> int | None:
        """Claim a slot for an image of ``plan``; None if all slots are being read. See ``OwnedSlots.claim_next``."""
        # Prefer the older of the first two slots, so that the other slots fall out of use.
        return self._owned.claim_next(
            self._taken(), partial(self._take, plan), most, preference=lambda slot: max(slot, LASTING - 1)
        )

    def fill(self, plan: WeightPlan) -> None:
        """Allocate in advance the memory that ``claim`` always needs."""
        while (slot := self._owned.grow(self._taken(), partial(self._take, plan), LASTING)) is not None:
            self._owned.offer(slot)

    def copy(self, slot: int, plan: WeightPlan, tensors: Sequence[torch.Tensor], threads: CopyThreads) -> None:
        """Copy tensors into a claimed slot. Wait for the end of the copies.

        Args:
            slot: A claimed slot.
            plan: The layout of the slot.
            tensors: All tensors of the plan, in the order of the plan. The tensors must not change during this call.
            threads: The threads that copy.
        """
        check_not_capturing()
        ready = ready_events(tensors)
        if (device := first_device(tensors, ready)) is not None:
            self._slots[slot].pin(device)
        self._slots[slot].stager_of(plan).copy(tensors, ready, threads, lambda _: None, lambda _: None)

    def views(self, slot: int, plan: WeightPlan, source: torch.device | None = None) -> Sequence[torch.Tensor]:
        """Return writable views of all tensors in a claimed slot.

        Args:
            slot: A claimed slot.
            plan: The layout of the slot, and the order of the views.
            source: The device to copy from. The memory is pinned for the device's driver.
        """
        if source is not None and kind_of(source) is not None:
            self._slots[slot].pin(source)
        return self._slots[slot].views_of(plan)

    def publish(self, slot: int, version: PublishedVersion) -> None:
        """Publish the image in a claimed ``slot`` to readers. Give back the memory of unused extra slots."""
        self._owned.publish(slot, version)
        for number, each in enumerate(self._slots):
            each.unused = 0 if number == slot else each.unused + 1
        for number in self._taken()[LASTING:]:
            if self._slots[number].unused >= _UNUSED and self._owned.claim(number):
                self._slots[number].give_back()
                self._owned.offer(number)

    def give_back(self) -> None:
        """Withdraw all versions, and let the worker release the memory. Readers keep the versions they have leased."""
        self._owned.withdraw_all()
        for number in (self._number, *(slot.number for slot in self._slots)):
            self._client.tell(SessionApi.release, number)
        self.close()

    def close(self) -> None:
        """Unmap the memory in this process. The worker and readers may keep it."""
        self._owned.close()
        for slot in self._slots:
            slot.close()
        self._control.close()

    def _take(self, plan: WeightPlan, slot: int) -> None:
        """Allocate a new slot, or memory again for a slot that gave it back. Raises ``OutOfMemoryError``."""
        if slot == len(self._slots):
            self._add(plan)
        else:
            self._slots[slot].take(plan)

    def _taken(self) -> list[int]:
        """Return the slots that have memory."""
        return [number for number, slot in enumerate(self._slots) if slot.segment.is_taken]

    def _add(self, plan: WeightPlan) -> None:
        number, segment = self._client.allocate(plan.places.nbytes, self._timeout)
        try:
            segment.touch()
            segment.view[: len(plan.header)] = plan.header
        except BaseException:
            segment.close()
            self._client.tell(SessionApi.release, number)
            raise
        self._slots.append(_Slot(segment, number))
        self._describe()

    def _describe(self) -> None:
        layout = WeightsLayout(tuple(slot.number for slot in self._slots))
        self._client.call(self._timeout, SessionApi.describe, self._number, layout)


class _Slot:
    """The memory of one image, with views and a stager. Both are created on first use."""

    def __init__(self, segment: Segment, number: int = 0) -> None:
        self.segment = segment
        self.number = number
        self.unused = 0
        """The number of publications since this slot was last used."""
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
            # Pin the memory in one piece, because no tensor may cross a boundary between pieces.
            self._pinned = PinnedMemory(self.segment, [], device)

    def unpin(self) -> None:
        if self._pinned is not None:
            self._pinned.close()
            self._pinned = None

    def give_back(self) -> None:
        """Unpin the memory, and then give it back. The segment stays, because readers have it mapped."""
        self.unpin()
        self.segment.give_back()

    def take(self, plan: WeightPlan) -> None:
        """Allocate the memory again. Raises ``OutOfMemoryError``."""
        try:
            # Write the header first. So a slot with memory always has a header, even if this process dies now.
            self.segment.touch(len(plan.header))
            self.segment.view[: len(plan.header)] = plan.header
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
        """Discard the views and the stager of another plan. Plans of one layout may differ in the tensors' dtypes."""
        if plan is not self._plan:
            self._plan, self._stager, self._views = plan, None, []
