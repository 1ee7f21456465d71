"""An image on its way into a slot. What has arrived of it can be written while the rest is coming."""

from __future__ import annotations

import threading
from collections.abc import Callable

from asyncckpt.errors import CheckpointError
from asyncckpt.shm.slots import SlotTable, State
from asyncckpt.worker.messages import Order

# How often is looked for more. At tens of gigabytes a second that is a piece to write, each time.
_POLL_S = 0.002


class Arrival:
    """What the trainer is staging, or has staged, for one order. Under the server's ``changed``, but ``wait_beyond``.

    ``timings``: the trainer's, once it is staged. ``followed``: it was being written before that. ``is_freed``: its
    slot is the trainer's again. ``inode``: of a single file, once it is written.
    """

    def __init__(
        self, order: Order, slots: SlotTable, changed: threading.Condition, wanted: Callable[[], bool]
    ) -> None:
        """``wanted``: whether its save can still succeed."""
        self.order = order
        self.timings: dict[str, float] = {}
        self.followed = False
        self.is_staged = False
        self.is_freed = False
        self.inode: int | None = None
        self._slots = slots
        self._changed = changed
        self._wanted = wanted
        self.failure: CheckpointError | None = None
        """Why the rest is not coming."""

    def stage(self, timings: dict[str, float]) -> None:
        """All of it is there; the slot belongs to the worker from now on."""
        self.timings.update(timings)
        self.is_staged = True
        self._changed.notify_all()

    def fail(self, reason: CheckpointError) -> None:
        """The rest is not coming."""
        self.failure = reason
        self._changed.notify_all()

    def says_staged(self) -> bool:
        """Whether the slot does, for when the trainer can no longer say so."""
        order, slots = self.order, self._slots
        return slots.state(order.slot) is State.STAGED and slots.save_id(order.slot) == order.save_id

    def set_state(self, state: State) -> None:
        """Change the state of its slot."""
        self._slots.set(self.order.slot, state)

    def wait_beyond(self, nbytes: int, whole: int) -> int:
        """Wait until more than ``nbytes`` of the ``whole`` are there. Returns how many, in bytes.

        They stay as they are. Raises what was given to ``fail``, as it is when the trainer ends; the wait is over, too,
        when the save is, which has a timeout.
        """
        with self._changed:
            while True:
                if self.is_staged:
                    return whole
                if self.failure is None and not self._wanted():
                    self.failure = CheckpointError("the save failed while it was being staged")
                if self.failure is not None:
                    raise self.failure
                arrived = self._slots.nbytes(self.order.slot)
                # The last byte is told of before the slot is STAGED, on which alone the trainer has committed itself.
                if nbytes < arrived < whole:
                    return arrived
                self._changed.wait(_POLL_S)
