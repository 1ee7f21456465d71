"""Copies: the memory in which a worker keeps images of other hosts' ranks, two slots for each rank and structure.

One slot holds the last step that all ranks have copies of, or an image that is being read. The next image goes to the
other slot, and its unchanged parts are copied from the first slot. A segment of copies has the layout of the original
segment, except for the slots.
"""

from __future__ import annotations

import threading
from array import array
from collections.abc import Collection, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from typing import Any

from asyncckpt.errors import CheckpointError, DamagedCheckpointError
from asyncckpt.format.manifest import checksum, checksums_in
from asyncckpt.format.segment_layout import ImageLayout
from asyncckpt.format.write_request import COPY_SLOTS, CopiedRank, HeldImage
from asyncckpt.link.segment_store import SegmentStore
from asyncckpt.shm.slots import OwnedSlots, State
from asyncckpt.transfer.fetch import Fetch, ImagePart, Previous, RateLimit
from asyncckpt.transfer.holder import RemoteImage


@dataclass
class _CopySegment:
    number: int
    nbytes: int
    owned: OwnedSlots
    saves: list[int]
    """The number of the save in each slot; 0: no save. Inherited images have negative numbers: the newest has -1."""
    digests: list[bytes] = field(default_factory=lambda: [b""] * COPY_SLOTS)
    """The digests of the spans in each slot, one after the other; empty: unknown."""


class Incoming:
    """A slot that receives an image, in the segment with number ``number`` and layout ``layout``."""

    def __init__(self, owner: Copies, segment: _CopySegment, slot: int, held: HeldImage) -> None:
        self._owner, self._segment = owner, segment
        first = held.layout.slots[0]
        slots = tuple(first + number * held.layout.data_bytes for number in range(COPY_SLOTS))
        self.layout: ImageLayout = replace(held.layout, slots=slots)
        self.memory = owner.memory_of(segment.number)
        self.source, self.slot = held, slot

    def fill(self, image: RemoteImage[HeldImage], pool: ThreadPoolExecutor, limit: RateLimit) -> None:
        """Fetch the image from its holder, and hold the image from now on.

        Args:
            image: The image for this slot.
            pool: The threads that fetch.
            limit: The rate limit of the fetch.

        Raises:
            OSError: The image cannot be read from its holder.
            CheckpointError: The image was damaged on the way.
        """
        request = self.source.request
        where: dict[str, Any] = {"path": request.path, "step": request.step, "rank": request.rank}
        if not self.has_constants():
            for region in self.source.layout.constants():
                image.read(region.offset, self.memory[region.offset : region.offset + region.nbytes])
            if not self.has_constants():  # check now, because the constants include the bounds of the spans
                raise DamagedCheckpointError("the constants of an image did not arrive as they were sent", **where)
        spans = _Spans(self.memory, self.layout)
        previous = Previous(self._image(1 - self.slot), self._segment.digests[1 - self.slot])
        fetch = Fetch("an image", where, self._image(self.slot), len(spans.begins), spans.bounds, previous, limit)
        shift = self.source.layout.slots[request.slot]
        digests = b"".join(fetch.run([ImagePart(image, 0, shift)], pool))
        self.finish(digests, spans.checksums(digests, self._image(self.slot)))

    def _image(self, slot: int) -> memoryview:
        begin = self.layout.slots[slot]
        return self.memory[begin : begin + self.layout.data_bytes]

    def finish(self, digests: bytes, checksums: array[int]) -> None:
        """Hold the complete image from now on. Its spans have these ``digests`` and ``checksums``."""
        held = replace(self.source, checksums=checksums.tobytes())
        self._owner.add(self._segment, self.slot, self.layout, held)
        self._segment.digests[self.slot] = digests

    def has_constants(self) -> bool:
        """Return whether the constant regions of the image are here already, from an earlier image."""
        regions = self.source.layout.constants()
        found = (self.memory[region.offset : region.offset + region.nbytes] for region in regions)
        return tuple(map(checksum, found)) == self.source.constants


class _Spans:
    """The begin and the end of each span of an image."""

    def __init__(self, memory: memoryview, layout: ImageLayout) -> None:
        self.begins, self.ends = array("Q"), array("Q")
        for file in layout.spanned_files():
            bounds = memory[file.spans.offset : file.spans.offset + file.spans.nbytes].cast("Q").tolist()
            self.begins.extend(file.begin + bound for bound in bounds[:-1])
            self.ends.extend(file.begin + bound for bound in bounds[1:])

    def bounds(self, span: int) -> tuple[int, int]:
        """Return the begin and the end of a span."""
        return self.begins[span], self.ends[span]

    def checksums(self, digests: bytes, image: memoryview) -> array[int]:
        """Return the checksums of all spans of ``image``. The spans have these concatenated ``digests``."""
        return checksums_in(digests, zip(self.begins, self.ends, strict=True), image)


class Copies:
    """The copies of one worker. Any thread may call, but only one thread at a time may copy from the same rank."""

    def __init__(self, segment_store: SegmentStore) -> None:
        self._store = segment_store
        self._lock = threading.Lock()
        self._segments: dict[tuple[int, int], _CopySegment] = {}  # by rank and plan
        self._inherited: dict[int, tuple[int, list[int]]] = {}  # by segment: the rank, and the saves in the slots
        self._replicated = -1  # the newest replicated save; -1: the newest inherited image

    def inherit(self, number: int, held: Sequence[HeldImage]) -> None:
        """Keep a segment of copies of an earlier session, with the images in ``held``.

        The newest of these images stays until all ranks have copies of a newer save.
        """
        saves = [0] * COPY_SLOTS
        newest_first = sorted(held, key=lambda image: image.staged_at, reverse=True)
        for age, image in enumerate(newest_first, 1):
            saves[image.request.slot] = -age
        self._inherited[number] = held[0].request.rank, saves

    def keep(self, plan: int, ranks: Collection[CopiedRank], plans: Collection[int]) -> None:
        """Allocate memory for the images of some ranks.

        Args:
            plan: The number of the plan for the structure of the images.
            ranks: The ranks, and the size of each rank's segment in bytes.
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
                self._segments[each.rank, plan] = _CopySegment(
                    number, each.nbytes, OwnedSlots(segment, COPY_SLOTS), saves
                )

    def begin(self, held: HeldImage) -> Incoming:
        """Choose a slot for an image. Raises ``CheckpointError`` if there is no memory for the image."""
        request = held.request
        with self._lock:
            self._release_inherited()
            segment = self._segments.get((request.rank, request.plan))
            need = held.layout.slots[0] + COPY_SLOTS * held.layout.data_bytes
            if segment is None or segment.nbytes < need:
                raise CheckpointError(f"no memory was taken for copies of plan {request.plan}", rank=request.rank)
            # Never overwrite the last save that all ranks have copies of. Prefer the slot with the oldest save.
            by_age = sorted(range(COPY_SLOTS), key=segment.saves.__getitem__)
            slot = segment.owned.claim_first(slot for slot in by_age if segment.saves[slot] != self._replicated)
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

    def add(self, segment: _CopySegment, slot: int, layout: ImageLayout, held: HeldImage) -> None:
        """Hold a complete image. Called by ``Incoming.finish``."""
        hosted = self._store.hosted(segment.number)
        hosted.describe(layout)
        hosted.slots.set(slot, State.STAGED)
        request = replace(held.request, segment=segment.number, slot=slot, small_files=())
        self._store.copy_made(request, layout, array("Q", held.checksums))
        segment.saves[slot] = held.request.save_id
        segment.owned.offer_image(slot)

    def memory_of(self, number: int) -> memoryview:
        """Return the memory of a segment."""
        return self._store.hosted(number).segment.view

    def on_replicated(self, save_id: int) -> None:
        """Protect the copies of a replicated save, until a later save is replicated.

        This method does not wait for memory.
        """
        self._replicated = save_id

    def close(self) -> None:
        """Stop copying. The images stay."""
        with self._lock:
            for segment in self._segments.values():
                segment.owned.close()
            self._segments.clear()

    def _release_inherited(self) -> None:
        """Release the images of the earlier job, if a save of this job is replicated."""
        if self._replicated > 0:
            for number in self._inherited:
                self._store.release(number)
            self._inherited.clear()

    def _inherited_of(self, wanted: CopiedRank) -> tuple[int, list[int]] | None:
        """Return an inherited segment with this rank and size, and the saves in its slots; None if there is none."""
        for number, (rank, saves) in self._inherited.items():
            if rank == wanted.rank and self._store.hosted(number).segment.nbytes == wanted.nbytes:
                del self._inherited[number]
                return number, saves
        return None

    def _taken(self, nbytes: int) -> tuple[int, list[int]]:
        number, _ = self._store.allocate(nbytes)
        return number, [0] * COPY_SLOTS

    def _release(self, segment: _CopySegment) -> None:
        segment.owned.close()
        self._store.release(segment.number)
