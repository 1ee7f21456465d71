"""The image that the trainer stages, and the file that the worker writes while the trainer still copies.

A few threads write large aligned pieces and keep the disk busy. Another thread makes checksums of all spans. This file
does not depend on tensors.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from itertools import pairwise

from asyncckpt.errors import CheckpointError
from asyncckpt.format.manifest import digest_of
from asyncckpt.format.write_request import WriteRequest
from asyncckpt.shm.hosted_segment import HostedSegment
from asyncckpt.shm.huge import only_private, own_buffer
from asyncckpt.shm.memcpy import address_of, memcpy
from asyncckpt.shm.segment import HUGE_PAGE, round_up
from asyncckpt.shm.slots import State
from asyncckpt.storage.storage import OutputFile
from asyncckpt.threads import Flag, settle

# Polling interval for more data. Frequent enough to always have something to write, at tens of gigabytes a second.
_POLL_S = 0.002
BUFFER_BYTES = 4 << 20
# Bytes for which one task makes digests.
_GROUP_BYTES = 16 << 20


@dataclass(eq=False)
class StagedImage:
    """The image that the trainer stages, or has staged, for one request.

    ``can_succeed`` returns whether the save can still succeed.
    """

    request: WriteRequest
    hosted: HostedSegment
    can_succeed: Callable[[], bool]
    timings: dict[str, float] = field(default_factory=dict)
    """See ``manifest.py``. The trainer's timings are known once the image is staged."""
    replicas: dict[str, int] = field(default_factory=dict)
    """See ``replica_check.py``. Known once the image is staged. Empty if nothing is compared, or the trainer died."""
    inode: int | None = None
    """The inode of a single file, once it is written."""

    def __post_init__(self) -> None:
        self._is_complete = False
        self._failure: CheckpointError | None = None
        self._told = Flag()  # set when the image is complete or has failed

    def complete(self) -> None:
        """Note that the image is complete."""
        self._is_complete = True
        self._told.set()

    def stop(self, reason: CheckpointError) -> None:
        """Note that the rest of the image will not arrive."""
        self._failure = reason
        self._told.set()

    def is_marked_staged(self) -> bool:
        """Return whether the header page says that the image is staged. A dead trainer cannot report this."""
        request, slots = self.request, self.hosted.slots
        return slots.state(request.slot) is State.STAGED and slots.save_id(request.slot) == request.save_id

    def check_kept(self) -> None:
        """Raise ``CheckpointError`` if another save has taken the slot. Then the bytes read may be a mixture."""
        if self.hosted.slots.save_id(self.request.slot) != self.request.save_id:
            raise CheckpointError("another save was staged in its place while it was being written: please report this")

    def set_slot_state(self, state: State) -> None:
        """Change the state of the slot."""
        self.hosted.slots.set(self.request.slot, state)

    def wait_beyond(self, nbytes: int, whole: int) -> int:
        """Wait until more than the first ``nbytes`` of the ``whole`` image have arrived. Return the number that has.

        Bytes that have arrived do not change. Raises ``CheckpointError`` if the rest will not arrive: the image was
        cancelled, the trainer has died, or the save has failed. Every save has a timeout, so this wait ends too.
        """
        while True:
            if self._is_complete:
                return whole
            if self._failure is not None:
                raise self._failure
            if not self.can_succeed():
                raise CheckpointError("the save failed while it was being staged")
            arrived = self.hosted.slots.arrived(self.request.slot)
            # Never return ``whole`` here: the last byte arrives before the slot is STAGED, and the trainer may still
            # cancel the save.
            if nbytes < arrived < whole:
                return arrived
            self._told.wait(_POLL_S)


class UnwrittenFile:
    """A stand-in for ``ImageFile`` if nothing is written before the image is complete."""

    def __init__(self, image: memoryview) -> None:
        self._image = image

    def advance(self, end: int) -> None:
        """Do nothing. The image is final up to ``end``, in bytes."""

    def follow(self, wait_beyond: Callable[[int, int], int]) -> None:
        """Wait for the whole image. See ``ImageFile.follow``."""
        there = 0
        while there < len(self._image):
            there = wait_beyond(there, len(self._image))


def span_digests(image: memoryview, bounds: Sequence[int], pool: ThreadPoolExecutor) -> bytes:
    """Return the digests of the spans of ``image`` between the ``bounds``, made on the threads of a pool."""
    groups = [[bounds[0]]]
    for bound in bounds[1:]:
        groups[-1].append(bound)
        if bound - groups[-1][0] >= _GROUP_BYTES:
            groups.append([bound])

    def digest(its: Sequence[int]) -> bytes:
        return b"".join(digest_of(image[begin:end]) for begin, end in pairwise(its))

    return b"".join(pool.map(digest, groups))


class ImageFile:
    """A new file, to which an image is written as far as the image is final.

    A context manager. After its end no thread reads the image, and the file is closed.
    """

    def __init__(self, file: OutputFile, pool: ThreadPoolExecutor, image: memoryview, is_huge: bool) -> None:
        """Begin.

        Args:
            file: The file, which this object owns from now on.
            pool: The threads that write.
            image: The memory of the image, from a multiple of ``IMAGE_PAGE`` to another.
            is_huge: Whether the pages are huge pages.
        """
        self._file, self._pool, self._image = file, pool, image
        self._is_ready = is_huge or HUGE_PAGE > BUFFER_BYTES or not only_private()
        self._pieces: list[Future[None]] = []
        self._begin = self._good = 0

    def advance(self, end: int) -> None:
        """Write all whole pieces before ``end``, in bytes. The image must be final up to ``end``.

        Raises ``StorageError`` if an earlier piece could not be written.
        """
        while self._good < len(self._pieces) and self._pieces[self._good].done():
            self._pieces[self._good].result()
            self._good += 1
        while self._begin + self._file.piece_bytes <= end:
            self._submit(self._begin + self._file.piece_bytes)

    def follow(self, wait_beyond: Callable[[int, int], int]) -> None:
        """Write the image while it arrives, until it is complete.

        Args:
            wait_beyond: See ``StagedImage.wait_beyond``.

        Raises:
            StorageError: A write failed. Errors of ``wait_beyond`` are raised too.
        """
        there = 0
        while there < len(self._image):
            there = wait_beyond(there, len(self._image))
            self.advance(there)

    def write_rest(self, nbytes: int) -> None:
        """Submit the unwritten rest of the first ``nbytes`` of the image. Raises as ``advance``."""
        end = round_up(nbytes, self._file.block_bytes)
        self.advance(end)
        if self._begin < end:
            self._submit(end)

    def finish(self, nbytes: int) -> None:
        """Write the unwritten rest of the first ``nbytes`` of the image, and wait for all writes.

        Raises ``StorageError``.
        """
        self.write_rest(nbytes)
        for piece in self._pieces[self._good :]:
            piece.result()
        if self._begin != nbytes:  # the last piece has whole blocks, or goes to the end of the image
            self._file.truncate(nbytes)

    def sync(self) -> None:
        """Flush the file to storage. Raises ``StorageError``."""
        self._file.sync()

    def __enter__(self) -> ImageFile:
        return self

    def __exit__(self, *_: object) -> None:
        settle(self._pieces)
        self._file.close()

    def _submit(self, end: int) -> None:
        self._pieces.append(self._pool.submit(self._write, self._begin, end))
        self._begin = end

    def _write(self, begin: int, end: int) -> None:
        if self._is_ready or not self._file.direct:
            self._file.write(self._image[begin:end], begin)
            return
        # Write through a buffer on huge pages. The copy costs less time than direct writes from small pages do.
        buffer = own_buffer(BUFFER_BYTES)
        for at in range(begin, end, BUFFER_BYTES):
            nbytes = min(BUFFER_BYTES, end - at)
            memcpy(address_of(buffer), address_of(self._image[at:end]), nbytes)
            self._file.write(buffer[:nbytes], at)
