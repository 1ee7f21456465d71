"""A visit: how a process that did not start a worker asks it, at its door, for what it holds."""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import time
from collections.abc import Collection
from types import TracebackType

import psutil
from multiprocess.connection import Connection
from multiprocess.reduction import recv_handle

from asyncckpt.errors import CheckpointError, SaveTimeoutError
from asyncckpt.shm.segment import Segment
from asyncckpt.shm.slots import Published, SlotTable
from asyncckpt.worker.door import door_names, knock, peer_pid, taken
from asyncckpt.worker.messages import Busy, Holding, Look, Retire, Take
from asyncckpt.worker.wire import receive, send

logger = logging.getLogger(__name__)

# How long a worker may take to see that its trainer is dead, and how often it is asked.
_NOTICE_S = 5.0
_ASK_S = 0.02


class Visit:
    """At a worker whose trainer is gone: the ``images`` and ``shelves`` it holds, and the ``segments`` they are in,
    mapped here.

    The worker stays as long as the visit lasts, and its ``linger`` beyond it.
    """

    def __init__(self, connection: Connection, holding: Holding, segments: dict[int, Segment]) -> None:
        self._connection = connection
        self.worker = holding.worker
        self.segments = segments
        self.images = list(holding.images)
        self.shelves = list(holding.shelves)

    @classmethod
    def pay(cls, door: str, timeout: float, left: Collection[int] = ()) -> Visit | None:
        """Visit the worker with that ``door``; None where there is none. ``left``: workers this process has left.

        Raises ``JobTakenError`` where its trainer lives, ``SaveTimeoutError`` where it does not answer within
        ``timeout`` seconds.
        """
        noticed = time.monotonic() + _NOTICE_S
        while (connection := knock(door)) is not None:
            try:
                reply = cls._look(connection, timeout)
                if isinstance(reply, Visit):
                    return reply
                lives = _lives(reply.trainer) and reply.worker not in left
                if lives or time.monotonic() > noticed:
                    raise taken(reply.worker, reply.trainer)
            except CheckpointError:
                connection.close()
                raise
            except (EOFError, OSError) as error:
                connection.close()  # it has just left
                if time.monotonic() > noticed:
                    raise SaveTimeoutError(f"a worker cannot be talked to at its door: {error}") from error
            connection.close()
            time.sleep(_ASK_S)
        return None

    @classmethod
    def _look(cls, connection: Connection, timeout: float) -> Visit | Busy:
        reply = _look(connection, timeout)
        if isinstance(reply, Busy):
            return reply
        segments: dict[int, Segment] = {}
        send(connection, Take())
        try:
            for number in reply.segments:
                _await(connection, timeout)
                segments[number] = Segment.attach(recv_handle(connection))
        except BaseException:
            for segment in segments.values():
                segment.close()
            raise
        return cls(connection, reply, segments)

    def last_published(self) -> Published | None:
        """The newest of what was published in the segments of the images."""
        found: list[Published] = []
        for number, layout in {each.order.segment: each.layout for each in self.images}.items():
            table = SlotTable(self.segments[number].view)
            found += table.publications(len(layout.slots))
            table.close()
        return max(found, default=None)

    def retire(self, timeout: float) -> None:
        """Have the worker leave once all is written, and wait for that. What is mapped here stays.

        One that has not left after ``timeout`` seconds (storage may be stalled, or a host of the job be lost) is
        killed: what it was writing is held here. Raises ``SaveTimeoutError`` if not even that ends it.
        """
        try:
            send(self._connection, Retire())
            if not self._connection.poll(timeout):  # nothing comes but the end of file
                logger.warning(
                    "the worker %d of the trainer before this one is killed, after %g s", self.worker, timeout
                )
                os.kill(peer_pid(self._connection), signal.SIGKILL)
                if not self._connection.poll(_NOTICE_S):
                    raise SaveTimeoutError(f"the worker {self.worker} of the trainer before this one cannot be killed")
        except CheckpointError:
            raise
        except OSError:
            pass  # it has left
        self._connection.close()

    def close(self) -> None:
        """End the visit, and let go of the memory."""
        self._connection.close()
        for segment in self.segments.values():
            segment.close()

    def __enter__(self) -> Visit:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def make_room(timeout: float) -> bool:
    """Have the workers leave that only linger, with nothing that is not in storage. Returns whether one has.

    ``timeout``: seconds that each may take.
    """
    found = False
    for door in door_names():
        if (connection := knock(door)) is None:
            continue
        with connection, contextlib.suppress(CheckpointError, EOFError, OSError):
            reply = _look(connection, timeout)
            if isinstance(reply, Holding) and all(each.committed for each in reply.images):
                send(connection, Retire())
                found |= connection.poll(timeout)
    return found


def is_leaving(door: str, timeout: float) -> bool:
    """Whether the worker with that ``door`` is about to leave, or has left."""
    connection = knock(door)
    if connection is None:
        return True
    with connection:
        try:
            reply = _look(connection, timeout)
        except CheckpointError:
            return False
        except (EOFError, OSError):
            return True
    return isinstance(reply, Holding) and reply.leaving


def _look(connection: Connection, timeout: float) -> Busy | Holding:
    send(connection, Look())
    _await(connection, timeout)
    reply = receive(connection)
    if not isinstance(reply, (Busy, Holding)):
        raise CheckpointError(f"a worker answered {reply!r} to a visitor: please report this")
    return reply


def _await(connection: Connection, timeout: float) -> None:
    if not connection.poll(timeout):
        raise SaveTimeoutError(f"a worker did not answer at its door within {timeout:g} s; it may be stopped")


def _lives(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False
