"""The reader client: a process that only reads what a worker of its host has published, whoever the trainer is."""

from __future__ import annotations

from multiprocess.connection import Connection
from multiprocess.reduction import recv_handle

from asyncckpt.errors import CheckpointError
from asyncckpt.shm.segment import Segment
from asyncckpt.worker.endpoint import ask, await_answer, connect
from asyncckpt.worker.messages import ListPublished, OpenSegment, PublishedSegment, PublishedSegments, send


class ReaderClient:
    """A connection to the worker at one endpoint, until one of the two leaves. For one thread at a time."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self.timeout = 10.0
        """Seconds that each answer may take."""

    @classmethod
    def connect(cls, endpoint: str) -> ReaderClient | None:
        """None where no worker has that endpoint."""
        connection = connect(endpoint)
        return None if connection is None else cls(connection)

    def published(self) -> tuple[PublishedSegment, ...]:
        """Where something is published now.

        Raises ``EOFError`` or ``OSError`` when the worker has left, ``SaveTimeoutError`` when it does not answer.
        """
        reply = ask(self._connection, ListPublished(), self.timeout)
        if not isinstance(reply, PublishedSegments):
            raise CheckpointError(f"a worker answered {reply!r} to a reader: please report this")
        return reply.published

    def open_segment(self, number: int) -> Segment:
        """The segment of that number, mapped here for reading, to be closed. Raises as ``published`` does."""
        send(self._connection, OpenSegment(number))
        await_answer(self._connection, self.timeout)
        return Segment.attach(recv_handle(self._connection), writable=False)

    def close(self) -> None:
        """Leave."""
        self._connection.close()
