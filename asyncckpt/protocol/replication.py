"""Copies on other hosts: which images a worker copies, and when a save is replicated.

Each worker has one ``Replication``. The worker copies the images of some ranks, its *sources*. A save is *replicated*
when all ranks have staged it, and all workers have the images of all their sources. The first rank decides, as in a
commit.

The first rank:

    state      event                                   next state  actions
               Begun                                   OPEN        ConcludeCopies: saves that it did not begin
    OPEN       all its images are here, and
               CopiesReported: all other ranks         (ends)      ConcludeCopies, ProtectCopies, TellCopies
    OPEN       an image will not come, CopiesFailed,
               RankGone, CopiesBegin, deadline         (ends)      ConcludeCopies, TellCopies

The other ranks:

    state      event                                   next state  actions
               Begun                                   OPEN        AwaitCopies; at the first save also SayBegin
    OPEN       all its images are here                 COMPLETE    ReportCopies
    OPEN       an image will not come                  FAILED      FailCopies, TellCopies
    OPEN,
    COMPLETE   deadline                                FAILED      FailCopies, TellCopies
    OPEN,
    COMPLETE   OutcomeLost                             (ends)      FailCopies, TellCopies
    COMPLETE   CopiesOutcome()                         (ends)      ProtectCopies, TellCopies
    all        CopiesOutcome(error)                    (ends)      TellCopies, unless told before
    FAILED     CopiesOutcome(), OutcomeLost            (ends)      ProtectCopies, if it is replicated

``ImageHere`` says that an image is here, or that it will not come. The image of this rank is "here" when it is staged.
If the save fails before that, the image will not come. The image of a source will not come if a newer image of the
source is here.

Invariant: the copies of a replicated save stay until a newer save is replicated. A worker has two slots for each
source: one for the last replicated save, and one for the newest copy. So the newest copy stays until its save has
ended. Only then does ``AllowCopy`` answer ``CopyWanted``. For this reason the first rank reports the end of every save.
A save that the first rank did not begin ends when the first rank begins its next save.

If a worker dies, another worker takes its place, without copies of earlier saves. ``SayBegin`` tells the first rank the
first save that a worker copies.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field
from typing import TypeAlias

from asyncckpt.errors import (
    CheckpointError,
    RankFailedError,
    SaveDroppedError,
    SaveTimeoutError,
    WorkerDiedError,
    located,
)
from asyncckpt.protocol.commit import KEPT_SAVES, Begun, RankGone, Tick, grace, in_words


@dataclass(frozen=True)
class Copying:
    """This worker copies the images of ``source`` from now on."""

    source: int


@dataclass(frozen=True)
class CopyWanted:
    """The next image of ``source`` can be copied."""

    source: int


@dataclass(frozen=True)
class ImageHere:
    """The image of a save of ``source`` is here. With an ``error``, it is not here, and will not be copied again.

    ``source``: a rank among the sources, or the rank of this worker.
    """

    save: int
    source: int
    error: CheckpointError | None = None


@dataclass(frozen=True)
class CopiesReported:
    """First rank: another ``rank`` has all its images of the save."""

    save: int
    rank: int


@dataclass(frozen=True)
class CopiesBegin:
    """First rank: the worker of ``rank`` copies images from this save on, and no images of older saves."""

    save: int
    rank: int


@dataclass(frozen=True)
class CopiesFailed:
    """First rank: another rank will not have all its images of the save."""

    save: int
    error: CheckpointError


@dataclass(frozen=True)
class CopiesOutcome:
    """Other ranks: the first rank has decided. ``error``: the reason if the save is not replicated."""

    save: int
    error: CheckpointError | None


@dataclass(frozen=True)
class OutcomeLost:
    """Other ranks: the first rank's worker was replaced, or has forgotten the save. Nobody will decide."""

    save: int


@dataclass(frozen=True)
class AllowCopy:
    """Copy the next image of ``source`` over the image before the newest one."""

    source: int


@dataclass(frozen=True)
class SayBegin:
    """Tell the first rank that this worker copies images from this save on. ``timeout``: in seconds, for retries."""

    save: int
    timeout: float


@dataclass(frozen=True)
class ReportCopies:
    """Tell the first rank that this worker has all its images of the save. ``timeout``: see ``SayBegin``."""

    save: int
    timeout: float


@dataclass(frozen=True)
class FailCopies:
    """Tell the first rank that this worker will not have all its images of the save. ``timeout``: see ``SayBegin``."""

    save: int
    error: CheckpointError
    timeout: float


@dataclass(frozen=True)
class AwaitCopies:
    """Wait for the first rank's decision."""

    save: int


@dataclass(frozen=True)
class ConcludeCopies:
    """First rank: tell the other ranks whether the save is replicated."""

    save: int
    error: CheckpointError | None


@dataclass(frozen=True)
class ProtectCopies:
    """Protect the copies of this save, instead of the copies of an older save."""

    save: int


@dataclass(frozen=True)
class TellCopies:
    """Tell the trainer whether the save is replicated."""

    save: int
    error: CheckpointError | None


OF_COPIES = (
    Copying,
    CopyWanted,
    ImageHere,
    CopiesBegin,
    CopiesReported,
    CopiesFailed,
    CopiesOutcome,
    OutcomeLost,
)
"""The external events that concern only copies."""
OfCopies: TypeAlias = (
    Copying | CopyWanted | ImageHere | CopiesBegin | CopiesReported | CopiesFailed | CopiesOutcome | OutcomeLost
)
CopyEvent: TypeAlias = OfCopies | Begun | RankGone | Tick
CopyAction: TypeAlias = (
    AllowCopy | SayBegin | ReportCopies | FailCopies | AwaitCopies | ConcludeCopies | ProtectCopies | TellCopies
)

_UNMADE = "this rank did not make this save, or its worker has died since"
_REPLACED = "the worker of rank 0 died before it reported whether the save is replicated"
_NEWER = "a newer image of this rank was copied first"


@dataclass
class _Save:
    """A save without a known outcome. ``deadline``: on the clock of ``handle``."""

    begun: Begun
    deadline: float
    missing: set[int] | None
    """The ranks whose images are missing here, possibly this rank too; None: the save failed, and this was reported."""
    reports: set[int] = field(default_factory=set)
    """First rank: the ranks that have all their images."""


class Replication:
    """The copies of one worker."""

    def __init__(self) -> None:
        self._saves: dict[int, _Save] = {}  # in the order of their numbers
        self._newest = 0  # the newest save that has begun here
        self._newest_images: dict[int, ImageHere] = {}  # by source
        self._wanted: set[int] = set()
        # On the first rank, by rank: the first save that its worker copies, and the reason why the rank is gone. By
        # save: events that came before the save began.
        self._begins: dict[int, int] = {}
        self._gone: dict[int, CheckpointError] = {}
        self._early: defaultdict[int, list[CopiesReported | CopiesFailed]] = defaultdict(list)

    def is_waiting(self) -> bool:
        """Return whether the trainer still waits for the outcome of a save."""
        return any(its.missing is not None for its in self._saves.values())

    def handle(self, event: CopyEvent, now: float) -> list[CopyAction]:
        """Change the state by an event. Return the actions to carry out, in their order.

        Args:
            event: The event.
            now: The time in seconds, on any clock that does not jump.
        """
        actions: list[CopyAction] = []
        match event:
            case Begun():
                self._begin(event, now, actions)
            case Copying(source) | CopyWanted(source):
                self._newest_images.setdefault(source, ImageHere(0, source))
                if isinstance(event, CopyWanted):
                    self._wanted.add(source)
            case ImageHere():
                self._note_image(event, actions)
            case CopiesReported(save) | CopiesFailed(save) if save > self._newest:
                self._early[save].append(event)
            case CopiesReported() | CopiesFailed():
                self._hear(event, actions)
            case CopiesOutcome(save, error):
                self._end(save, error, actions)
            case OutcomeLost(save):
                error = WorkerDiedError(_REPLACED, rank=0)
                self._fail_here(save, error, actions)
                self._end(save, error, actions)
            case CopiesBegin(save, rank):
                self._begins[rank] = save
                self._lose(rank, actions)
            case RankGone(rank, error):
                self._gone.setdefault(rank, error)
                self._lose(rank, actions)
            case Tick():
                self._pass_time(now, actions)
        for source in sorted(self._wanted):
            if self._newest_images[source].save <= self._known():
                self._wanted.discard(source)
                actions.append(AllowCopy(source))
        return actions

    def _known(self) -> int:
        """Return the number of the last save before the first save without a known outcome."""
        return min(self._saves, default=self._newest + 1) - 1

    def _begin(self, begun: Begun, now: float, actions: list[CopyAction]) -> None:
        number = begun.save
        early = [event for event in self._early.pop(number, ()) if begun.is_copied]
        for passed in [save for save in self._early if save < number]:
            del self._early[passed]
        if not begun.is_copied:
            return
        newest = self._newest_images.values()
        missing = {begun.rank, *(image.source for image in newest if image.save < number)}
        self._saves[number] = _Save(begun, now + begun.timeout, missing)
        if begun.rank > 0 and self._newest == 0:
            actions.append(SayBegin(number, begun.timeout))
        if begun.rank > 0:
            actions.append(AwaitCopies(number))
        else:
            for unmade in range(max(self._newest + 1, number - KEPT_SAVES), number):
                actions.append(ConcludeCopies(unmade, RankFailedError(_UNMADE, rank=0)))
        self._newest = number
        for image in newest:
            if (failure := _failure(number, image)) is not None:
                self._fail_here(number, failure, actions)
        for event in early:
            self._hear(event, actions)
        for rank in {*self._begins, *self._gone}:
            self._lose(rank, actions)

    def _note_image(self, image: ImageHere, actions: list[CopyAction]) -> None:
        saves = [image.save]
        if image.source in self._newest_images:  # skip this rank, which may still stage an older save
            self._newest_images[image.source] = image
            saves = [*self._saves]
        for save in saves:
            its = self._saves.get(save)
            if its is None or its.missing is None or image.source not in its.missing:
                continue
            if (failure := _failure(save, image)) is not None:
                self._fail_here(save, failure, actions)
            elif save == image.save:
                its.missing.discard(image.source)
                if not its.missing:
                    self._complete(save, actions)

    def _complete(self, save: int, actions: list[CopyAction]) -> None:
        """Note that all images of a save are here."""
        rank = self._saves[save].begun.rank
        if rank > 0:
            actions.append(ReportCopies(save, self._saves[save].begun.timeout))
        else:
            self._hear(CopiesReported(save, rank), actions)

    def _fail_here(self, save: int, error: CheckpointError, actions: list[CopyAction]) -> None:
        """Note that not all images of a save will be here."""
        its = self._saves.get(save)
        if its is None or its.missing is None:  # already known
            return
        error = located(error, rank=its.begun.rank)
        if its.begun.rank == 0:
            self._conclude(save, error, actions)
        else:
            its.missing = None
            actions += [FailCopies(save, error, its.begun.timeout), TellCopies(save, error)]

    def _hear(self, event: CopiesReported | CopiesFailed, actions: list[CopyAction]) -> None:
        """First rank: handle the report of a rank, possibly this rank."""
        its = self._saves.get(event.save)
        if its is None:
            return
        if isinstance(event, CopiesFailed):
            self._conclude(event.save, event.error, actions)
            return
        its.reports.add(event.rank)
        if len(its.reports) == its.begun.ranks:
            self._conclude(event.save, None, actions)

    def _conclude(self, save: int, error: CheckpointError | None, actions: list[CopyAction]) -> None:
        actions.append(ConcludeCopies(save, error))
        self._end(save, error, actions)

    def _end(self, save: int, error: CheckpointError | None, actions: list[CopyAction]) -> None:
        its = self._saves.pop(save)
        if error is None:
            actions.append(ProtectCopies(save))
        if its.missing is not None:
            actions.append(TellCopies(save, error))

    def _lose(self, rank: int, actions: list[CopyAction]) -> None:
        """First rank: fail the saves that ``rank`` will never have copies of."""
        for save, its in [*self._saves.items()]:
            if self._begins.get(rank, 0) > save:  # the copies died with the earlier worker
                self._conclude(save, WorkerDiedError("its worker died, and its copies are lost", rank=rank), actions)
            elif rank in self._gone and rank not in its.reports:
                self._conclude(save, self._gone[rank], actions)

    def _pass_time(self, now: float, actions: list[CopyAction]) -> None:
        for save, its in [*self._saves.items()]:
            rank, seconds = its.begun.rank, its.begun.timeout
            if rank == 0 and now >= its.deadline:
                missing = [rank for rank in range(its.begun.ranks) if rank not in its.reports]
                text = f"{in_words(missing)} did not copy all images within {seconds:g} s"
                self._conclude(save, SaveTimeoutError(text, rank=missing[0]), actions)
            elif rank > 0 and now >= its.deadline + grace(seconds):
                text = f"rank 0 did not report within {seconds:g} s whether the save is replicated"
                self._fail_here(save, SaveTimeoutError(text, rank=0), actions)


def _failure(save: int, image: ImageHere) -> CheckpointError | None:
    """Return the error of a save that cannot be replicated because of ``image``; None: it may still be replicated."""
    if image.save > save:
        return SaveDroppedError(_NEWER, rank=image.source)
    return image.error if image.save == save else None
