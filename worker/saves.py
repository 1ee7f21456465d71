"""The saves of a worker: carry out the actions of the state machines (``asyncckpt/protocol/saves.py``).

All events go into one queue, and one thread gives them to the machines. The events are calls of the trainer,
finished writes, fields of the store that other ranks have set, results from storage, and the passing of time. Other
threads write, wait for storage, wait for the first rank, and remove old checkpoints. The other threads do not change
the state of a save, but report their results as events.

No trainer takes part in a commit. The worker watches a save from its begin, so it notices the failure of another rank
even while its own writer is stuck.
"""

from __future__ import annotations

import contextlib
import json
import logging
import math
import os
import threading
import time
from collections.abc import Callable, Iterator
from functools import partial
from queue import Empty, SimpleQueue
from typing import TYPE_CHECKING, NamedTuple

from asyncckpt.budgets import ANSWER_S, NOTICE_S, SILENCE_S, TELL_S
from asyncckpt.config import TRAINER
from asyncckpt.errors import (
    CheckpointError,
    CheckpointExistsError,
    RankFailedError,
    SaveTimeoutError,
    StorageError,
    WorkerDiedError,
    decode,
    located,
)
from asyncckpt.format.manifest import note
from asyncckpt.format.write_request import WriteRequest
from asyncckpt.link.api import Committed, Failed, Hosting, Rendezvous, Staged, TrainerApi
from asyncckpt.link.root_lock import is_locked
from asyncckpt.link.segment_store import SegmentStore
from asyncckpt.protocol import commit, replication
from asyncckpt.protocol import saves as machines
from asyncckpt.ranks.rounds import (
    COMMITTED,
    COPIES_BEGIN,
    PATIENCE_S,
    REPLICATED,
    SAVE,
    UNKNOWN,
    Rounds,
    keys_to_clear,
    opened,
    round_name,
    sealed_outcome,
)
from asyncckpt.ranks.store import ENDS, Operation, Store
from asyncckpt.ranks.store_connection import Patience
from asyncckpt.shm.slots import State
from asyncckpt.storage import parties, resolve
from asyncckpt.storage.follow_up import follow_up, remove_rest
from asyncckpt.storage.history import prune
from asyncckpt.storage.storage import OpenAttempt, Storage
from asyncckpt.storage.uploader import Uploader
from asyncckpt.threads import Flag, Pool, start, wait_until
from asyncckpt.worker.attempt import Attempt, begin_attempt
from asyncckpt.worker.durable_files import DurableFiles
from asyncckpt.worker.replica_check import ReplicaCheck
from asyncckpt.worker.staged_image import StagedImage

if TYPE_CHECKING:
    from asyncckpt.transfer.replicator import Replicator

logger = logging.getLogger(__name__)

# Interval at which the machines look at the time while a save is under way.
_TICK_S = 0.25
# Maximum number of events that the machines handle before a due tick. Waiting events come before the tick, so that a
# report that has arrived counts before a deadline.
_MOST_EVENTS = 1000
_REVOKED = (
    "the files of this save were removed while it was written: another rank has failed it, or someone removed them"
)
_NOT_KNOWN = "the first rank could not ask storage whether the save was committed"


class _Stored(NamedTuple):
    """A field that a client has set in the store of this worker."""

    key: str
    field: int
    value: bytes


class SavesOfTrainer:
    """The saves of one trainer."""

    def __init__(
        self,
        storage_for: Callable[[str], Storage],
        segment_store: SegmentStore,
        tell: Callable[..., None],
        on_end: Callable[[WriteRequest, Committed | Failed], None],
        io_threads: int,
    ) -> None:
        """Start the threads.

        Args:
            storage_for: Returns the storage of a path.
            segment_store: The memory. The saves note complete images and their checksums there.
            tell: Calls a method of ``TrainerApi`` in the trainer.
            on_end: Called when a save has ended. The function tells the trainer.
            io_threads: Number of threads that write in parallel.
        """
        self._storage_for, self._segment_store = storage_for, segment_store
        self._tell_trainer, self._on_end = tell, on_end
        self._pool = Pool(io_threads, thread_name_prefix="asyncckpt-io")
        self.uploader: Uploader | None = None
        """First rank: copies committed checkpoints to another root, if there is one."""
        self.replicator: Replicator | None = None
        """Copies the images of other hosts, if the ranks have copies on other hosts."""
        self._rendezvous: Rendezvous | None = None
        self._rounds: Rounds | None = None  # on all ranks but the first
        self._store: Store | None = None  # first rank
        self._secret = b""
        self._patience = Patience(PATIENCE_S)
        self._replicas = ReplicaCheck()
        self._durable = DurableFiles()
        self._machines = machines.WorkerSaves()
        self._events: SimpleQueue[machines.SaveEvent | _Stored] = SimpleQueue()
        self._trainer_left = Flag()
        # By the number of the save: requests of saves that may still be committed, requests of saves whose end the
        # trainer has not been told, their images, and attempts that have not ended.
        self._open: dict[int, WriteRequest] = {}
        self._untold: dict[int, WriteRequest] = {}
        self._images: dict[int, StagedImage] = {}
        self._attempts: dict[int, Attempt] = {}
        self._kept: dict[int, Attempt] = {}  # attempts of ended saves that the trainer has not been told
        self._reported: set[int] = set()  # saves of a party that were reported to the first rank
        self._is_looking = False
        self._look_s = 0.0
        self._looks_at = 0.0  # the time of the next look for parties
        self._orphan_at = math.inf  # from then on, others are not waited for if they are gone, as the trainer is
        self._to_write: SimpleQueue[StagedImage | None] = SimpleQueue()
        self._jobs: SimpleQueue[Callable[[], object] | None] = SimpleQueue()
        self._to_hear: SimpleQueue[WriteRequest | None] = SimpleQueue()
        # A separate thread removes old checkpoints, so that no commit waits for a removal.
        self._last_step: int | None = None
        self._next_step: int | None = None
        self._prunable: SimpleQueue[Callable[[], object] | None] = SimpleQueue()
        self._loop = self._started("saves", self._run)
        self._writer = self._started("writer", self._write_all)
        self._workers = [
            self._started("storage", self._work),
            self._started("prune", self._prune),
        ]
        self._pool.start(io_threads)  # start all threads before a save begins

    def _started(self, name: str, target: Callable[[], None]) -> threading.Thread:
        thread = threading.Thread(target=target, name=f"asyncckpt-{name}", daemon=True)
        start(thread)
        return thread

    def host(self, ports: tuple[int, int], address: str, secret: bytes) -> Hosting:
        """First rank: host the store that joins the ranks, see ``SessionApi.host``. Raises ``WorkerDiedError``.

        ``ports``: the first and the last port to try.
        """
        if self._store is not None:
            self._store.close()
        self._secret = secret
        try:
            self._store = Store(secret, ports, address, self._on_stored)
        except OSError as error:
            raise WorkerDiedError(f"the worker cannot host the store that joins the ranks: {error}") from error
        return Hosting(self._store.port, self._store.address)

    def join(self, rendezvous: Rendezvous, timeout: float) -> None:
        """Commit with the other ranks, from the next save on. ``timeout``: timeout in seconds of calls to the store."""
        self._rendezvous = rendezvous
        if rendezvous.rank > 0 and self._rounds is None:
            self._rounds = Rounds(rendezvous, timeout, self._patience)
            self._workers.append(self._started("hear", partial(self._hear, self._rounds)))

    def hurry(self) -> None:
        """Note that the trainer is gone. So no trainer restarts the store for its saves."""
        self._patience.end()
        self._orphan_at = time.monotonic() + NOTICE_S
        self._events.put(commit.TrainerGone())

    def restarted(self) -> None:
        """Note that the job was restarted. Stop waiting for ranks without a trainer and a worker."""
        self._events.put(commit.Restarted())

    def begin(self, request: WriteRequest) -> None:
        """Note that the trainer begins to stage a save."""
        save = request.save_id
        self._open[save] = self._untold[save] = request
        hosted = self._segment_store.hosted(request.segment)
        self._images[save] = StagedImage(request, hosted, lambda: save in self._open)
        is_copied = request.is_copied and self.replicator is not None
        others = () if request.joint is None else request.parties
        self._events.put(commit.Begun(save, request.member, request.world_size, request.timeout, is_copied, others))
        if request.rank > 0:
            self._patience.renew()
            self._to_hear.put(request)

    def staged(self, staged: Staged) -> None:
        """Note that an image is staged."""
        if (image := self._images.get(staged.save_id)) is not None:
            image.replicas = staged.replicas
            image.timings.update(staged.timings)
        self._events.put(machines.ImageStaged(staged.save_id))

    def post(self, event: machines.SaveEvent) -> None:
        """Post an event for the machines. Does not wait."""
        self._events.put(event)

    def cancel(self, save_id: int, reason: CheckpointError) -> None:
        """Cancel a save for the trainer, for ``reason``. See ``SessionApi.cancel``."""
        self._events.put(machines.ImageCancelled(save_id, reason))

    def forget(self, segment: int) -> None:
        """Forget a segment that is released."""
        self._durable.forget(segment)

    def stop_copying(self) -> None:
        """Stop copying images of other hosts. Complete copies stay."""
        if self.replicator is not None:
            self.replicator.close()

    def finish(self) -> None:
        """After the trainer's end, write exactly the staged images, including images that it has not reported."""
        staged = [save for save, each in self._images.copy().items() if each.is_marked_staged()]
        self._events.put(machines.TrainerLeft(frozenset(staged)))
        self._trainer_left.wait()

    def wait_written(self) -> bool:
        """Wait until all images are written. Return False if a write is stuck and no save waits for an outcome."""
        stuck_s = 0.0
        while self._writer.is_alive() and stuck_s < SILENCE_S:
            self._writer.join(1.0)
            stuck_s = stuck_s + 1.0 if not self._open else 0.0
        return not self._writer.is_alive()

    def unended(self) -> tuple[WriteRequest, ...]:
        """Return the saves that have not ended."""
        return tuple(self._untold.values())

    def close(self, why: str) -> None:
        """Wait until all saves have ended, then leave the other ranks. ``why``: the reason to tell the other ranks."""
        rank, ranks = (0, 1) if self._rendezvous is None else (self._rendezvous.rank, self._rendezvous.world_size)
        self._events.put(commit.Finish(rank, ranks, NOTICE_S, RankFailedError(why, rank=rank)))
        self._loop.join()
        self._jobs.put(None)
        self._workers[0].join()  # first, because the end of a save may make older ones prunable
        self._prunable.put(None)
        self._to_hear.put(None)
        if self._rounds is not None:
            self._rounds.close(ANSWER_S)  # also ends a wait for the first rank
        for thread in self._workers[1:]:
            thread.join()
        if self._rounds is not None:
            # If this fails, the first rank's worker only waits a little longer.
            with _logged("leaving", logging.INFO), self._rounds.probe(TELL_S) as rounds:
                rounds.leave()
        if self._store is not None:
            self._store.close()

    def _on_stored(self, key: str, field: int, value: bytes) -> None:
        """Note that a client has set a field of the store. Does not wait."""
        self._events.put(_Stored(key, field, value))

    # The thread of the machines

    def _run(self) -> None:
        event: machines.SaveEvent | _Stored | None
        is_closing = has_left = False
        tick_at, events = 0.0, 0
        while True:
            now = time.monotonic()
            if not (self._open or is_closing or self._machines.needs_ticks()):
                event = self._events.get()
                tick_at = time.monotonic() + _TICK_S
            elif now >= tick_at and (self._events.empty() or events >= _MOST_EVENTS):
                event = commit.Tick({} if self._store is None else self._store.heard())
                tick_at, events = now + _TICK_S, 0
                if now >= self._looks_at and not self._is_looking and self._has_joint():
                    self._is_looking = True
                    self._jobs.put(self._look_around)
            else:
                try:
                    event = self._events.get(timeout=max(0.0, tick_at - now))
                except Empty:
                    continue
                events += 1
            if isinstance(event, _Stored) and (event := self._translated(event)) is None:
                continue
            for action in self._machines.handle(event, time.monotonic()):
                if isinstance(action, commit.Leave):
                    return
                self._carry_out(action)
            is_closing = is_closing or isinstance(event, commit.Finish)
            if isinstance(event, machines.TrainerLeft):
                has_left = True
                self._trainer_left.set()
            if has_left and not self._machines.uses_slots():
                self._to_write.put(None)

    def _has_joint(self) -> bool:
        """Return whether a save with parties is under way."""
        return any(request.joint is not None for request in self._open.copy().values())

    def _translated(self, stored: _Stored) -> machines.SaveEvent | None:
        """Translate a field of the store into an event; None if the field does not concern a save."""
        key, field, value = stored
        match key.split("/")[2:]:
            case ["left"]:
                return commit.Left(field)
            case ["gone"]:
                return commit.RankGone(field, self._error_in(key, value))
            case [name, rank] if name == COPIES_BEGIN:
                begins = self._opened(key, value)
                if not isinstance(begins, CheckpointError):
                    return replication.CopiesBegin(int(begins), int(rank))
            case [name, "failure"] if (its := _round_of(name)) is not None:
                return _failed(*its, self._error_in(key, value))
            case [name, "reports"] if (its := _round_of(name)) is not None and field != ENDS:
                report = self._opened(f"{key.removesuffix('reports')}value/{field}", value)
                if isinstance(report, CheckpointError):
                    return _failed(*its, report)
                kind, save = its
                is_of_save = kind == SAVE
                return commit.Reported(save, field, report) if is_of_save else replication.CopiesReported(save, field)
        return None

    def _error_in(self, key: str, value: bytes) -> CheckpointError:
        text = self._opened(key, value)
        return text if isinstance(text, CheckpointError) else decode(text)

    def _opened(self, key: str, value: bytes) -> bytes | CheckpointError:
        """Return the value of a sealed field, or an error if no rank of this job has set it."""
        try:
            return opened(self._secret, key, value)
        except RankFailedError as error:
            return error

    def _carry_out(self, action: machines.SaveAction) -> None:
        match action:
            case machines.WriteImage(save):
                self._to_write.put(self._images[save])
            case machines.CompleteImage(save):
                self._images[save].set_slot_state(State.WRITING)
                self._images[save].complete()
            case machines.StopWriting(save, reason):
                self._images[save].stop(reason)
            case machines.HoldImage(save):
                self._segment_store.image_staged(self._images[save].request)
            case machines.FreeSlot(save, tell):
                self._free(self._images.pop(save), tell=tell)
            case machines.AnswerCancel(save, in_time, slot_free):
                self._tell_trainer(TrainerApi.cancelled, save, in_time, slot_free)
            case commit.SendReport(save, report) if self._rounds is not None:
                # In the background: a slow worker of the first rank must not delay the next write.
                self._rounds.report_soon(round_name(SAVE, save), report, self._untold[save].timeout)
            case commit.SendReport(save, report) if self._untold[save].party:
                self._jobs.put(partial(self._report_as_party, save, report))
            case commit.SendFailure(save, error) if self._untold[save].party:
                self._jobs.put(partial(self._fail_as_party, save, error))
            case commit.SendFailure(save, error) if self._rounds is not None:
                request = self._untold[save]
                self._rounds.fail_soon(round_name(SAVE, save), located_in(request, error), request.timeout)
            case commit.SendGone(why) if self._rounds is not None:
                self._rounds.gone_soon(why, ANSWER_S)
            case commit.Conclude(save, error):
                if error is not None and self._untold[save].joint is not None:  # before the attempt is removed
                    self._jobs.put(partial(self._note_failure, self._untold[save], TRAINER, error))
                self._conclude(SAVE, save, COMMITTED if error is None else located_in(self._untold[save], error))
            case commit.ConcludeUnknown(save):
                self._conclude(SAVE, save, UNKNOWN)
            case replication.ConcludeCopies(save, error):
                self._conclude(REPLICATED, save, error or COMMITTED)
            case commit.Finalize(save, reports):
                self._jobs.put(partial(self._finalize, save, reports))
            case commit.FollowUp(save):
                self._jobs.put(partial(self._follow_up, save))
            case commit.Resolve(save):
                self._jobs.put(partial(self._resolve, save))
            case commit.KeepPart(save):
                self._jobs.put(partial(self._keep, save))
            case commit.DiscardPart(save):
                self._jobs.put(partial(self._discard, save))
            case commit.Tell(save, error, trouble):
                self._open.pop(save)
                self._jobs.put(partial(self._tell, save, error, trouble))
            case (
                replication.AllowCopy()
                | replication.SayBegin()
                | replication.ReportCopies()
                | replication.FailCopies()
                | replication.AwaitCopies()
                | replication.ProtectCopies()
                | replication.TellCopies()
            ) if self.replicator is not None:
                self.replicator.carry_out(action)

    def _free(self, freed: StagedImage, *, tell: bool) -> None:
        freed.set_slot_state(State.FREE)
        if tell:
            self._tell_trainer(TrainerApi.written, freed.request.save_id, freed.inode, dict(freed.timings))

    def _conclude(self, kind: str, save: int, outcome: bytes | CheckpointError) -> None:
        """Tell the other ranks the outcome, through the store in this process."""
        if self._store is not None and self._rendezvous is not None:
            self._store.post(Operation.PUT, *sealed_outcome(self._rendezvous, round_name(kind, save), outcome))
            for key in keys_to_clear(self._rendezvous, kind, save):
                self._store.post(Operation.REMOVE, key)

    # The thread that writes

    def _write_all(self) -> None:
        while (staged := self._to_write.get()) is not None:
            with staged.hosted.used():  # the trainer may release the segment as soon as the slot is free
                self._write(staged)
        self._pool.shutdown()  # not after an error, because a thread without memory may never end, but the worker must

    def _write(self, staged: StagedImage) -> None:
        request, attempt = staged.request, None
        save = request.save_id
        os.umask(request.umask)
        try:
            try:
                attempt = begin_attempt(self._storage_for(request.path), staged, self._durable)
                checksums = attempt.write(self._pool)
                staged.check_kept()
                self._segment_store.image_written(request, checksums)
            finally:
                self._events.put(machines.LetGo(save))
            report = attempt.seal()
        except MemoryError:  # end the worker, because the event that frees the slot may be lost
            raise
        except Exception as error:
            if not isinstance(error, CheckpointError):  # otherwise the outcome of the save reports the error
                logger.exception("writing %s failed", request.path)
            if attempt is not None:
                self._attempts[save] = attempt
                # A removal begins with the files of the attempt, and ends with its folder. So check for both.
                is_revoked = isinstance(error.__cause__, FileNotFoundError) or attempt.opened.is_revoked()
                if (request.world_size > 1 or request.joint) and isinstance(error, StorageError) and is_revoked:
                    # Rank 0 removes the files of a failed save, and tells the reason, which says more than this error.
                    error = RankFailedError(_REVOKED, rank=0)
                    if request.rank > 0:
                        wait_until(lambda: save not in self._open, NOTICE_S)
            error.__traceback__ = None  # a traceback would keep the image's memory after the segment is released
            self._events.put(commit.PartFailed(save, located_in(request, error)))
        else:
            attempt.written_at = time.perf_counter()
            self._attempts[save] = attempt
            self._events.put(commit.PartWritten(save, report))

    # The thread that waits for storage

    def _finalize(self, save: int, reports: list[bytes]) -> None:
        request, error = self._untold[save], None
        try:
            decoded = [json.loads(report) for report in reports]
            if request.world_size > 1:
                ranks = decoded[: request.world_size]
                self._replicas.check(request, [report.get("replicas", {}) for report in ranks])
            self._next_step = request.step
            self._attempts[save].commit(decoded)
        except MemoryError:  # end the worker
            raise
        except Exception as failure:
            error = located_in(request, failure)
        self._events.put(commit.Finalized(save, error))

    def _follow_up(self, save: int) -> None:
        """Advance the pointer, and rename old checkpoints. Another thread removes them later."""
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
            self._events.put(commit.Resolved(save, resolve(request, SILENCE_S, inode)))
        except SaveTimeoutError as error:
            self._events.put(commit.Resolved(save, None, error))

    def _keep(self, save: int) -> None:
        attempt = self._kept[save] = self._attempts.pop(save)
        self._reported.discard(save)
        attempt.release()

    def _discard(self, save: int) -> None:
        self._reported.discard(save)
        if (attempt := self._attempts.pop(save, None)) is not None:
            attempt.discard()

    def _tell(self, save: int, error: CheckpointError | None, trouble: CheckpointError | None) -> None:
        request = self._untold.pop(save)  # before the message: after it, a process may ask for the unended saves
        attempt = self._kept.pop(save, None)
        if error is not None:
            failure = located_in(request, error)
            logger.error("saving failed: %s", failure, extra={"is_told": True})
            self._on_end(request, Failed(save, failure))
        elif attempt is not None:
            note(attempt.timings, "commit", attempt.written_at, request.called_at)
            self._on_end(request, Committed(save, attempt.timings, attempt.layout.data_bytes, trouble))
            if request.member == 0 and request.keep_last is not None and request.step is not None:
                self._prunable.put(partial(prune, os.path.dirname(request.path), request.keep_last, self._is_recent))

    def _is_recent(self, step: int) -> bool:
        """Return whether ``step`` was committed last, or is being committed, or waits for its upload."""
        return step in (self._last_step, self._next_step) or (self.uploader is not None and self.uploader.needs(step))

    # The parties

    def _report_as_party(self, save: int, report: bytes) -> None:
        """Party: let the first rank's worker see that this part is durable."""
        try:
            parties.write(self._attempts[save].opened, parties.name_of(self._untold[save].party), report)
            self._reported.add(save)
        except StorageError as error:
            self._events.put(commit.FirstLost(save, error))

    def _fail_as_party(self, save: int, error: CheckpointError) -> None:
        """Party: let the first rank's worker see that this part will not become durable.

        If another process of this party has the part of the step, the step can still succeed.
        """
        if not isinstance(error, CheckpointExistsError):
            self._note_failure(self._untold[save], self._untold[save].party, error)

    def _note_failure(self, request: WriteRequest, who: str, error: CheckpointError) -> None:
        with _logged("telling the parties of a failure", logging.INFO):
            root = os.path.dirname(request.path)
            parties.note_failure(root, who, request.attempt, located_in(request, error))

    def _look_around(self) -> None:
        """Look for the reports of parties; on a party, look for the outcome."""
        try:
            for save, attempt in self._attempts.copy().items():
                request = self._untold.get(save)
                if request is not None and request.joint is not None and save in self._open:
                    with _logged("looking for the parties of a save", logging.DEBUG):
                        for event in self._found(save, request, attempt.opened):
                            self._events.put(event)
        finally:
            self._looks_at = time.monotonic() + self._look_s
            self._is_looking = False

    def _found(self, save: int, request: WriteRequest, opened: OpenAttempt) -> Iterator[commit.CommitEvent]:
        storage, joint, root = self._storage_for(request.path), request.joint, os.path.dirname(request.path)
        self._look_s = parties.look_s(storage)
        is_orphan = time.monotonic() > self._orphan_at
        if joint is not None and joint.party and save in self._reported:
            is_there = opened.read(parties.name_of(joint.party)) is not None
            is_final = storage.is_finalized(request.path, request.attempt)
            if not is_final and (failure := parties.failure_of(root, TRAINER, request.attempt)) is not None:
                yield commit.FirstLost(save, failure)
            elif not is_final and is_orphan and parties.is_superseded(root, joint.token):
                yield commit.FirstLost(save, RankFailedError("the training was started again"))
            yield commit.PartyLooked(save, is_final, is_there)
        for number, party in enumerate(request.parties):
            if (failure := parties.failure_of(root, party, request.attempt)) is not None:
                yield commit.RankFailed(save, failure)
            elif (report := parties.received(opened, party)) is not None:
                yield commit.Reported(save, request.world_size + number, report)
            elif is_orphan and not is_locked(parties.folder_of(root, party)):
                gone = RankFailedError(f"the training has ended, and the party {party!r} has, too")
                yield commit.RankGone(request.world_size + number, gone)
        if request.parties and opened.is_revoked():
            yield commit.RankFailed(save, RankFailedError("a party has given up this step"))

    def _work(self) -> None:
        while (job := self._jobs.get()) is not None:
            job()

    # The thread that removes old checkpoints

    def _prune(self) -> None:
        while (job := self._prunable.get()) is not None:
            try:
                job()
            except Exception:
                logger.exception("the removal of old checkpoints failed: please report this")

    # The thread that waits for the first rank

    def _hear(self, rounds: Rounds) -> None:
        while (request := self._to_hear.get()) is not None:
            if (event := self._heard_of(request, rounds)) is not None:
                self._events.put(event)

    def _heard_of(self, request: WriteRequest, rounds: Rounds) -> commit.CommitEvent | None:
        """Wait for the outcome of a save; None if the save has ended here. Ask often, to show that this rank lives."""
        save = request.save_id
        try:
            outcome = rounds.hear(
                round_name(SAVE, save), commit.silence(request.world_size) / 5, lambda: save in self._open
            )
        except CheckpointError as error:
            return commit.FirstLost(save, error)
        if outcome == UNKNOWN:
            return commit.FirstLost(save, CheckpointError(_NOT_KNOWN, rank=0))
        return (
            None if outcome is None else commit.Outcome(save, outcome if isinstance(outcome, CheckpointError) else None)
        )


def _round_of(name: str) -> tuple[str, int] | None:
    """Return the kind of the round ``name``, and the number of its save; None: a round of another kind."""
    kind, _, number = name.rpartition("-")
    is_number = number.isascii() and number.isdigit() and len(number) < 19
    return (kind, int(number)) if kind in (SAVE, REPLICATED) and is_number else None


def _failed(kind: str, save: int, error: CheckpointError) -> machines.SaveEvent:
    """Return the event of a rank that has failed a round."""
    return commit.RankFailed(save, error) if kind == SAVE else replication.CopiesFailed(save, error)


def located_in(request: WriteRequest, error: BaseException) -> CheckpointError:
    """Return ``error`` as an error of the save of ``request``, with path, rank and step."""
    return located(error, path=request.path, rank=None if request.party else request.rank, step=request.step)


@contextlib.contextmanager
def _logged(doing: str, level: int = logging.WARNING) -> Iterator[None]:
    """Log errors in the block."""
    try:
        yield
    except CheckpointError as error:
        logger.log(level, "%s failed: %s", doing, error)
