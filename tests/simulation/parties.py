"""The saves of a trainer and its parties, under a seeded scheduler: one seed is one history.

A history has a trainer with one rank, 1 to 3 parties, and 2 to 6 steps. Trainer and parties run ``Commits`` of
``asyncckpt/protocol/commit.py``; they meet in a model of storage alone, as ``asyncckpt/storage/parties.py`` does.
Faults: trainers, parties and workers die, and begin again with the newest checkpoint, also elsewhere while the worker
before still writes; looks are late; storage is late, fails, and fails after it did the work.

Each part has a *lineage*: the number of the application's start. The checker looks at what must always hold. No
checkpoint has parts of two lineages, or of two steps. A process finds the checkpoint after a success, and does not
find it after a failure. Each save ends within its budget.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from asyncckpt.errors import CheckpointError, CheckpointExistsError, StorageError
from asyncckpt.protocol import commit
from simulation.saves import Machines
from simulation.schedule import Schedule, Violation

TIMEOUT_S, RESOLVE_S, STALLED_S = 20.0, 8.0, 10.0
BUDGET_S = TIMEOUT_S + commit.grace(TIMEOUT_S) + 2 * RESOLVE_S + 4 * STALLED_S
_END_S = 2000.0


@dataclass
class Attempt:
    """An attempt on storage.

    ``parts``: by member, the lineage of its files. ``joined``: the marks of the processes in it. ``state``: open, final
    or revoked.
    """

    step: int
    parts: dict[str, int] = field(default_factory=dict)
    joined: set[str] = field(default_factory=set)
    reports: set[str] = field(default_factory=set)
    failures: set[str] = field(default_factory=set)
    state: str = "open"


@dataclass
class Open:
    """A save of a worker: its attempt, its lineage, whether it has a part there, and whether it was reported.

    ``arrived``: for the trainer: the parties with a report.
    """

    attempt: tuple[str, int]
    lineage: int
    begun_at: float
    has_part: bool = False
    has_reported: bool = False
    arrived: set[int] = field(default_factory=set)


class Worker:
    """The worker of the trainer ("") or of a party."""

    def __init__(self, machine: Any, name: str) -> None:
        self.machine, self.name = machine, name
        self.is_alive = True
        self.saves: dict[int, Open] = {}
        self.numbers = 0
        self.ticks = False


class PartiesHistory(Schedule):
    """One history of saves with parties."""

    def __init__(self, seed: int, machines: Machines | None = None, *, log: bool = False) -> None:
        """Plan the history. ``machines``: the default is the product's. ``log``: print each event."""
        super().__init__(seed, _END_S)
        self.machines, self.is_logged = machines or _MACHINES, log
        self.parties = ("a", "b", "c")[: self.random.randint(1, 3)]
        self.steps = self.random.randint(2, 6)
        self.has_objects = self.random.random() < 0.5  # a party's discard revokes the attempt, as on an object store
        self.trouble = self.random.choice((0.0, 0.1, 0.3))
        self.attempts: dict[tuple[str, int], Attempt] = {}
        self.token = ""  # in ``session.json``
        self.lineage = self.tries = self.newest = 0
        self.workers: dict[str, Worker] = {}
        self.all_workers: list[Worker] = []
        self.told: list[tuple[Worker, Open, bool | None]] = []
        self._begin_application()

    def run(self) -> None:
        """Carry out the history. Raises ``Violation``."""
        for _ in self.happen():
            self._check()
        if any(worker.is_alive and worker.saves for worker in self.all_workers):
            raise Violation("a save has never ended")
        if not self.trouble and max((each.step for each in self._final()), default=0) < self.steps:
            raise Violation("a step is not complete, without a fault")

    def fails(self, probability: float) -> bool:
        return self.random.random() < probability * self.trouble

    def _delay(self) -> float:
        return self.random.uniform(0, STALLED_S) if self.fails(0.3) else self.random.expovariate(4)

    def _final(self) -> list[Attempt]:
        return [each for each in self.attempts.values() if each.state == "final"]

    # The application

    def _begin_application(self) -> None:
        """Begin at the newest checkpoint: the trainer with a new token, and all parties roll back with it."""
        self.lineage += 1
        self.tries = self.newest = 0
        for name in ("", *self.parties):
            if name not in self.workers or not self.workers[name].is_alive or self.random.random() < 0.5:
                self.workers[name] = Worker(self.machines.Commits(), name)  # elsewhere, and the one before may live
                self.all_workers.append(self.workers[name])
        self.token = f"{self.lineage}-0"
        self._next_step(self.lineage, max((each.step for each in self._final()), default=0) + 1)

    def _next_step(self, lineage: int, step: int) -> None:
        if lineage != self.lineage or step > self.steps:
            return
        if self.fails(0.3) and self.lineage < 5:
            self.after(self._delay(), self._begin_application)
        if self.fails(0.3):
            self._kill(self.random.choice(("", *self.parties)))
        self.after(self.random.uniform(0, 2), self._save_trainer, lineage, step)
        for name in self.parties:
            if not self.fails(0.15):  # otherwise this party is dead, or forgets
                self.after(self.random.uniform(0, 2), self._save_party, lineage, name, step)
            if self.fails(0.2):  # it went back alone, or was started again
                self.after(self.random.uniform(0, 20), self._save_party, lineage, name, step)
        is_repeated = self.fails(0.2)
        again = self.random.uniform(2, 30) if self.trouble else BUDGET_S
        self.after(again, self._next_step, lineage, step if is_repeated else step + 1)

    def _kill(self, name: str) -> None:
        """Kill a worker. The next save of its process begins another one."""
        self.workers[name].is_alive = False

    def _save_trainer(self, lineage: int, step: int) -> None:
        if lineage != self.lineage:
            return
        self.tries += step <= self.newest
        self.newest = step
        self.token = f"{lineage}-{self.tries}"
        worker = self._worker("")
        self._begin(worker, lineage, step, (self.token, step))

    def _save_party(self, lineage: int, name: str, step: int) -> None:
        if lineage == self.lineage:  # otherwise the process is gone, or rolled back
            self._begin(self._worker(name), lineage, step, (self.token, step))

    def _worker(self, name: str) -> Worker:
        if not self.workers[name].is_alive:
            self.workers[name] = Worker(self.machines.Commits(), name)
            self.all_workers.append(self.workers[name])
        return self.workers[name]

    def _begin(self, worker: Worker, lineage: int, step: int, attempt: tuple[str, int]) -> None:
        m = self.machines
        worker.numbers += 1
        number, parties = worker.numbers, () if worker.name else self.parties
        worker.saves[number] = Open(attempt, lineage, self.now)
        self.give(worker, m.Begun(number, 1 if worker.name else 0, 1, TIMEOUT_S, False, parties))
        self.after(self._delay(), self._write, worker, number)

    # A worker

    def give(self, worker: Worker, event: Any) -> None:
        """Give an event to the machine of a worker, and carry out the returned actions."""
        if not worker.is_alive:
            return
        if self.is_logged:
            print(f"{self.now:7.2f} {worker.name or 'trainer'}: {event}")
        for action in worker.machine.handle(event, self.now):
            if self.is_logged:
                print(f"{'':8}-> {action}")
            self._carry_out(worker, action)
        its = worker.saves.get(getattr(event, "save", 0))
        if isinstance(event, self.machines.Reported) and its is not None:
            its.arrived.add(event.rank)
        if isinstance(event, self.machines.RankFailed) and its is not None and len(its.arrived) < len(self.parties):
            raise Violation("a step goes on, although a party has failed it")
        if not worker.ticks:
            worker.ticks = True
            self.after(1.0, self._tick, worker)

    def _tick(self, worker: Worker) -> None:
        m = self.machines
        worker.ticks = False
        if worker.is_alive and worker.saves:
            for number in [*worker.saves]:
                self._look(worker, number)
            self.give(worker, m.Tick())

    def _attempt(self, its: Open) -> Attempt:
        return self.attempts.setdefault(its.attempt, Attempt(its.attempt[1]))

    def _write(self, worker: Worker, number: int) -> None:
        m = self.machines
        if not worker.is_alive or number not in worker.saves:
            return
        its = worker.saves[number]
        attempt = self._attempt(its)
        if worker.name in attempt.joined:
            self.give(worker, m.PartFailed(number, CheckpointExistsError("a part of this party")))
            return
        if worker.name and attempt.state == "open" and "" not in attempt.joined:  # the ranks have not begun it
            is_old = its.attempt[0] != self.token and not self.fails(0.5)
            if not is_old and worker.machine.is_open(number):
                self.after(1.0, self._write, worker, number)
                return
        if self.fails(0.2) or attempt.state != "open" or (worker.name and "" not in attempt.joined):
            self.give(worker, m.PartFailed(number, StorageError("I/O")))
            return
        attempt.joined.add(worker.name)
        its.has_part = True
        attempt.parts[worker.name] = its.lineage
        self.give(worker, m.PartWritten(number, worker.name.encode()))

    def _look(self, worker: Worker, number: int) -> None:
        m = self.machines
        its = worker.saves.get(number)
        if its is None or self.random.random() < 0.2:  # this look is late
            return
        attempt = self._attempt(its)
        if worker.name and its.has_reported:
            self.give(worker, m.PartyLooked(number, attempt.state == "final", worker.name in attempt.reports))
        for place, party in enumerate(self.parties if not worker.name else ()):
            if party in attempt.failures:
                self.give(worker, m.RankFailed(number, StorageError("a party has failed")))
            elif party in attempt.reports:
                self.give(worker, m.Reported(number, 1 + place, party.encode()))

    def _carry_out(self, worker: Worker, action: Any) -> None:
        m = self.machines
        match action:
            case m.SendReport(number):
                self.after(self._delay(), self._report, worker, number)
            case m.SendFailure(_, CheckpointExistsError()):
                pass  # the part of the other process may still be taken
            case m.SendFailure(number):
                attempt = self._attempt(worker.saves[number])
                if attempt.state == "open":
                    attempt.failures.add(worker.name)
            case m.Finalize(number, reports):
                if [*map(bytes.decode, reports)] != ["", *self.parties]:
                    raise Violation(f"a step is finalized with the reports {reports}")
                self.after(self._delay(), self._finalize, worker, number)
            case m.FollowUp(number):
                self.after(self._delay(), self.give, worker, m.FollowedUp(number, None))
            case m.Resolve(number):
                self.after(self._delay(), self._resolve, worker, number)
            case m.DiscardPart(number) if number in worker.saves and worker.saves[number].has_part:
                self._discard(worker, self._attempt(worker.saves[number]))
            case m.Tell(number, error):
                its = worker.saves.pop(number)
                is_open = isinstance(error, CheckpointExistsError) or (error and error.message == _UNKNOWN)
                self.told.append((worker, its, None if is_open else not error))
                if self.now > its.begun_at + BUDGET_S:
                    raise Violation(f"{worker.name} was told after {self.now - its.begun_at:.0f} s")

    def _report(self, worker: Worker, number: int) -> None:
        m = self.machines
        if not worker.is_alive or number not in worker.saves:
            return
        its = worker.saves[number]
        attempt = self._attempt(its)
        if self.fails(0.1) or attempt.state != "open":
            self.give(worker, m.FirstLost(number, StorageError("the attempt is gone")))
            return
        attempt.reports.add(worker.name)
        its.has_reported = True

    def _finalize(self, worker: Worker, number: int) -> None:
        m = self.machines
        if not worker.is_alive:
            return
        attempt, error = self._attempt(worker.saves[number]), None
        if self.fails(0.1):
            error = StorageError("refused")
        elif attempt.state != "open":
            error = StorageError("it was revoked")
        else:
            if attempt.parts.keys() != {"", *self.parties}:
                raise Violation(f"step {attempt.step} is finalized with the parts {attempt.parts}")
            attempt.state = "final"
            error = StorageError("it has worked, and nobody knows") if self.fails(0.1) else None
        self.after(self._delay(), self.give, worker, m.Finalized(number, error))

    def _resolve(self, worker: Worker, number: int) -> None:
        m = self.machines
        if not worker.is_alive or number not in worker.saves:
            return
        attempt = self._attempt(worker.saves[number])
        if not self.fails(0.1):
            attempt.state = "revoked" if attempt.state == "open" else attempt.state
            if not self.fails(0.1):
                self.give(worker, m.Resolved(number, attempt.state == "final"))
                return
        self.give(worker, m.Resolved(number, None, CheckpointError(_UNKNOWN)))

    def _discard(self, worker: Worker, attempt: Attempt) -> None:
        if attempt.state == "final":
            return  # storage keeps what is final
        if not worker.name or self.has_objects:
            attempt.state = "revoked"
            attempt.reports.clear()
        else:
            attempt.parts.pop(worker.name, None)
            attempt.reports.discard(worker.name)

    # What must always hold

    def _check(self) -> None:
        for attempt in self._final():
            if len({*attempt.parts.values()}) != 1:
                raise Violation(f"step {attempt.step} has parts of the lineages {attempt.parts}")
        for worker, its, said in self.told:
            is_final = self._attempt(its).state == "final"
            if said is not None and said != is_final:
                raise Violation(f"{worker.name or 'the trainer'} was told {said} of {its.attempt}")


_UNKNOWN = "unknown"
_MACHINES = Machines(commit)
