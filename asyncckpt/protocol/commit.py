"""The commit: how a save ends on all ranks, as machines without input and output.

Each worker has one ``Commits``, with a machine for each save that has not ended. The first rank has ``_First``, which
decides. All other ranks have ``_Other``. ``Commits.handle`` takes an event and the time, changes the state, and returns
the actions in order. The caller carries the actions out, and reports the results as events.

The first rank:

    state       event                             next state  actions
    OPEN        PartWritten, Reported: all ranks  READY
    OPEN        PartFailed, RankFailed,
                RankGone, a lost rank, deadline   FAILED      Conclude, DiscardPart, Tell
    READY       all earlier saves have ended      FINALIZING  Finalize
    FINALIZING  Finalized()                       FOLLOWING   FollowUp
    FINALIZING  Finalized(error of storage)       RESOLVING   Resolve, because storage may fail after it did the work
    FINALIZING  Finalized(another error)          FAILED      Conclude, DiscardPart, Tell
    FOLLOWING   FollowedUp                        COMMITTED   Conclude, KeepPart, Tell
    RESOLVING   Resolved(True)                    FOLLOWING   FollowUp
    RESOLVING   Resolved(False)                   FAILED      Conclude, DiscardPart, Tell
    RESOLVING   Resolved(None)                    UNKNOWN     ConcludeUnknown, KeepPart, Tell

The other ranks:

    state       event                             next state  actions
    OPEN        PartWritten                       REPORTED    SendReport
    OPEN        PartFailed, FirstLost, deadline   FAILED      SendFailure, DiscardPart, Tell
    OPEN        Outcome                           FAILED      DiscardPart, Tell
    REPORTED    FirstLost, deadline               RESOLVING   SendFailure, Resolve
    REPORTED    PartyLooked(final)                     COMMITTED   KeepPart, Tell
    REPORTED    PartyLooked(the report is gone)        RESOLVING   Resolve
    REPORTED,   Outcome()                         COMMITTED   KeepPart, Tell
    RESOLVING   Outcome(error)                    FAILED      DiscardPart, Tell
    RESOLVING   Resolved(True)                    COMMITTED   KeepPart, Tell
    RESOLVING   Resolved(False)                   FAILED      DiscardPart, Tell
    RESOLVING   Resolved(None)                    UNKNOWN     KeepPart, Tell

A *party* is a process that is no rank, and writes a part too. It has no connection to the first rank. A party writes
its report to storage, and looks there for the outcome (``PartyLooked``). The first rank looks for the reports of
parties, which count as the ranks after the last one.

Invariants:

- Only the first rank finalizes, after all ranks have reported, and after all earlier saves have ended.
- A rank that has reported keeps its files until it knows the outcome. It also keeps them if the outcome stays unknown.
- ``Resolve`` asks storage, and revokes an attempt that is not finalized.
- Each save gets one ``Tell``.
- A part that is written after the end of its save is discarded.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum, auto
from typing import TypeAlias

from asyncckpt.budgets import NOTICE_S
from asyncckpt.errors import CheckpointError, RankFailedError, SaveTimeoutError, StorageError


class CommitState(Enum):
    """The state of a save. The module docstring lists the transitions."""

    OPEN = auto()
    """This rank's part is being staged and written."""
    REPORTED = auto()
    """Other ranks: the part is durable, and the first rank was told."""
    READY = auto()
    """First rank: all parts are durable, but an earlier save has not ended."""
    FINALIZING = auto()
    """First rank: the checkpoint gets its final name."""
    FOLLOWING = auto()
    """First rank: the checkpoint is final, and the pointer is being advanced."""
    RESOLVING = auto()
    """Storage is asked for the outcome."""
    COMMITTED = auto()
    FAILED = auto()
    UNKNOWN = auto()
    """Storage did not answer."""


_ENDED = (CommitState.COMMITTED, CommitState.FAILED, CommitState.UNKNOWN)


@dataclass(frozen=True)
class Begun:
    """A save begins on this rank.

    ``timeout``: seconds until all ranks must have written their parts. ``is_copied``: other hosts keep copies.
    ``parties``: on the first rank, the names of processes that are no ranks, and write parts too. They count as the
    ranks from ``ranks`` on. For a party itself, ``rank`` is any number above 0.
    """

    save: int
    rank: int
    ranks: int
    timeout: float
    is_copied: bool = False
    parties: tuple[str, ...] = ()


@dataclass(frozen=True)
class PartWritten:
    """This rank's part is durable. ``report``: for the first rank."""

    save: int
    report: bytes


@dataclass(frozen=True)
class PartFailed:
    """This rank's part will not become durable."""

    save: int
    error: CheckpointError


@dataclass(frozen=True)
class Reported:
    """First rank: another rank's part is durable."""

    save: int
    rank: int
    report: bytes


@dataclass(frozen=True)
class RankFailed:
    """First rank: another rank, or a trainer, has failed a save."""

    save: int
    error: CheckpointError


@dataclass(frozen=True)
class RankGone:
    """First rank: ``rank`` will write no more parts. Its reports stay valid."""

    rank: int
    error: CheckpointError


@dataclass(frozen=True)
class Outcome:
    """Other ranks: the first rank has decided. ``error``: the reason, if the save has failed."""

    save: int
    error: CheckpointError | None


@dataclass(frozen=True)
class FirstLost:
    """Other ranks: the first rank's worker is gone and not restarted, or does not know the outcome."""

    save: int
    error: CheckpointError


@dataclass(frozen=True)
class PartyLooked:
    """A party has looked at storage: whether the checkpoint is final, and whether the party's own report is there."""

    save: int
    is_final: bool
    is_report_there: bool


@dataclass(frozen=True)
class Finalized:
    """First rank: ``Finalize`` is done. ``error``: the reason if the action failed."""

    save: int
    error: CheckpointError | None


@dataclass(frozen=True)
class FollowedUp:
    """First rank: ``FollowUp`` is done. ``trouble``: the reason if the pointer is not advanced."""

    save: int
    trouble: CheckpointError | None


@dataclass(frozen=True)
class Resolved:
    """``Resolve`` is done. ``is_committed`` is None if storage did not answer; ``error`` is the reason."""

    save: int
    is_committed: bool | None
    error: CheckpointError | None = None


@dataclass(frozen=True)
class TrainerGone:
    """This rank's trainer is gone."""


@dataclass(frozen=True)
class Restarted:
    """The job was restarted. Do not wait any more for ranks without a trainer and a worker."""


@dataclass(frozen=True)
class Left:
    """First rank: ``rank`` no longer needs this worker."""

    rank: int


@dataclass(frozen=True)
class Finish:
    """This rank writes no more parts, for the reason ``why``. The worker leaves when all saves have ended.

    ``rank``, ``ranks``: this rank, and the number of ranks. ``patience``: seconds that the first rank waits for the
    other ranks, which may still ask for the outcome of a save.
    """

    rank: int
    ranks: int
    patience: float
    why: CheckpointError


@dataclass(frozen=True)
class Tick:
    """Time has passed. ``heard``: on the first rank, when each other rank last sent a message (clock of ``handle``)."""

    heard: Mapping[int, float] = field(default_factory=dict)


@dataclass(frozen=True)
class SendReport:
    """Tell the first rank that this rank's part is durable."""

    save: int
    report: bytes


@dataclass(frozen=True)
class SendFailure:
    """Tell the first rank that the save cannot be committed."""

    save: int
    error: CheckpointError


@dataclass(frozen=True)
class SendGone:
    """Tell the first rank that this rank writes no more parts."""

    why: CheckpointError


@dataclass(frozen=True)
class Finalize:
    """Give the checkpoint its final name. ``reports``: the reports of all ranks, by rank."""

    save: int
    reports: list[bytes]


@dataclass(frozen=True)
class FollowUp:
    """Advance the pointer, and take the names of old checkpoints, which are removed later."""

    save: int


@dataclass(frozen=True)
class Resolve:
    """Ask storage whether the save is finalized. If not, revoke the attempt, so that it never will be."""

    save: int


@dataclass(frozen=True)
class Conclude:
    """First rank: tell the other ranks the outcome."""

    save: int
    error: CheckpointError | None


@dataclass(frozen=True)
class ConcludeUnknown:
    """First rank: tell the other ranks to ask storage for the outcome. They get ``FirstLost``."""

    save: int


@dataclass(frozen=True)
class KeepPart:
    """Release the attempt. This rank's files stay."""

    save: int


@dataclass(frozen=True)
class DiscardPart:
    """Remove this rank's part, if it was written."""

    save: int


@dataclass(frozen=True)
class Tell:
    """Tell the trainer the outcome of the save. ``trouble``: see ``FollowedUp``."""

    save: int
    error: CheckpointError | None
    trouble: CheckpointError | None = None


@dataclass(frozen=True)
class Leave:
    """End the loop, because all saves have ended and the other ranks have left. No event may follow."""


_OF_SAVE = (
    PartWritten,
    PartFailed,
    Reported,
    RankFailed,
    Outcome,
    FirstLost,
    PartyLooked,
    Finalized,
    FollowedUp,
    Resolved,
)
OfSave: TypeAlias = (
    PartWritten
    | PartFailed
    | Reported
    | RankFailed
    | Outcome
    | FirstLost
    | PartyLooked
    | Finalized
    | FollowedUp
    | Resolved
)
CommitEvent: TypeAlias = Begun | OfSave | RankGone | TrainerGone | Restarted | Left | Finish | Tick
CommitAction: TypeAlias = (
    SendReport
    | SendFailure
    | SendGone
    | ConcludeUnknown
    | Finalize
    | FollowUp
    | Resolve
    | Conclude
    | KeepPart
    | DiscardPart
    | Tell
    | Leave
)

KEPT_SAVES = 64
"""Number of newer saves after which the outcome of a save is forgotten."""
RANKS_PER_SILENCE = 1000
"""Number of ranks above which each rank sends messages less often, to limit the load on the first rank."""


@functools.lru_cache(16)
def grace(timeout: float) -> float:
    """Return the seconds that other ranks wait beyond ``timeout`` for the outcome from the first rank."""
    return min(NOTICE_S, timeout / 4)


def silence(ranks: int) -> float:
    """Return the seconds of silence after which one of ``ranks`` ranks counts as lost, if the job was restarted."""
    return NOTICE_S * max(1.0, ranks / RANKS_PER_SILENCE)


@dataclass
class _Save:
    """One save on one rank. ``deadline``: on the clock of ``handle``."""

    number: int
    begun: Begun
    deadline: float
    state: CommitState = CommitState.OPEN
    failure: CheckpointError | None = None  # the error to report if the save is not finalized

    def handle(self, event: OfSave) -> list[CommitAction]:
        """Handle an event of this save."""
        raise NotImplementedError

    def pass_time(self, now: float) -> list[CommitAction]:
        """Change the state if the deadline has passed."""
        raise NotImplementedError

    def _resolve(self, failure: CheckpointError) -> list[CommitAction]:
        self.failure, self.state = failure, CommitState.RESOLVING
        return [Resolve(self.number)]

    def _end(
        self, state: CommitState, error: CheckpointError | None, trouble: CheckpointError | None = None
    ) -> list[CommitAction]:
        self.state = state
        part = DiscardPart(self.number) if state is CommitState.FAILED else KeepPart(self.number)
        return [part, Tell(self.number, error, trouble)]


@dataclass
class _First(_Save):
    reports: dict[int, bytes] = field(default_factory=dict)

    def handle(self, event: OfSave) -> list[CommitAction]:
        match self.state, event:
            case CommitState.OPEN, PartWritten(_, report):
                self._note(0, report)
            case CommitState.OPEN, Reported(_, rank, report):
                self._note(rank, report)
            case CommitState.OPEN, PartFailed(_, error) | RankFailed(_, error):
                return self.fail(error)
            case CommitState.FINALIZING, Finalized(_, None):
                return self._follow()
            case CommitState.FINALIZING, Finalized(_, StorageError() as error):
                return self._resolve(error)
            case CommitState.FINALIZING, Finalized(_, CheckpointError() as error):
                return self.fail(error)
            case CommitState.FOLLOWING, FollowedUp(_, trouble):
                return [Conclude(self.number, None), *self._end(CommitState.COMMITTED, None, trouble)]
            case CommitState.RESOLVING, Resolved(_, True):
                return self._follow()
            case CommitState.RESOLVING, Resolved(_, False):
                return [Conclude(self.number, self.failure), *self._end(CommitState.FAILED, self.failure)]
            case CommitState.RESOLVING, Resolved(_, None, error):
                return [ConcludeUnknown(self.number), *self._end(CommitState.UNKNOWN, error)]
        return []

    def pass_time(self, now: float) -> list[CommitAction]:
        if self.state is not CommitState.OPEN or now < self.deadline:
            return []
        missing, ranks = self.missing(), self.begun.ranks
        if missing == [0]:
            text = f"the save was not written within {self.begun.timeout:g} s; the storage may be stalled"
        else:
            late = [f"the party {self.begun.parties[number - ranks]!r}" for number in missing if number >= ranks]
            if missing[0] < ranks:
                late.insert(0, in_words([rank for rank in missing if rank < ranks]))
            text = f"{' and '.join(late)} did not write the save within {self.begun.timeout:g} s"
        return self.fail(SaveTimeoutError(text, rank=missing[0] if missing[0] < ranks else None))

    def missing(self) -> list[int]:
        """Return the ranks that have not reported."""
        return [rank for rank in self._members() if rank not in self.reports]

    def fail(self, error: CheckpointError) -> list[CommitAction]:
        return [Conclude(self.number, error), *self._end(CommitState.FAILED, error)]

    def finalize(self) -> list[CommitAction]:
        """Begin to finalize. Call this when all earlier saves have ended."""
        self.state = CommitState.FINALIZING
        return [Finalize(self.number, [self.reports[rank] for rank in self._members()])]

    def _members(self) -> range:
        return range(self.begun.ranks + len(self.begun.parties))

    def _note(self, rank: int, report: bytes) -> None:
        self.reports.setdefault(rank, report)
        if len(self.reports) == len(self._members()):
            self.state = CommitState.READY

    def _follow(self) -> list[CommitAction]:
        self.state = CommitState.FOLLOWING
        return [FollowUp(self.number)]


@dataclass
class _Other(_Save):
    def handle(self, event: OfSave) -> list[CommitAction]:
        match self.state, event:
            case CommitState.OPEN, PartWritten(_, report):
                self.state = CommitState.REPORTED
                return [SendReport(self.number, report)]
            case CommitState.OPEN, PartFailed(_, error) | FirstLost(_, error):
                return [SendFailure(self.number, error), *self._end(CommitState.FAILED, error)]
            case CommitState.OPEN, Outcome(_, error):
                return self._end(CommitState.FAILED, error or CheckpointError(_UNREPORTED))
            case CommitState.REPORTED, FirstLost(_, error):
                return [SendFailure(self.number, error), *self._resolve(error)]
            case CommitState.REPORTED, PartyLooked(_, True):
                return self._end(CommitState.COMMITTED, None)
            case CommitState.REPORTED, PartyLooked(_, False, False):
                return self._resolve(RankFailedError(_NOT_JOINED))
            case CommitState.REPORTED | CommitState.RESOLVING, Outcome(_, error):
                return self._end(CommitState.FAILED if error is not None else CommitState.COMMITTED, error)
            case CommitState.RESOLVING, Resolved(_, True):
                return self._end(CommitState.COMMITTED, None)
            case CommitState.RESOLVING, Resolved(_, False):
                return self._end(CommitState.FAILED, self.failure)
            case CommitState.RESOLVING, Resolved(_, None, error):
                return self._end(CommitState.UNKNOWN, error)
        return []

    def pass_time(self, now: float) -> list[CommitAction]:
        late_s = grace(self.begun.timeout)
        if self.state not in (CommitState.OPEN, CommitState.REPORTED) or now < self.deadline + late_s:
            return []
        seconds = self.begun.timeout + late_s
        return self.handle(
            FirstLost(self.number, SaveTimeoutError(f"rank 0 sent no outcome within {seconds:g} s", rank=0))
        )


_NOT_JOINED = (
    "this step is not in storage: the trainer or another party has failed it (see their logs), or a newer step is saved"
    " and this one was removed (see Config.keep_last)"
)
_UNREPORTED = "a save was concluded before this rank had reported: please report this"


class Commits:
    """The saves of one worker that have not ended."""

    def __init__(self) -> None:
        self._saves: dict[int, _First | _Other] = {}  # in the order of their numbers
        self._newest = 0  # the newest save that has begun
        self._early: dict[int, list[Reported | RankFailed]] = {}  # events of saves that have not begun here
        self._gone: dict[int, CheckpointError] = {}
        self._left: set[int] = set()
        self._is_without_trainer = False
        self._is_restarted = False
        self._awake_since = self._ticked_at = 0.0
        self._finish: Finish | None = None
        self._leaves_at: float | None = None

    def is_open(self, save: int) -> bool:
        """Return whether a save may still be committed."""
        its = self._saves.get(save)
        return its is not None and its.state not in _ENDED

    def open_saves(self) -> tuple[int, ...]:
        """Return the saves that have not ended."""
        return tuple(self._saves)

    def handle(self, event: CommitEvent, now: float) -> list[CommitAction]:
        """Change the state by an event. Return the actions to carry out, in their order.

        Args:
            event: The event.
            now: The time in seconds, on any clock that does not jump.
        """
        if isinstance(event, _OF_SAVE) and (its := self._saves.get(event.save)) is not None:
            actions = its.handle(event)
        else:
            actions = self._handle(event, now)
        if self._gone:
            self._fail_without_lost_ranks(actions)
        for number in [number for number, save in self._saves.items() if save.state in _ENDED]:
            del self._saves[number]
        oldest = next(iter(self._saves.values()), None)
        if isinstance(oldest, _First) and oldest.state is CommitState.READY:
            actions += oldest.finalize()
        if self._finish is not None and oldest is None:
            self._leaves_at = self._leaves_at or now + self._finish.patience
            others = self._finish.ranks - 1 if self._finish.rank == 0 else 0
            if len(self._left) >= others or now >= self._leaves_at:
                actions.append(Leave())
        return actions

    def _handle(self, event: CommitEvent, now: float) -> list[CommitAction]:
        match event:
            case Begun():
                return self._begin(event, now)
            case Reported(save) | RankFailed(save) if save > self._newest:
                self._early.setdefault(save, []).append(event)
            case RankGone(rank, error):
                self._gone.setdefault(rank, error)
            case TrainerGone():
                self._is_without_trainer = True
                self._awake_since = self._ticked_at = now
            case Restarted():
                self._is_restarted = True
            case Left(rank):
                self._left.add(rank)
            case Finish():
                self._finish = event
                if event.rank > 0:  # all reports were sent before this event
                    return [SendGone(event.why)]
                self._gone.setdefault(0, event.why)
            case Tick(heard):
                return self._pass_time(heard, now)
            case PartWritten(save) | PartFailed(save):  # the save has ended
                return [DiscardPart(save)]
        return []

    def _begin(self, event: Begun, now: float) -> list[CommitAction]:
        kind = _First if event.rank == 0 else _Other
        save = self._saves[event.save] = kind(event.save, event, now + event.timeout)
        self._newest = event.save
        actions = [action for early in self._early.get(event.save, ()) for action in save.handle(early)]
        self._early = {number: events for number, events in self._early.items() if number > event.save}
        return actions

    def _pass_time(self, heard: Mapping[int, float], now: float) -> list[CommitAction]:
        actions = [action for save in self._saves.values() for action in save.pass_time(now)]
        if self._is_without_trainer:
            for save in self._saves.values():
                self._look_for_lost(save, heard, now)
            self._ticked_at = now
        return actions

    def _look_for_lost(self, save: _First | _Other, heard: Mapping[int, float], now: float) -> None:
        """Note missing ranks that have been silent for too long since the trainer was gone."""
        limit = silence(save.begun.ranks)
        if now - self._ticked_at > limit / 2:  # this worker was stopped, and perhaps the other workers too
            self._awake_since = now
        if isinstance(save, _First) and save.state is CommitState.OPEN and self._is_restarted:
            for rank in save.missing():
                if 0 < rank < save.begun.ranks and now - max(heard.get(rank, 0.0), self._awake_since) > limit:
                    self._gone.setdefault(rank, RankFailedError("its trainer and its worker have exited", rank=rank))
                    self._left.add(rank)

    def _fail_without_lost_ranks(self, actions: list[CommitAction]) -> None:
        for save in self._saves.values():
            if isinstance(save, _First) and save.state is CommitState.OPEN:
                lost = min((rank for rank in self._gone if rank not in save.reports), default=None)
                if lost is not None:
                    actions += save.fail(self._gone[lost])


def in_words(ranks: list[int]) -> str:
    """Return a text that names the first of the ``ranks``."""
    more = f" and {len(ranks) - 8} more" if len(ranks) > 8 else ""
    return ("rank " if len(ranks) == 1 else "ranks ") + ", ".join(map(str, ranks[:8])) + more
