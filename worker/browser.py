"""A browser: a process that looks at what a worker of its host has published, and reads it, whoever the trainer is."""

from __future__ import annotations

from multiprocess.connection import Connection
from multiprocess.reduction import recv_handle

from asyncckpt.errors import CheckpointError, SaveTimeoutError
from asyncckpt.shm.segment import Segment
from asyncckpt.worker.door import knock
from asyncckpt.worker.messages import Browse, Read, Shelf, Shelves
from asyncckpt.worker.wire import receive, send


class Browser:
    """At the worker with a certain door, until one of the two leaves. For one thread at a time."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self.timeout = 10.0
        """Seconds that each answer may take."""

    @classmethod
    def enter(cls, door: str) -> Browser | None:
        """None where nobody has that door."""
        connection = knock(door)
        return None if connection is None else cls(connection)

    def shelves(self) -> tuple[Shelf, ...]:
        """Where something is published now.

        Raises ``EOFError`` or ``OSError`` when the worker has left, ``SaveTimeoutError`` when it does not answer.
        """
        send(self._connection, Browse())
        self._await()
        reply = receive(self._connection)
        if not isinstance(reply, Shelves):
            raise CheckpointError(f"a worker answered {reply!r} to a reader: please report this")
        return reply.shelves

    def read(self, segment: int) -> Segment:
        """The segment of that number, mapped here for reading, to be closed. Raises as ``shelves`` does."""
        send(self._connection, Read(segment))
        self._await()
        return Segment.attach(recv_handle(self._connection), writable=False)

    def close(self) -> None:
        """Leave."""
        self._connection.close()

    def _await(self) -> None:
        if not self._connection.poll(self.timeout):
            raise SaveTimeoutError(f"a worker did not answer a reader within {self.timeout:g} s; it may be stopped")
