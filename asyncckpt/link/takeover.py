"""What a process asks a worker that it did not start: the memory of a dead trainer, to leave, or what is published."""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import time
from collections.abc import Collection
from typing import Any

import psutil

from asyncckpt.errors import CheckpointError, SaveTimeoutError
from asyncckpt.format.segment_layout import CheckpointLayout, FileSetLayout
from asyncckpt.format.write_request import HeldImage, ImageKey
from asyncckpt.link.endpoint import connect, endpoint_names, job_taken_error, peer_pid
from asyncckpt.link.endpoint_messages import (
    AskImage,
    AskImages,
    AskStatus,
    Follow,
    Followed,
    FoundImage,
    Images,
    Inspect,
    Inventory,
    ListPublished,
    OpenSegment,
    PublishedSegments,
    Retire,
    Serve,
    Served,
    TakeSegments,
    TrainerAlive,
    WorkerStatus,
)
from asyncckpt.link.messages import receive, send
from asyncckpt.link.socket_connection import SocketConnection
from asyncckpt.shm.segment import Segment
from asyncckpt.shm.slots import PublishedVersion, SlotTable
from asyncckpt.storage.history import was_removed

logger = logging.getLogger(__name__)

# How long a worker may take to see that its trainer is dead, where nobody here can say whether it is, and how often it
# is asked.
_NOTICE_S = 5.0
_POLL_S = 0.02
# How long a worker may take to end when it is killed.
_END_S = 5.0
# How long it may take to make the checksums of an image, some GB/s, beside others that do.
_CHECKSUMS_S = 300.0


class Takeover:
    """A connection to a worker whose trainer is gone: the ``images`` and ``published`` it holds, and ``copies`` of the
    images of other hosts; and the ``segments`` they are in, mapped here.

    The worker stays as long as the connection is open, and its ``linger`` beyond it.
    """

    def __init__(self, connection: SocketConnection, inventory: Inventory, segments: dict[int, Segment]) -> None:
        """Begin; ``find`` does.

        Args:
            connection: To the worker.
            inventory: What it has answered.
            segments: By the numbers of the worker.
        """
        self._connection = connection
        self.worker = inventory.worker
        self.segments = segments
        self.images = [each for each in inventory.images if not each.is_copy]
        self.copies = [each for each in inventory.images if each.is_copy]
        self.published = list(inventory.published)
        self._not_held = set(inventory.saves) - {image.request.path for image in self.images}

    @classmethod
    def find(cls, endpoint: str, timeout: float, left: Collection[int] = ()) -> Takeover | None:
        """Connect to the worker that a dead trainer has left.

        Args:
            endpoint: The name of its endpoint.
            timeout: Seconds that each answer may take.
            left: Process ids of workers that this process itself has left: they may still be writing.

        Returns:
            The connection; None where there is no worker.

        Raises:
            JobTakenError: Its trainer lives.
            SaveTimeoutError: It does not answer.
        """
        noticed, left_by = time.monotonic() + _NOTICE_S, time.monotonic() + timeout
        while (connection := connect(endpoint, strict=True)) is not None:
            try:
                reply = _inspect(connection, timeout)
                if isinstance(reply, Inventory):
                    return cls(connection, reply, _take_segments(connection, reply, timeout))
                is_left = reply.worker in left
                # It may be busy (taking memory, say) before it takes note that its trainer is gone. That the trainer
                # is not found means this only where process ids are the same for that worker and for us.
                limit = left_by if is_left or peer_pid(connection) == reply.worker else noticed
                if time.monotonic() > limit or (not is_left and is_running(reply.trainer)):
                    raise job_taken_error(reply.worker, reply.trainer)
            except CheckpointError:
                connection.close()
                raise
            except (EOFError, OSError) as error:
                connection.close()  # it has just left
                if time.monotonic() > noticed:
                    raise SaveTimeoutError(f"a worker cannot be talked to at its endpoint: {error}") from error
            connection.close()
            time.sleep(_POLL_S)
        return None

    def images_in(self, number: int) -> tuple[HeldImage, ...]:
        """Those in the segment of that number."""
        return tuple(each for each in self.images if each.request.segment == number)

    def copies_by_segment(self) -> dict[int, tuple[HeldImage, ...]]:
        """The copies in each segment that has any."""
        numbers = {each.request.segment for each in self.copies}
        return {number: tuple(each for each in self.copies if each.request.segment == number) for number in numbers}

    def layouts(self) -> dict[int, CheckpointLayout | FileSetLayout]:
        """Those of the segments that saves were staged in, by their numbers."""
        published = {each.segment: each.layout for each in self.published if isinstance(each.layout, FileSetLayout)}
        return {**published, **{each.request.segment: each.layout for each in self.images}}

    def published_versions(self) -> dict[PublishedVersion, bool]:
        """What is published where saves were staged, and whether its checkpoint was not removed (of sets: yes)."""
        found: dict[PublishedVersion, bool] = {}
        places = {(each.request.segment, each.request.slot): each for each in self.images}
        for number, layout in self.layouts().items():
            table = SlotTable(self.segments[number].view)
            for version, slot in table.publications(len(layout.slots)).items():
                image = places.get((number, slot))
                found[version] = image is None or not (image.committed and was_removed(image.request))
            table.close()
        return found

    def retire(self, timeout: float, longest: float = 0.0) -> None:
        """Have the worker leave once all is written, and wait for that. What is mapped here stays.

        Args:
            timeout: Seconds after which one that has not left (storage may be stalled, or a host of the job be lost) is
                killed: what it was writing is held here.
            longest: The same, if it is more, for one that was writing what is not held: sets of files, and all of a
                trainer that has closed. Where one of several has died that counts for nothing: another may be lost, and
                those that are there would wait for this one.

        Raises:
            SaveTimeoutError: Not even that ends it.
        """
        if self._not_held:
            timeout = max(timeout, longest)
            logger.info("waiting for the worker %d, which writes %s", self.worker, ", ".join(sorted(self._not_held)))
        try:
            send(self._connection, Retire())
            if not self._connection.poll(timeout):  # nothing comes but the end of file
                logger.warning(
                    "the worker %d of the trainer before this one is killed, after %g s", self.worker, timeout
                )
                # Where its process ids are none here (another container), that is 0, which would be our own group.
                if (pid := peer_pid(self._connection)) > 0:
                    os.kill(pid, signal.SIGKILL)
                if not self._connection.poll(_END_S):
                    raise SaveTimeoutError(f"the worker {self.worker} of the trainer before this one cannot be killed")
        except CheckpointError:
            raise
        except OSError:
            pass  # it has left
        self._connection.close()

    def close(self) -> None:
        """Drop the connection, and let go of the memory."""
        self._connection.close()
        for segment in self.segments.values():
            segment.close()

    def __enter__(self) -> Takeover:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class ReaderClient:
    """A process that only reads, connected to the worker at one endpoint until one of the two leaves.

    For one thread at a time. All questions raise ``EOFError`` or ``OSError`` when the worker has left, and
    ``SaveTimeoutError`` when it does not answer.
    """

    def __init__(self, connection: SocketConnection, endpoint: str) -> None:
        self._connection, self._endpoint = connection, endpoint
        self.timeout = 10.0
        """Seconds that each answer may take."""

    @classmethod
    def connect(cls, endpoint: str) -> ReaderClient | None:
        """None where no worker has that endpoint."""
        connection = connect(endpoint)
        return None if connection is None else cls(connection, endpoint)

    def published(self) -> PublishedSegments:
        """Where something is published now."""
        answer: PublishedSegments = ask(self._connection, ListPublished(), self.timeout, PublishedSegments)
        return answer

    def follow(self, locator: str) -> Followed:
        """Have it have here what is published on another host, where ``locator`` says."""
        answer: Followed = ask(self._connection, Follow(locator), self.timeout, Followed)
        return answer

    def images(self) -> Images:
        """What it holds, the oldest first."""
        answer: Images = ask(self._connection, AskImages(), self.timeout, Images)
        return answer

    def image(self, key: ImageKey) -> HeldImage | None:
        """What one image is; None where it is not held any more."""
        send(self._connection, AskImage(key))
        until = time.monotonic() + max(self.timeout, _CHECKSUMS_S)
        while not self._connection.poll(self.timeout / 2):
            self._check_answers()  # one that is stopped makes no checksums
            if time.monotonic() > until:
                _await_answer(self._connection, 0)
        found: FoundImage = _receive(self._connection, AskImage(key), FoundImage)
        return found.held

    def _check_answers(self) -> None:
        """See that it is there: on a connection of its own it answers whatever else it does."""
        if (connection := connect(self._endpoint)) is None:
            raise EOFError("the worker has left")
        with connection:
            ask(connection, AskStatus(), self.timeout / 2, WorkerStatus)

    def serve(self, key: bytes, address: str) -> int:
        """Have it serve its images to those on other hosts who know ``key``. Returns the port.

        Raises ``OSError`` also where it cannot.
        """
        served: Served = ask(self._connection, Serve(key, address), self.timeout, Served)
        if served.trouble is not None:
            raise OSError(served.trouble)
        return served.port

    def open_segment(self, number: int) -> Segment:
        """The segment of that number, mapped here for reading, to be closed."""
        send(self._connection, OpenSegment(number))
        return _receive_segment(self._connection, self.timeout, writable=False)

    def close(self) -> None:
        """Leave."""
        self._connection.close()


def retire_idle_workers(timeout: float) -> bool:
    """Have the workers leave that only linger, with nothing that is not in storage. Returns whether one has.

    ``timeout``: seconds that each may take.
    """
    found = False
    for endpoint in endpoint_names():
        if (connection := connect(endpoint)) is None:
            continue
        with connection, contextlib.suppress(CheckpointError, EOFError, OSError):
            noticed = time.monotonic() + _NOTICE_S
            # It may not have taken note yet that its trainer is gone; see ``find``.
            while isinstance(reply := _inspect(connection, timeout), TrainerAlive):
                is_near = peer_pid(connection) == reply.worker
                if not is_near or is_running(reply.trainer) or time.monotonic() > noticed:
                    break
                time.sleep(_POLL_S)
            if isinstance(reply, Inventory) and not reply.follows and all(each.committed for each in reply.images):
                send(connection, Retire())
                found |= connection.poll(timeout)
    return found


def is_leaving(endpoint: str, timeout: float) -> bool:
    """Whether the worker with that ``endpoint`` is about to leave, or has left. ``timeout``: seconds to wait for it."""
    connection = connect(endpoint)
    if connection is None:
        return True
    with connection:
        try:
            reply = _inspect(connection, timeout)
        except CheckpointError:
            return False
        except (EOFError, OSError):
            return True
    return isinstance(reply, Inventory) and reply.leaving


def _inspect(connection: SocketConnection, timeout: float) -> TrainerAlive | Inventory:
    answer: TrainerAlive | Inventory = ask(connection, Inspect(), timeout, TrainerAlive, Inventory)
    return answer


def _take_segments(connection: SocketConnection, inventory: Inventory, timeout: float) -> dict[int, Segment]:
    segments: dict[int, Segment] = {}
    send(connection, TakeSegments())
    with contextlib.ExitStack() as undo:
        for number in inventory.segments:
            segments[number] = undo.enter_context(_receive_segment(connection, timeout))
        undo.pop_all()
    return segments


def ask(connection: SocketConnection, question: object, timeout: float, *expected: type) -> Any:
    """Ask a worker, and wait for its answer.

    Args:
        connection: To its endpoint.
        question: One of ``py``.
        timeout: Seconds.
        expected: The classes that the answer may be of.

    Raises:
        SaveTimeoutError: It does not answer.
        EOFError, OSError: It has left.
    """
    send(connection, question)
    _await_answer(connection, timeout)
    return _receive(connection, question, *expected)


def _receive(connection: SocketConnection, question: object, *expected: type) -> Any:
    answer = receive(connection)
    if not isinstance(answer, expected):
        raise CheckpointError(f"a worker answered {answer!r} to {question!r}: please report this")
    return answer


def _receive_segment(connection: SocketConnection, timeout: float, *, writable: bool = True) -> Segment:
    _await_answer(connection, timeout)
    return connection.receive_segment(writable=writable)


def _await_answer(connection: SocketConnection, timeout: float) -> None:
    if not connection.poll(timeout):
        raise SaveTimeoutError(f"a worker did not answer at its endpoint within {timeout:g} s; it may be stopped")


def is_running(pid: int) -> bool:
    """Whether there is a process of that id on this host, and it has not ended."""
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False
