"""Carry out the saves of an engine, from each call until the save has ended on all ranks.

The thread that calls ``save`` copies, and a few threads help it. With overlap, a thread of the engine copies in its
place. If no slot is free, ``Config.when_busy`` decides (backpressure). A failure is raised by a later call, unless the
caller was told of it before.
"""

from __future__ import annotations

import contextlib
import logging
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from statistics import median
from typing import Any

import torch

from asyncckpt.config import Config
from asyncckpt.devices.captures import check_guarded_capture
from asyncckpt.devices.kinds import ReadyEvents, ready_events
from asyncckpt.engine.plan_selection import Captured
from asyncckpt.engine.retention import Retention
from asyncckpt.errors import (
    CheckpointError,
    CheckpointExistsError,
    ClosedError,
    NothingMeasuredError,
    SaveDroppedError,
    SaveTimeoutError,
    StorageError,
    WorkerDiedError,
    is_interrupt,
    located,
    unless_interrupt,
)
from asyncckpt.events import Event, EventPhase, end_of_save
from asyncckpt.format.manifest import note, own_version
from asyncckpt.format.segment_layout import CheckpointLayout
from asyncckpt.format.write_request import Existing, WriteRequest
from asyncckpt.interval import Advice
from asyncckpt.link.client import TrackedSave, WorkerClient, longest
from asyncckpt.link.messages import Committed
from asyncckpt.planning.plan import CheckpointPlan
from asyncckpt.planning.replicas import Sample
from asyncckpt.planning.torch_file_plan import TorchFilePlan
from asyncckpt.ranks.group import Group
from asyncckpt.save_handle import Save, SaveState
from asyncckpt.shm.slots import State
from asyncckpt.staging.buffer import StagingBuffer
from asyncckpt.staging.host_copy import CopyThreads, copy_threads
from asyncckpt.staging.slot_copy import held_memory, note_copy
from asyncckpt.storage import is_address, storage_for
from asyncckpt.storage.follow_up import dated, follow_up, remove_rest
from asyncckpt.storage.storage import exists_error
from asyncckpt.supervisor import note_loss
from asyncckpt.threads import Flag

logger = logging.getLogger(__name__)


class EventsOfSave:
    """Tell the events of one save, in their order.

    No event is told before the call of ``save`` is over: a listener would take a core from the caller.

    Any thread may call.
    """

    def __init__(self, tell: Callable[[Event], object], *, path: str, step: int | None, rank: int) -> None:
        """Tell nothing yet. ``tell`` is called with each event; the other arguments are fields of an event."""
        self._tell = tell
        self._about: dict[str, Any] = {"path": path, "step": step, "rank": rank}
        self._early: list[Event] | None = []
        self._plan: tuple[str, float] | None = None
        self._lock = threading.RLock()

    def planned(self, *, is_new: bool, nbytes: int) -> None:
        """Note that the save has a plan, a new one or a kept one, and the bytes of its image."""
        self._plan = "new" if is_new else "kept", time.time()
        self._about["nbytes"] = nbytes

    def on_return(self, timings: Mapping[str, float]) -> None:
        """Tell the events of the call, which is over. From now on tell each event at once."""
        with self._lock:
            early, self._early = self._early or [], None
            if self._plan is not None:
                source, at = self._plan
                self.tell("planned", timings, timings.get("plan_s"), source=source, at=at)
            for event in early:
                self._tell(replace(event, timings={**event.timings, "stall_s": timings["stall_s"]}))

    def tell(self, phase: EventPhase, timings: Mapping[str, float], seconds: float | None, **more: Any) -> None:
        """Tell that a ``phase`` is over, after so many ``seconds``. Waits for nothing, and raises nothing."""
        event = Event(phase=phase, seconds=seconds, timings=dict(timings), **self._about, **more)
        with self._lock:
            if self._early is None:
                self._tell(event)
            else:
                self._early.append(event)

    def end(self, failure: BaseException | None, timings: Mapping[str, float], seconds: float) -> None:
        """Tell that the save has ended, so many ``seconds`` after the call."""
        error = None if failure is None else f"{type(failure).__name__}: {failure}"
        self.tell(end_of_save(failure), timings, seconds, error=error)


class Copier:
    """The threads of an engine that copy tensors into slots: the caller's own and ``threads``; with ``overlaps`` one of
    ours in the place of the caller's, which does not wait.
    """

    def __init__(self, *, overlaps: bool) -> None:
        self.threads = copy_threads()
        self.overlaps = overlaps
        self._behind = CopyThreads(1, "asyncckpt-stager") if overlaps else None

    def run(self, copy: Callable[[], CheckpointError | None]) -> CheckpointError | None:
        """Call ``copy``, or have a thread call it. Return its failure, if it is known by now."""
        if self._behind is None:
            return copy()
        self._behind.run(copy)
        return None

    def wait(self) -> None:
        """Return when nothing is being copied."""
        if self._behind is not None:
            self._behind.wait()

    def close(self) -> None:
        """Wait for all copies, and end the threads."""
        if self._behind is not None:
            self._behind.close()
        self.threads.close()


class SaveOperation(SaveState):
    """A save on this rank. Its life:

        planned      the plan that fits the state is found or made, and the tensors are captured
        staging      a slot is its own, the worker was told of it (``is_begun``), and the tensors are being copied
        staged       all is copied (``is_whole``): the caller may change its tensors, and the slot is the worker's
        written      the worker lets go of the slot (``is_written``)
        committed    on all ranks alike; or failed, or withdrawn, which may happen at any time before (``has_ended``)

    Its slot is free when the worker has let go of it, nobody copies into it (``copied``), and it has ended, or is only
    waiting for an end that is known (``is_withdrawn``).
    """

    request: WriteRequest
    buffer: StagingBuffer
    begun_at: float
    is_begun = is_whole = is_written = is_withdrawn = is_durable = is_replicated = has_ended = False
    is_given_up = False
    """The engine is aborted, and tells other ranks nothing."""
    is_called_off = False
    """Staging has failed."""
    _inode: int | None = None
    _early: tuple[Committed | CheckpointError, bool] | None = None

    def __init__(
        self,
        path: str,
        step: int | None,
        group: Group,
        number: int,
        config: Config,
        on_outcome: Callable[[CheckpointError | None], object],
        tell: Callable[[Event], object],
    ) -> None:
        """Plan nothing yet.

        Args:
            path: Where the checkpoint, or the file, is to stand, absolute.
            step: The training step it is of, if it is of one.
            group: The ranks that save together.
            number: Of this save, the same on all ranks.
            config: ``timeout`` and ``commit_timeout`` are taken from it.
            on_outcome: Told, of a save that the worker was told of, what it failed with (None: it is committed),
                before the handle is.
            tell: Given what becomes of it. Waits for nothing, and raises nothing.
        """
        super().__init__(path, step)
        self.group, self.number = group, number
        self.copied = Flag()
        self._config = config
        self._on_outcome = on_outcome
        self._events = EventsOfSave(tell, path=self.path, step=step, rank=group.rank)
        self._beginning = threading.Lock()
        self._may_copy = threading.Lock()

    def stage(self, captured: Captured, slot: int, retention: Retention, copier: Copier) -> None:
        """Copy the state into a slot, which is its own from now on, and hand that over to the worker.

        Args:
            captured: What is to be staged. Its tensors must stay as they are until ``staged`` is set.
            slot: Of its staging buffer, nobody's until now.
            retention: What is to become of other checkpoints.
            copier: Who copies. With overlap this returns before that is done.

        Raises:
            CheckpointError: What the save fails with, unless the copy overlaps.
        """
        self.buffer = captured.buffer
        self._events.planned(is_new=captured.is_new, nbytes=self.buffer.plan.layout.nbytes)
        self.request = self._write_request(slot, captured, retention)
        tensors = held_memory(captured.tensors) if copier.overlaps else captured.tensors
        sample = captured.sample
        ready = ready_events([*tensors, *sample.on_devices] if sample.on_devices else tensors)
        plan = self.buffer.plan
        devices = plan.fingerprint.devices if isinstance(plan, CheckpointPlan) else None
        # In this order: from when the save is begun, the worker may read of the slot what it is told has arrived.
        self.buffer.slots.take(slot, self.number)
        self.buffer.write_objects(slot)
        try:
            self.buffer.begin(slot, self)
            self._begin()
            if copier.overlaps:
                note_copy(self.copied)
            failure = copier.run(partial(self._copy, tensors, ready, devices, copier.threads, sample))
        except BaseException as error:  # an interrupt: nobody else would ever call it off
            if not self.copied.is_set() and (not copier.overlaps or self._may_copy.acquire(blocking=False)):
                self._call_off(error)
            else:  # the stager copies: the caller gets no handle, and could not wait for that before it goes on
                self.copied.wait(self._config.timeout)
            raise
        if failure is not None:
            raise failure

    def _write_request(self, slot: int, captured: Captured, retention: Retention) -> WriteRequest:
        group = self.group
        return WriteRequest(
            save_id=self.number,
            segment=self.buffer.number,
            slot=slot,
            path=os.fspath(self.path),
            attempt=group.attempt(self.number),
            step=self.step,
            rank=group.rank,
            world_size=group.world_size,
            existing=retention.existing,
            keep_last=retention.keep_last,
            keep=group.rank == 0 and retention.keep is not None and retention.keep(),
            timeout=self._config.commit_timeout,
            pickle_bytes=captured.pickle_bytes,
            small_files=captured.small_files,
            umask=_umask(),
            since=retention.since,
            began=retention.began,
            version=own_version(),
            plan=self.buffer.plan.number,
            upload=retention.upload() if group.rank == 0 and retention.upload is not None else None,
            pointer=dated(retention.pointer, self.called_at) if group.rank == 0 and retention.pointer else None,
            rotation=retention.rotation if group.rank == 0 else None,
            called_at=self.called_at,
            most_links=self._config.rewrite_unchanged_every if self._config.link_unchanged else 0,
            refuses_differing=self._config.differing_replicas == "raise",
            is_copied=self._config.replicas > 0 and isinstance(self.buffer.layout, CheckpointLayout),
        )

    def _begin(self) -> None:
        # Of the worker whose memory this is: should it have died since, this says so, and nothing has begun.
        self.buffer.client.begin(self)
        self.is_copied = self.request.is_copied
        self.request = replace(self.request, small_files=())  # a handle may be kept for long
        with self._beginning:
            self.is_begun, early = True, self._early
        if early is not None:
            self._finish(*early)

    def _copy(
        self,
        tensors: Sequence[torch.Tensor],
        ready: ReadyEvents,
        devices: object | None,
        threads: CopyThreads,
        sample: Sample,
    ) -> CheckpointError | None:
        """Copy, and hand the slot over to the worker. Return the failure of the save, if there is one."""
        begun = time.perf_counter()
        buffer, slot = self.buffer, self.request.slot
        if not self._may_copy.acquire(blocking=False):
            return None  # the call was interrupted, and has called it off
        try:
            buffer.copy(slot, tensors, ready, threads, self.copies_queued, devices)
            note(self.timings, "copy", begun, self.called_at)
            buffer.slots.set(slot, State.STAGED)
            buffer.offer(slot)
            buffer.client.saves.on_copied(self)
            self.is_whole = True
            stall_s = self.timings.get("stall_s", time.perf_counter() - self.begun)  # it may have returned already
            self._events.tell("staged", self.timings, self.timings["copy_s"])  # before the worker can say more
            buffer.client.staged(self.number, {**self.timings, "stall_s": stall_s}, sample.digests(ready))
            self.release_tensors()
        except BaseException as error:
            failure = self._call_off(error)
            if is_interrupt(error):
                raise
            return failure
        return None

    def _call_off(self, error: BaseException) -> CheckpointError:
        """End a save whose staging has failed with ``error``. Return the failure of the save."""
        failure = error if isinstance(error, CheckpointError) else None
        if failure is None:
            text = f"staging failed: {type(error).__name__}: {error}"
            failure = CheckpointError(text, path=self.path, rank=self.group.rank, step=self.step)
            if not is_interrupt(error):  # that is raised, and would keep all that its traceback has seen
                failure.__cause__ = error
        client = self.buffer.client
        client.saves.on_copied(self)
        self.release_tensors()
        self.is_called_off = True
        # An interrupt matters more to the caller than what goes wrong here.
        with contextlib.suppress(*((CheckpointError,) if is_interrupt(error) else ())):
            if client.alive and not client.cancel(self, failure, self._config.timeout):
                self.is_called_off = not self.is_whole
                if not self.is_whole:  # the worker was never told of it, and nobody else will end it
                    client.saves.discard(self)
                    self.is_written = self.has_ended = True
        return failure

    def on_return(self) -> None:
        """Note that the call of ``save`` is over. Events are told from now on."""
        self.timings["stall_s"] = time.perf_counter() - self.begun
        self._events.on_return(self.timings)

    def on_written(self, inode: int | None, timings: Mapping[str, float]) -> None:
        """Note that the worker lets go of the slot. ``inode``: of a single file, known by it under its final name."""
        self.is_written = True
        self._inode = self._inode if inode is None else inode
        for name, seconds in timings.items():
            self.timings.setdefault(name, seconds)
        if "write_s" in timings and not self.has_ended:  # another rank may have failed it meanwhile
            self._events.tell("written", self.timings, timings["write_s"])

    def on_replicated(self, failure: CheckpointError | None) -> None:
        """Note that other hosts have copies of the image, or, with ``failure``, that they will not have any."""
        self.replication_failure = failure
        if failure is None:
            self.is_replicated = True
            self.timings["replicated_s"] = time.perf_counter() - self.begun
            self._events.tell("replicated", self.timings, self.timings["replicated_s"])
        self.replicated.set()

    def on_end(self, outcome: Committed | CheckpointError, *, heard: bool = True) -> None:
        """End the save. The engine is told first, then the handle, because somebody may wait for the handle.

        ``heard``: the worker has said so; else the worker is gone.
        """
        self.is_durable = isinstance(outcome, Committed)
        if not isinstance(self.buffer.plan, TorchFilePlan):
            self.buffer.plan.note_end(is_committed=self.is_durable)
        self.has_ended = True
        with self._beginning:
            if not self.is_begun:  # the worker died while it was told of the save
                self._early = self._early or (outcome, heard)
                return
        self._finish(outcome, heard)

    def end(self, error: BaseException | None, timings: Mapping[str, float] | None = None) -> None:
        self._on_outcome = _forget  # a handle that is kept shall not keep the engine
        has_ended = self.done.is_set()
        if not self.is_begun or self.copied.is_set():  # else whoever copies does that when it stops
            self.release_tensors()
        super().end(error, timings)
        if not has_ended:
            self._events.end(error, self.timings, time.perf_counter() - self.begun)

    def _finish(self, outcome: Committed | CheckpointError, heard: bool) -> None:
        failure = outcome if isinstance(outcome, CheckpointError) else outcome.trouble
        try:
            # What is raised here is for the log: whoever calls has other saves to end.
            if failure is not None and not heard and not self.is_given_up:
                with _logged("finding out how a save has ended"):
                    failure = self._resolve(failure)
            with _logged("taking note of the end of a save"):
                self._on_outcome(failure)
        finally:
            self.end(failure, outcome.timings if isinstance(outcome, Committed) else None)

    def _resolve(self, failure: CheckpointError) -> CheckpointError | None:
        """Find out how the save has ended on all ranks, as this rank's worker is dead."""
        tell = partial(self.group.report_failure, self.number, failure, begun=True)
        if self.group.rank > 0:
            tell()
        try:
            if self.group.is_committed(self.request, self._inode):
                remove_rest(follow_up(self.request))  # the worker may have died just before
                return None  # its part was done, and it could not say so any more
        except (SaveTimeoutError, StorageError) as error:
            return error
        if self.group.rank == 0 and isinstance(failure, WorkerDiedError):
            tell()
        return failure


@contextlib.contextmanager
def _logged(doing: str) -> Iterator[None]:
    try:
        yield
    except Exception:
        logger.exception("%s failed", doing)


def _forget(*_: object) -> None:
    pass


def _umask() -> int:
    """Return the umask of this process. ``os.umask`` would change it to read it."""
    try:
        with open("/proc/self/status") as file:
            return next(int(line.split()[1], 8) for line in file if line.startswith("Umask:"))
    except unless_interrupt(OSError, StopIteration):  # a kernel before 4.7
        return 0o022


class Saves:
    """The saves of one engine. Any thread may call, but only one at a time takes a slot."""

    def __init__(self, config: Config) -> None:
        self._config = config
        # Those under way, and those that failed and nobody was told of, the oldest first.
        self._saves: list[SaveOperation] = []
        self.failures = 0
        """The number of saves that have failed."""

    def __del__(self) -> None:
        """Note failures that no call has raised, for the status of the process: the engine was dropped, not closed."""
        lost = [save for save in getattr(self, "_saves", ()) if _is_untold(save)]
        if self._config.failure != "warn" and any(not isinstance(save.failure, ClosedError) for save in lost):
            note_loss()

    def add(self, save: SaveOperation) -> None:
        """Add a save, which is under way until it has ended."""
        self._saves = [each for each in self._saves if not each.done.is_set() or _is_untold(each)] + [save]

    def on_failure(self, failure: BaseException) -> None:
        """Count and log the ``failure`` of a save."""
        if isinstance(failure, ClosedError):
            logger.warning("%s", str(failure))
        elif not isinstance(failure, SaveDroppedError):
            logger.error("saving failed: %s", str(failure))  # not itself: it holds on to the memory it saw
            self.failures += 1

    def check_place(self, save: SaveOperation, existing: Existing) -> None:
        """Raise ``StorageError`` if this rank cannot write where ``save`` goes. On the first rank, raise
        ``CheckpointExistsError`` where it may not go: because of what stands there, or of a save to there that is under
        way. One that replaces what is there comes after that: saves end in order. An object store is not asked: the
        worker does that, while the training goes on.
        """
        path = os.fspath(save.path)
        check_writable(path, save.step)
        if save.group.rank > 0:
            return
        if existing == "refuse" and any(other.path == save.path for other in self._under_way()):
            raise CheckpointExistsError("this checkpoint is being saved already", path=path, step=save.step)
        if not is_address(path) and not storage_for(path).may_put(path, existing):
            raise exists_error(path, existing, save.step)

    def take_slot(self, save: SaveOperation, buffer: StagingBuffer) -> int | None:
        """Find a slot of ``buffer`` to stage ``save`` in. None where the save was dropped instead: then it has ended.

        Raises ``SaveTimeoutError`` where none becomes free in time, ``WorkerDiedError`` where nobody would free one.
        """
        if self._config.when_busy != "wait" and self._is_dropped(save, buffer):
            return None
        buffer.fit_memory()
        slot: int | None = None

        def claimed() -> bool:
            nonlocal slot
            # Where the worker is gone all saves have ended; but one that was left is writing what is in their slots.
            if slot is None and buffer.client.alive:
                slot = buffer.claim_slot()
            return slot is not None

        # Saves that are in time are waited for, as long as each may take.
        limit = max(self._config.timeout, longest(self._config.commit_timeout))
        buffer.client.wait_for(claimed, limit, "waiting for a free slot", save.group.check_first)
        return slot

    def give_up(self, worker: WorkerClient | None) -> None:
        """Kill the worker and remove its unfinished attempts, at once. Tell the other ranks nothing."""
        given_up = self._under_way()
        for save in given_up:
            save.is_given_up = save.is_reported = True
        if worker is not None:
            worker.kill()
        for save in given_up:
            # Only the first rank, whose worker would have finalized the save, may remove what is of all ranks.
            if save.group.rank == 0:
                path = os.fspath(save.path)
                with contextlib.suppress(StorageError):
                    storage = storage_for(path)
                    storage.remove(storage.revoke(path, save.group.attempt(save.number)))

    def wait(self, timeout: float | None) -> None:
        """Wait until all saves have ended. Raises ``SaveTimeoutError`` after ``timeout`` seconds."""
        deadline = None if timeout is None else time.monotonic() + timeout
        for save in self._under_way():
            if not save.done.wait(None if deadline is None else deadline - time.monotonic()):
                raise SaveTimeoutError(f"saves are still under way after {timeout:g} s")

    def raise_failure(self, after: SaveOperation | None = None) -> None:
        """Raise the first failure nobody was told of, unless a line in the log is enough.

        Args:
            after: A save that was called just now. It has to be staged first, as its caller gets no handle by which to
                wait for that; and a failure of it is for the next call.
        """
        untold = [save for save in self._saves if save is not after and _is_untold(save)]
        for save in untold:
            save.is_reported = True
        if untold and untold[0].failure is not None and self._config.failure != "warn":
            if after is not None and not after.staged.wait(self._config.timeout):
                logger.error("the tensors of %s are still being copied", after.path)
            raise untold[0].failure

    def _under_way(self) -> list[SaveOperation]:
        return [save for save in self._saves if not save.done.is_set()]

    def _is_dropped(self, save: SaveOperation, buffer: StagingBuffer) -> bool:
        """Make room as ``when_busy`` says. The first rank decides for all. Returns whether ``save`` was skipped."""
        group = save.group
        skips, replaced = group.follow_first("slot", save.number, lambda: self._decide(save, buffer))
        if skips:
            buffer.fit_memory()
            dropped = "skipped: all slots were being written"
            save.is_reported = True
            save.end(SaveDroppedError(dropped, path=save.path, rank=group.rank, step=save.step))
        elif replaced is not None and group.rank > 0:
            self._drop(replaced, save, buffer)
        return skips

    def _decide(self, save: SaveOperation, buffer: StagingBuffer) -> tuple[bool, int | None]:
        """First rank: decide whether to skip ``save``, and which save it replaces."""
        skip = self._config.when_busy == "skip"
        # Until a save has ended, some rank may not have a free slot yet.
        under_way = [other for other in buffer.saves if other is not None and not other.has_ended]
        if len(under_way) < len(buffer.saves):
            # Unless all but those under way are being read: then another is free soon.
            return skip and buffer.claim_slot() is None, None
        if skip:
            return True, None
        for other in sorted(under_way, key=lambda other: -other.request.save_id):
            if other.is_written or not other.copied.is_set():
                continue  # it is about to be committed, or is being copied
            if buffer.client.cancel(other, _replaced(other, save), self._config.timeout):
                return False, other.request.save_id
        if len(under_way) > 1 and not save.group.alone:
            # Written here, but not yet everywhere. The oldest is spared, or slow ranks would never finish any.
            newest = max(under_way, key=lambda other: other.request.save_id)
            newest.is_withdrawn = True
            save.group.report_failure(newest.request.save_id, _replaced(newest, save), begun=True)
            return False, newest.request.save_id
        return False, None

    def _drop(self, replaced: int, save: SaveOperation, buffer: StagingBuffer) -> None:
        """Drop the save of a number, as the first rank has done. Here it may be under way, in vain."""
        timeout = self._config.timeout
        for other in filter(None, buffer.saves):
            if other.request.save_id != replaced:
                continue
            other.is_withdrawn = True
            if other.is_written:
                continue
            if not other.copied.wait(timeout):
                raise SaveTimeoutError(
                    f"the copy of what is to be replaced has taken {timeout:g} s so far",
                    path=other.request.path,
                    rank=other.request.rank,
                    step=other.request.step,
                )
            buffer.client.cancel(other, _replaced(other, save), timeout)


def synchronize_staging(saves: Iterable[Save], timeout: float) -> None:
    """Have whatever is queued from here on wait until the tensors of ``saves`` are copied, as before an optimizer step.

    Args:
        saves: Those whose tensors are about to change.
        timeout: Seconds that the copies may take.

    Raises:
        SaveTimeoutError: The copies take longer.
        CheckpointError: The step is captured in a graph, which would wait for events from outside of it.
    """
    copying = [save for save in saves if not save.staged()]
    check_guarded_capture(copies_are_under_way=bool(copying))
    for save in copying:  # not the newest alone: that may have been skipped, or refused
        save.synchronize_staging(timeout)


def check_writable(path: str, step: int | None = None) -> None:
    """Raise ``StorageError`` if this process cannot create ``path``. An object store is not asked."""
    if not is_address(path):
        try:
            storage_for(path).check_writable(path)
        except StorageError as error:
            raise located(error, step=step) from error


def _is_untold(save: SaveOperation) -> bool:
    """Return True if the save has failed, and nobody was told."""
    return not save.is_reported and save.failure is not None and not isinstance(save.failure, SaveDroppedError)


def _replaced(other: TrackedSave, save: SaveOperation) -> SaveDroppedError:
    return SaveDroppedError(
        f"replaced by the newer save of step {save.step} before it was written",
        path=other.request.path,
        rank=other.request.rank,
        step=other.request.step,
    )


_MOST = 100


class RecentSaves:
    """The costs of the last saves on this rank. No handle of an ended save is kept, because handles hold memory."""

    def __init__(self) -> None:
        self._under_way: list[Save] = []
        self._measured: deque[tuple[float, float]] = deque(maxlen=_MOST)
        self._has_first = False  # the first of all plans, and says little of the others

    def add(self, save: Save) -> None:
        """Add a save that was called just now."""
        self.settle()
        self._under_way.append(save)

    def advice(self, mtbf_s: float, restart_s: float | None) -> Advice:
        """Return advice from the medians. Raises ``NothingMeasuredError`` if no save has been committed yet."""
        self.settle()
        if not self._measured:
            raise NothingMeasuredError("no save has been committed yet: ask again after one or two")
        stalls, lags = zip(*self._measured, strict=True)
        return Advice(median(stalls), median(lags), mtbf_s, len(stalls), restart_s)

    def settle(self) -> None:
        """Measure the saves that have ended."""
        ended = [save for save in self._under_way if save.done()]
        self._under_way = [save for save in self._under_way if save not in ended]
        for save in ended:
            timings = save.timings
            if save.failure is None and {"stall_s", "durable_s", "slot_s"} <= timings.keys():
                if len(self._measured) == 1 and not self._has_first:
                    self._has_first = True
                    self._measured.clear()
                waited = timings["slot_s"]  # for storage, as saves came too often: it is no cost of a save
                self._measured.append((timings["stall_s"] - waited, timings["durable_s"] - waited))
