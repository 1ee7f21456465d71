"""The saves of a worker: choose the next image to write, free its slot, and end the save.

``commit.py`` has the commits, and ``replication.py`` has the copies on other hosts. This module is about the images.

An image arrives while the trainer copies its state into a slot. The writer is one thread of the worker. It writes one
image after the other. If no complete image waits, the writer follows an image that is still arriving.

    state      event                                  next state  actions
    ARRIVING   the writer is idle, no image is STAGED FOLLOWED    WriteImage
    ARRIVING   as above, and the save has ended       UNWRITTEN
    ARRIVING   ImageStaged                            STAGED      HoldImage
    ARRIVING   ImageCancelled                         (ends)      FreeSlot, AnswerCancel, PartFailed
    ARRIVING   TrainerLeft                            (ends)      PartFailed
    FOLLOWED   ImageStaged                            WRITING     HoldImage, CompleteImage
    FOLLOWED   ImageCancelled                         STOPPING    StopWriting, AnswerCancel
    FOLLOWED   TrainerLeft                            STOPPING    StopWriting
    FOLLOWED   LetGo                                  UNWRITTEN
    UNWRITTEN  ImageStaged                            (ends)      HoldImage, FreeSlot
    UNWRITTEN  ImageCancelled                         (ends)      FreeSlot, AnswerCancel, PartFailed
    UNWRITTEN  TrainerLeft                            (ends)
    STAGED     the writer is idle, oldest STAGED      WRITING     CompleteImage, WriteImage
    STAGED     as above, and the save has ended       (ends)      FreeSlot
    STAGED     ImageCancelled                         (ends)      FreeSlot, AnswerCancel, PartFailed
    WRITING,
    STOPPING   LetGo                                  (ends)      FreeSlot
    others     ImageCancelled                                     AnswerCancel: too late

``PartFailed`` is an event of the commit. ``TrainerLeft`` lists the images with slots that are marked as staged. For
these images, ``TrainerLeft`` means ``ImageStaged``.

Each slot is freed exactly once, when neither the trainer nor the writer uses the slot any more.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum, auto
from typing import TypeAlias

from asyncckpt.errors import CheckpointError, RankFailedError
from asyncckpt.protocol.commit import (
    Begun,
    CommitAction,
    CommitEvent,
    Commits,
    PartFailed,
    PartWritten,
    RankGone,
    Tell,
    Tick,
)
from asyncckpt.protocol.replication import (
    OF_COPIES,
    CopyAction,
    CopyEvent,
    ImageHere,
    OfCopies,
    Replication,
)


class ImageState(Enum):
    """The state of an image. The module docstring lists the transitions."""

    ARRIVING = auto()
    """The trainer copies, and the writer has not begun."""
    FOLLOWED = auto()
    """The trainer copies, and the writer writes the part that has arrived."""
    UNWRITTEN = auto()
    """The trainer still copies, and the writer will not write the image."""
    STOPPING = auto()
    """The trainer has stopped copying, and the writer has not noticed yet."""
    STAGED = auto()
    """The image is complete, and waits for the writer."""
    WRITING = auto()
    """The image is complete, and the writer writes it."""


@dataclass(frozen=True)
class ImageStaged:
    """The trainer has copied the whole state."""

    save: int


@dataclass(frozen=True)
class ImageCancelled:
    """The trainer has stopped copying, or no longer needs the save."""

    save: int
    reason: CheckpointError


@dataclass(frozen=True)
class LetGo:
    """The writer no longer reads the slot. The writer is idle after ``PartWritten`` or ``PartFailed``."""

    save: int


@dataclass(frozen=True)
class TrainerLeft:
    """The trainer copies no more images. ``staged``: the saves with slots that are marked as staged."""

    staged: frozenset[int]


@dataclass(frozen=True)
class WriteImage:
    """Write the image, even while it is still arriving."""

    save: int


@dataclass(frozen=True)
class CompleteImage:
    """Tell the writer that the image is complete, and mark the slot as WRITING."""

    save: int


@dataclass(frozen=True)
class StopWriting:
    """Tell the writer that the rest of the image will not arrive."""

    save: int
    reason: CheckpointError


@dataclass(frozen=True)
class HoldImage:
    """Note that the image in memory is complete."""

    save: int


@dataclass(frozen=True)
class FreeSlot:
    """Mark the slot as free. ``tell``: tell the trainer."""

    save: int
    tell: bool


@dataclass(frozen=True)
class AnswerCancel:
    """Answer the trainer's ``ImageCancelled``. ``in_time``: whether the save is cancelled."""

    save: int
    in_time: bool
    slot_free: bool


ImageEvent: TypeAlias = ImageStaged | ImageCancelled | LetGo | TrainerLeft
ImageAction: TypeAlias = WriteImage | CompleteImage | StopWriting | HoldImage | FreeSlot | AnswerCancel | PartFailed

SaveEvent: TypeAlias = CommitEvent | ImageEvent | OfCopies
SaveAction: TypeAlias = CommitAction | ImageAction | CopyAction

_OF_IMAGES = ImageStaged, ImageCancelled, LetGo, TrainerLeft

_LEFT = "the trainer of this rank ended before the state was staged"


class _Slots:
    """The images in slots that are in use, oldest first."""

    def __init__(self) -> None:
        self.states: dict[int, ImageState] = {}
        self._staged: list[int] = []  # the saves in state STAGED, in order
        self.writer_is_idle = True

    def handle(self, event: ImageEvent, actions: list[ImageAction]) -> None:
        """Change the state by an event. Add the resulting actions to ``actions``."""
        match event:
            case ImageStaged(save):
                self._stage(save, actions)
            case ImageCancelled():
                self._cancel(event, actions)
            case LetGo(save):
                if self.states[save] is ImageState.FOLLOWED:
                    self.states[save] = ImageState.UNWRITTEN
                else:
                    self._free(save, actions)
            case TrainerLeft(staged):
                for save in [*self.states]:
                    if save in staged:
                        self._stage(save, actions)
                    else:
                        self._lose(save, actions)

    def pick(self, is_open: Callable[[int], bool], actions: list[ImageAction]) -> None:
        """If the writer is idle, choose its next image. ``is_open``: return whether a save may still be committed."""
        while self.writer_is_idle and self._staged:
            save = self._staged.pop(0)
            if is_open(save):
                self.writer_is_idle = False
                self.states[save] = ImageState.WRITING
                actions += [CompleteImage(save), WriteImage(save)]
            else:
                self._free(save, actions)
        for save, state in self.states.items() if self.writer_is_idle else ():
            if state is ImageState.ARRIVING and is_open(save):
                self.writer_is_idle = False
                self.states[save] = ImageState.FOLLOWED
                actions.append(WriteImage(save))
                return
            if state is ImageState.ARRIVING:
                self.states[save] = ImageState.UNWRITTEN

    def _stage(self, save: int, actions: list[ImageAction]) -> None:
        match self.states.get(save):
            case ImageState.ARRIVING:
                self.states[save] = ImageState.STAGED
                self._staged.append(save)
                actions.append(HoldImage(save))
            case ImageState.FOLLOWED:
                self.states[save] = ImageState.WRITING
                actions += [HoldImage(save), CompleteImage(save)]
            case ImageState.UNWRITTEN:
                actions.append(HoldImage(save))
                self._free(save, actions)

    def _cancel(self, event: ImageCancelled, actions: list[ImageAction]) -> None:
        save = event.save
        match self.states.get(save):
            case ImageState.ARRIVING | ImageState.UNWRITTEN | ImageState.STAGED as state:
                if state is ImageState.STAGED:
                    self._staged.remove(save)
                self._free(save, actions, tell=False)
                actions.append(AnswerCancel(save, in_time=True, slot_free=True))
                actions.append(PartFailed(save, event.reason))
            case ImageState.FOLLOWED:
                self.states[save] = ImageState.STOPPING
                actions.append(StopWriting(save, event.reason))
                actions.append(AnswerCancel(save, in_time=True, slot_free=False))
            case _:
                actions.append(AnswerCancel(save, in_time=False, slot_free=True))

    def _lose(self, save: int, actions: list[ImageAction]) -> None:
        """Give up an image that was still arriving when the trainer ended."""
        match self.states[save]:
            case ImageState.ARRIVING:
                del self.states[save]
                actions.append(PartFailed(save, RankFailedError(_LEFT)))
            case ImageState.UNWRITTEN:
                del self.states[save]
            case ImageState.FOLLOWED:
                self.states[save] = ImageState.STOPPING
                actions.append(StopWriting(save, RankFailedError(_LEFT)))

    def _free(self, save: int, actions: list[ImageAction], *, tell: bool = True) -> None:
        del self.states[save]
        actions.append(FreeSlot(save, tell))


class WorkerSaves:
    """All saves of one worker: their images, their commits, and their copies on other hosts."""

    def __init__(self) -> None:
        self._slots = _Slots()
        self._commits = Commits()
        self._replication: Replication | None = None  # created when the first save needs copies
        self._rank = 0

    def is_open(self, save: int) -> bool:
        """Return whether a save may still be committed."""
        return self._commits.is_open(save)

    def open_saves(self) -> tuple[int, ...]:
        """Return the saves that may still be committed."""
        return self._commits.open_saves()

    def needs_ticks(self) -> bool:
        """Return whether ``Tick`` events are needed."""
        return bool(self._commits.open_saves()) or (self._replication is not None and self._replication.is_waiting())

    def uses_slots(self) -> bool:
        """Return whether any slot is in use."""
        return bool(self._slots.states)

    def handle(self, event: SaveEvent, now: float) -> list[SaveAction]:
        """Change the state by an event. Return the actions to carry out, in their order.

        Args:
            event: The event.
            now: The time in seconds, on any clock that does not jump.
        """
        if isinstance(event, OF_COPIES):
            return [*self._copies().handle(event, now)]
        actions = self._handle(event, now)
        if self._replication is not None or (isinstance(event, Begun) and event.is_copied):
            for each in self._followed(event, actions):
                actions += self._copies().handle(each, now)
        return actions

    def _handle(self, event: CommitEvent | ImageEvent, now: float) -> list[SaveAction]:
        """Update the images and the commits for an event."""
        actions: list[SaveAction] = []
        if isinstance(event, _OF_IMAGES):
            of_images: list[ImageAction] = []
            self._slots.handle(event, of_images)
            for action in of_images:
                actions += self._commits.handle(action, now) if isinstance(action, PartFailed) else [action]
        else:
            actions += self._commits.handle(event, now)
            if isinstance(event, (PartWritten, PartFailed)):
                self._slots.writer_is_idle = True
            elif isinstance(event, Begun):
                self._slots.states[event.save] = ImageState.ARRIVING
                self._rank = event.rank
        if self._slots.writer_is_idle:
            picked: list[ImageAction] = []
            self._slots.pick(self._commits.is_open, picked)
            actions += picked
        return actions

    def _copies(self) -> Replication:
        if self._replication is None:
            self._replication = Replication()
        return self._replication

    def _followed(self, event: CommitEvent | ImageEvent, actions: list[SaveAction]) -> list[CopyEvent]:
        """Translate an event and its actions into events for the copies."""
        events: list[CopyEvent] = [event] if isinstance(event, (Begun, RankGone, Tick)) else []
        for action in actions:
            match action:
                case HoldImage(save):
                    events.append(ImageHere(save, self._rank))
                case Tell(save, CheckpointError() as error):
                    events.append(ImageHere(save, self._rank, error))
        return events
