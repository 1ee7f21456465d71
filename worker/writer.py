"""The writer: the thread that writes staged images, one request after the other.

The states of a request (``ImageState``):

- STAGING: the trainer copies the image. When the trainer reports the image as staged, the state becomes STAGED, and the
  request is queued. If nothing is queued, the writer begins earlier, and the state becomes FOLLOWED.
- FOLLOWED: the writer writes the part that has arrived, while the rest is being copied. When the image is staged, the
  state becomes STAGED, and writing continues. If writing fails before that, the state becomes UNWRITTEN.
- UNWRITTEN: nobody writes the image. Its slot is free as soon as the trainer has stopped copying.
- STAGED: the slot is WRITING while the writer writes the image, and FREE once all bytes are on storage. The trainer is
  notified, and the committer continues.

The trainer may cancel a request before it is written. Its slot is then free at once, unless the request is FOLLOWED. A
FOLLOWED request becomes CANCELLED until the writer lets go of the slot.

After the death of the trainer, ``finish`` writes all images that the slots say are staged, and gives up the others.
"""

from __future__ import annotations

import logging
import os
import threading
from collections import deque
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

from asyncckpt.errors import CheckpointError, RankFailedError
from asyncckpt.format.segment_layout import CheckpointLayout, FileSetLayout, TorchFileLayout
from asyncckpt.format.write_request import WriteRequest
from asyncckpt.link import messages
from asyncckpt.link.segment_store import SegmentStore
from asyncckpt.shm.slots import State
from asyncckpt.storage.storage import Storage, exists_error
from asyncckpt.threads import Pool, start
from asyncckpt.worker.attempt import Attempt, CheckpointAttempt, FileAttempt, FileSetAttempt
from asyncckpt.worker.committer import Committer, located_in
from asyncckpt.worker.durable_files import DurableFiles
from asyncckpt.worker.staged_image import ImageState, StagedImage

logger = logging.getLogger(__name__)

# Minimum age of an unlocked attempt before its removal. A younger attempt may not be locked yet.
_ORPHAN_S = 60.0
# Maximum time that a write may continue after its save has failed, if the trainer is gone.
_STUCK_S = 30.0


def begin_attempt(storage: Storage, staged_image: StagedImage, durable: DurableFiles) -> Attempt:
    """Create the file or folder of a write request on ``storage``. The image need not be complete.

    ``durable``: the files that may be linked. Raises ``StorageError`` if storage refuses, ``CheckpointError`` if the
    segment has no layout of a checkpoint or file.
    """
    request, layout = staged_image.request, staged_image.hosted.layout
    match layout:
        case TorchFileLayout():
            file = storage.begin_file(request.path, request.attempt, layout.data_bytes, _ORPHAN_S)
            return FileAttempt(file, staged_image, layout)
        case CheckpointLayout() | FileSetLayout():
            beside = sum(region.nbytes for region in layout.constants())
            beside += sum(len(data) for _, data in request.small_files)
            # If there are other hosts, their locks may be invisible here. But no attempt outlives its timeout.
            sees_all = request.world_size == 1 and storage.has_locks
            orphan_s = None if request.rank > 0 else _ORPHAN_S if sees_all else request.timeout
            if not storage.has_locks and orphan_s is not None and not storage.may_put(request.path, request.existing):
                raise exists_error(request.path, request.existing, request.step)  # the trainer has not checked
            nbytes, linked = layout.data_bytes + beside, durable.expected_bytes(request.segment, request.most_links)
            folder = storage.begin_checkpoint(request.path, request.attempt, nbytes, orphan_s, linked_bytes=linked)
            if isinstance(layout, FileSetLayout):
                return FileSetAttempt(folder, staged_image, layout, durable)
            return CheckpointAttempt(folder, staged_image, layout, durable)
        case _:
            raise CheckpointError("the trainer never described this segment as a checkpoint's")


class Writer:
    """Writes the requests of one trainer, on a thread of its own."""

    def __init__(
        self,
        storage_for: Callable[[str], Storage],
        segment_store: SegmentStore,
        committer: Committer,
        send: Callable[[messages.FromWorker], None],
        io_threads: int,
    ) -> None:
        """Start the thread.

        Args:
            storage_for: Returns the storage of a path.
            segment_store: The memory. It is told which images are complete, and their checksums.
            committer: Takes over written attempts and failures.
            send: Sends to the trainer.
            io_threads: Number of threads that write at once.
        """
        self._storage_for = storage_for
        self._segment_store = segment_store
        self._committer = committer
        self._send = send
        self._io_threads = io_threads
        self._durable = DurableFiles()
        # Guards all attributes below, and the images.
        self._changed = threading.Condition()
        self._begun: dict[int, StagedImage] = {}  # requests that the trainer has not reported as staged
        self._queue: deque[StagedImage] = deque()
        self._finishing = False
        self._thread = threading.Thread(target=self._run, name="asyncckpt-writer", daemon=True)
        start(self._thread)

    def begin(self, request: WriteRequest) -> None:
        """Note that the trainer is staging a request."""
        hosted = self._segment_store.hosted(request.segment)
        image = StagedImage(request, hosted, self._changed, lambda: self._committer.can_succeed(request))
        with self._changed:
            self._begun[request.save_id] = image
            self._changed.notify_all()

    def staged(self, message: messages.Staged) -> WriteRequest | None:
        """Note that an image is staged. Return its request, or None if the request was cancelled."""
        with self._changed:
            if (image := self._begun.pop(message.save_id, None)) is None:
                return None
            image.replicas = message.replicas
            self._take_staged(image, message.timings)
            return image.request

    def cancel(self, asked: int, save_id: int, reason: CheckpointError) -> None:
        """Cancel a request for the trainer.

        Args:
            asked: The number of the trainer's question. The answer says whether the request was cancelled in time.
            save_id: The save.
            reason: The error that the save fails with.
        """
        with self._changed:
            image = self._begun.pop(save_id, None)
            if image is None:
                image = next((each for each in self._queue if each.request.save_id == save_id), None)
                if image is not None:
                    self._queue.remove(image)
            is_followed = image is not None and image.state is ImageState.FOLLOWED
            if image is not None and is_followed:
                image.cancel(reason)
            elif image is not None:
                image.set_slot_state(State.FREE)
        answer = messages.Cancelled(save_id, in_time=image is not None, slot_free=not is_followed)
        self._send(messages.Answer(asked, answer))
        if image is not None and not is_followed:
            self._committer.failed(image.request, reason)

    def forget(self, segment: int) -> None:
        """Forget a segment that is released."""
        self._durable.forget(segment)

    def finish(self) -> None:
        """Write all staged images after the trainer's end, also images that it did not report, and end the thread."""
        with self._changed:
            for image in self._begun.values():
                if image.is_marked_staged():
                    self._take_staged(image, {})
                    continue
                why = located_in(image.request, RankFailedError("its trainer ended before the state was staged"))
                if image.state is ImageState.FOLLOWED:
                    image.cancel(why)
                else:
                    self._committer.failed(image.request, why)
            self._begun.clear()
            self._finishing = True
            self._changed.notify_all()

    def wait_finished(self) -> bool:
        """Wait for the end of the thread. Return False if a write is stuck and no save waits for an outcome."""
        stuck_s = 0.0
        while self._thread.is_alive() and stuck_s < _STUCK_S:
            self._thread.join(1.0)
            stuck_s = stuck_s + 1.0 if self._committer.idle() else 0.0
        return not self._thread.is_alive()

    def _take_staged(self, image: StagedImage, timings: dict[str, float]) -> None:
        self._segment_store.image_staged(image.request)
        before = image.state
        image.stage(timings)
        if before is ImageState.FOLLOWED:
            image.set_slot_state(State.WRITING)
        elif before is ImageState.UNWRITTEN:
            self._free(image)
        else:
            self._queue.append(image)

    def _run(self) -> None:
        pool = Pool(self._io_threads, thread_name_prefix="asyncckpt-io")
        pool.start(self._io_threads)  # here, because no save has begun
        while (image := self._next()) is not None:
            with image.hosted.used():  # the trainer may release the segment as soon as the slot is free
                self._carry_out(image, pool)
        pool.shutdown()  # not after an error: a thread without memory may never end, and the worker has to

    def _next(self) -> StagedImage | None:
        """Return the next image to write; None when there will be no more."""
        with self._changed:
            self._changed.wait_for(lambda: self._queue or self._to_follow() or self._finishing)
            if self._queue:
                image = self._queue.popleft()
                image.set_slot_state(State.WRITING)
                return image
            if (begun := self._to_follow()) is not None:
                begun.state = ImageState.FOLLOWED
            return begun

    def _to_follow(self) -> StagedImage | None:
        """Return the next image that the trainer is staging."""
        return next((each for each in self._begun.values() if each.state is ImageState.STAGING), None)

    def _carry_out(self, image: StagedImage, pool: ThreadPoolExecutor) -> None:
        request = image.request
        if not self._committer.can_succeed(request):
            self._let_go(image)
            return
        os.umask(request.umask)
        attempt: Attempt | None = None
        try:
            try:
                attempt = begin_attempt(self._storage_for(request.path), image, self._durable)
                checksums = attempt.write(pool)
                image.check_kept()
                self._segment_store.image_written(request, checksums)
            finally:
                self._let_go(image)
            report = attempt.seal()
        except MemoryError:  # perhaps nobody was told that the slot is free: the worker ends
            raise
        except Exception as error:
            if not isinstance(error, CheckpointError):  # otherwise the outcome of the save reports the error
                logger.exception("writing %s failed", request.path)
            failure = located_in(request, error)
            error.__traceback__ = None  # the traceback would keep its memory alive long after the segment is released
            self._committer.failed(request, failure, attempt)
        else:
            self._committer.written(attempt, report)

    def _let_go(self, image: StagedImage) -> None:
        """Stop reading the slot. The slot stays in use while the trainer still copies into it."""
        with self._changed:
            if image.state is ImageState.FOLLOWED:
                image.state = ImageState.UNWRITTEN
            else:
                self._free(image)

    def _free(self, image: StagedImage) -> None:
        image.set_slot_state(State.FREE)
        self._send(messages.Written(image.request.save_id, image.inode, dict(image.timings)))
