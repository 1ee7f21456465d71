"""Hold the shared memory of plans: staging buffers, the memory of their slots, and memory of an earlier trainer.

The slots stand at the end of a segment. The segment has memory up to some slot: for one slot, and for another while
saves overlap (``Config.slots``). The worker takes memory for another slot in the background. The save that needs a slot
waits for this memory or for the slot of the save before, and uses the first one that is ready.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import chain
from typing import Protocol, TypeAlias

import torch

from asyncckpt.devices.kinds import ReadyEvents, first_device
from asyncckpt.devices.pinned import PinnedMemory
from asyncckpt.errors import CheckpointError, OutOfMemoryError, SaveTimeoutError
from asyncckpt.format.segment_layout import ImageLayout, Region
from asyncckpt.format.write_request import COPY_SLOTS, HeldImage
from asyncckpt.link.api import SessionApi
from asyncckpt.link.client import WorkerClient
from asyncckpt.planning.layout import DataLayout
from asyncckpt.planning.plan import Plan
from asyncckpt.shm.segment import BLOCK, IMAGE_PAGE, Segment, round_up
from asyncckpt.shm.slots import HEADER_BYTES, OwnedSlots, PublishedVersion, SlotTable, State
from asyncckpt.staging.device_copy import Fence, pinned_cuts
from asyncckpt.staging.host_copy import CopyThreads
from asyncckpt.staging.slot_copy import SlotStager
from asyncckpt.threads import Flag

logger = logging.getLogger(__name__)

Constants: TypeAlias = Sequence[tuple[Region, bytes | memoryview]]
"""Bytes that are the same in every save, each with its region in the segment."""


@dataclass
class InheritedMemory:
    """A segment of the worker that the trainer before this one left, with its layout and the images in it.

    ``number``: the segment's number in the worker; 0: the worker is gone.
    """

    segment: Segment
    layout: ImageLayout
    held: tuple[HeldImage, ...]
    number: int = 0

    def fits(self, layout: ImageLayout, constants: Constants) -> bool:
        """Return True if the segment belongs to the same plan: the layout and all constant bytes are equal."""
        if self.number == 0 or self.segment.closed or self.layout != layout:
            return False
        view = self.segment.view
        return all(view[region.offset : region.offset + region.nbytes] == data for region, data in constants)


def give_back(inherited: list[InheritedMemory], client: WorkerClient) -> None:
    """Give back all ``inherited`` memory. Tell the worker of ``client`` if the worker has the memory."""
    while inherited:
        unfit = inherited[-1]  # removed from the list only after its release, because an exception may come in between
        unfit.segment.close()
        if unfit.number:
            client.tell(SessionApi.release, unfit.number)
        inherited.pop()


# After this number of saves in a row without overlap, give back the memory of the last slot, and ask again for memory
# that was refused.
_LONG = 16


class SlotMemory:
    """The memory of one segment's slots. One thread at a time may call. Another thread delivers the worker's answer."""

    def __init__(self, client: WorkerClient, number: int, segment: Segment, begins: Sequence[int], taken: int) -> None:
        """Take no memory yet.

        Args:
            client: The worker.
            number: The segment's number in the worker.
            segment: The segment.
            begins: The offset of each slot, and the end of the last one, in bytes.
            taken: The number of slots that have memory, and keep it.
        """
        self.taken = self._least = taken
        """The number of slots with memory, from the first on."""
        self.is_coming = False
        """The worker is taking memory for another slot."""
        self._client, self._number, self._segment = client, number, segment
        self._begins = begins
        self._apart = 0  # the number of saves in a row that did not overlap
        self._refused: CheckpointError | None = None

    @property
    def end(self) -> int:
        """The end of the memory, as an offset in the segment, in bytes."""
        return self._begins[self.taken]

    @property
    def ends(self) -> Sequence[int]:
        """The end of each slot with memory, as an offset in the segment, in bytes."""
        return self._begins[1 : self.taken + 1]

    @property
    def is_too_much(self) -> bool:
        """True if the last slot with memory was not needed for long."""
        return self.taken > self._least and self._apart >= _LONG and not self.is_coming

    def note(self, *, overlaps: bool) -> None:
        """Note that a save has got a slot. ``overlaps``: another save was under way."""
        self._apart = 0 if overlaps else self._apart + 1
        self._refused = self._refused if self._apart < _LONG else None

    def take_another(self) -> None:
        """Have the worker take memory for another slot, if there is one. Later ``taken`` counts the slot."""
        if self.is_coming or self._refused is not None or self.taken == len(self._begins) - 1:
            return
        slot = self.taken
        self._apart = 0
        try:
            self.is_coming = True
            begin, end = self._begins[slot], self._begins[slot + 1]
            self._client.take(self._number, begin, end, partial(self._on_taken, slot))
        except BaseException:  # an interrupt; the worker may have got the request nevertheless
            self.is_coming = False
            raise

    def keep_two(self) -> None:
        """Keep memory for two slots from now on: readers need a version while the next one is staged."""
        self._least = max(self._least, min(2, len(self._begins) - 1))
        if self.taken < self._least:
            self.take_another()

    def give_back_last(self) -> None:
        """Have the worker give back the memory of the last slot. Nothing may be under way there."""
        self.taken -= 1
        self._client.tell(SessionApi.give_back, self._number, self.end, (self.taken,))

    def _on_taken(self, slot: int, refused: CheckpointError | None) -> None:
        """Note the answer of the worker. Called on a separate thread, because mapping the memory takes a while."""
        if refused is None:
            # Fill the page tables of this process, so that the copy need not wait. The segment may be closed meanwhile.
            with contextlib.suppress(OutOfMemoryError, ValueError):
                self._segment.touch(self._begins[slot + 1], self._begins[slot])
            self.taken = max(self.taken, slot + 1)
        else:
            self._refused = refused
            logger.warning("the state has one image in memory, so saves wait for each other: %s", refused)
        self.is_coming = False


class SlotUser(Protocol):
    """A save that uses a slot, or was the last one to use it."""

    number: int
    slot_free: Flag
    """Set when the slot is no longer used for this save."""
    is_whole: bool
    """True if the image of the save is complete."""
    is_durable: bool
    is_replicated: bool


class StagingBuffer:
    """A plan with its segment, to stage states of one structure.

    The segment holds the header page, the constants, and one image in each slot. Each image begins at a multiple of
    ``IMAGE_PAGE``. Some slots may have no memory. ``saves``: for each slot, the last save that took it. ``client``: the
    worker that owns the memory.
    """

    is_closed = False
    """True after a call of ``close``. If an exception interrupted ``close``, call it again."""

    def __init__(
        self,
        plan: Plan,
        client: WorkerClient,
        slots: int,
        timeout: float,
        inherited: list[InheritedMemory],
        taken: int | None = None,
    ) -> None:
        """Take the memory, and write the constants.

        Args:
            plan: The plan of the images.
            client: The worker.
            slots: Maximum number of images.
            timeout: Maximum time to wait for each answer of the worker, in seconds.
            inherited: Memory of the trainer before this one. If no segment fits, all are given back.
            taken: The number of slots with memory from the beginning; None: all.

        Raises:
            OutOfMemoryError: There is too little memory.
            WorkerDiedError, SaveTimeoutError: The worker is gone, or does not answer.
        """
        self.plan = plan
        self.client = client
        self.saves: list[SlotUser | None] = [None] * slots
        self._pinned: PinnedMemory | None = None
        plan.forget_slots()
        regions, fixed, first = _laid_out(plan)
        *self._offsets, nbytes = (first + number * plan.layout.nbytes for number in range(slots + 1))
        self.layout = plan.image_layout(tuple(self._offsets), regions)
        taken = slots if taken is None else taken
        adopted = next((each for each in inherited if each.fits(self.layout, fixed)), None)
        try:
            if adopted is None:
                give_back(inherited, client)
            self._take_memory(adopted, nbytes, taken, timeout)
            self._set_up(adopted.held if adopted is not None else (), fixed)
            client.call(timeout, SessionApi.describe, self.number, self.layout)
            inherited[:] = [each for each in inherited if each is not adopted]
        except BaseException:
            if hasattr(self, "_owned"):
                self._owned.close()
            if adopted is None and hasattr(self, "segment"):  # inherited memory stays inherited, with the images in it
                self._release()
            raise

    def _take_memory(self, adopted: InheritedMemory | None, nbytes: int, taken: int, timeout: float) -> None:
        """Take memory for ``taken`` slots, or use inherited memory, with the slots of its images."""
        if adopted is not None:
            self.number, self.segment = adopted.number, adopted.segment
        else:
            end = self._offsets[0] + taken * self.plan.layout.nbytes
            self.number, self.segment = self.client.allocate(nbytes, timeout, end)
        self._owned = OwnedSlots(self.segment, len(self.saves))
        self._memory = SlotMemory(self.client, self.number, self.segment, [*self._offsets, nbytes], taken)
        if adopted is not None:
            needed = {each.request.slot for each in adopted.held} | {*self._owned.publications().values()}
            # Keep the memory of slots that readers are reading, too.
            others = (slot for slot in range(len(self.saves)) if slot not in needed)
            needed |= {slot for slot in others if not self._owned.claim(slot)}
            self._memory.taken = max(taken, *(slot + 1 for slot in needed), 0)
            self.segment.give_back(self._memory.end)
        self.segment.touch(self._memory.end)
        if self._owned.publications():
            self._memory.keep_two()

    def _set_up(self, held: Sequence[HeldImage], fixed: Constants) -> None:
        """Free all slots except those with ``held`` or published images, and write the constants."""
        self.slots = SlotTable(self.segment.view)
        kept = [each.request.slot for each in sorted(held, key=lambda each: each.request.save_id)]
        kept += [slot for slot in self._owned.publications().values() if slot not in kept]
        # The least recently used slot first. Slots with held images are overwritten last, the newest image last of all.
        self._by_age = [slot for slot in range(len(self.saves)) if slot not in kept] + kept
        self._kept = set(kept)
        view, layout = self.segment.view, self.plan.layout
        for slot in range(len(self.saves)):
            self.slots.set(slot, State.FREE)
        for region, data in fixed:
            view[region.offset : region.offset + region.nbytes] = data
        self._blank = set(range(len(self.saves)))
        for slot in range(self._memory.taken):
            self._write_constants(slot)
        self._stagers = [SlotStager(layout, self.segment, offset, layout.converted) for offset in self._offsets]

    def _write_constants(self, slot: int) -> None:
        """Write the constants of an image into a slot that has just got its memory."""
        view, offset = self.segment.view, self._offsets[slot]
        for place, data in self.plan.layout.constants:
            view[offset + place : offset + place + len(data)] = data
        self._blank.discard(slot)

    def fit_memory(self) -> int | None:
        """Have memory taken if no slot is free, and return the free slot otherwise.

        If a slot was not needed for long, give back its memory instead, and return None.
        """
        last, slot = self._memory.taken - 1, None
        if not self._memory.is_too_much:
            slot = self.claim_slot()
            if slot is None:
                self._memory.take_another()
        elif last != self._by_age[-1] and self._is_free(last) and self._owned.claim(last):
            self.saves[last] = None
            self.plan.forget_slots()
            self._blank.add(last)
            if self._pinned is not None:
                self._pinned.cut_back(self._offsets[last])
            self._memory.give_back_last()
        return slot

    def claim_slot_for(self, save: SlotUser) -> int | None:
        """Take a free slot for ``save``, and return it; None if there is none. The thread of the saves calls this."""
        slot = self.fit_memory()
        if slot is None:
            slot = self.claim_slot()
        if slot is not None:
            self._begin(slot, save)
        return slot

    def claim_slot(self) -> int | None:
        """Return a free slot, the least recently used; None if there is none. From now on nobody can read it.

        Never reuse the slot of the newest safe save while that save is replicated but not durable. Otherwise a lost
        host would take the only copy of this rank's part along. Never reuse the published slot while memory for another
        slot is coming.
        """
        safe = [save for save in self.saves if save is not None and (save.is_durable or save.is_replicated)]
        last = max(safe, key=lambda save: save.number, default=None)
        kept = last if last is not None and not last.is_durable and len(self.saves) > 1 else None
        published = self._owned.publications().values() if self._memory.is_coming else ()
        # If the last slot is not needed, prefer the first slots.
        order = sorted(self._by_age) if self._memory.is_too_much else self._by_age
        unkept = (slot for slot in order if (kept is None or self.saves[slot] is not kept) and slot not in published)
        return self._owned.claim_first(slot for slot in unkept if slot < self._memory.taken and self._is_free(slot))

    def unused_slots(self) -> list[int]:
        """Return the slots that hold no image yet."""
        unused = (slot for slot in self._by_age if self.saves[slot] is None and slot not in self._kept)
        return [slot for slot in unused if slot < self._memory.taken]

    def publish(self, slot: int, published: PublishedVersion) -> bool:
        """Publish an image, see ``OwnedSlots.publish_unless_last``, and keep memory for two slots from now on."""
        self._memory.keep_two()
        return self._owned.publish_unless_last(slot, published)

    def _begin(self, slot: int, save: SlotUser) -> None:
        others = (other for other in range(len(self.saves)) if other != slot)
        self._memory.note(overlaps=not all(map(self._is_free, others)))
        self.saves[slot] = save
        self._kept.discard(slot)
        self._by_age = [*(other for other in self._by_age if other != slot), slot]

    def offer(self, slot: int) -> None:
        """Let readers use the image in ``slot``. The image has to be complete."""
        self._owned.offer_image(slot)

    def wait_idle(self, timeout: float, doing: str) -> None:
        """Wait until no save uses a slot, so that the memory can be given back.

        Raises ``SaveTimeoutError`` after ``timeout`` seconds, and ``WorkerDiedError`` if the worker is gone. ``doing``:
        the action to name in the timeout error.
        """
        for save in self.saves:
            if save is not None and not self.client.wait_while_it_lives(save.slot_free, timeout):
                raise SaveTimeoutError(f"{doing} took longer than {timeout:g} s; the storage may be stalled")

    def copy(
        self,
        slot: int,
        tensors: Sequence[torch.Tensor],
        ready: ReadyEvents,
        threads: CopyThreads,
        queued: Callable[[Sequence[Fence]], None] = lambda _: None,
        devices: object | None = None,
        check: Callable[[], object] = lambda: None,
    ) -> None:
        """Copy the tensors of a state, and return when that is done. The first copy from a device pins the memory.

        Args:
            slot: The slot.
            tensors: All tensors of the plan, in the order of the layout.
            ready: Events that the copies from each device wait for.
            threads: Threads that help.
            queued: As in ``SlotStager.copy``.
            devices: As in ``SlotStager.copy``.
            check: Called by any thread, many times. The copy ends if ``check`` raises an error.
        """

        def arrived(nbytes: int) -> None:
            check()
            self.slots.set_arrived(slot, nbytes)

        if self._pinned is None and (device := first_device(tensors, ready)) is not None:
            cuts = _cuts(self.plan.layout, self._offsets)
            self._pinned = PinnedMemory(self.segment, cuts, device, self._memory.ends[0])
        if self._pinned is not None:
            for end in self._memory.ends:  # no pinned range crosses the end of a slot, which may lose its memory
                self._pinned.extend(end)
        self._stagers[slot].copy(tensors, ready, threads, arrived, queued, devices)

    def write_objects(self, slot: int) -> None:
        """Write the objects that the plan last captured into ``slot``."""
        if slot in self._blank:
            self._write_constants(slot)
        begin = self._offsets[slot]
        image = self.segment.view[begin : begin + self.plan.layout.nbytes]
        self.plan.write_objects(slot, image)

    def close(self) -> None:
        """Give the memory back. No save may use it, unless the worker is gone. Safe to call twice."""
        self.is_closed = True
        for stager in self._stagers:
            stager.close()
        self._owned.close()
        self.slots.close()
        self._release()

    def _release(self) -> None:
        if self._pinned is not None:
            self._pinned.close()
        if self.client.alive:
            self.client.tell(SessionApi.release, self.number)
        self.segment.close()

    def _is_free(self, slot: int) -> bool:
        save = self.saves[slot]
        return save is None or self.client.saves.is_free(save.number)


def copy_bytes(plan: Plan) -> int:
    """Return the size of a segment, on another host, for copies of the plan's images."""
    return _laid_out(plan)[2] + COPY_SLOTS * plan.layout.nbytes


def _laid_out(plan: Plan) -> tuple[dict[str, Region], Constants, int]:
    """Return the regions of the constants in a segment, by name; the constants; and the offset of the first slot."""
    regions: dict[str, Region] = {}
    fixed: list[tuple[Region, bytes | memoryview]] = []
    end = HEADER_BYTES
    for name, data in plan.constants().items():
        regions[name] = Region(end, len(data))
        fixed.append((regions[name], data))
        end = round_up(end + len(data), BLOCK)
    return regions, fixed, round_up(end, IMAGE_PAGE)


def _cuts(layout: DataLayout, offsets: Sequence[int]) -> list[int]:
    """Return the offsets in a segment with slots at ``offsets`` where ranges of pinned memory may end.

    No copy crosses these offsets.
    """
    cuts = sorted(chain.from_iterable(map(pinned_cuts, layout.tensors)))
    return [offset + place for offset in offsets for place in (0, *cuts)]
