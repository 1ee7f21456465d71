"""What has arrived of an image that the trainer stages: it can be written while the rest is being copied."""

from __future__ import annotations

import enum
import threading
from collections.abc import Callable
from dataclasses import dataclass, field

from asyncckpt.errors import CheckpointError
from asyncckpt.shm.slots import SlotTable, State
from asyncckpt.worker.messages import WriteRequest

# How often to look for more. At tens of gigabytes a second that is enough to write, each time.
_POLL_S = 0.002


class ImageState(enum.Enum):
    """How far staging and writing of an image are; ``writer.py`` says what follows on what."""

    STAGING = enum.auto()
    """The trainer copies, and nothing is written yet."""
    FOLLOWED = enum.auto()
    """The trainer copies, and what has arrived is being written."""
    UNWRITTEN = enum.auto()
    """The trainer still copies, and writing has failed."""
    CANCELLED = enum.auto()
    """The trainer has stopped copying, and the writer does not know it yet."""
    STAGED = enum.auto()
    """All of it is there, and the slot is the worker's."""


@dataclass(eq=False)
class StagedImage:
    """What the trainer is staging, or has staged, for one request.

    Shared by the threads of the server: all but ``wait_beyond`` is called while ``changed`` is held. ``can_succeed``
    is called to learn whether the save still can.
    """

    request: WriteRequest
    slots: SlotTable
    changed: threading.Condition
    can_succeed: Callable[[], bool]
    state: ImageState = ImageState.STAGING
    timings: dict[str, float] = field(default_factory=dict)
    """Seconds the trainer spent, by phase; known when all is staged."""
    inode: int | None = None
    """That of a single file, once it is written."""
    failure: CheckpointError | None = None
    """Why the rest is not coming."""

    def stage(self, timings: dict[str, float]) -> None:
        """All of it is there; the slot belongs to the worker from now on."""
        self.timings.update(timings)
        self.state = ImageState.STAGED
        self.changed.notify_all()

    def cancel(self, reason: CheckpointError) -> None:
        """The rest of an image that is being written is not coming."""
        self.failure, self.state = reason, ImageState.CANCELLED
        self.changed.notify_all()

    def is_marked_staged(self) -> bool:
        """Whether the header page says that it is staged, for when the trainer can no longer say so."""
        request, slots = self.request, self.slots
        return slots.state(request.slot) is State.STAGED and slots.save_id(request.slot) == request.save_id

    def set_slot_state(self, state: State) -> None:
        """Change the state of its slot."""
        self.slots.set(self.request.slot, state)

    def wait_beyond(self, nbytes: int, whole: int) -> int:
        """Wait until more of the image is there, which stays as it is.

        Args:
            nbytes: How many of its first bytes the caller has.
            whole: The size of the image, in bytes.

        Returns:
            How many of its first bytes are there: more than ``nbytes``.

        Raises:
            CheckpointError: The rest is not coming: it was cancelled, the trainer has died, or the save has failed
                (it has a timeout, so this wait ends, too).
        """
        with self.changed:
            while True:
                if self.state is ImageState.STAGED:
                    return whole
                if self.failure is None and not self.can_succeed():
                    self.failure = CheckpointError("the save failed while it was being staged")
                if self.failure is not None:
                    raise self.failure
                arrived = self.slots.arrived(self.request.slot)
                # The last byte arrives before the slot is STAGED, and only that state commits the trainer.
                if nbytes < arrived < whole:
                    return arrived
                self.changed.wait(_POLL_S)
