"""The worker's loop: it owns the segments, and carries out orders one after the other.

An order's life, here: *begun* (the trainer is staging it), *queued* (staged), *running* (the slot is WRITING until its
bytes are on storage), then the committer's. If there is nothing else to run, one that is only begun is *followed*: what
has arrived of it is written while the rest is coming. The loop answers the trainer all the while; one thread runs the
orders, a few threads write for it, and one brings what is written to its end.

When the trainer closes, or dies at whatever instant, every order whose slot says STAGED is still run; one that is only
begun is forgotten. Then the worker leaves; at once if the trainer has closed, else when it has lingered for a while
with what it holds, for a trainer that comes back.
"""

from __future__ import annotations

import logging
import os
import signal
import threading
from collections import deque
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from multiprocess.connection import Connection, wait
from multiprocess.reduction import recv_handle, send_handle

from asyncckpt.errors import CheckpointError, JobTakenError, OutOfMemoryError, RankFailedError, WorkerDiedError
from asyncckpt.shm import budget
from asyncckpt.shm.segment import Segment
from asyncckpt.shm.slots import State
from asyncckpt.worker.arrival import Arrival
from asyncckpt.worker.commit import Attempt
from asyncckpt.worker.committer import Committer, told
from asyncckpt.worker.file_attempt import FileAttempt
from asyncckpt.worker.holdings import Holdings, Room
from asyncckpt.worker.messages import (
    Adopt,
    Adopted,
    Allocate,
    Allocated,
    Begin,
    Cancel,
    Cancelled,
    Close,
    Committed,
    Describe,
    Described,
    Failed,
    FileLayout,
    FromTrainer,
    FromWorker,
    Host,
    Hosting,
    Join,
    Layout,
    Open,
    Opened,
    Ready,
    Refused,
    Release,
    Staged,
    Written,
)
from asyncckpt.worker.rounds import host
from asyncckpt.worker.storage import LocalStorage
from asyncckpt.worker.visit import make_room
from asyncckpt.worker.wire import receive, send

logger = logging.getLogger(__name__)


# How long a write may go on after the save it is for has failed, when the trainer is gone.
_STUCK_S = 30.0
_MAKE_ROOM_S = 10.0
_CLOSED = "it has closed its checkpointer"


class Server:
    """One worker serving one trainer over ``connection``, which it owns."""

    def __init__(
        self, connection: Connection, storage: LocalStorage, holdings: Holdings, io_threads: int, linger: float
    ) -> None:
        """``linger``: seconds to stay with what is held when the trainer has died."""
        self._connection = connection
        self._storage = storage
        self._holdings = holdings
        self._io_threads = io_threads
        self._linger = linger
        self._sending = threading.Lock()
        # Guards what the loop and the runner share: the orders and their queue.
        self._changed = threading.Condition()
        self._begun: dict[int, Arrival] = {}
        self._queue: deque[Arrival] = deque()
        self._followed: Arrival | None = None
        self._leaving = False
        self._committer = Committer(self._ended)
        self._store: Any = None

    def run(self, trainer: int | None = None) -> bool:
        """Serve until the trainer closes or dies, and linger then.

        Returns whether all threads have come to their end. If not, storage has never answered, and the process should
        end itself. ``trainer``: a pidfd, noticed even where a fork holds the socket.
        """
        runner = threading.Thread(target=self._run_orders, name="asyncckpt-runner", daemon=True)
        runner.start()
        why, lingers = "its worker failed", False
        try:
            self._send(Ready(os.getpid()))
            why = self._serve(trainer)
            lingers = why != _CLOSED and self._linger > 0
        finally:
            with self._changed:
                self._queue_staged()
                self._leaving = True
                self._changed.notify_all()
            self._holdings.orphan(keep=lingers)
            finished = self._is_finished(runner)
            if finished:
                self._leave(why, lingers)
        return finished

    def _leave(self, why: str, lingers: bool) -> None:
        self._committer.gone(why)
        self._committer.close()
        self._store = None
        self._storage.close()
        self._connection.close()
        if lingers:
            # Until here nobody could make it leave. From here on it only spares others a read.
            signal.signal(signal.SIGTERM, lambda *_: self._holdings.retire())
            self._holdings.linger(self._linger)
        self._holdings.close()

    def _is_finished(self, runner: threading.Thread) -> bool:
        """Wait for the runner; False where it is stuck in a write, of which all that could be said has been said."""
        stuck_s = 0.0
        while runner.is_alive() and stuck_s < _STUCK_S:
            runner.join(1.0)
            stuck_s = stuck_s + 1.0 if self._committer.idle() else 0.0
        return not runner.is_alive()

    def _serve(self, trainer: int | None) -> str:
        """Returns why it ended."""
        watched = [self._connection] if trainer is None else [self._connection, trainer]
        while True:
            ready = wait(watched)
            try:
                while self._connection.poll():
                    message: FromTrainer = receive(self._connection)
                    if isinstance(message, Close):
                        return _CLOSED
                    self._handle(message)
            except (EOFError, OSError):
                return "its trainer is gone"
            if trainer in ready:
                return "its trainer has died"

    def _handle(self, message: FromTrainer) -> None:
        match message:
            case Open():
                self._open()
            case Host(port):
                self._host(port)
            case Join(meeting, timeout):
                self._committer.join(meeting, timeout)
            case Allocate(nbytes):
                self._allocate(nbytes)
            case Adopt(held):
                segment = Segment.attach(recv_handle(self._connection))
                self._send(Adopted(self._holdings.adopt(segment, held)))
            case Describe(number, layout):
                self._holdings.room(number).describe(layout)
                self._send(Described())
            case Begin(order):
                self._holdings.taken(order)
                self._committer.expect(order)
                with self._changed:
                    slots = self._holdings.room(order.segment).slots
                    self._begun[order.save_id] = Arrival(
                        order, slots, self._changed, lambda: self._committer.wanted(order)
                    )
                    self._changed.notify_all()
            case Staged(save_id, timings):
                with self._changed:
                    arrival = self._begun.pop(save_id, None)
                    if arrival is not None:  # else it was called off
                        self._staged(arrival, timings)
            case Cancel(save_id, reason):
                self._cancel(save_id, reason)
            case Release(number):
                self._holdings.release(number)

    def _open(self) -> None:
        trouble = None
        try:
            self._holdings.open()
        except JobTakenError as error:
            self._send(Refused(error))
            return
        except OSError as error:
            trouble = f"{error.strerror}: {error.filename}" if error.filename else str(error)
        self._send(Opened(trouble))

    def _host(self, port: int) -> None:
        try:
            self._store = host(port)
        except OSError as error:
            self._send(Refused(WorkerDiedError(f"the worker cannot host the store that joins the ranks: {error}")))
            return
        self._send(Hosting(self._store.port))

    def _allocate(self, nbytes: int) -> None:
        try:
            self._require(nbytes)
            segment = Segment.create("asyncckpt", nbytes)
            try:
                segment.touch()
            except BaseException:
                segment.close()
                raise
        except OutOfMemoryError as error:
            self._send(Refused(error))
            return
        except (MemoryError, OSError) as error:
            self._send(Refused(OutOfMemoryError(f"no {nbytes:,} bytes of shared memory for staging: {error}")))
            return
        number = self._holdings.add(segment)
        with self._sending:
            send(self._connection, Allocated(number))
            send_handle(self._connection, segment.fileno(), os.getppid())

    def _require(self, nbytes: int) -> None:
        hint = "use fewer slots, or leave more memory to them (each holds one image of the state)"
        try:
            budget.require(nbytes, "staging", hint)
            return
        except OutOfMemoryError:
            # Something may have been given back that is free in a moment. Nor must what is held for trainers that may
            # never come back stand in the way of one that is here.
            if not (self._holdings.wait_given_back(_MAKE_ROOM_S) or make_room(_MAKE_ROOM_S)):
                raise
        budget.require(nbytes, "staging", hint)

    def _cancel(self, save_id: int, reason: CheckpointError) -> None:
        with self._changed:
            arrival = self._begun.pop(save_id, None)
            if arrival is None:
                arrival = next((each for each in self._queue if each.order.save_id == save_id), None)
                if arrival is not None:
                    self._queue.remove(arrival)
            following = arrival is not None and arrival is self._followed
            if arrival is not None and following:
                arrival.fail(reason)  # the rest is up to who follows it
            elif arrival is not None:
                arrival.set_state(State.FREE)
        self._send(Cancelled(save_id, in_time=arrival is not None, slot_free=not following))
        if arrival is not None and not following:
            self._committer.failed(arrival.order, reason)

    def _queue_staged(self) -> None:
        """Take up what was staged when the trainer could no longer say so."""
        for arrival in self._begun.values():
            if arrival.says_staged():
                self._staged(arrival, {})
                continue
            half = told(RankFailedError("its trainer ended before the state was staged"), arrival.order)
            if arrival is self._followed:
                arrival.fail(half)
            else:
                self._committer.failed(arrival.order, half)
        self._begun.clear()

    def _staged(self, arrival: Arrival, timings: dict[str, float]) -> None:
        self._holdings.staged(arrival.order)
        arrival.stage(timings)
        if arrival is self._followed:
            arrival.set_state(State.WRITING)
        elif arrival.followed:  # in vain
            self._free(arrival)
        else:
            self._queue.append(arrival)

    def _run_orders(self) -> None:
        with ThreadPoolExecutor(self._io_threads, thread_name_prefix="asyncckpt-io") as pool:
            while (arrival := self._next()) is not None:
                room = self._holdings.room(arrival.order.segment)
                with room.used():  # as soon as the slot is free, the trainer may give the segment back
                    self._carry_out(arrival, room, pool)

    def _next(self) -> Arrival | None:
        """What to run now; None: nothing will come any more."""
        with self._changed:
            self._changed.wait_for(lambda: self._queue or self._to_follow() or self._leaving)
            if self._queue:
                arrival = self._queue.popleft()
                arrival.set_state(State.WRITING)
                return arrival
            self._followed = self._to_follow()
            if self._followed is not None:
                self._followed.followed = True
            return self._followed

    def _to_follow(self) -> Arrival | None:
        """The next that is begun, if it can be followed: single files are completed here before they are written."""
        arrival = next((each for each in self._begun.values() if not each.followed), None)
        if arrival is None or not isinstance(self._holdings.room(arrival.order.segment).layout, Layout):
            return None
        return arrival

    def _carry_out(self, arrival: Arrival, room: Room, pool: ThreadPoolExecutor) -> None:
        order = arrival.order
        if not self._committer.wanted(order):
            self._let_go(arrival)
            return
        os.umask(order.umask)
        attempt: Attempt | FileAttempt | None = None
        try:
            match room.layout:
                case FileLayout() as layout:
                    attempt = FileAttempt(self._storage, arrival, layout, room.segment)
                case Layout() as layout:
                    attempt = Attempt(self._storage, arrival, layout, room.segment)
                case _:
                    raise CheckpointError("the trainer never described this segment as a checkpoint's")
            self._holdings.written(order, attempt.write(pool))
            self._let_go(arrival)
            report = attempt.seal()
        except Exception as error:
            if error is not arrival.failure:  # that is no fault of writing
                logger.exception("writing %s failed", order.path)
            self._let_go(arrival)
            self._committer.failed(order, told(error, order), attempt)
        else:
            self._committer.written(attempt, report)

    def _let_go(self, arrival: Arrival) -> None:
        """The runner looks at the slot no more; while it is still being staged, the trainer goes on to do so."""
        with self._changed:
            self._followed = None
            if arrival.order.save_id not in self._begun:
                self._free(arrival)

    def _free(self, arrival: Arrival) -> None:
        if arrival.is_freed:
            return
        arrival.is_freed = True
        arrival.set_state(State.FREE)
        self._send(Written(arrival.order.save_id, arrival.inode))

    def _ended(self, outcome: Committed | Failed) -> None:
        self._holdings.ended(outcome.save_id, committed=isinstance(outcome, Committed))
        self._send(outcome)

    def _send(self, message: FromWorker) -> None:
        try:
            with self._sending:
                send(self._connection, message)
        except OSError:
            pass  # the trainer is gone; the loop sees that by itself, and the work goes on
