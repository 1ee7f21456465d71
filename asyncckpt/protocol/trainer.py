"""The saves of a trainer with one worker: the user of each save's slot, and the end of each save.

``stage`` names the user of the slot:

    stage       event                               next stage  actions
    WAITING     Wanted, TimePassed, or a slot may
                be free                                         FindSlot
    WAITING     SlotTaken                           COPYING     StartCopy
    WAITING     NoSlot, and the rule is "skip"      FREE        Decided, End, ReleaseTensors
    WAITING     Interrupted, WorkerGone, or
                TimePassed at its deadline          FREE        End, ReportFailure, ReleaseTensors
    COPYING     Interrupted, or WorkerGone of a
                dead worker                         STOPPING    StopCopy
    COPYING,
    STOPPING    Copied                              STAGED      HandOver
    COPYING,
    STOPPING    Copied, of a withdrawn save         CANCELLING  ReleaseTensors, AskCancel
    COPYING,
    STOPPING    Copied, for a worker that was left  FREE        HandOver, NoteFreeSlot
    COPYING,
    STOPPING    CopyFailed                          CANCELLING  End, ReportFailure, ReleaseTensors, AskCancel
    COPYING,
    STOPPING    CopyFailed, unknown to any worker   FREE        End, ReportFailure, ReleaseTensors, NoteFreeSlot
    CANCELLING,
    STAGED      SlotWritten, or cancelled and freed FREE        NoteFreeSlot
    CANCELLING,
    STAGED      WorkerGone                          FREE        NoteFreeSlot

``outcome`` says whether the end of the save is known:

    outcome     event                               next outcome  actions
    OPEN        Ended                               ENDED         End
    OPEN        CancelAnswered in time              ENDED         End
    OPEN        another save replaces it            WITHDRAWN     ReportFailure, on the first rank
    WITHDRAWN   as OPEN
    OPEN        WorkerGone, and the image is staged ASKING        FindOut
    ASKING      FoundOut                            ENDED         End
    OPEN        WorkerGone, otherwise               ENDED         End, ReportFailure

No worker commits an image that is not staged. So the machine asks for the outcome only if the image is staged.

Invariants: the tensors of a save are read only in COPYING and STOPPING. Each save gets one ``End``, and one
``ReleaseTensors`` or ``HandOver``. A slot is free when its save is FREE and not OPEN. A save that this rank has written
may still wait for other ranks. If its slot were free, such saves would pile up in the worker.

If no slot is free, the save's rule decides. "wait": the save waits. "skip": the save ends. "latest": the save replaces
the newest save that is not written yet. The first rank decides for all ranks, and tells the other ranks.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum, auto
from typing import Literal, TypeAlias

from asyncckpt.errors import CheckpointError, ClosedError, SaveDroppedError, SaveTimeoutError

Rule: TypeAlias = Literal["wait", "skip", "latest"]


class Stage(Enum):
    """The user of the slot of a save; the transitions are in the docstring of the module."""

    WAITING = auto()
    """The save has no slot yet."""
    COPYING = auto()
    """The tensors are being copied into the slot."""
    STOPPING = auto()
    """The tensors are still being copied, and the copy has been told to stop."""
    CANCELLING = auto()
    """The copy has stopped, and the worker does not know that yet."""
    STAGED = auto()
    """The worker has the slot."""
    FREE = auto()
    """Neither the trainer nor the worker uses the slot."""


class EndState(Enum):
    """Whether the end of a save is known."""

    OPEN = auto()
    WITHDRAWN = auto()
    """A newer save replaces this save, which will fail on all ranks."""
    ASKING = auto()
    """The worker died during the save. The other ranks or storage are being asked for the outcome."""
    ENDED = auto()


@dataclass(frozen=True)
class Decision:
    """The decision of the first rank if no slot is free: skip the save, or replace the save with a number."""

    skips: bool = False
    replaced: int | None = None


@dataclass(frozen=True)
class Wanted:
    """A state is captured and needs a slot.

    Attributes:
        save: The number of the save.
        buffer: The number of the buffer that has the slots.
        slots: The number of slots in that buffer.
        rule: The rule to apply if no slot is free. On ranks other than the first, ``decision`` applies instead.
        decision: The decision of the first rank; None: this is the first rank, or the rule is "wait".
        alone: Whether there is only one rank.
        decide_s: Timeout in seconds for the decision of the first rank.
        slot_s: Timeout in seconds for a free slot.
        limit_s: Timeout in seconds for the worker to report the outcome, once the save has a slot.
        is_copied: Whether other hosts keep copies of the image.
        step: The training step, for messages.
    """

    save: int
    buffer: int
    slots: int
    rule: Rule
    decision: Decision | None
    alone: bool
    decide_s: float
    slot_s: float
    limit_s: float
    is_copied: bool
    step: int | None


@dataclass(frozen=True)
class SlotTaken:
    """The save has a slot."""

    save: int


@dataclass(frozen=True)
class NoSlot:
    """No slot is free for the save."""

    save: int


@dataclass(frozen=True)
class Copied:
    """All tensors are copied."""

    save: int


@dataclass(frozen=True)
class CopyFailed:
    """The copy ended before all tensors were copied. ``told``: the worker was told of the save."""

    save: int
    error: CheckpointError
    told: bool


@dataclass(frozen=True)
class Interrupted:
    """An exception ended the caller's wait. The caller may change the tensors once they are released."""

    save: int
    error: CheckpointError


@dataclass(frozen=True)
class SlotWritten:
    """The worker no longer uses the slot."""

    save: int


@dataclass(frozen=True)
class CancelAnswered:
    """The worker's answer to ``AskCancel``.

    ``slot_free``: the worker no longer uses the slot. If False, ``SlotWritten`` follows.
    """

    save: int
    in_time: bool
    slot_free: bool


@dataclass(frozen=True)
class Ended:
    """The worker reports the outcome of the save on all ranks."""

    save: int
    error: CheckpointError | None


@dataclass(frozen=True)
class CopiesMade:
    """Other hosts have copies of the image. With an ``error``, they never will."""

    save: int
    error: CheckpointError | None


@dataclass(frozen=True)
class WorkerGone:
    """The worker died with ``error``, or was left and goes on alone. ``pid``: the worker's process id, for messages."""

    error: CheckpointError
    left: bool
    pid: int


@dataclass(frozen=True)
class GivenUp:
    """The trainer gives up the saves under way, without telling the other ranks. The worker is about to be killed."""


@dataclass(frozen=True)
class FoundOut:
    """The outcome of a save after the death of its worker."""

    save: int
    error: CheckpointError | None


@dataclass(frozen=True)
class TimePassed:
    """Some time has passed, or a slot may be free."""


@dataclass(frozen=True)
class FindSlot:
    """Look for a free slot. The answer is ``SlotTaken`` or ``NoSlot``."""

    save: int


@dataclass(frozen=True)
class Decided:
    """Tell the other ranks the decision about the save."""

    save: int
    decision: Decision


@dataclass(frozen=True)
class StartCopy:
    """Tell the worker of the save, and copy the tensors into the slot."""

    save: int


@dataclass(frozen=True)
class StopCopy:
    """Tell the copy to stop."""

    save: int


@dataclass(frozen=True)
class ReleaseTensors:
    """Tell the caller that the tensors are no longer read."""

    save: int


@dataclass(frozen=True)
class HandOver:
    """Mark the slot as staged. Tell the caller that the tensors are no longer read, and tell the worker."""

    save: int


@dataclass(frozen=True)
class AskCancel:
    """Ask the worker to cancel the save, unless it already writes the complete image."""

    save: int
    reason: CheckpointError


@dataclass(frozen=True)
class NoteFreeSlot:
    """Tell waiting callers that the slot is no longer used."""

    save: int


@dataclass(frozen=True)
class End:
    """Tell the caller the outcome of the save. ``error`` is None for a committed save."""

    save: int
    error: CheckpointError | None


@dataclass(frozen=True)
class TellReplicated:
    """Tell the caller that other hosts have copies. With an ``error``, they never will."""

    save: int
    error: CheckpointError | None


@dataclass(frozen=True)
class ReportFailure:
    """Tell the other ranks that the save failed here. ``begun``: the workers may know of the save."""

    save: int
    error: CheckpointError
    begun: bool


@dataclass(frozen=True)
class FindOut:
    """Find out the outcome of the save. ``error``: the error of the save if it is not committed."""

    save: int
    error: CheckpointError


@dataclass(frozen=True)
class KillWorker:
    """Kill the worker, because it no longer responds."""


TrainerEvent: TypeAlias = (
    Wanted
    | SlotTaken
    | NoSlot
    | Copied
    | CopyFailed
    | Interrupted
    | SlotWritten
    | CancelAnswered
    | Ended
    | CopiesMade
    | WorkerGone
    | GivenUp
    | FoundOut
    | TimePassed
)
TrainerAction: TypeAlias = (
    FindSlot
    | Decided
    | StartCopy
    | StopCopy
    | ReleaseTensors
    | HandOver
    | AskCancel
    | NoteFreeSlot
    | End
    | TellReplicated
    | ReportFailure
    | FindOut
    | KillWorker
)


@dataclass
class SaveInTrainer:
    """A save and its state."""

    wanted: Wanted
    since: float
    """The time when the save began to wait for a slot. Later, the time when it got a slot."""
    is_decided: bool
    stage: Stage = Stage.WAITING
    outcome: EndState = EndState.OPEN
    reason: CheckpointError | None = None
    """The reason why the save is withdrawn or cancelled."""
    awaits_copies: bool = False
    asked: set[int] = field(default_factory=set)
    """The saves that the worker was asked to cancel in favor of this save."""

    @property
    def is_open(self) -> bool:
        """Whether the save has not ended, and no rank or storage is being asked for the outcome."""
        return self.outcome in (EndState.OPEN, EndState.WITHDRAWN)

    @property
    def is_under_way(self) -> bool:
        """Whether the save has or had a slot, and may be committed."""
        return self.stage is not Stage.WAITING and self.outcome is EndState.OPEN


class TrainerSaves:
    """All saves of one trainer with one worker."""

    def __init__(self) -> None:
        self.saves: dict[int, SaveInTrainer] = {}
        """The saves that have not ended, or whose slots are in use."""
        self._gone: WorkerGone | None = None
        self._is_given_up = False
        self._progress_at = 0.0

    def is_free(self, save: int) -> bool:
        """Return whether the slot of a save is free."""
        found = self.saves.get(save)
        return found is None or (found.stage is Stage.FREE and found.outcome is not EndState.OPEN)

    @property
    def is_left(self) -> bool:
        """Whether the worker was left, and may still write."""
        return self._gone is not None and self._gone.left

    def is_idle(self) -> bool:
        """Return whether all saves have ended, and no slot is in use."""
        return not self.saves

    def handle(self, event: TrainerEvent, now: float) -> list[TrainerAction]:
        """Change the state by an event. Return the actions to carry out, in their order.

        Args:
            event: The event.
            now: The time in seconds, on any clock that does not jump.
        """
        actions: list[TrainerAction] = []
        match event:
            case Wanted():
                self._want(event, now, actions)
            case SlotTaken(number):
                self._take(number, now, actions)
            case NoSlot(number):
                save = self.saves[number]
                if not save.is_decided:
                    self._decide(number, Decision(skips=True), actions)
            case Copied(number):
                self._on_copied(number, actions)
            case CopyFailed(number, error, told):
                self._stop(number, error, actions, told=told)
            case Interrupted(number, error):
                self._interrupt(number, error, actions)
            case SlotWritten(number):
                self._progress_at = now
                self._let_go(number, actions)
            case CancelAnswered():
                self._on_cancelled(event, actions)
            case Ended(number, error):
                self._progress_at = now
                self._end(number, error, actions)
            case FoundOut(number, error):
                if number in self.saves:
                    self.saves[number].outcome = EndState.OPEN
                    self._end(number, error, actions)
            case CopiesMade(number, error):
                self._on_replicated(number, error, actions)
            case WorkerGone():
                self._lose(event, now, actions)
            case GivenUp():
                self._is_given_up = True
            case TimePassed():
                self._tick(now, actions)
        for number, save in list(self.saves.items()):
            if save.stage is Stage.FREE and save.outcome is EndState.ENDED and not save.awaits_copies:
                del self.saves[number]
        if not isinstance(event, NoSlot):
            # Only the oldest save may look for a slot, because the ranks commit saves in order.
            oldest = next((save for save in self.saves.values() if save.stage is Stage.WAITING), None)
            if oldest is not None and (oldest.is_decided or oldest.wanted.rule == "skip"):
                actions.append(FindSlot(oldest.wanted.save))
        return actions

    def _want(self, event: Wanted, now: float, actions: list[TrainerAction]) -> None:
        number = event.save
        is_decided = event.rule == "wait"
        save = self.saves[number] = SaveInTrainer(event, now, is_decided)
        if self._gone is not None:
            self._fail(number, self._gone.error, actions)
        elif event.decision is not None:
            self._follow(number, event.decision, actions)
        elif not is_decided:
            under_way = [other for other in self.saves.values() if self._competes(other, save)]
            if len(under_way) >= event.slots:
                if event.rule == "skip":
                    self._decide(number, Decision(skips=True), actions)
                else:
                    self._replace(number, actions)
            elif event.rule == "latest":
                self._decide(number, Decision(), actions)

    def _competes(self, other: SaveInTrainer, save: SaveInTrainer) -> bool:
        """Return whether ``other`` counts as a user of a slot that ``save`` could use.

        A save counts until it ends. Until then another rank may lack a free slot, even if this rank has one.
        """
        return other.is_under_way and other.wanted.buffer == save.wanted.buffer

    def _replace(self, number: int, actions: list[TrainerAction]) -> None:
        """First rank: find a save for ``number`` to replace. Try the newest save first."""
        save = self.saves[number]
        under_way = {its: other for its, other in self.saves.items() if self._competes(other, save)}
        for its in sorted(under_way, reverse=True):
            if under_way[its].stage is Stage.STAGED and its not in save.asked:
                save.asked.add(its)
                under_way[its].reason = _replaced(save)
                actions.append(AskCancel(its, _replaced(save)))
                return
        newest = max(under_way, default=0)
        if len(under_way) > 1 and not save.wanted.alone:
            # The newest save is written here, but not on all ranks. Never replace the oldest save. Otherwise slow ranks
            # would never finish a save.
            self._withdraw(newest, _replaced(save), actions)
            actions.append(ReportFailure(newest, _replaced(save), begun=True))
            self._decide(number, Decision(replaced=newest), actions)
        else:
            self._decide(number, Decision(), actions)

    def _decide(self, number: int, decision: Decision, actions: list[TrainerAction]) -> None:
        if not self.saves[number].wanted.alone:
            actions.append(Decided(number, decision))
        self._follow(number, decision, actions)

    def _follow(self, number: int, decision: Decision, actions: list[TrainerAction]) -> None:
        save = self.saves[number]
        save.is_decided = True
        if decision.skips:
            save.stage = Stage.FREE
            self._end(number, SaveDroppedError("the save was skipped, because all slots were being written"), actions)
            actions.append(ReleaseTensors(number))
        elif decision.replaced is not None and save.wanted.decision is not None:
            self._withdraw(decision.replaced, _replaced(save), actions)

    def _withdraw(self, number: int, reason: CheckpointError, actions: list[TrainerAction]) -> None:
        """Give up a save that the first rank has replaced. This rank may already have written the save, in vain."""
        save = self.saves.get(number)
        if save is None or save.outcome is not EndState.OPEN:
            return
        save.outcome = EndState.WITHDRAWN
        save.reason = reason
        if save.stage is Stage.STAGED and save.wanted.decision is not None:
            actions.append(AskCancel(number, reason))

    def _take(self, number: int, now: float, actions: list[TrainerAction]) -> None:
        save = self.saves[number]
        if not save.is_decided:
            self._decide(number, Decision(), actions)
        save.stage = Stage.COPYING
        save.awaits_copies = save.wanted.is_copied
        save.since = now
        actions.append(StartCopy(number))

    def _on_copied(self, number: int, actions: list[TrainerAction]) -> None:
        save = self.saves[number]
        if self.is_left:
            save.stage = Stage.FREE
            actions += [HandOver(number), NoteFreeSlot(number)]
        elif self._gone is not None:
            self._stop(number, self._gone.error, actions, told=True)
        elif save.outcome is EndState.WITHDRAWN and save.reason is not None:
            save.stage = Stage.CANCELLING
            actions += [ReleaseTensors(number), AskCancel(number, save.reason)]
        else:
            save.stage = Stage.STAGED
            actions.append(HandOver(number))

    def _stop(self, number: int, error: CheckpointError, actions: list[TrainerAction], *, told: bool) -> None:
        """End a save after its copy has stopped. ``told``: the worker knows of the save."""
        save = self.saves[number]
        error = save.reason or error
        if save.is_open:
            self._end(number, error, actions)
            self._report(number, error, actions, begun=told)
        actions.append(ReleaseTensors(number))
        if told and self._gone is None:
            save.stage = Stage.CANCELLING
            actions.append(AskCancel(number, error))
        else:
            save.stage = Stage.FREE
            save.awaits_copies = False
            actions.append(NoteFreeSlot(number))

    def _interrupt(self, number: int, error: CheckpointError, actions: list[TrainerAction]) -> None:
        save = self.saves.get(number)
        if save is None:
            return
        if save.stage is Stage.WAITING:
            self._fail(number, error, actions)
        elif save.stage is Stage.COPYING:
            save.stage = Stage.STOPPING
            save.reason = error
            actions.append(StopCopy(number))

    def _on_cancelled(self, event: CancelAnswered, actions: list[TrainerAction]) -> None:
        save = self.saves.get(event.save)
        if event.in_time and save is not None and save.reason is not None:
            self._end(event.save, save.reason, actions)
        if event.in_time and event.slot_free:
            self._let_go(event.save, actions)
        for number, other in list(self.saves.items()):
            if other.stage is Stage.WAITING and not other.is_decided and event.save in other.asked:
                if event.in_time:
                    self._decide(number, Decision(replaced=event.save), actions)
                else:
                    self._replace(number, actions)

    def _on_replicated(self, number: int, error: CheckpointError | None, actions: list[TrainerAction]) -> None:
        save = self.saves.get(number)
        if save is not None and save.awaits_copies:
            save.awaits_copies = False
            actions.append(TellReplicated(number, error))

    def _lose(self, event: WorkerGone, now: float, actions: list[TrainerAction]) -> None:
        """Free all slots. Open saves are lost, unless another rank or storage reports a commit."""
        self._gone = event
        for number, save in self.saves.items():
            if save.stage is Stage.WAITING:
                self._fail(number, event.error, actions)
                continue
            is_staged = save.stage in (Stage.STAGED, Stage.FREE)
            if save.stage is Stage.COPYING and not event.left:
                save.stage = Stage.STOPPING
                actions.append(StopCopy(number))
            if save.stage in (Stage.STAGED, Stage.CANCELLING):
                save.stage = Stage.FREE
                actions.append(NoteFreeSlot(number))
            if save.is_open:
                error = self._loss(save, event, now)
                if is_staged and not event.left and not self._is_given_up:
                    save.outcome = EndState.ASKING
                    actions.append(FindOut(number, error))
                else:
                    self._end(number, error, actions)
                    self._report(number, error, actions, begun=True)
            if save.awaits_copies:
                self._on_replicated(number, event.error, actions)

    def _loss(self, save: SaveInTrainer, event: WorkerGone, now: float) -> CheckpointError:
        if event.left:
            return ClosedError(
                "the outcome of this save is not known: its checkpointer was closed before, and the worker"
                f" {event.pid} continues alone; a new checkpointer loads the save if all ranks had staged it"
            )
        if self._is_overdue(save, now):
            return SaveTimeoutError(
                f"the worker {event.pid} did not report the outcome within {save.wanted.limit_s:g} s, and was killed;"
                " the worker may have been stopped, or the storage is stalled"
            )
        return event.error

    def _tick(self, now: float, actions: list[TrainerAction]) -> None:
        for number, save in self.saves.items():
            limit_s = save.wanted.slot_s if save.is_decided else save.wanted.decide_s
            if save.stage is Stage.WAITING and now - save.since >= limit_s:
                text = f"waiting for a free slot took longer than {limit_s:g} s; the storage may be stalled"
                self._fail(number, SaveTimeoutError(text), actions)
        in_worker = (save for save in self.saves.values() if save.stage is not Stage.WAITING and save.is_open)
        if self._gone is None and any(self._is_overdue(save, now) for save in in_worker):
            actions.append(KillWorker())

    def _is_overdue(self, save: SaveInTrainer, now: float) -> bool:
        """Return whether the worker has stopped responding. A running worker would end the save by its own timeout."""
        return now >= max(save.since, self._progress_at) + save.wanted.limit_s

    def _fail(self, number: int, error: CheckpointError, actions: list[TrainerAction]) -> None:
        """End a save that has no slot yet."""
        self.saves[number].stage = Stage.FREE
        self._end(number, error, actions)
        self._report(number, error, actions, begun=False)
        actions.append(ReleaseTensors(number))

    def _end(self, number: int, error: CheckpointError | None, actions: list[TrainerAction]) -> None:
        save = self.saves.get(number)
        if save is not None and save.is_open:
            save.outcome = EndState.ENDED
            actions.append(End(number, error))

    def _report(self, number: int, error: CheckpointError, actions: list[TrainerAction], *, begun: bool) -> None:
        if not self.is_left and not self._is_given_up:
            actions.append(ReportFailure(number, error, begun))

    def _let_go(self, number: int, actions: list[TrainerAction]) -> None:
        save = self.saves.get(number)
        if save is not None and save.stage in (Stage.STAGED, Stage.CANCELLING):
            save.stage = Stage.FREE
            actions.append(NoteFreeSlot(number))


def _replaced(save: SaveInTrainer) -> SaveDroppedError:
    return SaveDroppedError(f"the save was replaced by the newer save of step {save.wanted.step} before it was written")
