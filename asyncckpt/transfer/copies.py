"""Copies: the memory in which a worker keeps images of other hosts' ranks, two slots for each rank and structure.

One slot holds the last step that all ranks have copies of, or an image that is being read. The next image goes to the
other slot, and its unchanged parts are copied from the first. A segment of copies is laid out like the segment that
it copies, except for the slots.
"""

from __future__ import annotations

import threading
from array import array
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field, replace

from asyncckpt.errors import CheckpointError
from asyncckpt.format.manifest import checksum
from asyncckpt.format.segment_layout import CheckpointLayout
from asyncckpt.format.write_request import COPY_SLOTS, CopiedRank, HeldImage
from asyncckpt.link.segment_store import SegmentStore
from asyncckpt.shm.slots import Claims, Readers, State


@dataclass
class _CopySegment:
    number: int
    nbytes: int
    claims: Claims
    saves: list[int]
    """The save in each slot, by its number; 0: none. Inherited images have negative numbers: the newest is -1."""
    digests: list[bytes] = field(default_factory=lambda: [b""] * COPY_SLOTS)
    """The digests of the spans in each slot, one after the other; empty: unknown."""


class Incoming:
    """A slot that an image is being copied to, in the segment with that ``number``, laid out as ``layout``."""

    def __init__(self, owner: Copies, segment: _CopySegment, slot: int, held: HeldImage) -> None:
        self._owner, self._segment = owner, segment
        first = held.layout.slots[0]
        slots = tuple(first + number * held.layout.data_bytes for number in range(COPY_SLOTS))
        self.layout: CheckpointLayout = replace(held.layout, slots=slots)
        self.memory = owner.memory_of(segment.number)
        self.source, self.slot = held, slot

    def has_constants(self) -> bool:
        """Return whether the constant regions of the image are here already, from an earlier image."""
        regions = self.source.layout.constants()
        found = (self.memory[region.offset : region.offset + region.nbytes] for region in regions)
        return tuple(map(checksum, found)) == self.source.constants

    @property
    def last(self) -> tuple[int, bytes]:
        """The slot of the image that was copied before, and the digests of its spans; empty: unknown."""
        slot = 1 - self.slot
        return slot, self._segment.digests[slot]

    def finish(self, digests: bytes, checksums: array[int]) -> None:
        """Hold the image from now on. The whole image is here; its spans have these ``digests`` and ``checksums``."""
        held = replace(self.source, checksums=checksums.tobytes())
        self._owner.add(self._segment, self.slot, self.layout, held)
        self._segment.digests[self.slot] = digests


class Copies:
    """The copies of one worker. Any thread may call, but only one thread at a time copies from one rank."""

    def __init__(self, segment_store: SegmentStore) -> None:
        self._store = segment_store
        self._lock = threading.Lock()
        self._segments: dict[tuple[int, int], _CopySegment] = {}  # by rank and plan
        self._inherited: dict[int, tuple[int, list[int]]] = {}  # by segment: its rank, and the saves in its slots
        self._replicated = -1  # the newest save that all ranks have copies of; before it, the newest inherited image

    def inherit(self, number: int, held: Sequence[HeldImage]) -> None:
        """Keep a segment of copies of an earlier session, with the images ``held`` there.

        The newest of these images stays until all ranks have copies of a newer save.
        """
        saves = [0] * COPY_SLOTS
        newest_first = sorted(held, key=lambda image: image.staged_at, reverse=True)
        for age, image in enumerate(newest_first, 1):
            saves[image.request.slot] = -age
        self._inherited[number] = held[0].request.rank, saves

    def keep(self, plan: int, ranks: Collection[CopiedRank], plans: Collection[int]) -> None:
        """Take memory for the images of some ranks.

        Args:
            plan: The number of their structure's plan.
            ranks: The ranks, and the size of a segment of each.
            plans: The plans to keep. Copies of other plans are released.

        Raises:
            OutOfMemoryError: There is too little memory.
        """
        with self._lock:
            self._release_inherited()
            for place in [place for place in self._segments if place[1] not in plans]:
                self._release(self._segments.pop(place))
            for each in ranks:
                if (each.rank, plan) in self._segments:
                    continue
                number, saves = self._inherited_of(each) or self._taken(each.nbytes)
                segment = self._store.hosted(number).segment
                self._segments[each.rank, plan] = _CopySegment(number, each.nbytes, Claims(segment), saves)

    def begin(self, held: HeldImage) -> Incoming:
        """Choose the slot to copy an image to. Raises ``CheckpointError`` if there is no memory for the image."""
        request = held.request
        with self._lock:
            self._release_inherited()
            segment = self._segments.get((request.rank, request.plan))
            need = held.layout.slots[0] + COPY_SLOTS * held.layout.data_bytes
            if segment is None or segment.nbytes < need:
                raise CheckpointError(f"no memory was taken for copies of plan {request.plan}", rank=request.rank)
            # Never overwrite the last save that all ranks have copies of. Prefer the slot with the oldest save.
            slots = sorted(range(COPY_SLOTS), key=segment.saves.__getitem__)
            free = (slot for slot in slots if segment.saves[slot] != self._replicated)
            slot = next((slot for slot in free if segment.claims.claim(slot)), None)
            if slot is None:
                raise CheckpointError("both copies of its last images are being read", rank=request.rank)
            segment.saves[slot] = 0
        incoming = Incoming(self, segment, slot, held)
        # If the constant regions change, the image in the other slot becomes unreadable too.
        for gone in [slot] if incoming.has_constants() else range(COPY_SLOTS):
            segment.digests[gone] = b""
            self._store.copy_begun(segment.number, gone)
        self._store.hosted(segment.number).slots.take(slot, request.save_id)
        return incoming

    def add(self, segment: _CopySegment, slot: int, layout: CheckpointLayout, held: HeldImage) -> None:
        """Hold an image that is complete. Called by ``Incoming.finish``."""
        hosted = self._store.hosted(segment.number)
        hosted.describe(layout)
        if hosted.constants != held.constants:
            raise CheckpointError("what is constant in its images did not arrive as it was", rank=held.request.rank)
        hosted.slots.set(slot, State.STAGED)
        request = replace(held.request, segment=segment.number, slot=slot, small_files=())
        self._store.copy_made(request, layout, array("Q", held.checksums))
        segment.saves[slot] = held.request.save_id
        segment.claims.offer(slot, Readers.OF_IMAGE)

    def memory_of(self, number: int) -> memoryview:
        """Return the memory of a segment."""
        return self._store.hosted(number).segment.view

    def on_replicated(self, save_id: int) -> None:
        """Protect the copy of a save that all ranks have copies of, until they all have copies of a later save.

        This does not wait for memory.
        """
        self._replicated = save_id

    def close(self) -> None:
        """Stop copying. The images stay."""
        with self._lock:
            for segment in self._segments.values():
                segment.claims.close()
            self._segments.clear()

    def _release_inherited(self) -> None:
        """Release the images of the job before, if all ranks have copies of a save of this one."""
        if self._replicated > 0:
            for number in self._inherited:
                self._store.release(number)
            self._inherited.clear()

    def _inherited_of(self, wanted: CopiedRank) -> tuple[int, list[int]] | None:
        """Return an inherited segment of that rank and size, and the saves in its slots; None if there is none."""
        for number, (rank, saves) in self._inherited.items():
            if rank == wanted.rank and self._store.hosted(number).segment.nbytes == wanted.nbytes:
                del self._inherited[number]
                return number, saves
        return None

    def _taken(self, nbytes: int) -> tuple[int, list[int]]:
        number, _ = self._store.allocate(nbytes)
        return number, [0] * COPY_SLOTS

    def _release(self, segment: _CopySegment) -> None:
        segment.claims.close()
        self._store.release(segment.number)
