"""The holdings of a worker: its segments, and which whole images are in them.

An image is held from the moment it is staged until its slot is taken again. When the trainer has died, whoever knocks
at the door is told of them, and handed the memory. What is published is shown to readers at any time, for reading.

A trainer that takes over hands the memory on to its own worker before the old one leaves, and only then has it take the
door. So at any instant one of the two holds what is staged, and can be found.
"""

from __future__ import annotations

import contextlib
import logging
import os
import threading
import time
from array import array
from collections.abc import Iterator
from dataclasses import dataclass, replace

from multiprocess.connection import Connection
from multiprocess.reduction import send_handle

from asyncckpt.errors import JobTakenError
from asyncckpt.shm.leases import reopen
from asyncckpt.shm.segment import Segment
from asyncckpt.shm.slots import SlotTable, State
from asyncckpt.worker.door import Door
from asyncckpt.worker.manifest import checksum
from asyncckpt.worker.messages import (
    Browse,
    Busy,
    FileLayout,
    Held,
    Holding,
    Layout,
    Look,
    Order,
    Read,
    Region,
    Retire,
    Shelf,
    Shelves,
    Take,
    WeightLayout,
)
from asyncckpt.worker.visit import is_leaving
from asyncckpt.worker.wire import receive, send

logger = logging.getLogger(__name__)

_POLL_S = 0.05
_ANSWER_S = 10.0
# How long the word to leave may take to reach a worker.
_SURE_S = 1.0


class Room:
    """A segment with what is known of it."""

    def __init__(self, segment: Segment) -> None:
        self._lock = threading.Lock()
        self._users = 0
        self._closing = False
        self.closed = threading.Event()
        self.segment = segment
        self._slots: SlotTable | None = None
        self.layout: Layout | FileLayout | WeightLayout | None = None
        self.constants: tuple[int, ...] = ()

    @property
    def slots(self) -> SlotTable:
        """Of a segment with a header page."""
        with self._lock:
            if self._slots is None:
                self._slots = SlotTable(self.segment.view)
            return self._slots

    def describe(self, layout: Layout | FileLayout | WeightLayout) -> None:
        """What its bytes are; the constant ones are in place."""
        self.layout = layout
        self.constants = tuple(checksum(self.region(region)) for region in layout.constants())

    def region(self, region: Region) -> memoryview:
        """Some of its bytes."""
        return self.segment.view[region.offset : region.offset + region.nbytes]

    @contextlib.contextmanager
    def used(self) -> Iterator[None]:
        """Keep the memory, even if the room is closed meanwhile."""
        with self._lock:
            self._users += 1
        try:
            yield
        finally:
            with self._lock:
                self._users -= 1
                last = self._closing and not self._users
            if last:
                self._drop()

    def close(self) -> None:
        """Let go of the memory, as soon as nobody uses it."""
        with self._lock:
            self._closing = True
            if self._users:
                return
        self._drop()

    def _drop(self) -> None:
        if self._slots is not None:
            self._slots.close()
        self.segment.close()
        self.closed.set()


@dataclass
class _Image:
    order: Order
    layout: Layout
    checksums: array[int] | None = None
    committed: bool | None = None
    adopted: bool = False


class Holdings:
    """What one worker holds. The server's threads and those of visitors call."""

    def __init__(self, worker: int, trainer: int, door: str | None) -> None:
        """``worker`` and ``trainer``: their process ids. ``door``: its name; None: none."""
        self._worker, self._trainer = worker, trainer
        self._name = door
        self._door: Door | None = None
        self._lock = threading.Lock()
        self._rooms: dict[int, Room] = {}
        self._next = 1
        self._images: dict[tuple[int, int], _Image] = {}  # by segment and slot
        self._given_back: list[Room] = []
        self._orphaned = False
        self._visitors = 0
        self._last_visit = 0.0
        # A plain flag, because a signal handler may set it.
        self._retired = False

    def open(self) -> None:
        """Take the door. Raises ``JobTakenError``, or ``OSError`` where there cannot be one."""
        if self._name is not None and self._door is None:
            self._door = Door(self._name, self._trainer)
            self._door.open(self._answer)

    def shut(self) -> None:
        """Give the door back."""
        if self._door is not None:
            self._door.close()

    def add(self, segment: Segment) -> int:
        """Take over a segment. Returns its number here."""
        with self._lock:
            number, self._next = self._next, self._next + 1
            self._rooms[number] = Room(segment)
        return number

    def adopt(self, segment: Segment, held: tuple[Held, ...]) -> int:
        """The same for one of another worker, with the images it held there."""
        number = self.add(segment)
        with self._lock:
            for each in held:
                self._rooms[number].layout, self._rooms[number].constants = each.layout, each.constants
                order = replace(each.order, segment=number)
                checksums = array("Q", each.checksums)
                self._images[number, order.slot] = _Image(order, each.layout, checksums, each.committed, adopted=True)
        return number

    def room(self, number: int) -> Room:
        """The segment of that number."""
        return self._rooms[number]

    def release(self, number: int) -> None:
        """Give a segment back."""
        with self._lock:
            for place in [place for place in self._images if place[0] == number]:
                del self._images[place]
            room = self._rooms.pop(number)
            room.close()
            self._given_back = [each for each in self._given_back if not each.closed.is_set()] + [room]

    def wait_given_back(self, timeout: float) -> bool:
        """Wait until memory that was given back is free, ``timeout`` seconds at most; False where there is none."""
        waiting = [room for room in self._given_back if not room.closed.is_set()]
        return any([room.closed.wait(timeout) for room in waiting])

    def taken(self, order: Order) -> None:
        """A slot is being staged: what was in it is gone."""
        with self._lock:
            self._images.pop((order.segment, order.slot), None)

    def staged(self, order: Order) -> None:
        """An image is whole. Those of single files are not held: nobody looks for them here."""
        layout = self._rooms[order.segment].layout
        if isinstance(layout, Layout):
            with self._lock:
                self._images[order.segment, order.slot] = _Image(order, layout)

    def written(self, order: Order, checksums: array[int]) -> None:
        """The checksums of an image are known."""
        with self._lock:
            if (image := self._images.get((order.segment, order.slot))) and image.order == order:
                image.checksums = checksums

    def ended(self, save_id: int, *, committed: bool) -> None:
        """A save has come to its end."""
        with self._lock:
            for image in self._images.values():
                if image.order.save_id == save_id and not image.adopted:
                    image.committed = committed

    def orphan(self, *, keep: bool) -> None:
        """The trainer is gone. Unless ``keep``, nothing is held for another."""
        with self._lock:
            self._orphaned = True
            if not keep:
                self._images.clear()

    def linger(self, seconds: float) -> None:
        """Wait for somebody to take what is held over, ``seconds`` after the last visitor."""
        if not self._find_door(seconds):
            return
        begun = time.monotonic()
        while self._is_wanted() and not self._retired:
            with self._lock:
                if not self._visitors and time.monotonic() - max(begun, self._last_visit) > seconds:
                    return
            time.sleep(min(_POLL_S, seconds))

    def _find_door(self, seconds: float) -> bool:
        """Take the door, if the trainer died before it could say so. Returns whether this one has it.

        The worker that has it may be just leaving, or about to hear that it shall; but if it stays, it has all that
        this one holds.
        """
        deadline = time.monotonic() + seconds
        stays_since: float | None = None
        while self._name is not None and self._door is None and self._is_wanted() and time.monotonic() < deadline:
            try:
                self.open()
            except JobTakenError:
                stays_since = None if is_leaving(self._name, _ANSWER_S) else stays_since or time.monotonic()
                if self._retired or (stays_since is not None and time.monotonic() - stays_since > _SURE_S):
                    break
                time.sleep(_POLL_S)
            except OSError as error:
                logger.warning("nobody will find what is held here: %s", error)
                break
        return self._door is not None

    def retire(self) -> None:
        """Linger no more."""
        self._retired = True

    def _answer(self, visitor: Connection) -> None:
        """Talk to a visitor until it leaves. Raises ``EOFError`` or ``OSError`` when it does."""
        with self._lock:
            self._visitors += 1
        numbers: tuple[int, ...] = ()
        try:
            while True:
                match receive(visitor):
                    case Look():
                        numbers = self._show(visitor)
                    case Take():
                        self._hand_over(visitor, numbers)
                    case Retire():
                        self.retire()
                    case Browse():
                        with self._lock:
                            shelves = self._shelves()
                        send(visitor, Shelves(shelves))
                    case Read(number):
                        self._lend(visitor, number)
        finally:
            with self._lock:
                self._visitors -= 1
                self._last_visit = time.monotonic()

    def close(self) -> None:
        """Give all back."""
        with self._lock:
            self._images.clear()
            for room in self._rooms.values():
                room.close()
            self._rooms.clear()

    def _show(self, visitor: Connection) -> tuple[int, ...]:
        """Tell what there is. Returns the numbers of the segments it is in."""
        with self._lock:
            orphaned = self._orphaned
            whole = [image for image in self._images.values() if self._is_whole(image)]
        if not orphaned:
            send(visitor, Busy(self._worker, self._trainer))
            return ()
        # Nothing is staged any more: what is whole stays so.
        images = tuple(map(self._held, whole))
        with self._lock:
            shelves = tuple(shelf for shelf in self._shelves() if isinstance(shelf.layout, WeightLayout))
        wanted = {image.order.segment for image in images}
        wanted.update(*((shelf.segment, *shelf.layout.slots) for shelf in shelves))
        numbers = tuple(sorted(wanted))
        send(visitor, Holding(self._worker, self._retired, numbers, images, shelves))
        return numbers

    def _is_wanted(self) -> bool:
        """Whether anything is held that somebody may come for."""
        with self._lock:
            return bool(self._images or self._shelves())

    def _shelves(self) -> tuple[Shelf, ...]:
        """Where something is published. The lock is held."""
        return tuple(
            Shelf(number, room.layout)
            for number, room in self._rooms.items()
            if isinstance(room.layout, Layout | WeightLayout) and room.slots.publications(len(room.layout.slots))
        )

    def _lend(self, visitor: Connection, number: int) -> None:
        with self._lock:
            if number not in self._rooms:
                raise EOFError  # it was given back meanwhile: the reader has to begin anew
            fd = reopen(self._rooms[number].segment.fileno(), os.O_RDONLY)
        try:
            send_handle(visitor, fd, None)
        finally:
            os.close(fd)

    def _hand_over(self, visitor: Connection, numbers: tuple[int, ...]) -> None:
        with self._lock:
            for number in numbers:
                send_handle(visitor, self._rooms[number].segment.fileno(), None)

    def _is_whole(self, image: _Image) -> bool:
        """Unless the trainer died after it had taken the slot again, and before it could say so."""
        order = image.order
        slots = self._rooms[order.segment].slots
        return slots.save_id(order.slot) == order.save_id and slots.state(order.slot) is not State.STAGING

    def _held(self, image: _Image) -> Held:
        room = self._rooms[image.order.segment]
        if image.checksums is None:  # not written yet, or in vain
            layout = image.layout
            bounds = room.region(layout.spans).cast("Q")
            data = room.region(Region(layout.slots[image.order.slot], layout.data_bytes))
            spans = zip(bounds[:-1], bounds[1:], strict=True)
            image.checksums = array("Q", (checksum(data[begin:end]) for begin, end in spans))
        return Held(image.order, image.layout, room.constants, image.checksums.tobytes(), image.committed)
