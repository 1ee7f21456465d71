"""The worker's loop: it owns the segments, and carries out orders one after the other.

An order's life, here: *begun* (the trainer is staging it), *queued* (staged), *running* (the slot is WRITING until its
bytes are on storage), then the committer's. The loop answers the trainer all the while; one thread runs the orders, a
few threads write for it, and one brings what is written to its end.

When the trainer closes, or dies at whatever instant, every order whose slot says STAGED is still run; one that is only
begun is forgotten. Then the worker leaves.
"""

from __future__ import annotations

import logging
import os
import threading
from collections import deque
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from multiprocess.connection import Connection, wait
from multiprocess.reduction import send_handle

from asyncckpt.errors import CheckpointError, OutOfMemoryError, RankFailedError, WorkerDiedError
from asyncckpt.shm import budget
from asyncckpt.shm.segment import Segment
from asyncckpt.shm.slots import SlotTable, State
from asyncckpt.worker.commit import Attempt
from asyncckpt.worker.committer import Committer, told
from asyncckpt.worker.messages import (
    Allocate,
    Allocated,
    Begin,
    Cancel,
    Cancelled,
    Close,
    Describe,
    FromTrainer,
    FromWorker,
    Host,
    Hosting,
    Join,
    Layout,
    Order,
    Ready,
    Refused,
    Release,
    Staged,
    Written,
)
from asyncckpt.worker.rounds import host
from asyncckpt.worker.storage import LocalStorage
from asyncckpt.worker.wire import receive, send

logger = logging.getLogger(__name__)


class _Room:
    """A segment with what is known of it."""

    def __init__(self, segment: Segment) -> None:
        self.segment = segment
        self.slots = SlotTable(segment.view)
        self.layout: Layout | None = None

    def close(self) -> None:
        self.slots.close()
        self.segment.close()


class Server:
    """One worker serving one trainer over ``connection``, which it owns."""

    def __init__(self, connection: Connection, storage: LocalStorage, io_threads: int) -> None:
        self._connection = connection
        self._storage = storage
        self._io_threads = io_threads
        self._sending = threading.Lock()
        self._rooms: dict[int, _Room] = {}
        self._next_segment = 1
        # Guards what the loop and the runner share: the orders and their queue.
        self._changed = threading.Condition()
        self._begun: dict[int, Order] = {}
        self._queue: deque[tuple[Order, dict[str, float]]] = deque()
        self._leaving = False
        self._committer = Committer(self._send)
        self._store: Any = None

    def run(self, trainer: int | None = None) -> None:
        """Serve until the trainer closes or dies. ``trainer``: a pidfd, noticed even where a fork holds the socket."""
        runner = threading.Thread(target=self._run_orders, name="asyncckpt-runner")
        runner.start()
        why = "its worker failed"
        try:
            self._send(Ready(os.getpid()))
            why = self._serve(trainer)
        finally:
            with self._changed:
                self._queue_staged()
                self._leaving = True
                self._changed.notify()
            runner.join()
            self._committer.gone(why)
            self._committer.close()
            for room in self._rooms.values():
                room.close()
            self._storage.close()
            self._connection.close()

    def _serve(self, trainer: int | None) -> str:
        """Returns why it ended."""
        watched = [self._connection] if trainer is None else [self._connection, trainer]
        while True:
            ready = wait(watched)
            try:
                while self._connection.poll():
                    message: FromTrainer = receive(self._connection)
                    if isinstance(message, Close):
                        return "it has closed its checkpointer"
                    self._handle(message)
            except (EOFError, OSError):
                return "its trainer is gone"
            if trainer in ready:
                return "its trainer has died"

    def _handle(self, message: FromTrainer) -> None:
        match message:
            case Host(port):
                self._host(port)
            case Join(meeting, timeout):
                self._committer.join(meeting, timeout)
            case Allocate(nbytes):
                self._allocate(nbytes)
            case Describe(segment, layout):
                self._rooms[segment].layout = layout
            case Begin(order):
                with self._changed:
                    self._begun[order.save_id] = order
                self._committer.expect(order)
            case Staged(save_id, timings):
                with self._changed:
                    self._queue.append((self._begun.pop(save_id), timings))
                    self._changed.notify()
            case Cancel(save_id, reason):
                self._cancel(save_id, reason)
            case Release(segment):
                self._rooms.pop(segment).close()

    def _host(self, port: int) -> None:
        try:
            self._store = host(port)
        except OSError as error:
            self._send(Refused(WorkerDiedError(f"the worker cannot host the store that joins the ranks: {error}")))
            return
        self._send(Hosting(self._store.port))

    def _allocate(self, nbytes: int) -> None:
        try:
            budget.require(
                nbytes,
                "staging",
                "use fewer slots, or leave more memory to them (each holds one image of the state)",
            )
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
        number = self._next_segment
        self._next_segment += 1
        self._rooms[number] = _Room(segment)
        with self._sending:
            send(self._connection, Allocated(number))
            send_handle(self._connection, segment.fileno(), os.getppid())

    def _cancel(self, save_id: int, reason: CheckpointError) -> None:
        with self._changed:
            order = self._begun.pop(save_id, None)
            if order is None:
                for entry in self._queue:
                    if entry[0].save_id == save_id:
                        self._queue.remove(entry)
                        order = entry[0]
                        break
        if order is not None:
            self._rooms[order.segment].slots.set(order.slot, State.FREE)
        self._send(Cancelled(save_id, in_time=order is not None))
        if order is not None:
            self._committer.failed(order, reason)

    def _queue_staged(self) -> None:
        """Take up what was staged when the trainer could no longer say so."""
        for order in self._begun.values():
            slots = self._rooms[order.segment].slots
            if slots.state(order.slot) is State.STAGED and slots.save_id(order.slot) == order.save_id:
                self._queue.append((order, {}))
            else:
                half = RankFailedError("its trainer ended before the state was staged")
                self._committer.failed(order, told(half, order))
        self._begun.clear()

    def _run_orders(self) -> None:
        with ThreadPoolExecutor(self._io_threads, thread_name_prefix="asyncckpt-io") as pool:
            while True:
                with self._changed:
                    self._changed.wait_for(lambda: self._queue or self._leaving)
                    if not self._queue:
                        return
                    order, timings = self._queue.popleft()
                    self._rooms[order.segment].slots.set(order.slot, State.WRITING)
                self._run(order, timings, pool)

    def _run(self, order: Order, timings: dict[str, float], pool: ThreadPoolExecutor) -> None:
        room = self._rooms[order.segment]
        if not self._committer.wanted(order):
            self._free(room, order)
            return
        freed = False
        try:
            if room.layout is None:
                raise CheckpointError("the trainer never described this segment")
            attempt = Attempt(self._storage, order, room.layout, room.segment, timings)
            try:
                attempt.write(pool)
                self._free(room, order)
                freed = True
                report = attempt.seal()
            except BaseException:
                attempt.discard()
                raise
        except Exception as error:
            logger.exception("writing %s failed", order.path)
            if not freed:
                self._free(room, order)
            self._committer.failed(order, told(error, order))
        else:
            self._committer.written(attempt, report)

    def _free(self, room: _Room, order: Order) -> None:
        room.slots.set(order.slot, State.FREE)
        self._send(Written(order.save_id))

    def _send(self, message: FromWorker) -> None:
        try:
            with self._sending:
                send(self._connection, message)
        except OSError:
            pass  # the trainer is gone; the loop sees that by itself, and the work goes on
