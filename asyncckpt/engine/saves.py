"""Carry out the saves of an engine, from each call until the save has ended on all ranks.

The thread that calls ``save`` captures the state, requests a slot, and waits. The thread that listens to the worker
decides everything else (``asyncckpt/protocol/trainer.py``). A stager thread copies. A later call raises a failure,
unless the failure was reported before.
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
from typing import Any, NamedTuple

import torch

from asyncckpt.budgets import CHECK_S
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
from asyncckpt.format.write_request import Existing, Joint, WriteRequest
from asyncckpt.interval import Advice
from asyncckpt.link.api import Committed, SessionApi, Staged
from asyncckpt.link.client import WorkerClient, longest
from asyncckpt.protocol.trainer import Copied, CopyFailed, Decision, GivenUp, Wanted
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
    """Tell listeners the events of one save, in their order.

    No event is told before the call of ``save`` is over, because a listener would take a core from the caller.

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
        """Note that the save has a plan, new or kept, with an image of ``nbytes``."""
        self._plan = "new" if is_new else "kept", time.time()
        self._about["nbytes"] = nbytes

    def on_return(self, timings: Mapping[str, float]) -> None:
        """Tell the events of the call, because it is over. From now on tell each event at once."""
        with self._lock:
            early, self._early = self._early or [], None
            if self._plan is not None:
                source, at = self._plan
                self.tell("planned", timings, timings.get("plan_s"), source=source, at=at)
            for event in early:
                self._tell(replace(event, timings={**event.timings, "stall_s": timings["stall_s"]}))

    def tell(self, phase: EventPhase, timings: Mapping[str, float], seconds: float | None, **more: Any) -> None:
        """Tell that a ``phase`` is over, after ``seconds``. Never blocks, and never raises."""
        event = Event(phase=phase, seconds=seconds, timings=dict(timings), **self._about, **more)
        with self._lock:
            if self._early is None:
                self._tell(event)
            else:
                self._early.append(event)

    def end(self, failure: BaseException | None, timings: Mapping[str, float], seconds: float) -> None:
        """Tell that the save has ended, ``seconds`` after the call."""
        error = None if failure is None else f"{type(failure).__name__}: {failure}"
        self.tell(end_of_save(failure), timings, seconds, error=error)


class Copier:
    """The threads of an engine that copy tensors into slots: a stager, and ``threads`` that help the stager.

    ``overlaps``: the caller does not wait for the copy.
    """

    def __init__(self, *, overlaps: bool) -> None:
        self.threads = copy_threads()
        self.overlaps = overlaps
        self._stager = CopyThreads(1, "asyncckpt-stager")

    def run(self, copy: Callable[[], object]) -> None:
        """Have a thread call ``copy``."""
        self._stager.run(copy)

    def wait(self) -> None:
        """Wait until no copy is running."""
        self._stager.wait()

    def close(self) -> None:
        """Wait for all copies, and end the threads."""
        self._stager.close()
        self.threads.close()


_INTERRUPTED = "the save was interrupted"


class _ToCopy(NamedTuple):
    """The work of the stager.

    ``tensors``: the tensors of ``captured``; with overlap, tensors that keep their memory. ``request_for``: returns the
    request to the worker for a ``slot``.
    """

    captured: Captured
    tensors: Sequence[torch.Tensor]
    ready: ReadyEvents
    copier: Copier
    request_for: Callable[..., WriteRequest]


class SaveOperation(SaveState):
    """A save on this rank, and the actions of the saves' thread (``SaveWork``) for ``protocol/trainer.py``.

    The caller captures the state, requests a slot, and waits for ``returned``.
    """

    request: WriteRequest
    buffer: StagingBuffer
    joint: Joint | None = None
    """The parties that save with the ranks; None: only the ranks save."""
    attempt = ""
    """The name of the attempt, the same on all ranks; "" before the capture."""
    is_posted = False
    """Whether the saves' thread knows of this save, or will in a moment."""
    is_begun = False
    """Whether the worker was told of this save."""
    is_whole = False
    """Whether the image in the slot is complete."""
    is_durable = is_replicated = False
    _slot: int | None = None
    _inode: int | None = None
    _to_copy: _ToCopy | None = None
    _is_stopped = False
    _end_of_copy: Copied | CopyFailed | None = None

    def __init__(
        self,
        path: str,
        step: int | None,
        group: Group,
        number: int,
        config: Config,
        on_outcome: Callable[[CheckpointError | None, bool], object],
        tell: Callable[[Event], object],
    ) -> None:
        """Plan nothing yet.

        Args:
            path: The absolute path of the checkpoint or file.
            step: The training step; None: the save has no step.
            group: The ranks that save together.
            number: The number of the save, the same on all ranks.
            config: The configuration.
            on_outcome: Called at the end, before the handle shows it, with the failure (None: the save is committed),
                and whether the worker knew of the save.
            tell: Called with each event. Must not block, and must not raise.
        """
        super().__init__(path, step)
        self.group, self.number = group, number
        self.returned, self.slot_free = Flag(), Flag()
        self._digests: dict[str, int] = {}
        self._config = config
        self._on_outcome = on_outcome
        self._events = EventsOfSave(tell, path=self.path, step=step, rank=group.rank)

    def stage(self, captured: Captured, retention: Retention, copier: Copier) -> None:
        """Have the captured state copied into a slot, and handed over to the worker. Return after that.

        Args:
            captured: The state. Its tensors must not change until ``staged`` is set.
            retention: The rules for other checkpoints.
            copier: The threads for the copy. With overlap this method returns when the copy begins.

        Raises:
            CheckpointError: The save has failed already.
        """
        self._planned_at = time.perf_counter()
        self.buffer = captured.buffer
        self._is_for_copies = self._config.replicas > 0 and self.buffer.plan.is_state
        tensors = held_memory(captured.tensors) if copier.overlaps else captured.tensors
        sample = captured.sample
        ready = ready_events(tensors if sample is None else [*tensors, *sample.on_devices])
        self._to_copy = _ToCopy(captured, tensors, ready, copier, self._write_request(captured, retention))
        client, group = self.buffer.client, self.group
        decision: Decision | None = None
        if self._config.when_busy != "wait" and group.rank > 0:
            decision = group.hear_decision("slot", self.number)
        try:
            self.is_posted = True
            client.saves.begin(self._wanted(decision), self)
            while not client.wait_while_it_lives(self.returned, CHECK_S):
                if self._slot is None:
                    group.check_first()
        except BaseException as error:
            self._is_stopped = True  # first, because the next line may be interrupted
            failure = CheckpointError(_INTERRUPTED) if is_interrupt(error) else located(error)
            client.saves.interrupt(self, failure)
            try:
                client.wait_while_it_lives(self.staged, self._config.timeout)
            except CheckpointError:  # the saves' thread had ended before, and never knew of this save
                self.abandon(failure)
            raise
        if isinstance(self.failure, SaveDroppedError) and group.rank > 0:
            self.buffer.fit_memory()  # request memory as the first rank does
        is_staged = self.is_whole or (copier.overlaps and self.is_begun)
        if self.failure is not None and not is_staged and not isinstance(self.failure, SaveDroppedError):
            raise self.failure

    def _wanted(self, decision: Decision | None) -> Wanted:
        config = self._config
        limit_s = longest(config.commit_timeout)
        return Wanted(
            save=self.number,
            buffer=self.buffer.number,
            slots=len(self.buffer.saves),
            rule=config.when_busy,
            decision=decision,
            alone=self.group.alone,
            decide_s=config.timeout,
            # The save waits for earlier saves, as long as each may take.
            slot_s=max(config.timeout, limit_s),
            limit_s=limit_s,
            is_copied=self._is_for_copies,
            step=self.step,
        )

    # The saves' thread calls the methods from here on.

    def claim_slot(self) -> bool:
        self._slot = self.buffer.claim_slot_for(self)
        if self._slot is None or self._to_copy is None:
            return False
        self.request = self._to_copy.request_for(slot=self._slot)
        now = time.perf_counter()
        self.timings |= {"plan_s": self._planned_at - self.begun, "slot_s": now - self._planned_at}
        return True

    def start_copy(self) -> None:
        what = self._to_copy
        if what is not None:
            note_copy(self.staged)
            self._begin(what)
            what.copier.run(partial(self._copy, what))

    def stop_copy(self) -> None:
        self._is_stopped = True

    def hand_over(self) -> Staged:
        self.buffer.slots.set(self.request.slot, State.STAGED)
        self.buffer.offer(self.request.slot)
        self.is_whole = True
        stall_s = self.timings.get("stall_s", time.perf_counter() - self.begun)  # with overlap the call may be over
        self._events.tell("staged", self.timings, self.timings["copy_s"])  # before the worker can report more
        digests, self._digests = self._digests, {}
        return Staged(self.number, {**self.timings, "stall_s": stall_s}, digests)

    def release(self) -> None:
        self._to_copy = None
        if self.is_begun and self.request.small_files:
            self.request = replace(self.request, small_files=())  # the user may keep the handle for long
        self.release_tensors()
        self.returned.set()

    def on_written(self, inode: int | None, timings: Mapping[str, float]) -> None:
        self._inode = self._inode if inode is None else inode
        for name, seconds in timings.items():
            self.timings.setdefault(name, seconds)
        if "write_s" in timings and not self.done.is_set():  # another rank may have failed the save meanwhile
            self._events.tell("written", self.timings, timings["write_s"])

    def on_slot_free(self) -> None:
        self.slot_free.set()

    def on_replicated(self, failure: CheckpointError | None) -> None:
        self.replication_failure = failure
        if failure is None:
            self.is_replicated = True
            self.timings["replicated_s"] = time.perf_counter() - self.begun
            self._events.tell("replicated", self.timings, self.timings["replicated_s"])
        self.replicated.set()

    def on_end(self, failure: CheckpointError | None, committed: Committed | None) -> None:
        self.is_durable = committed is not None or failure is None
        if self.is_begun:
            self.buffer.plan.note_end(is_committed=self.is_durable)
        if failure is not None and failure.path is None:
            failure = located(failure, path=self.path, rank=self.group.rank, step=self.step)
        try:
            with _logged("recording the end of a save"):
                self._on_outcome(failure, self.is_begun)
        finally:
            self.end(failure, None if committed is None else committed.timings)

    def end(self, error: BaseException | None, timings: Mapping[str, float] | None = None) -> None:
        self._on_outcome = _forget  # a kept handle must not keep the engine alive
        has_ended = self.done.is_set()
        super().end(error, timings)
        if not has_ended:
            self._events.end(error, self.timings, time.perf_counter() - self.begun)

    def abandon(self, error: CheckpointError) -> None:
        if not self.done.is_set():
            self.end(error)
            self.release()
            self.report(error, begun=False)

    # Other threads call the public methods from here on.

    def on_return(self) -> None:
        """Note that the call of ``save`` is over, and begin to tell events."""
        self.timings["stall_s"] = time.perf_counter() - self.begun
        self._events.on_return(self.timings)

    def find_out(self, failure: CheckpointError) -> CheckpointError | None:
        """Return the failure of the save, or None if it is committed on all ranks. This rank's worker has died."""
        failure = located(failure, path=self.path, rank=self.group.rank, step=self.step)
        tell = partial(self.group.report_failure, self.number, failure, begun=self.group.rank > 0)
        if self.group.rank > 0:
            tell()
        try:
            if self.group.is_committed(self.request, self._inode):
                remove_rest(follow_up(self.request))  # the worker may have died before it did this
                return None  # the worker died before it could report its part as written
        except (SaveTimeoutError, StorageError) as error:
            return error
        if self.group.rank == 0 and isinstance(failure, WorkerDiedError):
            tell()
        return failure

    def tell_decision(self, decision: Decision) -> None:
        with _logged("sending the slot of a save to the other ranks"):
            self.group.tell_decision("slot", self.number, decision)

    def report(self, error: CheckpointError, *, begun: bool) -> None:
        self.group.report_failure(self.number, error, begun=begun)

    def _copy(self, what: _ToCopy) -> None:
        """Copy the tensors, once. Nobody else uses the slot until the end of the copy is posted."""
        if self._end_of_copy is None:  # otherwise this call repeats one that had no memory to post the end
            no_memory = CheckpointError("the copy failed, and this process had no memory to describe the error")
            copied, self._end_of_copy = Copied(self.number), CopyFailed(self.number, no_memory, told=True)
            try:
                self._copy_tensors(what)
                self._end_of_copy = copied
            except BaseException as error:
                self._end_of_copy = CopyFailed(self.number, self._failure_of_copy(error), told=True)
        self.buffer.client.saves.post(self._end_of_copy)

    def _begin(self, what: _ToCopy) -> None:
        """Tell the worker of the save."""
        buffer, slot = self.buffer, self.request.slot
        self._events.planned(is_new=what.captured.is_new, nbytes=buffer.plan.layout.nbytes)
        # Prepare the slot first: once the save is begun, the worker may read the parts of the slot that have arrived.
        buffer.slots.take(slot, self.number)
        buffer.write_objects(slot)
        # Tell the worker that owns this memory. If it has died, this raises, and the save is not begun.
        buffer.client.tell(SessionApi.begin, self.request)
        self.is_begun = True
        self.is_copied = self.request.is_copied
        if what.copier.overlaps:
            self.returned.set()

    def _copy_tensors(self, what: _ToCopy) -> None:
        begun = time.perf_counter()
        buffer, slot, threads = self.buffer, self.request.slot, what.copier.threads
        devices = buffer.plan.devices
        buffer.copy(slot, what.tensors, what.ready, threads, self.copies_queued, devices, self._check_stopped)
        note(self.timings, "copy", begun, self.called_at)
        if what.captured.sample is not None:
            self._digests = what.captured.sample.digests(what.ready)

    def _check_stopped(self) -> None:
        if self._is_stopped:
            raise CheckpointError(_INTERRUPTED)

    def _failure_of_copy(self, error: BaseException) -> CheckpointError:
        if isinstance(error, CheckpointError):
            return error
        text = f"staging failed: {type(error).__name__}: {error}"
        failure = CheckpointError(text, path=self.path, rank=self.group.rank, step=self.step)
        failure.__cause__ = error
        return failure

    def _write_request(self, captured: Captured, retention: Retention) -> Callable[..., WriteRequest]:
        """Return a function that makes the request to the worker for a ``slot``."""
        group = self.group
        return partial(
            WriteRequest,
            save_id=self.number,
            segment=self.buffer.number,
            path=os.fspath(self.path),
            attempt=self.attempt,
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
            is_copied=self._is_for_copies,
            member=group.rank if self.joint is None else self.joint.member(group.rank),
            joint=self.joint,
        )


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
    """The saves of one engine. Any thread may call."""

    def __init__(self, config: Config) -> None:
        self._config = config
        # Saves under way, and failed saves that were not reported, the oldest first.
        self._saves: list[SaveOperation] = []
        self.failures = 0
        """The number of saves that have failed."""

    def __del__(self) -> None:
        """Note unreported failures for the exit status: the engine is garbage-collected without ``close``."""
        lost = [save for save in getattr(self, "_saves", ()) if _is_untold(save)]
        if self._config.failure != "warn" and any(not isinstance(save.failure, ClosedError) for save in lost):
            note_loss()

    def add(self, save: SaveOperation) -> None:
        """Add a save that begins. Forget saves that have ended, unless their failure is not reported."""
        self._saves = [each for each in self._saves if not each.done.is_set() or _is_untold(each)] + [save]

    def on_failure(self, failure: CheckpointError, *, is_raised: bool = False) -> None:
        """Count the ``failure`` of a save, and log it unless the call of ``save`` raises it."""
        if is_raised:
            self.failures += not isinstance(failure, SaveDroppedError)
        elif isinstance(failure, ClosedError):
            logger.warning("%s", str(failure))
            failure.is_logged = True
        elif not isinstance(failure, SaveDroppedError):
            logger.error("saving failed: %s", str(failure))  # not the error itself: its traceback keeps tensors alive
            failure.is_logged = True
            self.failures += 1

    def check_place(self, save: SaveOperation, existing: Existing) -> None:
        """Raise ``StorageError`` if this rank cannot write to the path of ``save``.

        On the first rank, raise ``CheckpointExistsError`` if ``existing`` forbids the path because something exists
        there, or because another save to that path is under way. A save that replaces the path may follow another one,
        because saves end in order. An object store is not asked here: the worker asks it while the training goes on.
        """
        path = os.fspath(save.path)
        check_writable(path, save.step)
        if save.group.rank > 0:
            return
        if existing == "refuse" and any(other.path == save.path for other in self._under_way()):
            raise CheckpointExistsError("this checkpoint is being saved already", path=path, step=save.step)
        if not is_address(path) and not storage_for(path).may_put(path, existing):
            raise exists_error(path, existing, save.step)

    def give_up(self, worker: WorkerClient | None) -> None:
        """Kill the worker and remove its unfinished attempts, at once. Do not tell the other ranks."""
        given_up = self._under_way()
        for save in given_up:
            save.is_reported = True
        if worker is not None:
            worker.saves.post(GivenUp())
            worker.kill()
        for save in given_up:
            # Only the first rank may remove the attempt of all ranks, because its worker would have committed it.
            if save.group.rank == 0:
                path = os.fspath(save.path)
                with contextlib.suppress(StorageError):
                    storage = storage_for(path)
                    storage.remove(storage.revoke(path, save.attempt))

    def wait(self, timeout: float | None) -> None:
        """Wait until all saves have ended. Raises ``SaveTimeoutError`` after ``timeout`` seconds."""
        deadline = None if timeout is None else time.monotonic() + timeout
        for save in self._under_way():
            if not save.done.wait(None if deadline is None else deadline - time.monotonic()):
                raise SaveTimeoutError(f"saves are still under way after {timeout:g} s")

    def raise_failure(self, after: SaveOperation | None = None) -> None:
        """Raise the first unreported failure, unless ``Config.failure`` is "warn".

        Args:
            after: The save of the current call. Wait until it is staged, because the caller will have no handle to wait
                with. Its own failure is left for the next call.
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


def synchronize_staging(saves: Iterable[Save], timeout: float) -> None:
    """Make work that is queued from here on wait until the tensors of ``saves`` are copied. See ``Checkpointer.guard``.

    Args:
        saves: The saves with tensors that are about to change.
        timeout: Maximum seconds for the copies.

    Raises:
        SaveTimeoutError: The copies take longer.
        CheckpointError: The step is captured in a graph, and the graph would wait for events outside the graph.
    """
    copying = [save for save in saves if not save.staged()]
    check_guarded_capture(copies_are_under_way=bool(copying))
    for save in copying:  # not only the newest save: it may have been skipped, or have failed
        save.synchronize_staging(timeout)


def check_writable(path: str, step: int | None = None) -> None:
    """Raise ``StorageError`` if this process cannot create ``path``. An object store is not asked."""
    if not is_address(path):
        try:
            storage_for(path).check_writable(path)
        except StorageError as error:
            raise located(error, step=step) from error


def _is_untold(save: SaveOperation) -> bool:
    """Return True if the save has failed, and the failure is not reported yet."""
    return not save.is_reported and save.failure is not None and not isinstance(save.failure, SaveDroppedError)


_MOST = 100


class RecentSaves:
    """Costs of the last saves on this rank. Handles of ended saves are not kept, because they hold memory."""

    def __init__(self) -> None:
        self._under_way: list[Save] = []
        self._measured: deque[tuple[float, float]] = deque(maxlen=_MOST)
        self._has_first = False  # the first save plans, and its cost says little about later saves

    def add(self, save: Save) -> None:
        """Add a save that has just been called."""
        self.settle()
        self._under_way.append(save)

    def advice(self, mtbf_s: float, restart_s: float | None) -> Advice:
        """Return advice from the medians. Raises ``NothingMeasuredError`` if no save has been committed yet."""
        self.settle()
        if not self._measured:
            raise NothingMeasuredError("no save has been committed yet: ask again after one or two")
        stalls, lags = zip(*self._measured, strict=True)
        return Advice(median(stalls), median(lags), mtbf_s, len(stalls), restart_s)

    def expected_s(self, otherwise: float) -> float:
        """Return the seconds that a save takes to be durable, behind those under way.

        ``otherwise``: the seconds of one save if none was measured.
        """
        self.settle()
        return (1 + len(self._under_way)) * max((durable for _, durable in self._measured), default=otherwise)

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
                waited = timings["slot_s"]  # for a free slot, because saves are too frequent: not a cost of a save
                self._measured.append((timings["stall_s"] - waited, timings["durable_s"] - waited))
