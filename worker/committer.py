"""The committer: brings saves to their end, one after the other, the same end on all ranks.

A save is expected from the moment it begins, so that the failure of another rank is learned of even while this one is
stuck in a write. When its part is durable here, that is reported; the first rank's committer publishes when the reports
of all ranks are in, and concludes; the others wait for that. No trainer takes part. Who waits in vain settles it on
storage: then the save is published, or it never will be.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import threading
import time
from collections.abc import Callable, Iterator
from queue import SimpleQueue

from asyncckpt.errors import CheckpointError, RankFailedError, SaveTimeoutError, WorkerDiedError
from asyncckpt.worker.commit import Attempt, settle
from asyncckpt.worker.file_attempt import FileAttempt
from asyncckpt.worker.messages import Committed, Failed, Meeting, Order
from asyncckpt.worker.rounds import Rounds, SoloRounds, grace, round_name
from asyncckpt.worker.steps import prune

logger = logging.getLogger(__name__)

# What the first rank's worker waits, at its end, for others that may still want to know how the last save went.
_LEAVE_S = 5.0
# How long to look for the store, which the first rank may just be bringing back in the save that this one is in too.
_PATIENCE_S = 10.0
# How long to look whether a store is gone, or just the connection to it.
_PROBE_S = 1.0
# A save whose time is up when its turn comes may have been reported by all meanwhile: time to see that.
_LEAST_S = 1.0
# How long storage may take to say how a save has ended.
_SETTLE_S = 30.0
_KIND = "save"


class Committer:
    """One thread that ends saves in the order in which they began."""

    def __init__(self, send: Callable[[Committed | Failed], None]) -> None:
        """``send``: how the trainer is told."""
        self._send = send
        self._rank = 0
        self._meeting: Meeting | None = None
        # A wait for an outcome keeps a connection busy: reports go over another.
        self._waiting: Rounds | SoloRounds = SoloRounds()
        self._reporting: Rounds | SoloRounds = self._waiting
        self._lock = threading.Lock()
        self._open: dict[int, Attempt | FileAttempt | None] = {}
        self._queue: SimpleQueue[tuple[Order, float] | None] = SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="asyncckpt-committer")
        self._thread.start()

    def join(self, meeting: Meeting, timeout: float) -> None:
        """From the next save on, commit with the other ranks."""
        self._rank, self._meeting = meeting.rank, meeting
        self._waiting, self._reporting = (Rounds(meeting, timeout, _PATIENCE_S) for _ in range(2))
        self._waiting.connect()
        self._reporting.connect()

    def expect(self, order: Order) -> None:
        """A save has begun."""
        with self._lock:
            self._open[order.save_id] = None
        self._queue.put((order, time.monotonic() + order.timeout))

    def wanted(self, order: Order) -> bool:
        """Whether the save can still succeed; it cannot when another rank has failed it."""
        with self._lock:
            return order.save_id in self._open

    def idle(self) -> bool:
        """Whether no save is open."""
        with self._lock:
            return not self._open

    def written(self, attempt: Attempt | FileAttempt, report: bytes) -> None:
        """This rank's part of a save is durable."""
        order = attempt.order
        with self._lock:
            late = order.save_id not in self._open
            if not late:
                self._open[order.save_id] = attempt
        if late:
            attempt.discard()
            return
        try:
            self._reporting.report(round_name(_KIND, order.save_id), report)
        except CheckpointError as error:
            self.failed(order, error)

    def failed(self, order: Order, error: CheckpointError, attempt: Attempt | FileAttempt | None = None) -> None:
        """This rank's part of a save came to nothing: so it is for all ranks. ``attempt``: what is to be removed."""
        with self._lock:
            if order.rank == 0 and order.save_id in self._open:
                # Only when the others have been told: they are writing into the folder that goes.
                self._open[order.save_id], attempt = attempt, None
        if attempt is not None:
            attempt.discard()
        with _logged("reporting a failure"):
            self._reporting.fail(round_name(_KIND, order.save_id), error)

    def gone(self, why: str) -> None:
        """This rank begins no more saves."""
        with _logged("saying goodbye"), self._quickly() as rounds:
            rounds.gone(RankFailedError(why, rank=self._rank))

    def close(self) -> None:
        """Wait until all saves have ended, then leave the other ranks."""
        self._queue.put(None)
        self._thread.join()
        with _logged("leaving"), self._quickly() as rounds:
            if self._rank == 0:
                rounds.wait_left(_LEAVE_S)
            else:
                rounds.leave()
        self._waiting.close()
        self._reporting.close()

    def _run(self) -> None:
        while (entry := self._queue.get()) is not None:
            order, deadline = entry
            self._end(order, deadline)

    def _end(self, order: Order, deadline: float) -> None:
        name = round_name(_KIND, order.save_id)
        failure: CheckpointError | None = None
        try:
            if order.rank == 0:
                self._publish(order, name, deadline)
            else:
                failure = self._await_outcome(order, name, deadline)
            attempt = self._take(order)
        except Exception as error:
            failure = told(error, order)
            if order.rank == 0:
                with _logged("telling the other ranks of the failure"):
                    self._waiting.conclude_failed(name, failure)
            attempt = self._take(order)  # if it is not written by now, it is never reported
            if order.rank > 0:
                failure = self._settle(order, name, failure)
        if failure is None and attempt is None:
            failure = CheckpointError("a save was concluded before this rank had reported: please report this")
        if failure is not None:
            self._give_up(order, attempt, failure)
        elif attempt is not None:
            attempt.release()
            timings = attempt.timings | {"commit_s": time.perf_counter() - attempt.written_at}
            self._send(Committed(order.save_id, order.path, timings, attempt.direct))
            self._prune(order)
        if order.rank == 0:
            with _logged("clearing up"):
                self._waiting.clear(_KIND, order.save_id)

    def _publish(self, order: Order, name: str, deadline: float) -> None:
        """First rank: publish what all have written, and tell them."""
        reports = self._waiting.collect(name, max(_LEAST_S, deadline - time.monotonic()))
        self._reported(order).commit([json.loads(report) for report in reports])
        with _logged("telling the other ranks of the commit"):  # they look at what is published
            self._waiting.conclude(name, b"")

    def _await_outcome(self, order: Order, name: str, deadline: float) -> CheckpointError | None:
        """What the first rank says of the save: None, it is published; or why it never will be.

        Raises ``WorkerDiedError`` or ``SaveTimeoutError`` where that cannot be learned.
        """
        deadline += grace(order.timeout)
        store = b""
        while True:
            try:
                left = max(_LEAST_S, deadline - time.monotonic())
                store = store or self._waiting.store_id(left)
                outcome = self._waiting.outcome(name, left)
            except WorkerDiedError:
                if not self._is_there(store) or time.monotonic() > deadline:
                    raise
                continue  # it was only the connection that broke
            return told(outcome, order) if isinstance(outcome, CheckpointError) else None

    def _settle(self, order: Order, name: str, failure: CheckpointError) -> CheckpointError | None:
        """How a save has ended of which nothing was heard from the first rank, hence ``failure``; None: published."""
        if isinstance(failure, SaveTimeoutError):  # it is only slow, perhaps, and shall hear why it finds nothing
            self._reporting.fail_soon(name, failure, 0.0)
        try:
            return None if settle(order, _SETTLE_S) else failure
        except SaveTimeoutError as error:
            return error

    def _is_there(self, store: bytes) -> bool:
        """Whether the same store still answers."""
        try:
            with self._quickly() as rounds:
                return rounds.store_id(_PROBE_S) == store
        except CheckpointError:
            return False

    @contextlib.contextmanager
    def _quickly(self) -> Iterator[Rounds | SoloRounds]:
        """Rounds that do not wait for a store that is gone."""
        rounds = SoloRounds() if self._meeting is None else Rounds(self._meeting, _PROBE_S)
        try:
            yield rounds
        finally:
            rounds.close()

    def _reported(self, order: Order) -> Attempt | FileAttempt:
        with self._lock:
            attempt = self._open[order.save_id]
        if attempt is None:
            raise CheckpointError("a save was concluded before this rank had reported: please report this")
        return attempt

    def _give_up(self, order: Order, attempt: Attempt | FileAttempt | None, error: CheckpointError) -> None:
        """The save is not published, and never will be."""
        logger.error("saving failed: %s", error)
        if attempt is not None:
            attempt.discard()
        self._send(Failed(order.save_id, error))

    def _take(self, order: Order) -> Attempt | FileAttempt | None:
        """What is written of a save, which is nobody else's business from here on."""
        with self._lock:
            return self._open.pop(order.save_id, None)

    def _prune(self, order: Order) -> None:
        if order.rank == 0 and order.keep_last is not None and order.step is not None:
            try:
                prune(os.path.dirname(order.path), order.keep_last, order.step)
            except OSError as error:  # what was to be removed stays; nothing is lost
                logger.warning("old checkpoints could not be looked through: %s", error)


def told(error: Exception, order: Order) -> CheckpointError:
    """``error`` with the place, rank and step it happened at; what is not ours is named by its type."""
    if isinstance(error, CheckpointError):
        rank = order.rank if error.rank is None else error.rank
        return type(error)(error.message, path=error.path or order.path, rank=rank, step=order.step)
    return CheckpointError(
        f"the worker failed: {type(error).__name__}: {error}", path=order.path, rank=order.rank, step=order.step
    )


@contextlib.contextmanager
def _logged(doing: str) -> Iterator[None]:
    """What goes wrong inside is for the log: somebody else will notice, and say it better."""
    try:
        yield
    except CheckpointError as error:
        logger.warning("%s failed: %s", doing, error)
