"""A plan and the shared memory for it: one segment, with the constant files and the slots."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import Protocol

import torch

from asyncckpt.device_copy import Fence, Ready
from asyncckpt.image import PAGE_ALIGNED_FROM, Image, Place
from asyncckpt.pinned import PinnedMemory
from asyncckpt.shm.leases import Claims
from asyncckpt.shm.segment import PAGE, Segment, round_up
from asyncckpt.shm.slots import HEADER_BYTES, Published, SlotTable, State
from asyncckpt.staging import SlotStager
from asyncckpt.worker.client import Pending, WorkerClient
from asyncckpt.worker.messages import FileLayout, Held, Layout, Region


@dataclass
class Spare:
    """Memory whose worker is gone: a segment, what its bytes are, and the images that are still held in it.

    ``number``: that of the segment in the worker that has adopted it; None: none has, yet.
    """

    segment: Segment
    layout: Layout | FileLayout
    held: tuple[Held, ...] = ()
    number: int | None = None


class Objects(Protocol):
    """What of a state is not tensors."""

    def forget_slots(self) -> None:
        """The slots are in other memory now."""

    def write(self, slot: int, image: memoryview, places: Sequence[Place]) -> None:
        """Bring them up to date in the ``image`` of ``slot``."""


class Housed(Protocol):
    """A plan, as far as it is about memory."""

    @property
    def number(self) -> int: ...

    @property
    def image(self) -> Image: ...

    @property
    def objects(self) -> Objects: ...

    def constants(self) -> Mapping[str, bytes | memoryview]:
        """Bytes that are the same in every save, by the name of their region in the layout."""

    def layout(self, slots: tuple[int, ...], regions: dict[str, Region]) -> Layout | FileLayout:
        """What the worker is told of a segment with images at ``slots``, and the constants in ``regions``."""


class Home:
    """Where the states of one structure are staged.

    The segment: the header page, the constants (of a checkpoint ``.metadata``, index, spans), then one image a slot,
    each from a page on. ``pending`` has, for each slot, the save that last took it. ``client`` is the worker whose
    memory it is.
    """

    def __init__(self, plan: Housed, client: WorkerClient, slots: int, timeout: float, spares: list[Spare]) -> None:
        """Take the one of ``spares`` that was for the same plan, or have ``client`` allocate the segment.

        ``client`` has adopted the spares; those that fit nothing are given back before memory is allocated. Writes all
        that is constant. Raises ``OutOfMemoryError``, ``WorkerDiedError``, ``SaveTimeoutError``.
        """
        self.plan = plan
        self.client = client
        self.pending: list[Pending | None] = [None] * slots
        self._pinned: PinnedMemory | None = None
        plan.objects.forget_slots()
        constants = plan.constants()
        regions = {}
        end = HEADER_BYTES
        for name, data in constants.items():
            regions[name] = Region(end, len(data))
            end = round_up(end + len(data))
        offsets = tuple(end + number * plan.image.nbytes for number in range(slots))
        self._offsets = offsets
        self.layout = plan.layout(offsets, regions)
        spare = _fitting(spares, self.layout, constants)
        if spare is None or spare.number is None:
            while spares:
                unfit = spares.pop()
                if unfit.number is not None:
                    client.release(unfit.number)
                unfit.segment.close()
            self.number, self.segment = client.allocate(end + slots * plan.image.nbytes, timeout)
        else:
            self.segment, self.number = spare.segment, spare.number
            spares.remove(spare)
        self.segment.touch()
        self.slots = SlotTable(self.segment.view)
        self._claims: Claims | None = None
        published = self._published()
        if published:
            self._claims = Claims(self.segment)
        held = [] if spare is None else sorted(spare.held, key=lambda each: each.order.save_id)
        kept = [each.order.slot for each in held]
        kept += [slot for _, slot in published if slot not in kept]
        # Least recently used first: what is held is overwritten last, the newest of it last of all.
        self._turns = [slot for slot in range(slots) if slot not in kept] + kept
        self._kept = set(kept)
        for slot in range(slots):
            self.slots.set(slot, State.FREE)
        for name, data in constants.items():
            region = regions[name]
            self.segment.view[region.offset : region.offset + region.nbytes] = data
        for place, data in plan.image.constants():
            for offset in offsets:
                self.segment.view[offset + place : offset + place + len(data)] = data
        self._stagers = [SlotStager(plan.image, self.segment, offset) for offset in offsets]
        client.describe(self.number, self.layout, timeout)

    def limit(self, slots: int) -> None:
        """Use no more than ``slots`` slots: another rank has no more."""
        del self.pending[slots:]
        self._turns = [slot for slot in self._turns if slot < slots]

    def claim_slot(self) -> int | None:
        """A slot to stage in, if there is one: that least recently used, so that they take turns.

        It is not under way, nobody reads what was published there, and from now on nobody can.
        """
        for slot in self._turns:
            if self._is_free(slot) and self._claim(slot):
                return slot
        return None

    def unused_slots(self) -> list[int]:
        """All that hold nothing yet: nobody reads there, and no save's image is lost by writing there."""
        return [slot for slot in self._turns if self.pending[slot] is None and slot not in self._kept]

    def publish(self, slot: int, published: Published) -> bool:
        """Let readers see what was staged in ``slot``.

        False, and nothing is published, where they have all others, so that none would be left that they cannot keep;
        or where they have this one already, as another version.
        """
        if self._claims is None:
            self._claims = Claims(self.segment)
        others = [other for _, other in self._published() if other != slot]
        if not self._claims.claim(slot) or (len(others) == len(self.pending) - 1 and not any(map(self._claim, others))):
            return False
        self.slots.publish(slot, published)
        self._claims.offer(slot)
        return True

    def begin(self, slot: int, pending: Pending) -> None:
        """``slot`` is taken for a save."""
        self.pending[slot] = pending
        self._kept.discard(slot)
        self._turns.remove(slot)
        self._turns.append(slot)

    def idle(self) -> bool:
        """Whether no slot holds a save under way."""
        return all(map(self._is_free, range(len(self.pending))))

    def copy(
        self,
        slot: int,
        tensors: Sequence[torch.Tensor],
        ready: Ready,
        pool: ThreadPoolExecutor,
        queued: Callable[[Sequence[Fence]], None] = lambda _: None,
    ) -> None:
        """Copy ``tensors`` into ``slot``, see ``SlotStager.copy``. The first from CUDA has the memory pinned."""
        if ready and self._pinned is None:
            # Only large tensors: small ones are brought over many at a time, and no copy may cross a cut.
            large = [each.payload_at for each in self.plan.image.tensors if _is_on_pages(each)]
            cuts = [offset + place for offset in self._offsets for place in (0, *large)]
            self._pinned = PinnedMemory(self.segment, cuts, next(iter(ready)))
        self._stagers[slot].copy(tensors, ready, pool, partial(self.slots.arrived, slot), queued)

    def write_objects(self, slot: int) -> None:
        """Bring the objects in ``slot`` up to what the plan last captured."""
        begin = self._offsets[slot]
        image = self.segment.view[begin : begin + self.plan.image.nbytes]
        self.plan.objects.write(slot, image, self.plan.image.objects)

    def close(self) -> None:
        """Give the memory back; nothing in it may be under way, or the worker is gone."""
        if self.client.alive:
            self.client.release(self.number)
        self.leave().segment.close()

    def leave(self) -> Spare:
        """Let go of the memory, but keep it for another worker: this one is gone."""
        if self._pinned is not None:
            self._pinned.close()
        for stager in self._stagers:
            stager.close()
        if self._claims is not None:
            self._claims.close()
        self.slots.close()
        return Spare(self.segment, self.layout)

    def _published(self) -> list[tuple[Published, int]]:
        """What readers may see, and in which slots, the oldest first."""
        return sorted(self.slots.publications(len(self.pending)).items())

    def _claim(self, slot: int) -> bool:
        """Have no reader look at ``slot``; False where one does."""
        if self._claims is None:
            return True
        if not self._claims.claim(slot):
            return False
        self.slots.withdraw(slot)
        return True

    def _is_free(self, slot: int) -> bool:
        save = self.pending[slot]
        return save is None or (save.slot_free and save.copied.is_set())


def _is_on_pages(place: Place) -> bool:
    """Whether a copy can begin there that no other copy has a part in."""
    return place.payload_bytes >= PAGE_ALIGNED_FROM and place.payload_at % PAGE == 0


def _fitting(
    spares: list[Spare], layout: Layout | FileLayout, constants: Mapping[str, bytes | memoryview]
) -> Spare | None:
    """The one that was for the same plan, down to the last constant byte."""
    for spare in spares:
        regions = {name: getattr(layout, name) for name in constants}
        if spare.layout == layout and all(
            spare.segment.view[region.offset : region.offset + region.nbytes] == constants[name]
            for name, region in regions.items()
        ):
            return spare
    return None
