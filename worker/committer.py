"""The committer: carries out what the machines of the commit decide (``asyncckpt/protocol/commit.py``).

No trainer takes part. A save is expected from the moment it begins, so that the failure of another rank is noticed even
while this one is stuck in a write.

All events go into one queue, and one thread gives them to the machines: what this worker has written, what the other
ranks have set in the store, what storage has done, and time. Other threads wait for storage, for the first rank, and
for the removal of old checkpoints. They change no state of a save, and report what they have found to the queue.
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
from queue import Empty, SimpleQueue
from typing import NamedTuple

from asyncckpt.errors import (
    CheckpointError,
    RankFailedError,
    SaveTimeoutError,
    StorageError,
    UnsavableStateError,
    WorkerDiedError,
    decode,
    located,
)
from asyncckpt.format.manifest import note
from asyncckpt.format.write_request import WriteRequest
from asyncckpt.link.client import grace
from asyncckpt.link.messages import Committed, Failed, Host, Hosting, Rendezvous
from asyncckpt.protocol import commit
from asyncckpt.ranks.rounds import Rounds, keys_to_clear, opened, round_name, sealed_outcome
from asyncckpt.ranks.store import ENDS, Operation, Store
from asyncckpt.ranks.store_connection import Patience
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
# Seconds that the storage may take to say how a save has ended.
_RESOLVE_S = 30.0
# Interval at which the machines look at the time while a save is under way.
_TICK_S = 0.1
_KIND = "save"


class _Stored(NamedTuple):
    """What another process has set in the store that this worker hosts."""

    key: str
    field: int
    value: bytes


class Committer:
    """Ends the saves of one worker."""

    def __init__(self, send: Callable[[WriteRequest, Committed | Failed], None]) -> None:
        """Start the threads. ``send``: tells the trainer how a save has ended."""
        self._send = send
        self.uploader: Uploader | None = None
        """First rank: copies committed checkpoints to another root, if there is one."""
        self._rendezvous: Rendezvous | None = None
        self._rounds: Rounds | None = None  # other ranks than the first
        self._store: Store | None = None  # first rank
        self._secret = b""
        self._patience = Patience(_PATIENCE_S)
        self._replicas = ReplicaCheck()
        self._commits = commit.Commits()
        self._events: SimpleQueue[commit.CommitEvent | _Stored] = SimpleQueue()
        # By the number of the save: those that may still be committed, those whose end is not told, those written here.
        self._open: dict[int, WriteRequest] = {}
        self._untold: dict[int, WriteRequest] = {}
        self._attempts: dict[int, Attempt] = {}
        self._jobs: SimpleQueue[Callable[[], object] | None] = SimpleQueue()
        self._to_hear: SimpleQueue[WriteRequest | None] = SimpleQueue()
        # No commit waits for the removal of old checkpoints.
        self._last_step: int | None = None
        self._next_step: int | None = None
        self._prunable: SimpleQueue[Callable[[], object] | None] = SimpleQueue()
        self._threads = [
            threading.Thread(target=target, args=arguments, name=f"asyncckpt-{name}", daemon=True)
            for name, target, arguments in (
                ("commits", self._run, ()),
                ("storage", _work, (self._jobs,)),
                ("prune", _work, (self._prunable,)),
            )
        ]
        for thread in self._threads:
            start(thread)

    def host(self, request: Host) -> Hosting:
        """First rank: host the store that joins the ranks. Raises ``WorkerDiedError``."""
        if self._store is not None:
            self._store.close()
        self._secret = request.secret
        try:
            self._store = Store(request.secret, request.port, request.address, self._on_stored)
        except OSError as error:
            raise WorkerDiedError(f"the worker cannot host the store that joins the ranks: {error}") from error
        return Hosting(self._store.port, self._store.address)

    def join(self, rendezvous: Rendezvous, timeout: float) -> None:
        """Commit with the other ranks, from the next save on. ``timeout``: seconds that the store may take."""
        self._rendezvous = rendezvous
        if rendezvous.rank > 0 and self._rounds is None:
            self._rounds = Rounds(rendezvous, timeout, self._patience)
            self._threads.append(threading.Thread(target=self._hear, name="asyncckpt-hear", daemon=True))
            start(self._threads[-1])

    def hurry(self) -> None:
        """Note that the trainer is gone. Nobody starts the store again for its saves."""
        self._patience.end()
        self._events.put(commit.TrainerGone())

    def restarted(self) -> None:
        """Note that the job was started again. Ranks without trainer and worker are not waited for any more."""
        self._events.put(commit.Restarted())

    def expect(self, request: WriteRequest) -> None:
        """Note that a save has begun."""
        self._patience.renew()
        self._open[request.save_id] = self._untold[request.save_id] = request
        its = request.save_id, request.rank, request.world_size, request.timeout, grace(request.timeout)
        self._events.put(commit.Begun(*its))
        if request.rank > 0:
            self._to_hear.put(request)

    def can_succeed(self, request: WriteRequest) -> bool:
        """Return whether the save has not ended yet. It ends as soon as another rank fails it."""
        return request.save_id in self._open

    def idle(self) -> bool:
        """Return whether no save is open."""
        return not self._open

    def unended(self) -> tuple[WriteRequest, ...]:
        """Return the saves that have not ended."""
        return tuple(self._untold.values())

    def written(self, attempt: Attempt, report: bytes) -> None:
        """Note that this rank's part of a save is durable, and report it."""
        attempt.written_at = time.perf_counter()
        self._attempts[attempt.request.save_id] = attempt
        self._events.put(commit.PartWritten(attempt.request.save_id, report))

    def failed(self, request: WriteRequest, error: CheckpointError, attempt: Attempt | None = None) -> None:
        """Fail a save on all ranks, because this rank's part has failed.

        Args:
            request: The save.
            error: The reason; all ranks get it.
            attempt: The attempt to discard; None: nothing was written.
        """
        if attempt is not None:
            self._attempts[request.save_id] = attempt
        self._events.put(commit.PartFailed(request.save_id, error))

    def gone(self, why: str) -> None:
        """Tell the other ranks that this rank begins no more saves, for the reason ``why``."""
        if self._rounds is None:
            self._events.put(commit.RankGone(0, RankFailedError(why, rank=0)))
        elif self._rendezvous is not None:
            self._rounds.gone_soon(RankFailedError(why, rank=self._rendezvous.rank), _TELL_S)

    def close(self) -> None:
        """Wait until all saves have ended, then leave the other ranks."""
        others = self._rendezvous.world_size - 1 if self._rendezvous is not None and self._rounds is None else 0
        self._events.put(commit.Finish(others, _LEAVE_S))
        self._threads[0].join()
        for queue in (self._jobs, self._prunable, self._to_hear):
            queue.put(None)
        for thread in self._threads[1:]:
            thread.join()
        if self._rounds is not None:
            self._rounds.close(_TELL_S)
            # If this fails, the first rank's worker waits a little longer, and nothing is lost.
            with _logged("leaving", logging.INFO), self._probe(_TELL_LEFT_S) as rounds:
                rounds.leave()
        if self._store is not None:
            self._store.close()

    def _on_stored(self, key: str, field: int, value: bytes) -> None:
        """Note that another process has set a field of the store. Does not wait."""
        self._events.put(_Stored(key, field, value))

    # The thread of the machines

    def _run(self) -> None:
        is_closing = False
        while True:
            for event in self._next_events(_TICK_S if self._open or is_closing else None):
                is_closing = is_closing or isinstance(event, commit.Finish)
                for action in self._commits.handle(event, time.monotonic()):
                    if isinstance(action, commit.Leave):
                        return
                    self._carry_out(action)

    def _next_events(self, timeout: float | None) -> Iterator[commit.CommitEvent]:
        try:
            event = self._events.get(timeout=timeout)
        except Empty:
            event = commit.Tick({} if self._store is None else self._store.heard())
        if not isinstance(event, _Stored):
            yield event
        elif (meaning := self._translated(event)) is not None:
            yield meaning

    def _translated(self, stored: _Stored) -> commit.CommitEvent | None:
        """Return what a field of the store means; None: nothing for a commit."""
        key, field, value = stored
        match key.split("/")[2:]:
            case ["left"]:
                return commit.Left(field)
            case ["gone"]:
                return commit.RankGone(field, self._error_in(key, value))
            case [name, "failure"] if (save := _save_of(name)) is not None:
                return commit.RankFailed(save, self._error_in(key, value))
            case [name, "reports"] if (save := _save_of(name)) is not None and field != ENDS:
                try:
                    report = opened(self._secret, f"{key.removesuffix('reports')}value/{field}", value)
                except RankFailedError as error:
                    return commit.RankFailed(save, error)
                return commit.Reported(save, field, report)
        return None

    def _error_in(self, key: str, value: bytes) -> CheckpointError:
        try:
            return decode(opened(self._secret, key, value))
        except RankFailedError as error:  # no rank of this job has set it
            return error

    def _carry_out(self, action: commit.CommitAction) -> None:
        match action:
            case commit.SendReport(save, report) if self._rounds is not None:
                # In the background: a slow worker of the first rank must not delay the next write.
                self._rounds.report_soon(round_name(_KIND, save), report, self._untold[save].timeout)
            case commit.SendFailure(save, error) if self._rounds is not None:
                request = self._untold[save]
                self._rounds.fail_soon(round_name(_KIND, save), located_in(request, error), request.timeout)
            case commit.Conclude(save, error):
                self._conclude(save, error)
            case commit.Finalize(save, reports):
                self._jobs.put(partial(self._finalize, save, reports))
            case commit.FollowUp(save):
                self._jobs.put(partial(self._follow_up, save))
            case commit.Resolve(save):
                self._jobs.put(partial(self._resolve, save))
            case commit.KeepPart(save):
                self._jobs.put(self._attempts[save].release)
            case commit.DiscardPart(save):
                self._jobs.put(partial(self._discard, save))
            case commit.Tell(save, error, trouble):
                self._open.pop(save)
                self._jobs.put(partial(self._tell, save, error, trouble))

    def _conclude(self, save: int, error: CheckpointError | None) -> None:
        """Tell the other ranks the outcome, through the store in this process."""
        if self._store is None or self._rendezvous is None:
            return
        name = round_name(_KIND, save)
        failure = None if error is None else located_in(self._untold[save], error)
        self._store.post(Operation.PUT, *sealed_outcome(self._rendezvous, name, failure))
        for key in keys_to_clear(self._rendezvous, _KIND, save):
            self._store.post(Operation.REMOVE, key)

    # The thread that waits for storage

    def _finalize(self, save: int, reports: list[bytes]) -> None:
        request, error = self._untold[save], None
        try:
            decoded = [json.loads(report) for report in reports]
            self._replicas.check(request, [report.get("replicas", {}) for report in decoded])
            self._next_step = request.step
            self._attempts[save].commit(decoded)
        except MemoryError:  # the worker ends
            raise
        except Exception as failure:
            error = located_in(request, failure)
        self._events.put(commit.Finalized(save, error))

    def _follow_up(self, save: int) -> None:
        """Advance the pointer, and rename old checkpoints, which are removed later."""
        request, trouble = self._untold[save], None
        self._last_step = request.step
        try:
            if leftovers := follow_up(request):
                self._prunable.put(partial(remove_rest, leftovers))
        except StorageError as error:
            logger.error("%s", error, extra={"is_told": True})
            trouble = error
        if self.uploader is not None:
            self.uploader.begin()
        self._events.put(commit.FollowedUp(save, trouble))

    def _resolve(self, save: int) -> None:
        request, inode = self._untold[save], self._attempts[save].staged_image.inode
        try:
            self._events.put(commit.Resolved(save, resolve(request, _RESOLVE_S, inode)))
        except SaveTimeoutError as error:
            self._events.put(commit.Resolved(save, None, error))

    def _discard(self, save: int) -> None:
        if (attempt := self._attempts.pop(save, None)) is not None:
            attempt.discard()

    def _tell(self, save: int, error: CheckpointError | None, trouble: CheckpointError | None) -> None:
        request = self._untold.pop(save)  # first: after the message, somebody may ask which saves have not ended
        attempt = self._attempts.pop(save, None)
        if attempt is None or error is not None:
            failure = located_in(request, error or CheckpointError("a save has ended before it was written"))
            logger.error("saving failed: %s", failure, extra={"is_told": True})
            self._send(request, Failed(save, failure))
            return
        note(attempt.timings, "commit", attempt.written_at, request.called_at)
        self._send(request, Committed(save, attempt.timings, attempt.layout.data_bytes, trouble))
        if request.rank == 0 and request.keep_last is not None and request.step is not None:
            self._prunable.put(partial(prune, os.path.dirname(request.path), request.keep_last, self._is_recent))

    def _is_recent(self, step: int) -> bool:
        """Return whether ``step`` was committed last, or is being committed, or waits for its upload."""
        return step in (self._last_step, self._next_step) or (self.uploader is not None and self.uploader.needs(step))

    # The thread that waits for the first rank

    def _hear(self) -> None:
        while (request := self._to_hear.get()) is not None:
            if self._rounds is not None and self._rendezvous is not None:
                event = self._heard_of(request, self._rounds, commit.silence(self._rendezvous.world_size) / 5)
                if event is not None:
                    self._events.put(event)

    def _heard_of(self, request: WriteRequest, rounds: Rounds, often_s: float) -> commit.CommitEvent | None:
        """Wait for the outcome of a save; None: it has ended here. Let the first rank hear from this rank often."""
        name, store = round_name(_KIND, request.save_id), b""
        while request.save_id in self._open:
            try:
                store = store or rounds.store_id(often_s)
                outcome = rounds.outcome(name, often_s)
            except WorkerDiedError as error:
                if not store or not self._is_there(store):
                    return commit.FirstLost(request.save_id, error)
            except SaveTimeoutError:
                continue
            except CheckpointError as error:
                return commit.Outcome(request.save_id, error)
            else:
                return commit.Outcome(request.save_id, outcome if isinstance(outcome, CheckpointError) else None)
        return None

    def _is_there(self, store: bytes) -> bool:
        """Return whether the same store still answers."""
        try:
            with self._probe(_PROBE_S) as rounds:
                return rounds.store_id(_PROBE_S) == store
        except CheckpointError:
            return False

    @contextlib.contextmanager
    def _probe(self, timeout: float) -> Iterator[Rounds]:
        """Yield rounds that do not wait for a store that is gone."""
        if self._rendezvous is None:
            raise WorkerDiedError("there is no store", rank=0)
        rounds = Rounds(self._rendezvous, timeout, Patience(0.0))
        try:
            yield rounds
        finally:
            rounds.close(0.0)


def _save_of(name: str) -> int | None:
    """Return the number of the save whose commit is the round ``name``; None: it is another round."""
    kind, _, number = name.rpartition("-")
    return int(number) if kind == _KIND else None


def _work(jobs: SimpleQueue[Callable[[], object] | None]) -> None:
    """Carry out jobs until None comes."""
    while (job := jobs.get()) is not None:
        try:
            job()
        except MemoryError:  # the worker ends
            raise
        except Exception:
            logger.exception("ending a save failed")


def located_in(request: WriteRequest, error: BaseException) -> CheckpointError:
    """Return ``error`` as an error of that save on this rank."""
    return located(error, path=request.path, rank=request.rank, step=request.step)


@contextlib.contextmanager
def _logged(doing: str, level: int = logging.WARNING) -> Iterator[None]:
    """Log errors in the block."""
    try:
        yield
    except CheckpointError as error:
        logger.log(level, "%s failed: %s", doing, error)
