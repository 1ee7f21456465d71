"""The copies on other hosts in a history: the threads of one worker that fetch images, and the slots for copies."""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING, Any

from asyncckpt.errors import CheckpointError

if TYPE_CHECKING:
    from simulation.saves import History, Worker

_AGAIN_S = 0.5


class Copier:
    """The copies that one worker makes, of the images of its sources."""

    def __init__(self, history: History, worker: Worker, sources: list[int]) -> None:
        self._history, self._worker, self._m = history, worker, history.machines
        self.slots: dict[int, list[int]] = {source: [0, 0] for source in sources}
        """By source: the saves whose images are in its two slots; 0: none, or one that is not complete."""
        self.replicated = 0  # the last save that is replicated, as this worker knows
        self.expected: set[int] = set()  # saves that this rank has begun
        self.lost: set[int] = set()  # saves that failed before this rank had staged them
        self.reported: set[int] = set()  # saves that it told the first rank to have all images of
        self.failed: set[int] = set()  # saves that it told the first rank not to have all images of
        self.outcomes: dict[int, CheckpointError | None] = {}  # what its trainer, or on the first rank all, were told
        self.given_up: set[int] = set()  # saves that no first rank knows
        self.has_begun = worker.rank == 0
        self.is_closed = False
        self._newest = dict.fromkeys(sources, 0)
        self._busy: set[int] = set()
        self._awaited: deque[int] = deque()

    @property
    def _works(self) -> bool:
        return self._worker.is_alive and not self._worker.has_left and not self.is_closed

    def begin(self) -> None:
        """Begin to copy."""
        for source in self.slots:
            self._history.give(self._worker, self._m.Copying(source))
            self.look(source)

    def look(self, source: int) -> None:
        """Look for a newer image."""
        its = self._history.workers[source]
        if source in self._busy or not self._works or not its.is_alive or not self._is_newer(its):
            return
        self._busy.add(source)
        self._history.after(self._history.little(), self._history.give, self._worker, self._m.CopyWanted(source))

    def allow(self, source: int) -> None:
        """The machine allows to copy the newest image."""
        if source not in self._busy:
            raise self._history.violation(f"rank {self._worker.rank} is to copy from rank {source}, which has nothing")
        unknown = self.expected - self.outcomes.keys()
        if min(unknown, default=self._newest[source] + 1) <= self._newest[source]:
            raise self._history.violation(f"rank {self._worker.rank} may overwrite a copy from rank {source} too early")
        self._history.after(self._history.little(), self._copy, source)

    def holds(self, save: int) -> bool:
        """Return whether all images of a save are here."""
        return all(save in slots for slots in self.slots.values())

    def has_passed(self, save: int, source: int | None) -> bool:
        """Return whether a newer image of ``source`` was copied before that of ``save``."""
        return source is not None and self._newest.get(source, 0) > save

    def check(self) -> None:
        """Check that no save waits for an image that will not come."""
        for save in self.given_up - self.failed:
            raise self._history.violation(f"rank {self._worker.rank} gives save {save} up, and tells nobody")
        for save in self.expected - self.reported - self.failed - self.outcomes.keys():
            if save in self.lost:
                raise self._history.violation(f"the copies of save {save} wait for rank {self._worker.rank} itself")
            for source, newest in self._newest.items():
                if newest >= save and save not in self.slots[source]:
                    raise self._history.violation(f"save {save} waits for an image of rank {source} that will not come")

    def is_stuck(self) -> bool:
        """Return whether an image waits for permission, and nothing will give it."""
        begun = max(self.expected, default=0)
        return self._works and not self._awaited and any(self._newest[source] <= begun for source in self._busy)

    def await_outcome(self, save: int) -> None:
        """Wait for what the first rank says about a save, after the saves before it."""
        self._awaited.append(save)
        self._history.after(self._history.little(), self.hear)

    def hear(self) -> None:
        """The first rank has said something."""
        history, first = self._history, self._history.workers[0]
        if not self._awaited or not self._works:
            return
        save = self._awaited[0]
        if not first.is_alive or first.has_left:  # this asks until another one is there
            return
        if history.cut_until[self._worker.rank] > history.now:
            history.at(history.cut_until[self._worker.rank], self.hear)
        elif save in first.copier.outcomes:
            self._answer(self._m.CopiesOutcome(save, first.copier.outcomes[save]))

    def _is_newer(self, its: Worker) -> bool:
        return max(its.images, default=0) > self._newest[its.rank]

    def find_another_first(self) -> None:
        """Another worker is in the place of the first rank's, which is gone with what it would have said."""
        if self._works and self._awaited:
            self._answer(self._m.OutcomeLost(self._awaited[0]))

    def _answer(self, event: Any) -> None:
        self._awaited.popleft()
        self._history.give(self._worker, event)
        self._history.after(self._history.little(), self.hear)

    def _copy(self, source: int) -> None:
        history = self._history
        if not self._works or history.waits(self._worker, self._copy, source):
            return
        its, slots = history.workers[source], self.slots[source]
        if not its.is_alive or not self._is_newer(its) or history.fails(0.05):  # it was overwritten
            self._stop(source)
            return
        slot = min(
            (slot for slot in range(2) if slots[slot] != self.replicated or not slots[slot]), key=slots.__getitem__
        )
        slots[slot] = 0
        history.after(history.random.expovariate(1), self._end, source, its, max(its.images), slot)

    def _end(self, source: int, its: Worker, save: int, slot: int) -> None:
        history = self._history
        if not self._works or history.waits(self._worker, self._end, source, its, save, slot):
            return
        if not its.is_alive or history.fails(0.05):  # the connection is gone
            self._stop(source)
            return
        self._newest[source] = save
        if history.fails(0.05):
            self._give(source, self._m.ImageHere(save, source, CheckpointError("damaged on the way")))
        else:
            self.slots[source][slot] = save
            self._give(source, self._m.ImageHere(save, source))

    def _give(self, source: int, event: Any) -> None:
        self._history.give(self._worker, event)
        self._stop(source)

    def _stop(self, source: int) -> None:
        self._busy.discard(source)
        self._history.after(_AGAIN_S, self.look, source)
