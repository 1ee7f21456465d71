"""One save, from the call until it has ended on all ranks.

The thread that calls copies, and a few threads help it; with overlap one of the engine's copies in its place.
"""

from __future__ import annotations

import contextlib
import logging
import os
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial

import torch

from asyncckpt.config import Config
from asyncckpt.devices.kinds import ReadyEvents, ready_events
from asyncckpt.engine.plan_selection import Captured
from asyncckpt.engine.retention import Retention
from asyncckpt.engine.save_events import EventsOfSave
from asyncckpt.errors import CheckpointError, SaveTimeoutError, WorkerDiedError, is_interrupt, unless_interrupt
from asyncckpt.events import Event
from asyncckpt.flag import Flag
from asyncckpt.format.manifest import own_version
from asyncckpt.format.segment_layout import CheckpointLayout
from asyncckpt.format.timings import note
from asyncckpt.format.write_request import WriteRequest
from asyncckpt.link.messages import Committed
from asyncckpt.planning.plan import CheckpointPlan
from asyncckpt.planning.replicas import Sample
from asyncckpt.planning.torch_file_plan import TorchFilePlan
from asyncckpt.ranks.group import Group
from asyncckpt.save_handle import SaveState
from asyncckpt.shm.slots import State
from asyncckpt.staging.buffer import StagingBuffer
from asyncckpt.staging.host_copy import CopyThreads, copy_threads
from asyncckpt.staging.slot_copy import held_memory, note_copy

logger = logging.getLogger(__name__)


class Copier:
    """The threads of an engine that copy tensors into slots: the caller's own and ``threads``; with ``overlaps`` one of
    ours in the place of the caller's, which does not wait.
    """

    def __init__(self, *, overlaps: bool) -> None:
        self.threads = copy_threads()
        self.overlaps = overlaps
        self._behind = CopyThreads(1, "asyncckpt-stager") if overlaps else None

    def run(self, copy: Callable[[], CheckpointError | None]) -> CheckpointError | None:
        """Have ``copy`` called. Returns its failure, as far as it is known."""
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
    """All that is known of a save on this rank. Its life:

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
    """The engine is aborted: no other rank is told anything."""
    is_called_off = False
    """Staging has come to nothing."""
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
        """Copy, and hand the slot over. What goes wrong is returned, and is the outcome of the save."""
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
        """Staging has come to nothing. Returns what the save fails with."""
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
        """The call is over. Until now nobody was told anything: who listens shall not keep the caller from its core."""
        self.timings["stall_s"] = time.perf_counter() - self.begun
        self._events.on_return(self.timings)

    def on_written(self, inode: int | None, timings: Mapping[str, float]) -> None:
        """The worker lets go of the slot. ``inode``: of a single file, by which it is known when it has its name."""
        self.is_written = True
        self._inode = self._inode if inode is None else inode
        for name, seconds in timings.items():
            self.timings.setdefault(name, seconds)
        if "write_s" in timings and not self.has_ended:  # another rank may have failed it meanwhile
            self._events.tell("written", self.timings, timings["write_s"])

    def on_replicated(self, failure: CheckpointError | None) -> None:
        """Other hosts have copies of its image; or, for ``failure``, they will not."""
        self.replication_failure = failure
        if failure is None:
            self.is_replicated = True
            self.timings["replicated_s"] = time.perf_counter() - self.begun
            self._events.tell("replicated", self.timings, self.timings["replicated_s"])
        self.replicated.set()

    def on_end(self, outcome: Committed | CheckpointError, *, heard: bool = True) -> None:
        """The worker's part has ended, or, not ``heard``, the worker has. First the engine learns of it, then the
        handle, on which somebody may be waiting.
        """
        self.is_durable = isinstance(outcome, Committed)
        if not isinstance(self.buffer.plan, TorchFilePlan):
            self.buffer.plan.note_end(is_committed=self.is_durable)
        self.has_ended = True
        with self._beginning:
            if not self.is_begun:  # the worker died while it was told of the save
                self._early = outcome, heard
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
        failure = outcome if isinstance(outcome, CheckpointError) else None
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
        """How a save has ended on all ranks, of which this rank's worker, dead, says nothing."""
        tell = partial(self.group.report_failure, self.number, failure, begun=True)
        if self.group.rank > 0:
            tell()
        try:
            if self.group.is_committed(self.request, self._inode):
                return None  # its part was done, and it could not say so any more
        except SaveTimeoutError as error:
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
    """This process's, which can be changed by whoever asks for it in any other way."""
    try:
        with open("/proc/self/status") as file:
            return next(int(line.split()[1], 8) for line in file if line.startswith("Umask:"))
    except unless_interrupt(OSError, StopIteration):  # a kernel before 4.7
        return 0o022
