"""A plan and the shared memory for it: one segment, with the constant files and the slots."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial

import torch

from asyncckpt.planning.buffer_plan import BufferPlan
from asyncckpt.planning.layout import PAGE_ALIGNED_FROM, Place
from asyncckpt.shm.published_slots import PublishedSlots
from asyncckpt.shm.segment import PAGE, Segment, round_up
from asyncckpt.shm.slots import HEADER_BYTES, PublishedVersion, SlotTable, State
from asyncckpt.staging.device_copy import Fence, ReadyEvents
from asyncckpt.staging.pinned import PinnedMemory
from asyncckpt.staging.slot_copy import SlotStager
from asyncckpt.worker.client import TrackedSave, WorkerClient
from asyncckpt.worker.messages import CheckpointLayout, HeldImage, Region, TorchFileLayout


@dataclass
class DetachedBuffer:
    """Memory whose worker is gone: a segment, what its bytes are, and the images that are still held in it.

    ``number``: that of the segment in the worker that has adopted it; None: none has, yet.
    """

    segment: Segment
    layout: CheckpointLayout | TorchFileLayout
    held: tuple[HeldImage, ...] = ()
    number: int | None = None


class StagingBuffer:
    """Where the states of one structure are staged: a plan with its segment.

    The segment holds the header page, the constants (of a checkpoint ``.metadata``, index, spans), then one image a
    slot, each from a page on. ``saves`` has, for each slot, the save that last took it. ``client`` is the worker whose
    memory it is.
    """

    def __init__(
        self, plan: BufferPlan, client: WorkerClient, slots: int, timeout: float, detached: list[DetachedBuffer]
    ) -> None:
        """Take the memory, and write all that is constant.

        Args:
            plan: What the images look like.
            client: The worker; it has adopted what is ``detached``.
            slots: How many images there are to be.
            timeout: Seconds that each answer of the worker may take.
            detached: Memory that outlived its worker. That which was for the same plan is used again; otherwise all of
                it is given back before memory is allocated.

        Raises:
            OutOfMemoryError: There is too little memory.
            WorkerDiedError, SaveTimeoutError: The worker is gone, or does not answer.
        """
        self.plan = plan
        self.client = client
        self.saves: list[TrackedSave | None] = [None] * slots
        self._pinned: PinnedMemory | None = None
        plan.objects.forget_slots()
        regions = {}
        end = HEADER_BYTES
        for name, data in plan.constants().items():
            regions[name] = Region(end, len(data))
            end = round_up(end + len(data))
        self._offsets = tuple(end + number * plan.layout.nbytes for number in range(slots))
        self.layout = plan.segment_layout(self._offsets, regions)
        adopted = self._acquire(detached, end + slots * plan.layout.nbytes, timeout)
        try:
            self.segment.touch()
            self._published = PublishedSlots(self.segment, slots)
            self._set_up(adopted.held if adopted is not None else (), regions)
            client.describe(self.number, self.layout, timeout)
        except BaseException:
            if (published := getattr(self, "_published", None)) is not None:
                published.close()
            if adopted is not None:
                detached.append(adopted)  # with the images in it, for the next worker
            else:
                if client.alive:
                    client.release(self.number)
                self.segment.close()
            raise

    def _acquire(self, detached: list[DetachedBuffer], nbytes: int, timeout: float) -> DetachedBuffer | None:
        """Take what fits of ``detached``, and return it; or allocate a segment of ``nbytes``."""
        adopted = _fitting(detached, self.layout, self.plan.constants())
        if adopted is not None and adopted.number is not None:
            self.segment, self.number = adopted.segment, adopted.number
            detached.remove(adopted)
            return adopted
        while detached:
            unfit = detached.pop()
            if unfit.number is not None:
                self.client.release(unfit.number)
            unfit.segment.close()
        self.number, self.segment = self.client.allocate(nbytes, timeout)
        return None

    def _set_up(self, held: Sequence[HeldImage], regions: Mapping[str, Region]) -> None:
        """Make the slots free, but for the images that are ``held`` or published, and write the constants."""
        self.slots = SlotTable(self.segment.view)
        kept = [each.request.slot for each in sorted(held, key=lambda each: each.request.save_id)]
        kept += [slot for slot in self._published.publications().values() if slot not in kept]
        # The least recently used first: what is held is overwritten last, the newest of it last of all.
        self._by_age = [slot for slot in range(len(self.saves)) if slot not in kept] + kept
        self._kept = set(kept)
        view, plan = self.segment.view, self.plan
        for slot in range(len(self.saves)):
            self.slots.set(slot, State.FREE)
        for name, data in plan.constants().items():
            view[regions[name].offset : regions[name].offset + regions[name].nbytes] = data
        for place, data in plan.layout.constants():
            for offset in self._offsets:
                view[offset + place : offset + place + len(data)] = data
        self._stagers = [SlotStager(plan.layout, self.segment, offset) for offset in self._offsets]

    def limit(self, slots: int) -> None:
        """Use no more than ``slots`` slots: another rank has no more."""
        del self.saves[slots:]
        self._published.count = len(self.saves)
        self._by_age = [slot for slot in self._by_age if slot < slots]

    def claim_slot(self) -> int | None:
        """A slot to stage in, if there is one: that least recently used, so that they take turns.

        It is not under way, nobody reads what was published there, and from now on nobody can.
        """
        for slot in self._by_age:
            if self._is_free(slot) and self._published.claim(slot):
                return slot
        return None

    def unused_slots(self) -> list[int]:
        """All that hold nothing yet: nobody reads there, and no save's image is lost by writing there."""
        return [slot for slot in self._by_age if self.saves[slot] is None and slot not in self._kept]

    def publish(self, slot: int, published: PublishedVersion) -> bool:
        """Let readers see what was staged in ``slot``; see ``PublishedSlots.publish_unless_last``."""
        return self._published.publish_unless_last(slot, published)

    def begin(self, slot: int, save: TrackedSave) -> None:
        """``slot`` is taken for ``save``."""
        self.saves[slot] = save
        self._kept.discard(slot)
        self._by_age.remove(slot)
        self._by_age.append(slot)

    def idle(self) -> bool:
        """Whether no slot holds a save under way."""
        return all(map(self._is_free, range(len(self.saves))))

    def copy(
        self,
        slot: int,
        tensors: Sequence[torch.Tensor],
        ready: ReadyEvents,
        pool: ThreadPoolExecutor,
        queued: Callable[[Sequence[Fence]], None] = lambda _: None,
    ) -> None:
        """Copy ``tensors`` into ``slot``, see ``SlotStager.copy``. The first from CUDA has the memory pinned."""
        if ready and self._pinned is None:
            # Only large tensors: small ones are brought over many at a time, and no copy may cross a cut.
            large = [each.payload_at for each in self.plan.layout.tensors if _is_on_pages(each)]
            cuts = [offset + place for offset in self._offsets for place in (0, *large)]
            self._pinned = PinnedMemory(self.segment, cuts, next(iter(ready)))
        self._stagers[slot].copy(tensors, ready, pool, partial(self.slots.set_arrived, slot), queued)

    def write_objects(self, slot: int) -> None:
        """Bring the objects in ``slot`` up to what the plan last captured."""
        begin = self._offsets[slot]
        image = self.segment.view[begin : begin + self.plan.layout.nbytes]
        self.plan.objects.write(slot, image, self.plan.layout.objects)

    def close(self) -> None:
        """Give the memory back; nothing in it may be under way, or the worker is gone."""
        if self.client.alive:
            self.client.release(self.number)
        self.leave().segment.close()

    def leave(self) -> DetachedBuffer:
        """Let go of the memory, but keep it for another worker: this one is gone."""
        if self._pinned is not None:
            self._pinned.close()
        for stager in self._stagers:
            stager.close()
        self._published.close()
        self.slots.close()
        return DetachedBuffer(self.segment, self.layout)

    def _is_free(self, slot: int) -> bool:
        save = self.saves[slot]
        return save is None or (save.is_written and save.copied.is_set())


def _is_on_pages(place: Place) -> bool:
    """Whether a copy can begin there that no other copy has a part in."""
    return place.payload_bytes >= PAGE_ALIGNED_FROM and place.payload_at % PAGE == 0


def _fitting(
    detached: list[DetachedBuffer],
    layout: CheckpointLayout | TorchFileLayout,
    constants: Mapping[str, bytes | memoryview],
) -> DetachedBuffer | None:
    """The one that was for the same plan, down to the last constant byte."""
    for each in detached:
        regions = {name: getattr(layout, name) for name in constants}
        if each.layout == layout and all(
            each.segment.view[region.offset : region.offset + region.nbytes] == constants[name]
            for name, region in regions.items()
        ):
            return each
    return None
