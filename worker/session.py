"""A session: the worker's connection to one trainer. The saves are on other threads (``saves.py``).

After the trainer closes or dies, the session still writes every request in a slot with the state STAGED, and discards
requests that have only begun. Then it ends. If the trainer has closed, the worker ends, too. If the trainer has died,
the worker lingers with the images that it holds. A restarted trainer opens the next session.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Collection
from multiprocessing.connection import wait
from typing import TYPE_CHECKING, Any, Concatenate, ParamSpec

from asyncckpt.errors import CheckpointError, WorkerDiedError
from asyncckpt.format.segment_layout import SegmentLayout
from asyncckpt.format.write_request import CopiedRank, WriteRequest
from asyncckpt.link.api import (
    Claim,
    Claimed,
    Committed,
    Failed,
    Hosting,
    Rendezvous,
    Served,
    SessionApi,
    Staged,
    TrainerApi,
)
from asyncckpt.link.calls import Answer, Files, carry_out, send_answer, tell, with_files
from asyncckpt.link.root_lock import RootLock
from asyncckpt.link.segment_store import SegmentStore
from asyncckpt.link.socket_connection import SocketConnection
from asyncckpt.storage.storage import Storage
from asyncckpt.storage.uploader import Uploader
from asyncckpt.storage.uploads import Uploaded, UploadsUnderWay
from asyncckpt.threads import start
from asyncckpt.transfer.api import TransferAddress
from asyncckpt.transfer.serving import Serving, listens_at
from asyncckpt.worker.endpoint_service import EndpointService, Trainer
from asyncckpt.worker.saves import SavesOfTrainer

if TYPE_CHECKING:
    from asyncckpt.worker.metrics_file import MetricsFile

P = ParamSpec("P")

_CLOSED = "the trainer of this rank has closed its checkpointer"


class Session(SessionApi):
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
        self._saves = SavesOfTrainer(storage_for, segment_store, self._tell, self._end, io_threads)
        endpoint_service.begin_session(trainer, self._saves.unended, self._saves.restarted)
        self._serving = serving
        first, last = trainer.options.ports  # a list, if they came from a command line
        serving.ports = first, last
        self._rendezvous: Rendezvous | None = None
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
        self._answer(Answer(0, trouble))  # to ``attach``, or to the start of this worker
        to_trainer = _LogHandler(self._tell)
        logging.getLogger().addHandler(to_trainer)
        if self._metrics is not None:
            self._metrics.begin()
        why = self._serve(trainer)
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
        """Carry out the calls of the trainer. Return the reason why serving ended."""
        while True:
            ready = wait([self._connection, *trainer])
            try:
                while self._connection.poll():
                    carry_out(self._connection.receive(), SessionApi, self, self._answer)
                    if self._is_closed:
                        return _CLOSED
            except (EOFError, OSError) as error:
                if isinstance(error, ConnectionError) or not self._connection.has_other_end():
                    return "the trainer of this rank has exited"
                raise  # an error of the operating system, and the trainer lives
            if any(each in ready for each in trainer):
                return "the trainer of this rank has died"

    # The calls of the trainer, see ``SessionApi``.

    def close(self) -> None:
        self._is_closed = True

    def join(self, rendezvous: Rendezvous, timeout: float) -> None:
        self._saves.join(rendezvous, timeout)
        self._rendezvous, self._timeout = rendezvous, timeout

    def host(self, port: int, address: str, secret: bytes) -> Hosting:
        return self._saves.host((port, port) if port else self._serving.ports, address, secret)

    def begin(self, request: WriteRequest) -> None:
        self._segment_store.slot_taken(request)
        self._saves.begin(request)

    def staged(self, staged: Staged) -> None:
        self._saves.staged(staged)

    def cancel(self, save_id: int, reason: CheckpointError) -> None:
        self._saves.cancel(save_id, reason)

    def allocate(self, nbytes: int, end: int) -> int:
        number, segment = self._segment_store.allocate(nbytes, end)
        return with_files(number, [segment])

    def adopt(self) -> int:
        return self._segment_store.adopt(self._connection.receive_segment())

    def describe(self, segment: int, layout: SegmentLayout) -> None:
        self._segment_store.hosted(segment).describe(layout)

    def take(self, segment: int, begin: int, end: int) -> None:
        # On another thread, because taking memory takes a second for each two GiB or so.
        thread = threading.Thread(target=self._take, args=[segment, begin, end], name="asyncckpt-memory", daemon=True)
        try:
            start(thread)
        except CheckpointError:
            self._take(segment, begin, end)
        else:
            self._taking = [each for each in self._taking if each.is_alive()] + [thread]

    def give_back(self, segment: int, begin: int, slots: tuple[int, ...]) -> None:
        self._segment_store.give_back(segment, begin, slots)

    def release(self, segment: int) -> None:
        self._segment_store.release(segment)
        self._saves.forget(segment)

    def uploads(self) -> UploadsUnderWay:
        uploader = self._saves.uploader
        return UploadsUnderWay((), None) if uploader is None else uploader.under_way()

    def serve(self, key: bytes, address: str) -> Served:
        served = self._serving.serve(key, listens_at(address), to_own_job=True)
        self._address = TransferAddress(address, served.port)
        return served

    def follow(self, locator: str) -> str | None:
        return self._serving.follow(locator)

    def claim(self, claim: Claim) -> Claimed:
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

    def keep_copies(
        self, plan: int, ranks: tuple[CopiedRank, ...], plans: tuple[int, ...], transport: str, rate: float | None
    ) -> None:
        if (replicator := self._saves.replicator) is None:
            if self._rendezvous is None or self._address is None:
                raise WorkerDiedError("the worker is not connected to the other ranks: please report this")
            from asyncckpt.transfer.replicator import Replicator  # imported only if needed

            where, how = (self._rendezvous, self._timeout), (transport, rate)
            replicator = Replicator(self._segment_store, *where, *how, self._tell, self._saves.post)
            self._saves.replicator = replicator
            replicator.announce(self._address)
            for number, held in self._segment_store.copies_before().items():
                replicator.copies.inherit(number, held)
        replicator.keep(plan, ranks, plans)

    # The calls of the worker, see ``TrainerApi``.

    def _take(self, segment: int, begin: int, end: int) -> None:
        error: CheckpointError | None = None
        try:
            self._segment_store.take(segment, begin, end)
        except CheckpointError as failure:
            error = failure
        except (KeyError, OSError) as failure:  # the segment was released meanwhile
            error = CheckpointError(f"the memory is not there any more: {failure}")
        self._tell(TrainerApi.taken, segment, error)

    def _end(self, request: WriteRequest, outcome: Committed | Failed) -> None:
        self._segment_store.save_ended(outcome.save_id, committed=isinstance(outcome, Committed))
        self._tell(TrainerApi.ended, outcome)
        if self._metrics is not None:
            self._metrics.on_end(request, outcome, time.time() - request.called_at)

    def _on_uploaded(self, uploaded: Uploaded) -> None:
        self._tell(TrainerApi.uploaded, uploaded)
        if self._metrics is not None:
            self._metrics.on_uploaded(uploaded)

    def _tell(self, method: Callable[Concatenate[Any, P], None], *given: P.args, **named: P.kwargs) -> None:
        """Call a method of the trainer."""
        self._send(tell, method, *given, **named)

    def _answer(self, answer: Answer, files: Files = ()) -> None:
        self._send(send_answer, answer, files)

    def _send(self, send: Callable[..., None], *given: Any, **named: Any) -> None:
        try:
            with self._sending:
                send(self._connection, *given, **named)
        except ConnectionError:
            pass  # the trainer is gone, which the loop in ``_serve`` notices
        except OSError:
            self._connection.hang_up()  # otherwise the trainer would wait for the lost message


class _LogHandler(logging.Handler):
    """Send log records to the trainer. Skip records with ``is_told``, because another message reports their content."""

    def __init__(self, tell: Callable[..., object]) -> None:
        super().__init__()
        self._tell = tell

    def emit(self, record: logging.LogRecord) -> None:
        if getattr(record, "is_told", False):
            return
        try:
            self._tell(TrainerApi.logged, record.levelno, record.getMessage())
        except Exception:
            self.handleError(record)
