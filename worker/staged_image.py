"""The image that the trainer stages: what has arrived of it, and how that gets to a file while the rest is copied.

Written are large aligned pieces, by a few threads that keep the disk busy; one more checksums every span. Nothing here
knows tensors.
"""

from __future__ import annotations

import enum
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_EXCEPTION, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, field
from itertools import pairwise

from asyncckpt.errors import CheckpointError
from asyncckpt.format.manifest import digest_of
from asyncckpt.format.write_request import WriteRequest
from asyncckpt.shm.hosted_segment import HostedSegment
from asyncckpt.shm.huge import only_private, own_buffer
from asyncckpt.shm.memcpy import address_of, memcpy
from asyncckpt.shm.segment import round_up
from asyncckpt.shm.slots import State
from asyncckpt.storage.storage import OutputFile

# How often to look for more. At tens of gigabytes a second that is enough to write, each time.
_POLL_S = 0.002
BUFFER_BYTES = 4 << 20
# What one thread makes digests of at once.
_GROUP_BYTES = 16 << 20


class ImageState(enum.Enum):
    """How far staging and writing of an image are; ``writer.py`` says what follows on what."""

    STAGING = enum.auto()
    """The trainer copies, and nothing is written yet."""
    FOLLOWED = enum.auto()
    """The trainer copies, and what has arrived is being written."""
    UNWRITTEN = enum.auto()
    """The trainer still copies, and writing has failed."""
    CANCELLED = enum.auto()
    """The trainer has stopped copying, and the writer does not know it yet."""
    STAGED = enum.auto()
    """All of it is there, and the slot is the worker's."""


@dataclass(eq=False)
class StagedImage:
    """What the trainer is staging, or has staged, for one request.

    Shared by the threads of the server: all but ``wait_beyond`` is called while ``changed`` is held. ``can_succeed``
    is called to learn whether the save still can.
    """

    request: WriteRequest
    hosted: HostedSegment
    changed: threading.Condition
    can_succeed: Callable[[], bool]
    state: ImageState = ImageState.STAGING
    timings: dict[str, float] = field(default_factory=dict)
    """See ``manifest.py``; the trainer's are known when all is staged."""
    replicas: dict[str, int] = field(default_factory=dict)
    """See ``committer.py``; known when all is staged. Empty: this save compares nothing, or the trainer died."""
    inode: int | None = None
    """That of a single file, once it is written."""
    failure: CheckpointError | None = None
    """Why the rest is not coming."""

    def stage(self, timings: dict[str, float]) -> None:
        """All of it is there; the slot belongs to the worker from now on."""
        self.timings.update(timings)
        self.state = ImageState.STAGED
        self.changed.notify_all()

    def cancel(self, reason: CheckpointError) -> None:
        """The rest of an image that is being written is not coming."""
        self.failure, self.state = reason, ImageState.CANCELLED
        self.changed.notify_all()

    def is_marked_staged(self) -> bool:
        """Whether the header page says that it is staged, for when the trainer can no longer say so."""
        request, slots = self.request, self.hosted.slots
        return slots.state(request.slot) is State.STAGED and slots.save_id(request.slot) == request.save_id

    def check_kept(self) -> None:
        """Raise ``CheckpointError`` if its slot was taken for another save: what was read there may be of both."""
        if self.hosted.slots.save_id(self.request.slot) != self.request.save_id:
            raise CheckpointError("another save was staged in its place while it was being written: please report this")

    def set_slot_state(self, state: State) -> None:
        """Change the state of its slot."""
        self.hosted.slots.set(self.request.slot, state)

    def wait_beyond(self, nbytes: int, whole: int) -> int:
        """Wait until more than the first ``nbytes`` of the ``whole`` image are there, and return how many.

        What is there stays as it is. Raises ``CheckpointError`` when the rest is not coming: it was cancelled, the
        trainer has died, or the save has failed (it has a timeout, so this wait ends, too).
        """
        with self.changed:
            while True:
                if self.state is ImageState.STAGED:
                    return whole
                if self.failure is None and not self.can_succeed():
                    self.failure = CheckpointError("the save failed while it was being staged")
                if self.failure is not None:
                    raise self.failure
                arrived = self.hosted.slots.arrived(self.request.slot)
                # The last byte arrives before the slot is STAGED, and only that state commits the trainer.
                if nbytes < arrived < whole:
                    return arrived
                self.changed.wait(_POLL_S)


class UnwrittenFile:
    """Takes the place of an ``ImageFile`` while all of the image is waited for, and nothing is written yet."""

    def __init__(self, image: memoryview) -> None:
        self._image = image

    def advance(self, end: int) -> None:
        """The image is final up to ``end``, in bytes."""

    def follow(self, wait_beyond: Callable[[int, int], int]) -> None:
        """As that of an ``ImageFile``."""
        there = 0
        while there < len(self._image):
            there = wait_beyond(there, len(self._image))


def span_digests(image: memoryview, bounds: Sequence[int], pool: ThreadPoolExecutor) -> bytes:
    """Those of the spans of an ``image`` between the ``bounds``, one after the other, made on the threads of a pool."""
    groups = [[bounds[0]]]
    for bound in bounds[1:]:
        groups[-1].append(bound)
        if bound - groups[-1][0] >= _GROUP_BYTES:
            groups.append([bound])

    def digest(its: Sequence[int]) -> bytes:
        return b"".join(digest_of(image[begin:end]) for begin, end in pairwise(its))

    return b"".join(pool.map(digest, groups))


class ImageFile:
    """A new file that an image is written to as far as it is final.

    A context manager: when it is left no thread looks at the image any more, and the file is closed.
    """

    def __init__(self, file: OutputFile, pool: ThreadPoolExecutor, image: memoryview, is_huge: bool) -> None:
        """Begin.

        Args:
            file: The file, which is this object's from now on.
            pool: The threads that write.
            image: Begins on a page and is whole pages.
            is_huge: Whether these are huge ones.
        """
        self._file, self._pool, self._image = file, pool, image
        self._is_ready = is_huge or not only_private()
        self._pieces: list[Future[None]] = []
        self._begin = self._good = 0

    def advance(self, end: int) -> None:
        """The image is final up to ``end``, in bytes: write all whole pieces of that.

        Raises ``StorageError`` if an earlier piece could not be written.
        """
        while self._good < len(self._pieces) and self._pieces[self._good].done():
            self._pieces[self._good].result()
            self._good += 1
        while self._begin + self._file.piece_bytes <= end:
            self._submit(self._begin + self._file.piece_bytes)

    def follow(self, wait_beyond: Callable[[int, int], int]) -> None:
        """Write what arrives of the image, until all of it is there.

        Args:
            wait_beyond: That of its ``StagedImage``. What has arrived stays as it is.

        Raises:
            StorageError: A write failed. What ``wait_beyond`` raises is raised too.
        """
        there = 0
        while there < len(self._image):
            there = wait_beyond(there, len(self._image))
            self.advance(there)

    def write_rest(self, nbytes: int) -> None:
        """Have the threads write what is left of the first ``nbytes`` of the image. Raises as ``advance``."""
        end = round_up(nbytes)
        self.advance(end)
        if self._begin < end:
            self._submit(end)

    def finish(self, nbytes: int) -> None:
        """Write what is left of the first ``nbytes`` of the image. Raises ``StorageError``."""
        self.write_rest(nbytes)
        done, _ = wait(self._pieces, return_when=FIRST_EXCEPTION)
        for piece in done:
            piece.result()
        if nbytes < round_up(nbytes):
            self._file.truncate(nbytes)

    def sync(self) -> bool:
        """Have storage keep what is written. Raises ``StorageError``. Returns whether the page cache was bypassed."""
        self._file.sync()
        return self._file.direct

    def __enter__(self) -> ImageFile:
        return self

    def __exit__(self, *_: object) -> None:
        for piece in self._pieces:
            piece.cancel()
        wait(self._pieces)
        self._file.close()

    def _submit(self, end: int) -> None:
        self._pieces.append(self._pool.submit(self._write, self._begin, end))
        self._begin = end

    def _write(self, begin: int, end: int) -> None:
        if self._is_ready or not self._file.direct:
            self._file.write(self._image[begin:end], begin)
            return
        # Through a buffer on huge pages: a copy takes less time than direct writes from small pages do.
        buffer = own_buffer(BUFFER_BYTES)
        for at in range(begin, end, BUFFER_BYTES):
            nbytes = min(BUFFER_BYTES, end - at)
            memcpy(address_of(buffer), address_of(self._image[at:end]), nbytes)
            self._file.write(buffer[:nbytes], at)
