"""The saves of a trainer: one thread runs their state machine, and carries out its actions.

The machine is in ``asyncckpt/protocol/trainer.py``. The thread is the listener, which receives the messages of the
worker. Other threads only post events, because an asynchronous exception may interrupt them at any step.
"""

from __future__ import annotations

import contextlib
import logging
import os
import select
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from functools import partial
from queue import Empty, SimpleQueue
from typing import Protocol, TypeAlias

from asyncckpt.errors import CheckpointError, ClosedError, WorkerDiedError, located
from asyncckpt.link.api import Committed, Failed, SessionApi, Staged
from asyncckpt.protocol import trainer as machines
from asyncckpt.protocol.trainer import TrainerAction, TrainerEvent, TrainerSaves, Wanted
from asyncckpt.threads import Flag, make_all

logger = logging.getLogger(__name__)


class SaveWork(Protocol):
    """The work for one save. The listener calls these methods, so they must not wait for long."""

    done: Flag
    """Set when the save has ended."""

    @property
    def number(self) -> int:
        """The number of the save."""

    def claim_slot(self) -> bool:
        """Take a slot if one is free. Return whether there was one."""

    def start_copy(self) -> None:
        """Tell the worker, and start a thread that copies. The thread posts ``Copied`` or ``CopyFailed``."""

    def stop_copy(self) -> None:
        """Have the copy fail soon."""

    def hand_over(self) -> Staged:
        """Mark the slot as staged. Return what the worker has to know."""

    def release(self) -> None:
        """Note that the tensors are not read any more."""

    def abandon(self, error: CheckpointError) -> None:
        """End a save that was never wanted, unless it has ended. A thread of its own calls this."""

    def on_written(self, inode: int | None, timings: Mapping[str, float]) -> None:
        """Note that the worker does not use the slot any more.

        Args:
            inode: The inode of a single file, which identifies it under its final name.
            timings: All timings so far; with ``write_s`` if the image was written.
        """

    def on_slot_free(self) -> None:
        """Note that the slot is free."""

    def on_replicated(self, failure: CheckpointError | None) -> None:
        """Note whether other hosts have copies of the image. ``failure``: the reason why they never will, or None."""

    def on_end(self, failure: CheckpointError | None, committed: Committed | None) -> None:
        """Note the end of the save. ``committed``: the worker's report of it; None: there was none."""

    def find_out(self, failure: CheckpointError) -> CheckpointError | None:
        """Find out the end of the save after its worker's death. Return the failure. A thread of its own calls this."""

    def tell_decision(self, decision: machines.Decision) -> None:
        """First rank: tell the others the decision about the save. A thread of its own calls this."""

    def report(self, error: CheckpointError, *, begun: bool) -> None:
        """Tell the other ranks that the save has failed. A thread of its own calls this."""


_Posted: TypeAlias = "TrainerEvent | tuple[Wanted | machines.Interrupted, SaveWork] | Flag"


class RunningSaves:
    """The saves for one worker."""

    def __init__(self, tell: Callable[..., None], kill: Callable[[], object]) -> None:
        """Run nothing yet.

        Args:
            tell: Calls a method of ``SessionApi`` in the worker.
            kill: Kills a worker that has stopped.
        """
        self._tell = tell
        self._kill = kill
        self._machine = TrainerSaves()
        self._work: dict[int, SaveWork] = {}
        self._committed: dict[int, Committed] = {}
        self.is_waiting = False
        """Whether a save waits for a slot. Only the listener reads this."""
        self._posted: SimpleQueue[_Posted] = SimpleQueue()
        self._taken: _Posted | None = None
        self._jobs: set[threading.Thread] = set()
        self._wake = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)

    def __del__(self) -> None:
        with contextlib.suppress(AttributeError, OSError):
            os.close(self._wake)

    def fileno(self) -> int:
        """Return the descriptor that is readable when something was posted."""
        return self._wake

    def begin(self, wanted: Wanted, work: SaveWork) -> None:
        """Begin a save. Any thread may call."""
        self.post((wanted, work))

    def interrupt(self, work: SaveWork, error: CheckpointError) -> None:
        """End a save with ``error``, unless it is staged. The save may not have begun when the exception came."""
        self.post((machines.Interrupted(work.number, error), work))

    def mark(self) -> Flag:
        """Return a flag that is set when all events that were posted before are handled."""
        handled = Flag()
        self.post(handled)
        return handled

    def post(self, posted: _Posted) -> None:
        """Post an event for the machine. Any thread may call. If this raises an exception, nothing is posted."""
        self._posted.put(posted)
        try:  # noqa: SIM105
            os.eventfd_write(self._wake, 1)
        except (OSError, MemoryError):
            pass  # the listener looks once a second anyway; contextlib.suppress would need memory, too

    def is_free(self, save: int) -> bool:
        """Return whether the slot of a save is free."""
        return self._machine.is_free(save)

    def is_idle(self) -> bool:
        """Return whether no save is under way."""
        return self._machine.is_idle() and self._posted.empty() and self._taken is None

    def wait_for_jobs(self, timeout: float) -> None:
        """Wait until all messages to other ranks are sent, at most ``timeout`` seconds."""
        deadline = time.monotonic() + timeout
        for job in [each for each in list(self._jobs) if each.ident is not None]:
            job.join(max(0.0, deadline - time.monotonic()))

    # Only the listener calls the methods below.

    def run(self, job: Callable[[], object], then: TrainerEvent | None = None) -> None:
        """Run a job on its own thread, because the job may wait for another rank or for storage.

        ``then``: an event to post after the job.
        """
        calls: SimpleQueue[Callable[[], object] | None] = SimpleQueue()
        thread = threading.Thread(target=make_all, args=(calls,), name="asyncckpt-outcome", daemon=True)
        following = [] if then is None else [partial(self.post, then)]
        for call in (job, partial(self._jobs.discard, thread), *following, None):
            calls.put(call)
        self._jobs.add(thread)
        try:
            thread.start()
        except RuntimeError:  # no thread can be started
            make_all(calls)
        except BaseException:
            self._jobs.discard(thread)
            raise

    def wait_posted(self, timeout: float) -> None:
        """Wait until something is posted, at most ``timeout`` seconds."""
        try:
            poll = select.poll()
            poll.register(self._wake, select.POLLIN)
            poll.poll(1000 * timeout)
        except OSError:
            time.sleep(timeout)

    def take_posted(self) -> None:
        """Handle the posted events. After a ``MemoryError``, the next call continues with the same event."""
        with contextlib.suppress(OSError):
            os.eventfd_read(self._wake)
        while True:
            try:
                posted = self._taken or self._posted.get_nowait()
            except Empty:
                return
            self._taken = None
            try:
                if isinstance(posted, Flag):
                    posted.set()
                elif isinstance(posted, tuple):
                    event, work = posted
                    if isinstance(event, Wanted):
                        self._work[work.number] = work
                    elif work.number not in self._work:
                        self.run(partial(work.abandon, event.error))
                        continue
                    self.handle(event)
                else:
                    self.handle(posted)
            except MemoryError:
                self._taken = posted
                raise

    def on_written(self, save: int, inode: int | None, timings: Mapping[str, float]) -> None:
        """Note that the worker does not use the slot of a save any more. See ``SaveWork.on_written``."""
        if (work := self._work.get(save)) is not None:
            work.on_written(inode, timings)
        self.handle(machines.SlotWritten(save))

    def on_ended(self, outcome: Committed | Failed) -> None:
        """Note the end of a save that the worker has reported."""
        save = outcome.save_id
        if isinstance(outcome, Failed):
            self.handle(machines.Ended(save, outcome.error))
        else:
            self._committed[save] = outcome
            self.handle(machines.Ended(save, outcome.trouble))
            self._committed.pop(save, None)

    def handle(self, event: TrainerEvent) -> None:
        """Give an event to the machine, and carry out its actions."""
        events: deque[TrainerEvent] = deque([event])
        while events:
            for action in self._machine.handle(events.popleft(), time.monotonic()):
                try:
                    self._carry_out(action, events)
                except Exception as error:  # an error of one save must not affect the actions of other saves
                    self._on_error(action, error, events)
        for save in self._work.keys() - self._machine.saves.keys():
            work = self._work[save]
            if not work.done.is_set():  # there was no memory for the machine's last actions
                self.run(partial(_end_lost, work, is_left=self._machine.is_left))
            del self._work[save]
        self.is_waiting = any(save.stage is machines.Stage.WAITING for save in self._machine.saves.values())

    def _on_error(
        self, action: TrainerAction, error: Exception, events: deque[TrainerEvent], *, again: bool = False
    ) -> None:
        match action:
            case machines.FindSlot() | machines.HandOver() | machines.AskCancel() if isinstance(
                error, (WorkerDiedError, ClosedError)
            ):
                pass  # the end of the worker is noticed soon, and its error says more
            case machines.FindSlot(save):
                events.append(machines.Interrupted(save, located(error, otherwise=CheckpointError)))
            case machines.StartCopy(save):
                events.append(machines.CopyFailed(save, located(error, otherwise=CheckpointError), told=False))
            case _ if not again:  # for example for lack of memory; each of these actions may be repeated
                try:
                    self._carry_out(action, events)
                except Exception as second:
                    self._on_error(action, second, events, again=True)
            case _:
                logger.error("the work after a save failed: please report this", exc_info=error)

    def _carry_out(self, action: TrainerAction, events: deque[TrainerEvent]) -> None:
        if isinstance(action, machines.KillWorker):
            self._kill()
            return
        save = action.save
        work = self._work[save]
        match action:
            case machines.FindSlot():
                events.append(machines.SlotTaken(save) if work.claim_slot() else machines.NoSlot(save))
            case machines.Decided(_, decision):
                self.run(partial(work.tell_decision, decision))
            case machines.StartCopy():
                work.start_copy()
            case machines.StopCopy():
                work.stop_copy()
            case machines.HandOver():
                try:
                    self._tell(SessionApi.staged, work.hand_over())
                finally:  # release last: after ``save`` returns, the save must not need the trainer any more
                    work.release()
            case machines.ReleaseTensors():
                work.release()
            case machines.AskCancel(_, reason):
                self._tell(SessionApi.cancel, save, reason)
            case machines.NoteFreeSlot():
                work.on_slot_free()
            case machines.End(_, failure):
                work.on_end(failure, self._committed.get(save))
            case machines.TellReplicated(_, failure):
                work.on_replicated(failure)
            case machines.ReportFailure(_, error, begun):
                self.run(partial(work.report, error, begun=begun))
            case machines.FindOut(_, error):
                self.run(lambda: self.post(machines.FoundOut(save, _found_out(work, error))))


def _end_lost(work: SaveWork, *, is_left: bool) -> None:
    error = CheckpointError("this process had no memory to record the end of the save")
    work.release()
    work.on_slot_free()
    work.on_replicated(error)
    work.on_end(error if is_left else _found_out(work, error), None)  # a detached worker may still write


def _found_out(work: SaveWork, error: CheckpointError) -> CheckpointError | None:
    try:
        return work.find_out(error)
    except Exception:
        logger.exception("finding the outcome of a save failed")
        return error
