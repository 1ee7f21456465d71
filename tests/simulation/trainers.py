"""The trainer of a rank with one worker: its machine, its slots, and the copies into them."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from asyncckpt.errors import CheckpointError, SaveDroppedError, WorkerDiedError

if TYPE_CHECKING:
    from simulation.saves import History, Worker

DECIDE_S, SLOT_S, LIMIT_S, STUCK_S = 30.0, 60.0, 40.0, 400.0
RELEASE_S = 5.0
"""The longest time from an interrupt until the tensors are not read any more."""


class Trainer:
    """One trainer with one worker. Another worker has another of these."""

    def __init__(self, history: History, worker: Worker) -> None:
        self._history = history
        self._worker = worker
        self.rank = worker.rank
        self._m = history.machines.trainer
        self.machine = self._m.TrainerSaves()
        self.has_lost = False  # it knows that the worker has died
        self.slots: list[int | None] = [None] * history.slots
        self.wanted: set[int] = set()
        self.taken: set[int] = set()  # saves that have, or had, slots
        self.refused: set[int] = set()  # saves for which no slot was free
        self.copying: set[int] = set()
        self.told: set[int] = set()  # saves that the worker was told of
        self.stopped: set[int] = set()
        self.failed: set[int] = set()  # saves whose copies did not succeed
        self.staged: set[int] = set()
        self.released: set[int] = set()
        self.ended: set[int] = set()
        self.replicated: set[int] = set()
        self._sent_until = 0.0
        self._ticks = False

    @property
    def is_alive(self) -> bool:
        """Whether the process lives."""
        return self._history.trainers[self.rank]

    def want(self, save: int) -> None:
        """Capture a state, and post that it wants a slot."""
        history, rule = self._history, self._history.rule
        decision = history.chosen.get(save) if self.rank > 0 and rule != "wait" else None
        self.wanted.add(save)
        where = save, 1, len(self.slots), rule, decision, history.ranks == 1
        self.give(self._m.Wanted(*where, DECIDE_S, SLOT_S, LIMIT_S, history.is_copied, save))
        if history.fails(0.05):
            history.after(history.random.uniform(0, 4), self._interrupt, save)

    def give(self, event: Any) -> None:
        """Give an event to the machine, and carry out what it returns."""
        if not self.is_alive:
            return
        events = deque([event])
        while events:
            event = events.popleft()
            if self._history.is_logged:
                print(f"{self._history.now:7.2f} trainer {self.rank}: {event}")
            for action in self.machine.handle(event, self._history.now):
                if self._history.is_logged:
                    print(f"{'':8}-> {action}")
                self._carry_out(action, events)
        if not self._ticks:
            self._ticks = True
            self._history.after(self._history.random.uniform(0.1, 1), self._tick)

    def hear(self, event: Any) -> None:
        """Hear a message of the worker. Messages are late, and come in their order."""
        history = self._history
        self._sent_until = max(self._sent_until, history.now + history.little())
        history.at(self._sent_until, self._arrive, event)

    def lose(self, error: CheckpointError) -> None:
        """Notice that the worker has died, after its messages."""
        self._sent_until = max(self._sent_until, self._history.now + self._history.little())
        self._history.at(self._sent_until, self._on_lost, error)

    def check_end(self) -> None:
        """Check that nothing is open at the end of a history."""
        history = self._history
        for save in self.wanted - self.ended:
            raise history.violation(f"the trainer of rank {self.rank} never heard of the end of save {save}")
        for save in self.wanted - self.released - self.copying:
            raise history.violation(f"the caller of save {save} on rank {self.rank} waits for ever")
        waiting = self.staged - self.replicated if history.is_copied else set()
        if waiting:
            raise history.violation(f"rank {self.rank} never heard of the copies of saves {waiting}")
        if not self.copying and not self.machine.is_idle():
            raise history.violation(f"the trainer of rank {self.rank} has something open for ever")

    def _on_lost(self, error: CheckpointError) -> None:
        if not self.has_lost:
            self.has_lost = True
            self.give(self._m.WorkerGone(error, False, 1))
            if self.is_alive and (waiting := self.wanted - self.taken - self.ended):
                raise self._history.violation(f"saves {waiting} of rank {self.rank} wait for slots of a dead worker")

    def _arrive(self, event: Any) -> None:
        if not self.has_lost:
            self.give(event)

    def _tick(self) -> None:
        if not self.is_alive or self.machine.is_idle():
            self._ticks = False
            return
        self.give(self._m.TimePassed())
        self._history.after(3.0, self._tick)

    def _interrupt(self, save: int) -> None:
        if save in self.released:
            return
        self.give(self._m.Interrupted(save, CheckpointError("interrupted")))
        self._history.after(RELEASE_S, self._check_released, save)

    def _check_released(self, save: int) -> None:
        if self.is_alive and save not in self.released:
            raise self._history.violation(f"the caller of save {save} still waits after an interrupt")

    def _carry_out(self, action: Any, events: deque[Any]) -> None:
        m, history, worker = self._m, self._history, self._worker
        match action:
            case m.FindSlot(save):
                slot = self._free_slot()
                if slot is None:
                    self.refused.add(save)
                    events.append(m.NoSlot(save))
                else:
                    self.slots[slot] = save
                    self.taken.add(save)
                    replaced = {decision.replaced for decision in history.chosen.values()}
                    if len(self.taken - self.ended - replaced) > len(self.slots):
                        raise history.violation(f"saves {self.taken - self.ended} of rank {self.rank} pile up")
                    events.append(m.SlotTaken(save))
            case m.Decided(save, decision):
                if self.rank == 0:
                    history.choose(save, decision)
            case m.StartCopy(save):
                self._start_copy(save)
            case m.StopCopy(save):
                self.stopped.add(save)
                history.after(history.random.uniform(0, 1), self._end_copy, save)
            case m.HandOver(save):
                if save in self.copying or save in self.failed or save in self.released:
                    raise history.violation(f"save {save} of rank {self.rank} is handed over, and is not whole")
                self.released.add(save)
                self.staged.add(save)
                worker.marked.add(save)
                if history.fails(0.01):
                    history.end_job(self.rank, with_host=False)
                elif not self.has_lost:
                    self._send(history.machines.ImageStaged(save))
            case m.ReleaseTensors(save):
                if save in self.copying or save in self.released:
                    raise history.violation(f"save {save} of rank {self.rank} is released, and is being read")
                self.released.add(save)
            case m.AskCancel(save, reason):
                if save in self.copying:
                    raise history.violation(f"save {save} is cancelled while it is copied")
                self._send(history.machines.ImageCancelled(save, reason))
            case m.NoteFreeSlot(save):
                if save in self.copying or (worker.is_alive and not self.has_lost and save in worker.used):
                    raise history.violation(f"the slot of save {save} of rank {self.rank} is free, and is used")
            case m.End(save, error):
                self.ended.add(save)
                if isinstance(error, SaveDroppedError):
                    history.dropped.add(save)
                    is_first = self.rank == 0 and save not in self.taken | self.refused
                    if is_first and len(self.taken - self.ended) < len(self.slots):
                        raise history.violation(f"save {save} is skipped, and a slot is free")
                history.tell(self.rank, save, error)
            case m.ReportFailure(save, error, begun):
                history.report(self.rank, save, error, begun=begun)
            case m.FindOut(save, error):
                history.ask(self.rank, save, error, lambda found: self.give(m.FoundOut(save, found)))
            case m.TellReplicated(save):
                if save in self.replicated:
                    raise history.violation(f"rank {self.rank} was told twice of the copies of save {save}")
                self.replicated.add(save)
            case m.KillWorker():
                if self.rank > 0 and worker.is_alive and worker.stopped_until < history.now - LIMIT_S:
                    raise history.violation(f"the worker of rank {self.rank} has not stopped, and is killed")
                history.kill_worker(self.rank)

    def _free_slot(self) -> int | None:
        if self._history.fails(0.05):
            return None  # somebody is reading what is in the slots
        for slot, last in enumerate(self.slots):
            if last is None or self.machine.is_free(last):
                is_used = last is not None and self._worker.is_alive and last in self._worker.used
                if (is_used and not self.has_lost) or last in self.copying:
                    raise self._history.violation(f"the slot of save {last} of rank {self.rank} is taken for another")
                return slot
        return None

    def _start_copy(self, save: int) -> None:
        history, worker = self._history, self._worker
        self.copying.add(save)
        if not worker.is_alive or history.fails(0.02):
            history.after(history.little(), self._end_copy, save)
            return
        self.told.add(save)
        worker.copying.add(save)
        worker.used.add(save)
        self._send(history.machines.Begun(save, self.rank, history.ranks, history.timeout, history.is_copied))
        if history.fails(0.03):
            history.after(STUCK_S, self._end_copy, save)
        else:
            worker.copied_at = max(worker.copied_at, history.now) + min(5.0, history.random.expovariate(0.5))
            history.at(worker.copied_at, self._end_copy, save)

    def _end_copy(self, save: int) -> None:
        if save not in self.copying or not self.is_alive:
            return
        if any(other < save for other in self.copying & self.stopped):  # one thread copies
            self._history.after(0.1, self._end_copy, save)
            return
        history = self._history
        self.copying.discard(save)
        self._worker.copying.discard(save)
        is_stopped = save in self.stopped and history.random.random() < 0.8  # else it was copied by then
        if is_stopped or save not in self.told or history.fails(0.08):
            self.failed.add(save)
            self.give(self._m.CopyFailed(save, CheckpointError("copy failed"), save in self.told))
        else:
            self.give(self._m.Copied(save))

    def _send(self, event: Any) -> None:
        """Send to the worker. Messages are late, and come in their order."""
        self._worker.sent_until = max(self._worker.sent_until, self._history.now + self._history.little() / 10)
        self._history.at(self._worker.sent_until, self._history.give, self._worker, event)


def died(rank: int) -> WorkerDiedError:
    """Return the error of a worker that has died."""
    return WorkerDiedError("the worker has died", rank=rank)


Answer = Callable[[CheckpointError | None], None]
