"""The saves of several ranks, under a seeded scheduler: one seed is one history, so every failure can be replayed.

A history has 1 to 8 ranks, each with a trainer and a worker, and 1 to 4 saves that may overlap. Both run the machines
of ``asyncckpt/protocol``; copies into slots (``trainers.py``), copies on other hosts (``copies.py``), writers,
connections and storage are modelled. Faults: trainers, workers and whole hosts die; processes stop and go on, or do
not; copies fail or are stuck; callers are interrupted; a connection is cut for a while, and then messages are late,
come twice, or are lost; a rank takes the first one for lost although it lives; storage is late, fails, and fails after
it did the work. After each event the checker looks at what must always hold, and at the end at whether all came to an
end.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Callable
from functools import partial
from types import ModuleType
from typing import Any

from asyncckpt.errors import (
    CheckpointError,
    RankFailedError,
    SaveDroppedError,
    SaveTimeoutError,
    StorageError,
    WorkerDiedError,
)
from asyncckpt.protocol import commit, replication, saves, trainer
from simulation.copies import Copier
from simulation.schedule import Schedule, Violation
from simulation.trainers import LIMIT_S, SLOT_S, Answer, Trainer, died

TIMEOUT_S, RESOLVE_S, LEAVE_S = 20.0, 8.0, 5.0
GRACE_S = commit.grace(TIMEOUT_S)
STALLED_S = 40.0
"""The longest time that storage takes."""
BUDGET_S = 2 * (TIMEOUT_S + GRACE_S + RESOLVE_S) + 3 * STALLED_S + SLOT_S + LIMIT_S
"""The longest time from the beginning of a save to its end, with three saves before it."""


_END_S = 600.0


class _Unknown(SaveTimeoutError):
    """Nobody can say how a save has ended."""


class Machines:
    """The classes of ``asyncckpt.protocol``, or mutated copies. ``trainer``: those of ``trainer.py``."""

    def __init__(self, *modules: ModuleType, trainer: ModuleType | None = None) -> None:
        """Take the classes of ``modules``."""
        for module in modules:
            self.__dict__.update({name: thing for name, thing in vars(module).items() if isinstance(thing, type)})
        if trainer is not None:
            self.trainer = Machines(trainer)

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(name)


class Worker:
    def __init__(self, history: History, rank: int) -> None:
        self.rank = rank
        self.machine = history.machines.WorkerSaves()
        self.is_alive = True
        self.stopped_until = 0.0
        self.waiting: list[tuple[Callable[..., None], tuple[Any, ...]]] = []  # what it does when it goes on
        self.has_left = False
        self.heard_at = history.now
        self.ticks = False
        self.resolves: set[int] = set()
        # First rank: what it has concluded; what has arrived there.
        self.outcomes: dict[int, CheckpointError | None] = {}
        self.reports: defaultdict[int, set[int]] = defaultdict(set)
        self.gone: dict[int, CheckpointError] = {}
        self.left: set[int] = set()
        self.restarted_at: float | None = None
        self.closed_at = 0.0
        # The writer: what it writes, what it was told, and what was done with the slots.
        self.sent_until = 0.0  # messages of its trainer arrive in their order
        self.job: int | None = None
        self.reads: int | None = None  # of it, while it reads the slot
        self.complete: set[int] = set()
        self.stopped: dict[int, CheckpointError] = {}
        self.copied_at = 0.0  # when the trainer has copied the newest save
        self.cancelled: set[int] = set()
        self.marked: set[int] = set()  # saves whose slots are marked as staged
        self.copying: set[int] = set()  # saves whose slots the trainer copies into
        self.used: set[int] = set()  # saves whose slots are in use
        self.written: list[int] = []
        self.said: set[int] = set()  # saves whose end it has told
        # Copies on other hosts.
        self.images: set[int] = set()  # saves whose images are, or were, complete here
        self.copier = Copier(history, self, history.sources(rank))
        # First rank: what the others have said of their copies.
        self.copies_begin: dict[int, int] = {}  # by rank: the first save that it may have copies of
        self.gone_copies: set[int] = set()
        self.copy_reports: defaultdict[int, set[int]] = defaultdict(set)


class History(Schedule):
    """One history of the commit of some saves."""

    def __init__(self, seed: int, machines: Machines | None = None, *, log: bool = False) -> None:
        """Plan the faults. ``machines``: the default is the product's. ``log``: print each event."""
        super().__init__(seed, _END_S)
        machines = machines or _MACHINES
        self.machines, self.is_logged = machines, log
        self.ranks = min(self.random.randint(1, 8), self.random.randint(1, 8))
        self.saves = self.random.randint(1, 4)
        self.is_copied = self.random.random() < 0.3
        self._copies = self.random.randint(1, 2)  # number of hosts with a copy of each image
        self.workers = [Worker(self, rank) for rank in range(self.ranks)]
        self.trainers = [True] * self.ranks
        self.calls: list[deque[int]] = [deque() for _ in range(self.ranks)]  # a trainer calls from one thread
        self.slots = self.random.randint(1, 2)
        self.rule = self.random.choice(("wait", "wait", "skip", "latest"))
        self._workers_at_first = [*self.workers]
        self.clients = [Trainer(self, worker) for worker in self.workers]
        self.clients_before: list[Trainer] = []
        self.chosen: dict[int, Any] = {}  # by save: what the first rank decides if no slot is free
        self.choosers: defaultdict[int, list[Callable[[], None]]] = defaultdict(list)
        self.dropped: set[int] = set()
        self.timeout = TIMEOUT_S
        self.cut_until = [0.0] * self.ranks  # until when a rank cannot reach the first
        self.sent_until = [0.0] * self.ranks  # messages of a rank to the first arrive in their order
        self.decisions: dict[int, str] = {}  # of storage, by save: "final" or "revoked"
        self.parts: defaultdict[int, dict[int, Worker]] = defaultdict(dict)  # by save: ranks with durable files
        self.begun: dict[tuple[int, int], float] = {}  # by rank and save: when it began
        self.told: dict[tuple[int, int], bool | None] = {}  # by rank and save; None: nobody can say
        self.cancelled: set[int] = set()
        self.told_at: dict[tuple[int, int], float] = {}
        self.untold: dict[int, CheckpointError | None] = {}  # what the first rank's trainer has to tell the others
        self.is_over = False  # no more faults
        self.replicated: tuple[int, list[Worker]] = (
            0,
            [],
        )  # the last save that is replicated, and the workers with copies
        self.copies_told: dict[tuple[int, int], CheckpointError | None] = {}  # by rank and save
        for worker in self.workers:
            worker.copier.begin()
        self._plan()

    def run(self) -> None:
        """Carry out the history. Raises ``Violation``."""
        for _ in self.happen():
            self._check()
        for rank, worker in enumerate(self.workers):
            if not worker.is_alive:
                continue
            copier = worker.copier
            if copier.is_stuck():
                raise Violation(f"rank {rank} copies nothing any more")
            for save in copier.expected - copier.outcomes.keys() if self.workers == self._workers_at_first else ():
                if (
                    self.workers[0].is_alive
                    and not copier.is_closed
                    and save < max(self.workers[0].copier.expected, default=0)
                ):
                    raise Violation(f"rank {rank} never knows whether save {save} is replicated")
            if open_saves := worker.machine.open_saves():
                raise Violation(f"rank {rank} never ended saves {open_saves}")
            if self.trainers[rank] and not self.clients[rank].has_lost and worker.used - worker.copying:
                raise Violation(f"the slots of saves {worker.used} of rank {rank} are never freed")
            if not self.trainers[rank] and not worker.has_left:
                raise Violation(f"the worker of rank {rank} never left")
        for client in (*self.clients, *self.clients_before):
            if client.is_alive:
                client.check_end()
        for rank, save in self.begun:
            if self.trainers[rank] and (rank, save) not in self.told:
                raise Violation(f"rank {rank} was never told of save {save}")
            if not self.has_faults and self.trainers[rank] and not self.told[rank, save] and save not in self.dropped:
                raise Violation(f"save {save} failed on rank {rank} without a reason")
        if not self.has_faults:  # perhaps the trainers have died
            for save in range(1, self.saves + 1):
                is_staged = all(save in worker.marked for worker in self.workers)
                if is_staged and self.decisions.get(save) != "final" and save not in self.dropped:
                    raise Violation(f"save {save} was staged on all ranks, and is not persisted")
            for save in range(1, self.saves + 1) if self.is_copied else ():
                told = [self.copies_told.get((rank, save)) for rank in range(self.ranks)]
                is_staged = all(save in worker.marked for worker in self.workers) and all(self.trainers)
                is_newest = not any(later > save for worker in self.workers for later in worker.marked)
                if is_staged and any(told) and (is_newest or not all(isinstance(e, SaveDroppedError) for e in told)):
                    raise Violation(f"save {save} was staged on all ranks, and is not replicated: {told}")
        for save, parts in self.parts.items():
            for rank, worker in parts.items():
                is_known = self.told.get((rank, save)) is not None
                if worker.is_alive and is_known and self.decisions.get(save) != "final":
                    raise Violation(f"rank {rank} leaves its part of save {save} behind")

    # What happens

    def _plan(self) -> None:
        chance, between = self.random.random, self.random.uniform
        at = 0.0
        for save in range(1, self.saves + 1):
            for rank in range(self.ranks):
                self.after(at + between(0, 1), self._call, rank, save)
            at += between(1, 8)
        self.has_faults = trouble = chance() < 0.85
        self.is_over = not trouble
        for rank in range(self.ranks):
            if trouble and chance() < 0.15:
                self.after(between(0, at + 12), self.kill_worker, rank)
            if trouble and chance() < 0.15:
                self.after(between(0, at + 12), self._stop, rank, between(1, 20) if chance() < 0.9 else 300.0)
            if trouble and rank and chance() < 0.15:
                self.after(between(0, at + 12), self._cut, rank, between(0.1, 20))
        if chance() < (0.4 if trouble else 0.5):
            self.after(between(0, at + 12), self.end_job, self.random.randrange(self.ranks), trouble and chance() < 0.5)
        self.after(at + STALLED_S, self._end_of_faults)

    def _end_of_faults(self) -> None:
        self.is_over = True

    def waits(self, worker: Worker, what: Callable[..., None], *arguments: Any) -> bool:
        """Return whether a worker is stopped. If so, it does this when it goes on, in the order of these calls."""
        if worker.stopped_until <= self.now and not worker.waiting:
            return False
        if not worker.waiting:
            self.at(worker.stopped_until, self._go_on, worker)
        worker.waiting.append((what, arguments))
        return True

    def _go_on(self, worker: Worker) -> None:
        if worker.stopped_until > self.now:  # it was stopped once more
            self.at(worker.stopped_until, self._go_on, worker)
            return
        waiting, worker.waiting = worker.waiting, []
        for what, arguments in waiting:
            what(*arguments)
            self._check()

    def little(self) -> float:
        return self.random.expovariate(10)

    def fails(self, probability: float) -> bool:
        return not self.is_over and self.random.random() < probability

    def _call(self, rank: int, save: int) -> None:
        """The trainer of ``rank`` calls ``save``, after its calls before this one have returned."""
        self.calls[rank].append(save)
        if len(self.calls[rank]) == 1:
            self._begin(rank, save)

    def _return(self, rank: int, save: int) -> None:
        calls = self.calls[rank]
        if calls and calls[0] == save:
            calls.popleft()
            if calls:
                self._begin(rank, calls[0])

    def _begin(self, rank: int, save: int) -> None:
        """Begin a save, with a new worker if the trainer knows that the old one is gone."""
        if not self.trainers[rank] or self.fails(0.02):
            self._return(rank, save)
            return
        if self.clients[rank].has_lost:
            self.workers[rank] = Worker(self, rank)
            self.clients_before.append(self.clients[rank])
            self.clients[rank] = Trainer(self, self.workers[rank])
            self.workers[rank].copier.begin()
            for other in self.workers[1:] if rank == 0 else ():
                self.after(self.little(), other.copier.find_another_first)
        if rank == 0 and self.workers[0].is_alive:
            for number, error in self.untold.items():
                self._conclude(self.workers[0], number, error)
            self.untold.clear()
        self.begun[rank, save] = self.now
        if rank > 0 and self.rule != "wait" and save not in self.chosen:
            self.choosers[save].append(partial(self._want, rank, save))
            self.after(TIMEOUT_S, self._give_up_choice, rank, save)
        else:
            self._want(rank, save)

    def _want(self, rank: int, save: int) -> None:
        if self.trainers[rank] and (rank, save) not in self.told:
            self.clients[rank].want(save)
        self._return(rank, save)

    def _give_up_choice(self, rank: int, save: int) -> None:
        """The first rank has not said in time what becomes of a save."""
        if self.trainers[rank] and save not in self.chosen and (rank, save) not in self.told:
            error = SaveTimeoutError("the first rank does not say", rank=0)
            self.report(rank, save, error, begun=False)
            self.tell(rank, save, error)
            self._return(rank, save)

    def choose(self, save: int, decision: Any) -> None:
        """First rank: tell the others what becomes of a save for which no slot may be free."""
        self.chosen[save] = decision
        for want in self.choosers.pop(save, ()):
            self.after(self.little(), want)

    def report(self, rank: int, save: int, error: CheckpointError, *, begun: bool) -> None:
        """A trainer tells the other ranks that a save failed."""
        first = self.workers[0]
        if rank > 0:
            self._send_to_first(rank, self.machines.RankFailed(save, error))
        elif not first.is_alive:
            self.untold.setdefault(save, error)
        elif begun:
            self.after(self.little(), self.give, first, self.machines.RankFailed(save, error))
        else:
            self._conclude(first, save, error)

    @staticmethod
    def violation(text: str) -> Violation:
        """Return the error for a broken promise."""
        return Violation(text)

    def _follow(self, worker: Worker, save: int, fails_at: float) -> None:
        """The writer writes what arrives, until the image is complete, it is told to stop, or it fails."""
        if not worker.is_alive or self.waits(worker, self._follow, worker, save, fails_at):
            return
        error = worker.stopped.get(save)
        if save not in worker.complete and not worker.machine.is_open(save):
            error = CheckpointError("the save failed while it was being staged")
        if self.now > fails_at:
            error = StorageError("no space")
        if error is not None:
            self._let_go(worker, save)
            self._end_write(worker, self.machines.PartFailed(save, error))
        elif save in worker.complete:
            self.after(self._delay(), self._finish_write, worker, save)
        else:
            self.after(0.3, self._follow, worker, save, fails_at)

    def _finish_write(self, worker: Worker, save: int) -> None:
        if not worker.is_alive or self.waits(worker, self._finish_write, worker, save):
            return
        fails = self.fails(0.05)
        self._let_go(worker, save)
        if not fails:
            self.parts[save][worker.rank] = worker
        event = self.machines.PartFailed(save, StorageError("I/O")) if fails else None
        self.after(
            self._delay(), self._end_write, worker, event or self.machines.PartWritten(save, b"%d" % worker.rank)
        )

    def _end_write(self, worker: Worker, event: Any) -> None:
        if worker.is_alive and not self.waits(worker, self._end_write, worker, event):
            worker.job = None
            self.give(worker, event)

    def _let_go(self, worker: Worker, save: int) -> None:
        if worker.job != save:
            raise Violation(f"rank {worker.rank} writes save {save} and {worker.job} at once")
        worker.reads = None
        self.give(worker, self.machines.LetGo(save))

    def kill_worker(self, rank: int) -> None:
        worker = self.workers[rank]
        if not worker.is_alive or worker.has_left:
            return
        worker.is_alive = False
        if rank == 0:
            for other in self.workers[1:]:
                self.after(self.little() + self.random.choice((0.1, 3, 20)), self._lose_first, other, worker)
        self.clients[rank].lose(died(rank))

    def ask(self, rank: int, save: int, error: CheckpointError, answer: Answer) -> None:
        """A trainer without a worker finds out how a save has ended: from the first rank, or from storage."""
        if rank > 0:
            self._send_to_first(rank, self.machines.RankFailed(save, error))
        self.after(self.random.uniform(0, RESOLVE_S), self._ask_first, rank, save, error, answer)

    def _ask_first(self, rank: int, save: int, error: CheckpointError, answer: Answer) -> None:
        first = self.workers[0]
        if rank > 0 and first.is_alive and save in first.outcomes and self.cut_until[rank] <= self.now:
            answer(first.outcomes[save])
            return

        def resolved(is_committed: bool | None) -> None:
            if not self.trainers[rank]:
                return
            if is_committed is not None and rank == 0:
                self.untold[save] = None if is_committed else error
            answer(_Unknown("unknown") if is_committed is None else None if is_committed else error)

        self._resolve(save, resolved)

    def _stop(self, rank: int, seconds: float) -> None:
        worker = self.workers[rank]
        worker.stopped_until = max(worker.stopped_until, self.now + seconds)

    def _cut(self, rank: int, seconds: float) -> None:
        self.cut_until[rank] = self.now + seconds
        if seconds > 3:
            self.after(self.random.uniform(0.1, seconds), self._lose_first, self.workers[rank], None)

    def _lose_first(self, worker: Worker, first: Worker | None) -> None:
        """A worker has noticed that the first rank's is gone. ``first``: that one; None: it may well live."""
        if first is None and self.cut_until[worker.rank] <= self.now:
            return
        error = WorkerDiedError("the worker of rank 0 is gone", rank=0)
        for save in worker.machine.open_saves():
            if self.random.random() < 0.8:  # otherwise it was not asked yet, and later there may be another one
                self.give(worker, self.machines.FirstLost(save, error))

    def end_job(self, rank: int, with_host: bool) -> None:
        """A trainer dies, perhaps with its host. The launcher ends the others, and may start the job again."""
        self._kill_trainer(rank, with_host)
        for other in range(self.ranks):
            if other != rank:
                self.after(self.random.uniform(0, 3), self._kill_trainer, other, False)
        if self.random.random() < 0.8:
            self.after(self.random.uniform(1, 10), self._restart)

    def _kill_trainer(self, rank: int, with_host: bool) -> None:
        if not self.trainers[rank]:
            return
        worker = self.workers[rank]
        self.trainers[rank] = False
        if with_host:
            self.kill_worker(rank)
        elif worker.is_alive:
            gone_at = max(self.now, worker.sent_until)  # after all that the trainer has sent
            self.at(gone_at, self.give, worker, self.machines.TrainerGone())
            self.at(gone_at + self.little(), self._finish, worker)

    def _finish(self, worker: Worker) -> None:
        """A worker without trainer gives up the saves that are not staged, and writes the others."""
        if not worker.is_alive or self.waits(worker, self._finish, worker):
            return
        worker.copying.clear()
        worker.copier.is_closed = True
        self.give(worker, self.machines.TrainerLeft(frozenset(worker.marked)))
        worker.closed_at = self.now
        self._leave(worker, self.now + _STUCK_S)

    def _leave(self, worker: Worker, ends_at: float) -> None:
        """A worker without trainer leaves when it has written all images. If a write is stuck, the worker ends."""
        if not worker.is_alive or self.waits(worker, self._leave, worker, ends_at):
            return
        if worker.machine.uses_slots() or worker.job is not None:
            if self.now > ends_at and not worker.machine.open_saves():
                self.kill_worker(worker.rank)
            else:
                self.after(1.0, self._leave, worker, ends_at)
            return
        worker.closed_at = self.now
        gone = RankFailedError("its trainer has died", rank=worker.rank)
        self.give(worker, self.machines.Finish(worker.rank, self.ranks, LEAVE_S, gone))

    def _restart(self) -> None:
        self.give(self.workers[0], self.machines.Restarted())
        if self.fails(0.3):
            self.after(self.random.uniform(0, 3), self._stop, 0, self.random.uniform(3, 12))

    # What machines do

    def give(self, worker: Worker, event: Any) -> None:
        """Give an event to the machine of a worker, and carry out what it returns."""
        if not worker.is_alive or worker.has_left or self.waits(worker, self.give, worker, event):
            return
        if self.is_logged:
            print(f"{self.now:7.2f} rank {worker.rank}: {event}")
        self._note_arrival(worker, event)
        were_open = worker.machine.open_saves()
        for action in worker.machine.handle(event, self.now):
            if self.is_logged:
                print(f"{'':8}-> {action}")
            self._carry_out(worker, action)
        if worker.rank == 0:
            self._check_first(worker, event)
        self._check_image(worker, event, were_open)
        worker.copier.check()
        if not worker.ticks:
            worker.ticks = True
            self.after(self.random.uniform(0.1, 2), self._tick, worker)

    def _note_arrival(self, worker: Worker, event: Any) -> None:
        m = self.machines
        match event:
            case m.Begun(save) if self.is_copied:
                worker.copier.expected.add(save)
            case m.Reported(save, rank):
                worker.reports[save].add(rank)
            case m.PartWritten(save):
                worker.reports[save].add(worker.rank)
            case m.RankGone(rank, error):
                worker.gone[rank] = error
            case m.Finish(0, _, _, error):
                worker.gone[0] = error
            case m.CopiesReported(save, rank):
                worker.copy_reports[save].add(rank)
            case m.CopiesOutcome(save, error):
                worker.copier.outcomes[save] = error
            case m.OutcomeLost(save):
                worker.copier.outcomes[save] = None
                worker.copier.given_up.add(save)
            case m.Left(rank):
                worker.left.add(rank)
            case m.Restarted():
                worker.restarted_at = self.now

    def _tick(self, worker: Worker) -> None:
        if not worker.is_alive or worker.has_left:
            return
        if worker.stopped_until <= self.now:
            if not worker.machine.needs_ticks() and self.trainers[worker.rank]:
                worker.ticks = False
                return
            self.give(worker, self.machines.Tick(self._heard() if worker.rank == 0 else {}))
        self.after(1.0, self._tick, worker)

    def _heard(self) -> dict[int, float]:
        """Return when the first rank's worker has heard each other rank. If it was stopped, it has heard nobody."""
        heard = {other.rank: other.heard_at for other in self.workers}
        for other in self.workers:
            if self._speaks(other) and (other.machine.open_saves() or self.trainers[other.rank]):
                other.heard_at = self.now
        return heard

    def _speaks(self, worker: Worker) -> bool:
        return worker.is_alive and worker.stopped_until <= self.now and self.cut_until[worker.rank] <= self.now

    def _carry_out(self, worker: Worker, action: Any) -> None:
        m, rank = self.machines, worker.rank
        match action:
            case m.SendReport(save, report):
                self._send_to_first(rank, m.Reported(save, rank, report))
            case m.SendFailure(save, error):
                self._send_to_first(rank, m.RankFailed(save, error))
            case m.SendGone(why):
                self._send_to_first(rank, m.RankGone(rank, why))
            case m.Conclude(save, error):
                self._check_reason(worker, save, error)
                self._conclude(worker, save, error)
            case m.WriteImage(save):
                if not worker.machine.is_open(save):
                    raise Violation(f"rank {rank} writes save {save}, which has ended")
                if worker.job is not None or save not in worker.used:
                    raise Violation(f"rank {rank} writes save {save} and {worker.job} at once")
                worker.job = worker.reads = save
                if save in worker.complete and worker.written and worker.written[-1] > save:
                    raise Violation(f"rank {rank} writes save {save} after {worker.written[-1]}")
                worker.written.append(save)
                fails_at = self.now + self.random.uniform(0, 3) if self.fails(0.1) else _END_S
                self.after(self.little(), self._follow, worker, save, fails_at)
            case m.CompleteImage(save):
                if save not in worker.marked:
                    raise Violation(f"the image of save {save} is taken for complete while it is copied")
                worker.complete.add(save)
            case m.StopWriting(save, reason):
                if save in worker.marked:
                    raise Violation(f"save {save} of rank {rank} is not written, although it was staged")
                worker.stopped[save] = reason
            case m.HoldImage(save):
                if save not in worker.marked:
                    raise Violation(f"the image of save {save} is held while it is copied")
                worker.images.add(save)
                for other in self.workers:
                    if rank in other.copier.slots:
                        self.after(self.little(), other.copier.look, rank)
            case m.FreeSlot(save, tell):
                self._free_slot(worker, save)
                if tell:
                    self._say(worker, m.trainer.SlotWritten(save))
            case m.AnswerCancel(save, in_time, slot_free):
                if in_time and slot_free != (save not in worker.used):
                    raise Violation(f"the slot of save {save} is free: {slot_free}, says the worker, and it is not so")
                if in_time and not slot_free and save not in worker.stopped:
                    raise Violation(f"nobody has told the writer that save {save} is cancelled")
                if not in_time and save in worker.used and save != worker.job:
                    raise Violation(f"save {save} waits to be written, and cannot be cancelled")
                if in_time:
                    self.cancelled.add(save)
                    worker.cancelled.add(save)
                self._say(worker, self.machines.trainer.CancelAnswered(save, in_time, slot_free))
            case m.ConcludeUnknown(save):
                lost = m.FirstLost(save, _Unknown("the first rank does not know"))
                for other in self.workers[1:]:
                    self.after(self.little(), self._learn_nothing, worker, other, lost)
            case m.Finalize(save, reports):
                if [*map(int, reports)] != [*range(self.ranks)]:
                    raise Violation(f"save {save} is finalized with the reports {reports}")
                self.after(self._delay(), self._finalize, worker, save)
            case m.FollowUp(save):
                if self.decisions.get(save) != "final":
                    raise Violation(f"the pointer names save {save}, which is not final")
                trouble = StorageError("no pointer") if self.fails(0.1) else None
                self.after(self._delay(), self.give, worker, m.FollowedUp(save, trouble))
            case m.Resolve(save):
                if save in worker.resolves:
                    raise Violation(f"rank {rank} asks storage for the outcome of save {save} twice")
                worker.resolves.add(save)
                self._resolve(save, lambda answer: self.give(worker, m.Resolved(save, answer, _Unknown("unknown"))))
            case m.DiscardPart(save):
                if rank in self.parts[save] and self.decisions.get(save) == "final":
                    raise Violation(f"rank {rank} discards its part of save {save}, which is final")
                self.parts[save].pop(rank, None)
                if rank == 0:
                    self.decisions.setdefault(save, "revoked")
            case m.KeepPart():
                pass
            case m.Tell(save, error, _):
                if save in worker.said:
                    raise Violation(f"the worker of rank {rank} tells the end of save {save} twice")
                worker.said.add(save)
                if error is not None and save not in worker.images:
                    worker.copier.lost.add(save)
                self._say(worker, m.trainer.Ended(save, error))
            case m.AllowCopy(source):
                worker.copier.allow(source)
            case m.SayBegin(save, _):
                worker.copier.has_begun = True
                self._send_to_first(rank, m.CopiesBegin(save, rank))
            case m.ReportCopies(save, _):
                if not worker.copier.holds(save):
                    raise Violation(f"rank {rank} reports copies of save {save} that it does not have")
                worker.copier.reported.add(save)
                self._send_to_first(rank, m.CopiesReported(save, rank))
            case m.FailCopies(save, error, _):
                worker.copier.failed.add(save)
                if error.message == _PASSED and not worker.copier.has_passed(save, error.rank):
                    raise Violation(f"rank {rank} says that an image of rank {error.rank} passed over save {save}")
                self._send_to_first(rank, m.CopiesFailed(save, error))
            case m.AwaitCopies(save):
                if not worker.copier.has_begun:
                    raise Violation(f"rank {rank} does not say with which save it begins to copy")
                worker.copier.await_outcome(save)
            case m.ConcludeCopies(save, error):
                self._conclude_copies(worker, save, error)
            case m.ProtectCopies(save):
                if self.workers[0].copier.outcomes.get(save) is not None and self.workers == self._workers_at_first:
                    raise Violation(f"rank {rank} protects its copies of save {save}, which is not replicated")
                worker.copier.replicated = save
            case m.TellCopies(save, error):
                self._tell_copies(worker, save, error)
            case m.Leave():
                worker.has_left = True
                if rank == 0:
                    self._check_left(worker)
                else:
                    self._send_to_first(rank, m.Left(rank))

    def _conclude_copies(self, first: Worker, save: int, error: CheckpointError | None) -> None:
        if save in first.copier.outcomes:
            raise Violation(f"the copies of save {save} are concluded twice")
        first.copier.outcomes[save] = error
        for other in self.workers[1:]:
            self.after(self.little(), other.copier.hear)
        if error is None:
            first.copier.reported.add(save)
            workers = [each for each in self.workers if save in each.copier.reported]
            for other in self.workers:
                is_new = other is not self._workers_at_first[other.rank]
                if other not in workers and (not is_new or first.copies_begin.get(other.rank, 0) > save):
                    raise Violation(f"save {save} is replicated, and rank {other.rank} has no copies")
            self.replicated = save, workers

    def _tell_copies(self, worker: Worker, save: int, error: CheckpointError | None) -> None:
        if (worker.rank, save) in self.copies_told and self.workers == self._workers_at_first:
            raise Violation(f"rank {worker.rank} is told of the copies of save {save} twice")
        self.copies_told[worker.rank, save] = error
        self._say(worker, self.machines.trainer.CopiesMade(save, error))

    def sources(self, rank: int) -> list[int]:
        """Return the sources of the worker of ``rank``."""
        number = min(self._copies, self.ranks - 1) if self.is_copied else 0
        return [(rank - each) % self.ranks for each in range(1, number + 1)]

    def _say(self, worker: Worker, event: Any) -> None:
        """A worker tells its trainer something."""
        self.clients[worker.rank].hear(event)

    def _free_slot(self, worker: Worker, save: int) -> None:
        if save not in worker.used:
            raise Violation(f"the slot of save {save} is freed twice")
        if save in worker.copying or worker.reads == save:
            raise Violation(f"the slot of save {save} is freed while it is used")
        worker.used.discard(save)

    def _send_to_first(self, rank: int, event: Any) -> None:
        """Send to the first rank's worker, or to the one in its place. A message may be lost, or come twice."""
        if rank > 0 and self.fails(0.02):
            return
        for _ in range(1 + self.fails(0.05)):
            self.sent_until[rank] = max(self.sent_until[rank], self.now + self.little())
            self.at(self.sent_until[rank], self._arrive_at_first, rank, event)

    def _arrive_at_first(self, rank: int, event: Any) -> None:
        if rank > 0 and self.cut_until[rank] > self.now:
            self.sent_until[rank] = max(self.sent_until[rank], self.cut_until[rank])
            self.at(self.cut_until[rank], self._arrive_at_first, rank, event)
        else:
            self.give(self.workers[0], event)

    def _conclude(self, first: Worker, save: int, error: CheckpointError | None) -> None:
        first.outcomes.setdefault(save, error)
        for other in self.workers[1:]:
            self.after(self.little(), self._learn, first, other, save)

    def _learn(self, first: Worker, other: Worker, save: int) -> None:
        """Another rank reads an outcome from the first rank's worker."""
        if self.cut_until[other.rank] > self.now:
            self.at(self.cut_until[other.rank], self._learn, first, other, save)
        elif first.is_alive and not first.has_left:
            self.give(other, self.machines.Outcome(save, first.outcomes[save]))

    def _learn_nothing(self, first: Worker, other: Worker, lost: Any) -> None:
        if first.is_alive and not first.has_left and self.cut_until[other.rank] <= self.now:
            self.give(other, lost)

    def tell(self, rank: int, save: int, error: CheckpointError | None) -> None:
        if (rank, save) in self.told:
            raise Violation(f"rank {rank} was told twice of save {save}")
        self.told_at[rank, save] = self.now
        self.told[rank, save] = None if isinstance(error, _Unknown) else error is None
        if self.now > self.begun[rank, save] + BUDGET_S:
            raise Violation(f"rank {rank} was told of save {save} after {self.now - self.begun[rank, save]:.0f} s")

    # Storage

    def _delay(self) -> float:
        return self.random.uniform(0, STALLED_S) if self.fails(0.05) else self.little()

    def _finalize(self, worker: Worker, save: int) -> None:
        if not worker.is_alive or self.waits(worker, self._finalize, worker, save):
            return
        error: CheckpointError | None = None
        if self.fails(0.05):
            error = StorageError("refused")
        elif self.fails(0.03):
            error = CheckpointError("the ranks have saved different things")
        elif self.decisions.get(save) == "revoked":
            error = StorageError("it was revoked")
        else:
            self._make_final(worker, save)
            error = StorageError("it has worked, and nobody knows") if self.fails(0.05) else None
        self.after(self.little(), self.give, worker, self.machines.Finalized(save, error))

    def _make_final(self, worker: Worker, save: int) -> None:
        if save in self.decisions:
            raise Violation(f"save {save} is finalized twice")
        if {*self.parts[save]} != {*range(self.ranks)}:
            raise Violation(f"save {save} is finalized with the parts of {sorted(self.parts[save])}")
        if earlier := [each for each in worker.machine.open_saves() if each < save]:
            raise Violation(f"save {save} is finalized before {earlier}")
        if save in self.cancelled:
            raise Violation(f"save {save} is finalized, and was cancelled")
        self.decisions[save] = "final"

    def _resolve(self, save: int, answer: Callable[[bool | None], None]) -> None:
        """Ask storage how a save has ended. It has an effect, an answer, both or neither."""
        delay = self._delay()
        self.after(min(delay, RESOLVE_S), self._answer, save, answer, delay, self.fails(0.1), self.fails(0.1))

    def _answer(
        self, save: int, answer: Callable[[bool | None], None], delay: float, has_no_effect: bool, is_unanswered: bool
    ) -> None:
        is_late = delay > RESOLVE_S
        if is_late and not has_no_effect:
            self.after(delay - RESOLVE_S, self.decisions.setdefault, save, "revoked")  # type: ignore[arg-type]
        elif not has_no_effect:
            self.decisions.setdefault(save, "revoked")
        answer(None if is_late or has_no_effect or is_unanswered else self.decisions[save] == "final")

    # What must always hold

    def _check(self) -> None:
        for (rank, save), said in self.told.items():
            is_final = self.decisions.get(save) == "final"
            if said is not None and said != is_final and (said or is_final):
                raise Violation(
                    f"rank {rank} was told {said} of save {save}, and storage says {self.decisions.get(save)}"
                )
        replicated, workers = self.replicated
        for worker in workers if workers and workers[0].is_alive else ():  # otherwise it may not be told to all
            if worker.is_alive and not worker.has_left and not worker.copier.holds(replicated):
                raise Violation(f"rank {worker.rank} has overwritten its copies of save {replicated}")

    def _check_first(self, first: Worker, event: Any) -> None:
        """Check that the first rank waits for nobody in vain."""
        awake_s = self.now - max(first.stopped_until, self.now if first.restarted_at is None else first.restarted_at)
        lost = [*first.gone]
        if awake_s > _LONG_S and isinstance(event, self.machines.Tick):
            lost += [each.rank for each in self.workers if self.now - each.heard_at > _LONG_S]
        for save in first.machine.open_saves() if lost else ():
            if missing := [rank for rank in lost if rank not in first.reports[save]]:
                raise Violation(f"save {save} waits for ranks {missing}, which are gone")
        match event:
            case self.machines.RankGone(rank):
                first.gone_copies.add(rank)
            case self.machines.CopiesBegin(save, rank):
                first.copies_begin[rank] = max(save, first.copies_begin.get(rank, 0))
            case self.machines.RankFailed(save) if save in first.machine.open_saves():
                if len(first.reports[save]) < self.ranks:
                    raise Violation(f"save {save} goes on, although a rank has failed it")

        for save in first.copier.expected - first.copier.outcomes.keys():
            replaced = {rank for rank, begin in first.copies_begin.items() if save < begin}
            for rank in replaced | (first.gone_copies - first.copy_reports[save]):
                raise Violation(f"save {save} waits for copies of rank {rank}, which makes none")
            is_here = save in first.images and first.copier.holds(save)
            if is_here and len(first.copy_reports[save]) == self.ranks - 1:
                raise Violation(f"save {save} is not said to be replicated, although all ranks have copies")

    def _check_image(self, worker: Worker, event: Any, were_open: tuple[int, ...]) -> None:
        """Check that a save goes on, or ends, as its image does."""
        are_open = worker.machine.open_saves()
        match event:
            case self.machines.ImageCancelled(save) if save in worker.cancelled & {*are_open} - worker.used:
                raise Violation(f"save {save} goes on, although it was cancelled")
            case self.machines.TrainerLeft(staged):
                if lost := staged.intersection(were_open).difference(are_open):
                    raise Violation(f"saves {lost} of rank {worker.rank} fail, although they were staged")
                for save in worker.used - staged:
                    if save in were_open and save not in worker.stopped and (save in are_open or save == worker.job):
                        raise Violation(f"save {save} of rank {worker.rank} waits for a dead trainer")

    def _check_reason(self, first: Worker, save: int, error: CheckpointError | None) -> None:
        """Check that a save does not fail because of a rank with a report, or a living rank."""
        rank = None if error is None else error.rank
        if rank in first.reports[save] and error is first.gone.get(rank):
            raise Violation(f"save {save} fails by rank {rank}, which had reported")
        if isinstance(error, RankFailedError) and error.message == _LOST:
            other = self.workers[error.rank or 0]
            speaks_s = self.now - max(other.stopped_until, self.cut_until[other.rank]) if other.is_alive else 0.0
            if first.restarted_at is None or (speaks_s > _OFTEN_S and other.machine.open_saves()):
                raise Violation(f"save {save} fails by rank {rank}, which has spoken for {speaks_s:.1f} s")

    def _check_left(self, first: Worker) -> None:
        """Check that the first rank's worker has waited for the others."""
        waited_s = self.now - max([first.closed_at, *(at for its, at in self.told_at.items() if its[0] == 0)])
        there = [each.rank for each in self.workers[1:] if each.is_alive and each.rank not in first.left]
        if there and waited_s < LEAVE_S - 0.01 and not first.restarted_at:
            raise Violation(f"the worker of the first rank left after {waited_s:.1f} s, before ranks {there}")


_STUCK_S = 30.0
_OFTEN_S = 1.5  # a rank that waits speaks at least so often
_LONG_S = commit.silence(1) + 3.0
_MACHINES = Machines(saves, commit, replication, trainer=trainer)
_PASSED = "a newer image of this rank was copied first"
_LOST = "its trainer and its worker have exited"
