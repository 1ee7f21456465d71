"""The writer: the thread that writes what is staged, one request after the other.

The life of a request here (``ImageState``):

- STAGING: it has begun, and the trainer copies. When the trainer says that all is staged, it is STAGED, and queued.
  When nothing is queued, the writer takes it before: then it is
- FOLLOWED: what has arrived of it is written while the rest is coming. When all is staged, it is STAGED, and the
  writing goes on. If writing fails before that, it is
- UNWRITTEN: nobody writes it, and its slot is free as soon as the trainer has stopped copying.
- STAGED: the slot is WRITING from when it is taken up until its bytes are on storage, then FREE, and the trainer is
  told. The rest is the committer's.

The trainer may take a request back before it is written. Its slot is then free at once, unless it is being followed:
then it is CANCELLED until the writer lets go of it.
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

# How long an attempt that nobody holds is left alone: it may have been made just now, and not be locked yet.
_ORPHAN_S = 60.0
# How long a write may go on after the save it is for has failed, when the trainer is gone.
_STUCK_S = 30.0


def begin_attempt(storage: Storage, staged_image: StagedImage, durable: DurableFiles) -> Attempt:
    """Open on ``storage`` what a write request asks for, whether all of the image is there or not.

    ``durable``: what may be linked. Raises ``StorageError`` where storage refuses, ``CheckpointError`` when the segment
    is no checkpoint's or file's.
    """
    request, layout = staged_image.request, staged_image.hosted.layout
    match layout:
        case TorchFileLayout():
            file = storage.begin_file(request.path, request.attempt, layout.data_bytes, _ORPHAN_S)
            return FileAttempt(file, staged_image, layout)
        case CheckpointLayout() | FileSetLayout():
            beside = sum(region.nbytes for region in layout.constants())
            beside += sum(len(data) for _, data in request.small_files)
            # Where there are other hosts, their locks may not be seen here; but no attempt outlives its timeout.
            sees_all = request.world_size == 1 and storage.has_locks
            orphan_s = None if request.rank > 0 else _ORPHAN_S if sees_all else request.timeout
            if not storage.has_locks and orphan_s is not None and not storage.may_put(request.path, request.existing):
                raise exists_error(request.path, request.existing, request.step)  # the trainer has not asked
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
            storage_for: The storage that a path is in.
            segment_store: The memory; it is told what is whole in it, and its checksums.
            committer: Takes over what is written, and is told what is not.
            send: Tells the trainer.
            io_threads: How many threads write at once.
        """
        self._storage_for = storage_for
        self._segment_store = segment_store
        self._committer = committer
        self._send = send
        self._io_threads = io_threads
        self._durable = DurableFiles()
        # Guards all that follows, and the images.
        self._changed = threading.Condition()
        self._begun: dict[int, StagedImage] = {}  # those of which the trainer has not said that they are staged
        self._queue: deque[StagedImage] = deque()
        self._finishing = False
        self._thread = threading.Thread(target=self._run, name="asyncckpt-writer", daemon=True)
        start(self._thread)

    def begin(self, request: WriteRequest) -> None:
        """The trainer is staging that."""
        hosted = self._segment_store.hosted(request.segment)
        image = StagedImage(request, hosted, self._changed, lambda: self._committer.can_succeed(request))
        with self._changed:
            self._begun[request.save_id] = image
            self._changed.notify_all()

    def staged(self, message: messages.Staged) -> WriteRequest | None:
        """All of it is in the slot. Returns what was staged; None: it was cancelled."""
        with self._changed:
            if (image := self._begun.pop(message.save_id, None)) is None:
                return None
            image.replicas = message.replicas
            self._take_staged(image, message.timings)
            return image.request

    def cancel(self, asked: int, save_id: int, reason: CheckpointError) -> None:
        """The trainer takes a request back.

        Args:
            asked: The number of its question, which is answered: whether that was in time.
            save_id: The save.
            reason: What the save fails with.
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
        """That segment is released."""
        self._durable.forget(segment)

    def finish(self) -> None:
        """The trainer is gone: write what is staged, also where it could not say so any more, and end."""
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
        """Wait for the end; False where a write is stuck, of which all that could be said has been said."""
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
        with Pool(self._io_threads, thread_name_prefix="asyncckpt-io") as pool:
            while (image := self._next()) is not None:
                with image.hosted.used():  # as soon as the slot is free, the trainer may release the segment
                    self._carry_out(image, pool)

    def _next(self) -> StagedImage | None:
        """What to write now; None: nothing will come any more."""
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
        """The next that is begun."""
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
        except Exception as error:
            if not isinstance(error, CheckpointError):  # else it is told as the outcome of the save
                logger.exception("writing %s failed", request.path)
            failure = located_in(request, error)
            error.__traceback__ = None  # which would keep the memory that it saw, long after the segment is released
            self._committer.failed(request, failure, attempt)
        else:
            self._committer.written(attempt, report)

    def _let_go(self, image: StagedImage) -> None:
        """The writer looks at the slot no more. Where the trainer still copies into it, it is not free yet."""
        with self._changed:
            if image.state is ImageState.FOLLOWED:
                image.state = ImageState.UNWRITTEN
            else:
                self._free(image)

    def _free(self, image: StagedImage) -> None:
        image.set_slot_state(State.FREE)
        self._send(messages.Written(image.request.save_id, image.inode, dict(image.timings)))
