"""A session: the worker's connection to one trainer. The saves are on other threads (``saves.py``).

After the trainer closes or dies, the session still writes every request in a slot with the state STAGED, and discards
requests that have only begun. Then it ends. If the trainer has closed, the worker ends, too. If the trainer has died,
the worker lingers with the images that it holds. A restarted trainer opens the next session.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable, Collection
from multiprocessing.connection import wait
from typing import TYPE_CHECKING, Any

from asyncckpt.errors import CheckpointError, WorkerDiedError
from asyncckpt.format.write_request import WriteRequest
from asyncckpt.link import messages
from asyncckpt.link.endpoint_messages import Follow, Serve
from asyncckpt.link.messages import Claim, Claimed, receive, send
from asyncckpt.link.root_lock import RootLock
from asyncckpt.link.segment_store import SegmentStore
from asyncckpt.link.socket_connection import SocketConnection
from asyncckpt.storage.storage import Storage
from asyncckpt.storage.uploader import Uploader
from asyncckpt.storage.uploads import AskUploads, Uploaded, UploadsUnderWay
from asyncckpt.threads import start
from asyncckpt.transfer.requests import TransferAddress
from asyncckpt.transfer.serving import Serving, listens_at
from asyncckpt.worker.endpoint_service import EndpointService, Trainer
from asyncckpt.worker.saves import SavesOfTrainer

if TYPE_CHECKING:
    from asyncckpt.worker.metrics_file import MetricsFile

_CLOSED = "it has closed its checkpointer"


class Session:
    """One trainer's session."""

    def __init__(
        self,
        trainer: Trainer,
        storage_for: Callable[[str], Storage],
        segment_store: SegmentStore,
        endpoint_service: EndpointService,
        serving: Serving,
        io_threads: int,
        uploaders: dict[str, Uploader],
        metrics: MetricsFile | None = None,
    ) -> None:
        """Start the threads.

        Args:
            trainer: The trainer. Its connection is closed at the end.
            storage_for: Returns the storage of a path.
            segment_store: The memory.
            endpoint_service: Answers other processes.
            serving: Serves images to other hosts.
            io_threads: Number of threads that write in parallel.
            uploaders: The uploaders of all sessions, by their local folders. The session adds its uploader.
            metrics: The metrics file, which counts the ends of saves and uploads.
        """
        self._metrics, self._uploaders = metrics, uploaders
        self._is_closed = False
        self._connection: SocketConnection = trainer.connection
        self._trainer = trainer.pid
        self._root_lock: RootLock | None = None
        self._segment_store = segment_store
        self._endpoint_service = endpoint_service
        self._sending = threading.Lock()
        self._storage_for = storage_for
        self._saves = SavesOfTrainer(storage_for, segment_store, self._send, self._end, io_threads)
        endpoint_service.begin_session(trainer, self._saves.unended, self._saves.restarted)
        self._serving = serving
        self._rendezvous: messages.Rendezvous | None = None
        self._timeout = 0.0
        self._address: TransferAddress | None = None
        self._taking: list[threading.Thread] = []

    def run(self, trainer: Collection[int], trouble: str | None, *, lingers: bool) -> bool:
        """Serve until the trainer closes or dies, and until all staged images are written.

        Args:
            trainer: A pidfd of the trainer, or nothing. The pidfd shows the death of the trainer even if a fork holds
                the socket.
            trouble: The reason why other processes cannot find this worker; None: they can.
            lingers: Whether the images are kept after the trainer's death.

        Returns:
            Whether all threads have ended. If not, storage does not answer, and the process should end itself.
        """
        self._send(messages.Ready(os.getpid(), trouble))
        to_trainer = _LogHandler(self._send)
        logging.getLogger().addHandler(to_trainer)
        if self._metrics is not None:
            self._metrics.begin()
        why = self._serve(trainer)
        self._is_closed = why == _CLOSED
        if why != _CLOSED:  # the trainer does not receive the log any more
            logging.getLogger().removeHandler(to_trainer)
            self._endpoint_service.redirect_log()
            self._saves.hurry()
        if self._root_lock is not None:
            self._root_lock.announce_end()
        self._saves.stop_copying()
        self._saves.finish()
        for thread in self._taking:
            thread.join()  # finish before the next trainer, which may give this memory back
        if self._is_closed or not lingers:
            self._segment_store.drop_images()
        self._endpoint_service.trainer_gone(closed=self._is_closed)
        finished = self._saves.wait_written()
        if finished:
            self._saves.close(why)
            if self._root_lock is not None:
                self._root_lock.release()
            if (uploader := self._saves.uploader) is not None and why != _CLOSED:
                uploader.trainer_gone()
            elif uploader is not None:
                uploader.close()  # while the trainer still receives failures
            logging.getLogger().removeHandler(to_trainer)
            with self._sending:
                self._connection.close()
        return finished

    def close_metrics(self) -> None:
        """Write the metrics for the last time, before another session writes the same file."""
        if self._metrics is not None:
            self._metrics.close(in_order=self._is_closed)

    def _serve(self, trainer: Collection[int]) -> str:
        """Serve the trainer. Return the reason why serving ended."""
        while True:
            ready = wait([self._connection, *trainer])
            try:
                while self._connection.poll():
                    message: messages.FromTrainer = receive(self._connection)
                    if isinstance(message, messages.Close):
                        return _CLOSED
                    self._handle(message)
            except (EOFError, OSError) as error:
                if isinstance(error, ConnectionError) or not self._connection.has_other_end():
                    return "its trainer is gone"
                raise  # an error of the operating system, and the trainer lives
            if any(each in ready for each in trainer):
                return "its trainer has died"

    def _handle(self, message: messages.FromTrainer) -> None:
        match message:
            case messages.Question(number):
                try:
                    self._answer(message)
                except CheckpointError as error:
                    self._send(messages.Answer(number, messages.Refused(error)))
            case messages.Join(rendezvous, timeout):
                self._saves.join(rendezvous, timeout)
                self._rendezvous, self._timeout = rendezvous, timeout
            case messages.Begin(request):
                self._segment_store.slot_taken(request)
                self._saves.begin(request)
            case messages.Staged():
                self._saves.staged(message)
            case messages.Cancel(save_id, reason):
                self._saves.cancel(save_id, reason)
            case messages.Take():
                # On another thread, because taking memory takes a second for each two GiB or so.
                thread = threading.Thread(target=self._take, args=[message], name="asyncckpt-memory", daemon=True)
                try:
                    start(thread)
                except CheckpointError:
                    self._take(message)
                else:
                    self._taking = [each for each in self._taking if each.is_alive()] + [thread]
            case messages.GiveBack(number, begin, slots):
                self._segment_store.give_back(number, begin, slots)
            case messages.Release(number):
                self._segment_store.release(number)
                self._saves.forget(number)

    def _answer(self, asked: messages.Question) -> None:
        answer: Any
        match asked.question:
            case messages.Allocate():
                self._allocate(asked.number, asked.question)
                return
            case Claim():
                answer = self._claim(asked.question)
            case messages.Host():
                answer = self._saves.host(asked.question)
            case AskUploads():
                uploader = self._saves.uploader
                answer = UploadsUnderWay((), None) if uploader is None else uploader.under_way()
            case messages.Adopt():
                answer = messages.Adopted(self._segment_store.adopt(self._connection.receive_segment()))
            case Serve(key, address):
                answer = self._serving.serve(key, listens_at(address), to_own_job=True)
                self._address = TransferAddress(address, answer.port)
            case Follow(locator):
                answer = self._serving.follow(locator)
            case messages.KeepCopies():
                answer = self._keep_copies(asked.question)
            case messages.Describe(number, layout):
                self._segment_store.hosted(number).describe(layout)
                answer = messages.Described()
        self._send(messages.Answer(asked.number, answer))

    def _claim(self, claim: Claim) -> Claimed:
        answer = Claimed()
        if self._root_lock is None:
            try:
                found = RootLock.take(claim, self._trainer)
            except OSError as error:
                answer = Claimed(trouble=error.strerror or str(error))
            else:
                if isinstance(found, RootLock):
                    self._root_lock = found
                else:
                    answer = Claimed(found)
        if claim.local is not None and answer.holder is None and self._saves.uploader is None:
            if (uploader := self._uploaders.get(claim.local)) is None:
                uploader = self._uploaders[claim.local] = Uploader(claim.local, self._storage_for, self._on_uploaded)
            uploader.trainer_came(self._storage_for, self._on_uploaded)
            self._saves.uploader = uploader
        return answer

    def _keep_copies(self, request: messages.KeepCopies) -> messages.CopiesKept:
        if (replicator := self._saves.replicator) is None:
            if self._rendezvous is None or self._address is None:
                raise WorkerDiedError("the worker has not met those of the other ranks: please report this")
            from asyncckpt.transfer.replicator import Replicator  # imported only if needed

            where, how = (self._rendezvous, self._timeout), (request.transport, request.rate)
            replicator = Replicator(self._segment_store, *where, *how, self._send, self._saves.post)
            self._saves.replicator = replicator
            replicator.announce(self._address)
            for number, held in self._segment_store.copies_before().items():
                replicator.copies.inherit(number, held)
        replicator.keep(request.plan, request.ranks, request.plans)
        return messages.CopiesKept()

    def _allocate(self, asked: int, request: messages.Allocate) -> None:
        number, segment = self._segment_store.allocate(request.nbytes, request.end)
        with self._sending:
            send(self._connection, messages.Answer(asked, messages.Allocated(number)))
            self._connection.send_descriptor(segment.fileno())

    def _take(self, request: messages.Take) -> None:
        error: CheckpointError | None = None
        try:
            self._segment_store.take(request.segment, request.begin, request.end)
        except CheckpointError as failure:
            error = failure
        except (KeyError, OSError) as failure:  # the segment was released meanwhile
            error = CheckpointError(f"the memory is not there any more: {failure}")
        self._send(messages.Taken(request.segment, error))

    def _end(self, request: WriteRequest, outcome: messages.Committed | messages.Failed) -> None:
        self._segment_store.save_ended(outcome.save_id, committed=isinstance(outcome, messages.Committed))
        self._send(outcome)
        if self._metrics is not None:
            self._metrics.on_end(request, outcome, time.time() - request.called_at)

    def _on_uploaded(self, uploaded: Uploaded) -> None:
        self._send(uploaded)
        if self._metrics is not None:
            self._metrics.on_uploaded(uploaded)

    def _send(self, message: messages.FromWorker) -> None:
        try:
            with self._sending:
                send(self._connection, message)
        except ConnectionError:
            pass  # the trainer is gone, which the loop in ``_serve`` notices
        except OSError:
            self._connection.hang_up()  # otherwise the trainer would wait for the lost message


class _LogHandler(logging.Handler):
    """Send log records to the trainer. Skip records with ``is_told``, because another message reports their content."""

    def __init__(self, send: Callable[[messages.FromWorker], object]) -> None:
        super().__init__()
        self._send = send

    def emit(self, record: logging.LogRecord) -> None:
        if getattr(record, "is_told", False):
            return
        try:
            self._send(messages.Logged(record.levelno, record.getMessage()))
        except Exception:
            self.handleError(record)
