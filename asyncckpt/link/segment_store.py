"""The worker's memory: its segments, and the complete images in them.

An image is held from the moment it is staged until its slot is taken again. When a trainer has died, the next trainer
can take over its images, with their memory.
"""

from __future__ import annotations

import contextlib
import logging
import os
import threading
import time
from array import array
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Generic, TypeVar

from asyncckpt.budgets import ANSWER_S
from asyncckpt.errors import OutOfMemoryError
from asyncckpt.format.manifest import checksum, digest_of
from asyncckpt.format.segment_layout import ImageLayout, WeightsLayout
from asyncckpt.format.write_request import HeldImage, ImageKey, ImageSummary, WriteRequest
from asyncckpt.link.api import PublishedSegment
from asyncckpt.link.endpoint import announce_memory, announced_bytes, host_lock
from asyncckpt.link.takeover import retire_idle_workers
from asyncckpt.shm import budget
from asyncckpt.shm.hosted_segment import HostedSegment
from asyncckpt.shm.huge import take_huge
from asyncckpt.shm.segment import Descriptor, Segment
from asyncckpt.shm.slots import Readers, State, lease, reopen

logger = logging.getLogger(__name__)

ImageKind = TypeVar("ImageKind")
"""``HeldImage`` for the image of a save; for a published version the sizes of its files."""

# Timeout for the lock of the host. A process that has the lock may wait for others to give back memory.
_TURN_S = 120.0
HINT = "use fewer slots, or leave more memory to them (each holds one image of the state)"


def take_memory(
    segment: Segment, wait_released: Callable[[], bool] = lambda: False, end: int | None = None, begin: int = 0
) -> None:
    """Take memory of ``segment``.

    Args:
        segment: The segment. Its memory before ``begin`` is taken already.
        wait_released: Waits for memory that will be free in a moment. Returns whether there was any.
        end: The end of the memory to take, in bytes; None: the end of the segment.
        begin: The begin of the memory to take, in bytes.

    Raises:
        OutOfMemoryError: There is too little memory. A part of the requested memory may be taken all the same.
    """
    end = segment.nbytes if end is None else end
    nbytes = end - begin
    with contextlib.ExitStack() as announced:
        # Only one process checks the budget at a time, because two processes would count the same free memory. The
        # processes then take memory in parallel, at some 2 GiB a second.
        with host_lock(_TURN_S) as alone:
            if not alone:
                logger.warning("%d bytes of memory are taken without the lock of this host", nbytes)
            try:
                _check_room(segment, nbytes)
            except OutOfMemoryError:
                # A lingering worker's images must not keep memory from a live trainer: their trainer may never return.
                if not (wait_released() or retire_idle_workers(ANSWER_S)):
                    raise
                _check_room(segment, nbytes)
            announced.enter_context(announce_memory(segment.fileno(), end))
        take_huge(segment, begin, end)
        segment.touch(end, begin)


def _check_room(segment: Segment, nbytes: int) -> None:
    budget.require(nbytes + announced_bytes(), "staging", HINT)
    segment.require_room(nbytes)


# Number of saves whose ends are remembered, for copies that arrive later.
_ENDS = 64


@dataclass
class _ImageRecord:
    request: WriteRequest
    layout: ImageLayout
    staged_at: float
    checksums: array[int] | None = None
    committed: bool | None = None
    adopted: bool = False
    is_copy: bool = False

    @property
    def key(self) -> ImageKey:
        return ImageKey(self.request.attempt, self.request.rank)


# Bytes whose digests are in one answer.
DIGESTED_BYTES = 64 << 20


def _spans(hosted: HostedSegment, layout: ImageLayout, slot: int, first: int = 0) -> Iterator[memoryview]:
    """Yield the spans of the image in ``slot``, from number ``first`` on."""
    before = 0
    for file in layout.spanned_files():
        begin = min(max(first - before, 0), file.checksums)
        bounds, data = hosted.region(file.spans).cast("Q")[begin:], hosted.region(layout.data(slot, file))
        yield from (data[start:stop] for start, stop in pairwise(bounds))
        before += file.checksums


def _digests(spans: Iterator[memoryview]) -> bytes:
    """Return the digests of the first spans, one after the other."""
    found, nbytes = bytearray(), 0
    for span in spans:
        found += digest_of(span)
        nbytes += len(span)
        if nbytes >= DIGESTED_BYTES:
            break
    return bytes(found)


class Leased(Generic[ImageKind]):
    """An image that another process reads. Its slot is not overwritten until this object is closed."""

    def __init__(
        self,
        described: ImageKind,
        memory: HostedSegment,
        digests: Callable[[int, float], bytes | None],
        kept: contextlib.ExitStack,
    ) -> None:
        """Take over a lease.

        Args:
            described: The description of the image for its reader.
            memory: The segment with the image.
            digests: Returns digests of spans, from the number in the first argument on, or None if no further digest
                will ever come. The function waits for the first digest, at most for the seconds in the second argument.
            kept: The resources to release at the end of the lease.
        """
        self.described = described
        self.segment = memory.segment
        self.used = memory.used
        """A context manager that keeps the memory mapped even after the lease ends."""
        self.digests = digests
        self._kept = kept

    def close(self) -> None:
        """End the lease. Safe to call twice."""
        self._kept.close()


class SegmentStore:
    """The segments of one worker, and the images in them. Any thread may call."""

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._hosted: dict[int, HostedSegment] = {}
        self._next = 1
        self._images: dict[tuple[int, int], _ImageRecord] = {}  # by segment and slot
        self._released: list[HostedSegment] = []
        self._is_closed = False
        self._ended: dict[int, bool] = {}  # for the last saves: whether they are committed
        self._staged = 0  # number of images that the trainer has staged
        self._is_staged, self._ended_waits = threading.Condition(self._lock), 0

    def allocate(self, nbytes: int, end: int | None = None) -> tuple[int, Segment]:
        """Create a segment, and take its memory up to byte ``end`` (None: all). Return its number, and the segment.

        Raises ``OutOfMemoryError``.
        """
        try:
            segment = Segment.create("asyncckpt", nbytes)
        except OutOfMemoryError as error:
            raise OutOfMemoryError(f"{error.message}; {HINT}") from error
        try:
            take_memory(segment, lambda: self._wait_released(ANSWER_S), end)
        except BaseException:
            segment.close()
            raise
        return self._add(segment), segment

    def adopt(self, segment: Segment) -> int:
        """Take over a segment of a worker that is gone. Return its number here."""
        return self._add(segment)

    def take(self, number: int, begin: int, end: int) -> None:
        """Take memory of a segment, from byte ``begin`` to byte ``end``. Raises ``OutOfMemoryError``."""
        hosted = self.hosted(number)
        with hosted.used():
            try:
                take_memory(hosted.segment, lambda: self._wait_released(ANSWER_S), end, begin)
            except OutOfMemoryError:
                with self._lock:
                    # Keep the memory if an earlier, equal request has taken it already.
                    if hosted.taken_end < end:
                        hosted.segment.give_back(begin)
                raise
            with self._lock:
                hosted.taken_end = max(hosted.taken_end, end)

    def give_back(self, number: int, begin: int, slots: tuple[int, ...]) -> None:
        """Give back the memory of a segment from byte ``begin`` on, with the images in these ``slots``."""
        with self._lock:
            for slot in slots:
                self._images.pop((number, slot), None)
            hosted = self.hosted(number)
            hosted.taken_end = begin
            hosted.segment.give_back(begin)

    def hosted(self, number: int) -> HostedSegment:
        """Return the segment with that number."""
        return self._hosted[number]

    def release(self, number: int) -> None:
        """Give back a segment. Safe to call twice: an interrupted trainer may release it again."""
        with self._lock:
            self._forget_images(number)
            if (hosted := self._hosted.pop(number, None)) is None:
                return
            hosted.close()
            self._released = [each for each in self._released if not each.closed.is_set()] + [hosted]

    def slot_taken(self, request: WriteRequest) -> None:
        """Note that a slot is being staged, so its image is gone."""
        with self._lock:
            self._images.pop((request.segment, request.slot), None)

    def image_staged(self, request: WriteRequest) -> None:
        """Note that an image is complete. It is held if a load can read it."""
        layout = self._hosted[request.segment].layout
        if isinstance(layout, ImageLayout) and layout.is_held:
            kept = replace(request, small_files=())
            with self._lock:
                self._images[request.segment, request.slot] = _ImageRecord(kept, layout, time.monotonic())
                self._staged += layout.has_state
                self._is_staged.notify_all()

    def wait_staged(self, after: int, timeout: float) -> tuple[int, ImageKey] | None:
        """Wait at most ``timeout`` seconds until the trainer has staged more than ``after`` images.

        Return the number of images that it has staged, and the key of the newest that is here; None after a timeout.
        """
        with self._lock:
            ended = self._ended_waits
            self._is_staged.wait_for(lambda: self._staged > after or self._ended_waits != ended, timeout)
            states = [each for each in self._images.values() if each.layout.has_state]
            own = [each for each in states if not each.adopted and not each.is_copy]
            if self._staged <= after or not own:
                return None
            return self._staged, max(own, key=lambda each: each.staged_at).key

    def end_waits(self) -> None:
        """End all calls of ``wait_staged``, because a server ends."""
        with self._lock:
            self._ended_waits += 1
            self._is_staged.notify_all()

    def copy_begun(self, number: int, slot: int) -> None:
        """Note that a copy is being written to a slot, so the slot's image is gone."""
        with self._lock:
            self._images.pop((number, slot), None)

    def copy_made(self, request: WriteRequest, layout: ImageLayout, checksums: array[int]) -> None:
        """Note that the copy of another host's image is complete and checked."""
        with self._lock:
            committed = self._ended.get(request.save_id)
            record = _ImageRecord(request, layout, time.monotonic(), checksums, committed, is_copy=True)
            self._images[request.segment, request.slot] = record

    def image_written(self, request: WriteRequest, checksums: array[int]) -> None:
        """Note the checksums of an image after it is written."""
        with self._lock:
            image = self._images.get((request.segment, request.slot))
            if image is not None and image.key == ImageKey(request.attempt, request.rank):
                image.checksums = checksums

    def save_ended(self, save_id: int, *, committed: bool) -> None:
        """Note the end of a save."""
        with self._lock:
            self._ended[save_id] = committed
            self._ended.pop(save_id - _ENDS, None)
            for image in self._images.values():
                if image.request.save_id == save_id and not image.adopted:
                    image.committed = committed

    def begin_session(self) -> None:
        """Begin the session of a trainer. Images of the trainer before it stay, and all other memory is released."""
        with self._lock:
            for hosted in self._hosted.values():
                hosted.taken_end = 0
            self._ended.clear()  # each session numbers its saves anew
            self._staged = 0
            self._images = {place: image for place, image in self._images.items() if self._is_whole(image)}
            for image in self._images.values():
                image.adopted = True
            for number in self._hosted.keys() - set(self.held_segments()):
                self.release(number)

    def drop_images(self) -> None:
        """Forget all images, so that no later trainer gets them."""
        with self._lock:
            self._images.clear()

    def held_segments(self) -> tuple[int, ...]:
        """Return the numbers of the segments that have images or publications."""
        with self._lock:
            numbers = {number for number, _ in self._images}
            for each in self.published_alone():
                numbers |= {each.segment, *(each.layout.slots if isinstance(each.layout, WeightsLayout) else ())}
            return tuple(sorted(numbers & self._hosted.keys()))

    def copies_before(self) -> dict[int, list[HeldImage]]:
        """Return the images of other hosts that an earlier session has left, by their segments."""
        with self._lock:
            images = [image for image in self._images.values() if image.is_copy and image.adopted]
        found: dict[int, list[HeldImage]] = {}
        for image in images:
            found.setdefault(image.request.segment, []).append(self._held(image))
        return found

    def holds_anything(self) -> bool:
        """Return whether there is an image or a publication that another process may come for."""
        with self._lock:
            return bool(self._images or self.published())

    def held_images(self) -> tuple[HeldImage, ...]:
        """Return the complete images. Do not call this while there is a trainer, because the trainer stages others."""
        with self._lock:
            whole = [image for image in self._images.values() if self._is_whole(image)]
        # No image changes before the next trainer attaches.
        return tuple(map(self._held, whole))

    def held(self, key: ImageKey) -> HeldImage | None:
        """Return a complete image; None if the worker does not hold it."""
        with self._lock:
            image = next((each for each in self._images.values() if each.key == key and self._is_whole(each)), None)
        return None if image is None else self._held(image)

    def summaries(self, *, with_own: bool) -> tuple[ImageSummary, ...]:
        """Return the complete images of states, oldest first. ``with_own``: also those of this session's trainer."""
        with self._lock:
            whole = [each for each in self._images.values() if self._is_whole(each) and each.layout.has_state]
            whole = [each for each in whole if each.adopted or with_own]
            whole.sort(key=lambda image: image.staged_at)
            return tuple(ImageSummary(each.request, each.committed) for each in whole)

    def lease(self, key: ImageKey, *, with_checksums: bool = True) -> Leased[HeldImage] | None:
        """Let another process read an image. Return None if the image is not here, or is being overwritten.

        ``with_checksums``: compute the checksums of the whole image that are not known yet.
        """
        with contextlib.ExitStack() as kept:
            with self._lock:
                image = next((each for each in self._images.values() if each.key == key), None)
                if image is None:
                    return None
                hosted = self._hosted[image.request.segment]
                hosted.use()
            kept.callback(hosted.close)
            fd = lease(hosted.segment.fileno(), image.request.slot, Readers.OF_IMAGE)
            if fd is None:
                return None
            kept.callback(fd.close)
            if not self._is_whole(image):  # the trainer took the slot just before the lease
                return None
            layout, slot = image.layout, image.request.slot
            return Leased(
                self._held(image, with_checksums=with_checksums),
                hosted,
                lambda first, _: _digests(_spans(hosted, layout, slot, first)),
                kept.pop_all(),
            )

    def published(self) -> tuple[PublishedSegment, ...]:
        """Return the segments that have publications.

        Raises ``OSError`` when the store is closed. After an empty answer, a reader would unmap its segments.
        """
        with self._lock:
            if self._is_closed:
                raise ConnectionAbortedError("the worker is exiting")
            return tuple(
                PublishedSegment(number, hosted.layout)
                for number, hosted in self._hosted.items()
                if hosted.layout is not None and hosted.slots.publications(len(hosted.layout.slots))
            )

    def published_alone(self) -> tuple[PublishedSegment, ...]:
        """Return the segments with publications of weights, or of sets of files without images."""
        return tuple(
            each for each in self.published() if isinstance(each.layout, WeightsLayout) or not each.layout.is_held
        )

    def open(self, number: int, flags: int = os.O_RDWR) -> Descriptor:
        """Return a new descriptor of a segment. ``flags``: for ``os.open``. Raises ``EOFError`` if it was released."""
        with self._lock:
            if (hosted := self._hosted.get(number)) is None:
                raise EOFError(f"the segment {number} was released")
            return Descriptor(reopen(hosted.segment.fileno(), flags))

    def close(self) -> None:
        """Release all memory."""
        with self._lock:
            self._is_closed = True
            self._images.clear()
            for hosted in self._hosted.values():
                hosted.close()
            self._hosted.clear()

    def _forget_images(self, number: int) -> None:
        for place in [place for place in self._images if place[0] == number]:
            del self._images[place]

    def _add(self, segment: Segment) -> int:
        with self._lock:
            number, self._next = self._next, self._next + 1
            self._hosted[number] = HostedSegment(segment)
        return number

    def _wait_released(self, timeout: float) -> bool:
        """Wait at most ``timeout`` seconds until released memory is free. Return False if there is none."""
        waiting = [hosted for hosted in self._released if not hosted.closed.is_set()]
        return any([hosted.closed.wait(timeout) for hosted in waiting])

    def _is_whole(self, image: _ImageRecord) -> bool:
        """Return whether an image is complete. A trainer may take the slot again, and die before telling the worker."""
        request = image.request
        slots = self._hosted[request.segment].slots
        return slots.save_id(request.slot) == request.save_id and slots.state(request.slot) is not State.STAGING

    def _held(self, image: _ImageRecord, *, with_checksums: bool = True) -> HeldImage:
        with self._lock:
            hosted = self._hosted.get(image.request.segment)
            if hosted is None:
                raise ConnectionAbortedError("the next trainer has released this image")
            hosted.use()
        checksums, layout = image.checksums, image.layout
        try:
            if checksums is None and with_checksums:  # the image is not written yet, or writing failed
                checksums = array("Q", (checksum(span) for span in _spans(hosted, layout, image.request.slot)))
                image.checksums = checksums  # set only when complete, because another thread may read the field
        finally:
            hosted.close()
        return HeldImage(
            image.request,
            image.layout,
            hosted.constants,
            b"" if checksums is None else checksums.tobytes(),
            image.committed,
            image.staged_at,
            image.is_copy,
        )
