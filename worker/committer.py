"""The committer: decides when a checkpoint is complete, and ends each save in the same way on all ranks.

No trainer takes part. A save is expected from the moment it begins, so that the failure of another rank is noticed even
while this one is stuck in a write.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from queue import SimpleQueue

from asyncckpt.errors import (
    CheckpointError,
    RankFailedError,
    SaveTimeoutError,
    StorageError,
    UnsavableStateError,
    WorkerDiedError,
    located,
)
from asyncckpt.format.manifest import note
from asyncckpt.format.write_request import WriteRequest
from asyncckpt.link.client import grace
from asyncckpt.link.messages import Committed, Failed, Rendezvous
from asyncckpt.ranks.rounds import Rounds, round_name
from asyncckpt.ranks.store_connection import Patience
from asyncckpt.ranks.survivors import Survivors
from asyncckpt.storage import resolve
from asyncckpt.storage.follow_up import follow_up, remove_rest
from asyncckpt.storage.history import prune
from asyncckpt.storage.uploader import Uploader
from asyncckpt.threads import start
from asyncckpt.worker.attempt import Attempt

logger = logging.getLogger(__name__)

_SHOWN = 5


class ReplicaCheck:
    """Compare the digests of all ranks, before a save is committed. Warn of each name once."""

    def __init__(self) -> None:
        self._known: set[str] = set()

    def check(self, request: WriteRequest, digests: Sequence[Mapping[str, int]]) -> None:
        """Look for names under which ranks have different values.

        Args:
            request: The save.
            digests: By name, of each rank, in the order of the ranks.

        Raises:
            UnsavableStateError: There are such names, and the request refuses them.
        """
        ranks: dict[str, dict[int, int]] = {}  # the first rank with each digest
        for rank, its in enumerate(digests):
            for name, digest in its.items():
                ranks.setdefault(name, {}).setdefault(digest, rank)
        differing = {name: [*of.values()] for name, of in ranks.items() if len(of) > 1 and name not in self._known}
        if not differing:
            return
        shown = ", ".join(f"{name!r} (ranks {of[0]} and {of[1]})" for name, of in list(differing.items())[:_SHOWN])
        more = f", and {len(differing) - _SHOWN} more" if len(differing) > _SHOWN else ""
        text = (
            f"{len(differing)} values differ from rank to rank, and of each only one is saved, which every rank will"
            f" load (of {len(ranks)} compared): {shown}{more}; wrap what is of each rank's own in asyncckpt.PerRank, or"
            " give it a name of its own on each rank, or make shards a DTensor; statistics of batches, as of BatchNorm,"
            " may differ"
        )
        if request.refuses_differing:
            raise UnsavableStateError(f"{text}; nothing is saved, as Config.differing_replicas is 'raise'")
        self._known.update(differing)
        logger.warning("%s [path %s]", text, request.path)


# Seconds that the first rank's worker waits at its end, for others that may still ask how the last save ended.
_LEAVE_S = 5.0
# Seconds to look for the store, which the first rank may be starting again in the same save. All saves under way share
# this time.
_PATIENCE_S = 20.0
# Seconds to tell the first rank's worker at the end of failures (otherwise it waits for this rank until its timeout),
# and that this rank has left, which is less important. A worker that is gone refuses at once.
_TELL_S, _TELL_LEFT_S = 10.0, 1.0
# Seconds to find out whether a store is gone, or only the connection to it. A store that is gone refuses at once.
_PROBE_S = 10.0
# Minimum seconds for each wait. While a save waited in the queue until its timeout, all ranks may have reported it.
_LEAST_S = 1.0
# Seconds that the storage may take to say how a save has ended.
_RESOLVE_S = 30.0
_KIND = "save"
_UNREPORTED = "a save was concluded before this rank had reported: please report this"


class _SoloRounds:
    """``Rounds`` for a job of one rank. It collects the report of this rank, and has nobody to tell."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._reports: dict[str, bytes | CheckpointError] = {}

    def report_soon(self, name: str, value: bytes | CheckpointError, timeout: float) -> None:
        """Record a report. Only the first one counts."""
        with self._changed:
            self._reports.setdefault(name, value)
            self._changed.notify_all()

    fail_soon = report_soon

    def collect(self, name: str, timeout: float, lost: Callable[[int], CheckpointError | None]) -> list[bytes]:
        with self._changed:
            self._changed.wait_for(lambda: name in self._reports, timeout)
            report = self._reports.pop(name, None)
        if report is None:
            raise SaveTimeoutError(f"not written within {timeout:g} s; the storage may be stalled", rank=0)
        if isinstance(report, CheckpointError):
            raise report
        return [report]

    def clear(self, kind: str, number: int) -> None:
        """Forget reports that came too late."""
        with self._changed:
            self._reports.pop(round_name(kind, number), None)

    def conclude(self, name: str, outcome: bytes) -> None: ...

    def conclude_failed(self, name: str, error: CheckpointError) -> None: ...

    def gone_soon(self, error: CheckpointError, timeout: float) -> None: ...

    def wait_left(self, timeout: float, lost: int) -> None: ...

    def close(self, timeout: float) -> None: ...

    # Never called: these are for other ranks than the first.

    def leave(self) -> None: ...

    def store_id(self, timeout: float) -> bytes:
        raise NotImplementedError

    def outcome(self, name: str, timeout: float) -> bytes | CheckpointError:
        raise NotImplementedError


class Committer:
    """One thread that ends saves in the order in which they began.

    A save has these states:

    - *open*, from ``expect`` on: this rank's part is being staged and written, and any rank may fail the save;
    - *written*, from ``written`` on: this rank's part is durable and reported, and its attempt is kept here;
    - *ended*, when the thread takes it: committed, or failed. A later attempt is discarded.

    On the first rank the thread collects the reports, finalizes the checkpoint and concludes. On other ranks it waits
    for the outcome. If no outcome comes, it asks the storage (``resolve``): then the save is committed, or never will
    be. The thread releases or discards the attempt, and tells the trainer. The first rank's attempt is discarded only
    after the other ranks have been told of the failure.
    """

    def __init__(self, send: Callable[[WriteRequest, Committed | Failed], None]) -> None:
        """Start the threads. ``send``: tells the trainer how a save has ended."""
        self._send = send
        self.uploader: Uploader | None = None
        """First rank: copies committed checkpoints to another root, if there is one."""
        self._rank = 0
        self._rendezvous: Rendezvous | None = None
        self._rounds: Rounds | _SoloRounds = _SoloRounds()
        self._patience = Patience(_PATIENCE_S)
        self._survivors: Survivors | None = None
        self._replicas = ReplicaCheck()
        self._lock = threading.Lock()
        self._open: dict[int, Attempt | None] = {}
        self._unended: dict[int, WriteRequest] = {}  # open, or just being ended
        self._queue: SimpleQueue[tuple[WriteRequest, float] | None] = SimpleQueue()
        # No commit waits for the removal of old checkpoints.
        self._last_step: int | None = None
        self._next_step: int | None = None
        self._prunable: SimpleQueue[Callable[[], object] | None] = SimpleQueue()
        self._pruner = threading.Thread(target=self._prune, name="asyncckpt-prune", daemon=True)
        start(self._pruner)
        self._thread = threading.Thread(target=self._run, name="asyncckpt-committer", daemon=True)
        start(self._thread)

    def join(self, rendezvous: Rendezvous, timeout: float) -> None:
        """Commit with the other ranks, from the next save on. ``timeout``: seconds that the store may take."""
        self._rank, self._rendezvous = rendezvous.rank, rendezvous
        self._rounds = Rounds(rendezvous, timeout, self._patience)

    def hurry(self) -> None:
        """Note that the trainer is gone. Nobody starts the store again for its saves."""
        self._patience.end()
        if self._rank == 0 and self._rendezvous is not None and not self.idle():
            self._survivors = Survivors(self._rendezvous, self._saves)

    def restarted(self) -> None:
        """Note that the job was started again. Ranks without trainer and worker are not waited for any more."""
        if self._survivors is not None:
            self._survivors.restarted()

    def _lost(self, rank: int) -> CheckpointError | None:
        return None if self._survivors is None else self._survivors.lost(rank)

    def expect(self, request: WriteRequest) -> None:
        """Note that a save has begun."""
        if self._rank > 0 and self._rendezvous is not None and self._survivors is None:
            self._survivors = Survivors(self._rendezvous, self._saves)
        self._patience.renew()
        with self._lock:
            self._open[request.save_id] = None
            self._unended[request.save_id] = request
        self._queue.put((request, time.monotonic() + request.timeout))

    def can_succeed(self, request: WriteRequest) -> bool:
        """Return whether the save has not ended yet. It ends as soon as another rank fails it."""
        with self._lock:
            return request.save_id in self._open

    def idle(self) -> bool:
        """Return whether no save is open."""
        with self._lock:
            return not self._open

    def _saves(self) -> bool:
        return not self.idle()

    def unended(self) -> tuple[WriteRequest, ...]:
        """Return the saves that have not ended."""
        with self._lock:
            return tuple(self._unended.values())

    def written(self, attempt: Attempt, report: bytes) -> None:
        """Note that this rank's part of a save is durable, and report it."""
        request = attempt.request
        attempt.written_at = time.perf_counter()
        with self._lock:
            is_late = request.save_id not in self._open
            if not is_late:
                self._open[request.save_id] = attempt
        if is_late:
            attempt.discard()
            return
        # In the background: a slow worker of the first rank must not delay the next write.
        self._rounds.report_soon(round_name(_KIND, request.save_id), report, request.timeout)

    def failed(self, request: WriteRequest, error: CheckpointError, attempt: Attempt | None = None) -> None:
        """Fail a save on all ranks, because this rank's part has failed.

        Args:
            request: The save.
            error: The reason; all ranks get it.
            attempt: The attempt to discard; None: nothing was written.
        """
        with self._lock:
            if request.rank == 0 and request.save_id in self._open:
                # Discard it after the others have been told, because they are writing into that folder.
                self._open[request.save_id], attempt = attempt, None
        if attempt is not None:
            attempt.discard()
        self._rounds.fail_soon(round_name(_KIND, request.save_id), error, request.timeout)

    def gone(self, why: str) -> None:
        """Tell the other ranks that this rank begins no more saves, for the reason ``why``."""
        self._rounds.gone_soon(RankFailedError(why, rank=self._rank), _TELL_S)

    def close(self) -> None:
        """Wait until all saves have ended, then leave the other ranks."""
        self._queue.put(None)
        self._thread.join()
        self._prunable.put(None)
        self._pruner.join()
        self._rounds.close(_TELL_S)
        if self._survivors is not None:
            self._survivors.close()
        # If this fails, the first rank's worker waits a little longer, and nothing is lost.
        with _logged("leaving", logging.INFO), self._probe(_TELL_LEFT_S) as rounds:
            if self._rank == 0:
                rounds.wait_left(_LEAVE_S, 0 if self._survivors is None else len(self._survivors.gone))
            else:
                rounds.leave()

    def _run(self) -> None:
        while (entry := self._queue.get()) is not None:
            self._end(*entry)

    def _prune(self) -> None:
        """Remove old checkpoints, as retention says, until told to end."""
        while (task := self._prunable.get()) is not None:
            try:
                task()
            except Exception:
                logger.exception("removing old checkpoints failed")

    def _is_recent(self, step: int) -> bool:
        """Return whether ``step`` was committed last, or is being committed, or waits for its upload."""
        return step in (self._last_step, self._next_step) or (self.uploader is not None and self.uploader.needs(step))

    def _end(self, request: WriteRequest, deadline: float) -> None:
        name = round_name(_KIND, request.save_id)
        failure: CheckpointError | None = None
        trouble: CheckpointError | None = None
        is_known = True
        try:
            if request.rank == 0:
                trouble = self._commit(request, name, deadline)
            else:
                failure = self._await_outcome(request, name, deadline)
            attempt = self._take(request)
        except MemoryError:  # the worker ends
            raise
        except Exception as error:
            failure = located_in(request, error)
            if request.rank == 0:
                with _logged("telling the other ranks of the failure"):
                    self._rounds.conclude_failed(name, failure)
            attempt = self._take(request)  # if it is not written yet, it is never reported
            if request.rank > 0:
                failure, is_known = self._resolve(request, name, failure)
        if failure is None and attempt is None:
            failure = CheckpointError(_UNREPORTED)
        if failure is None and self.uploader is not None:
            self.uploader.begin()
        if failure is not None:
            logger.error("saving failed: %s", failure, extra={"is_told": True})
            if attempt is not None and is_known:
                attempt.discard()
            elif attempt is not None:
                attempt.release()  # the first rank may be about to finalize it, and needs these files
            self._tell(Failed(request.save_id, failure))
        elif attempt is not None:
            attempt.release()
            note(attempt.timings, "commit", attempt.written_at, request.called_at)
            self._tell(Committed(request.save_id, attempt.timings, attempt.layout.data_bytes, trouble))
            if request.rank == 0 and request.keep_last is not None and request.step is not None:
                self._prunable.put(partial(prune, os.path.dirname(request.path), request.keep_last, self._is_recent))
        if request.rank == 0:
            with _logged("clearing up"):
                self._rounds.clear(_KIND, request.save_id)

    def _follow_up(self, request: WriteRequest) -> CheckpointError | None:
        """Advance the pointer, and rename old checkpoints, which are removed later.

        Returns the error if the pointer is not advanced.
        """
        try:
            if leftovers := follow_up(request):
                self._prunable.put(partial(remove_rest, leftovers))
        except StorageError as error:
            logger.error("%s", error, extra={"is_told": True})
            return error
        return None

    def _tell(self, outcome: Committed | Failed) -> None:
        with self._lock:  # first: after the message, somebody may ask which saves have not ended
            request = self._unended.pop(outcome.save_id)
        self._send(request, outcome)

    def _commit(self, request: WriteRequest, name: str, deadline: float) -> CheckpointError | None:
        """First rank: finalize the checkpoint, carry out the follow-up, and tell the other ranks.

        Returns the error if a pointer does not name the checkpoint.
        """
        limit = max(_LEAST_S, deadline - time.monotonic())
        reports = [json.loads(report) for report in self._rounds.collect(name, limit, lost=self._lost)]
        with self._lock:
            attempt = self._open[request.save_id]
        if attempt is None:
            raise CheckpointError(_UNREPORTED)
        self._replicas.check(request, [report.get("replicas", {}) for report in reports])
        self._next_step = request.step
        attempt.commit(reports)
        self._last_step = request.step
        trouble = self._follow_up(request)  # first: nobody must hear of a checkpoint before its pointer names it
        with _logged("telling the other ranks of the commit"):  # otherwise they ask the storage
            self._rounds.conclude(name, b"")
        return trouble

    def _await_outcome(self, request: WriteRequest, name: str, deadline: float) -> CheckpointError | None:
        """Return the first rank's answer: None if the save is committed, or the reason why it never will be.

        Raises ``WorkerDiedError`` or ``SaveTimeoutError`` if there is no answer.
        """
        deadline += grace(request.timeout)
        store = b""
        while True:
            try:
                left = max(_LEAST_S, deadline - time.monotonic())
                store = store or self._rounds.store_id(left)
                outcome = self._rounds.outcome(name, left)
            except WorkerDiedError:
                if not store or not self._is_there(store) or time.monotonic() > deadline:
                    raise
                continue  # only the connection was lost
            return located_in(request, outcome) if isinstance(outcome, CheckpointError) else None

    def _resolve(
        self, request: WriteRequest, name: str, failure: CheckpointError
    ) -> tuple[CheckpointError | None, bool]:
        """Ask the storage how a save has ended, after the first rank has not answered (``failure``).

        Returns the failure, or None if the save is committed; and whether that is certain.
        """
        # The first rank may only be slow, or may have another worker that expects this save. It will find the reason.
        self._rounds.fail_soon(name, failure, request.timeout)
        try:
            return (None if resolve(request, _RESOLVE_S) else failure), True
        except SaveTimeoutError as error:
            return error, False

    def _is_there(self, store: bytes) -> bool:
        """Return whether the same store still answers."""
        try:
            with self._probe(_PROBE_S) as rounds:
                return rounds.store_id(_PROBE_S) == store
        except CheckpointError:
            return False

    @contextlib.contextmanager
    def _probe(self, timeout: float) -> Iterator[Rounds | _SoloRounds]:
        """Yield rounds that do not wait for a store that is gone."""
        rounds = _SoloRounds() if self._rendezvous is None else Rounds(self._rendezvous, timeout, Patience(0.0))
        try:
            yield rounds
        finally:
            rounds.close(0.0)

    def _take(self, request: WriteRequest) -> Attempt | None:
        """End a save. Return its attempt, if that is written; only the caller has it then."""
        with self._lock:
            return self._open.pop(request.save_id, None)


def located_in(request: WriteRequest, error: BaseException) -> CheckpointError:
    """Return ``error`` as an error of that save on this rank."""
    return located(error, path=request.path, rank=request.rank, step=request.step)


@contextlib.contextmanager
def _logged(doing: str, level: int = logging.WARNING) -> Iterator[None]:
    """Log errors in the block. Other ranks notice the failure themselves, and have better errors."""
    try:
        yield
    except CheckpointError as error:
        logger.log(level, "%s failed: %s", doing, error)
