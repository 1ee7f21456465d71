"""Transport by sealed sockets: one connection for each reading thread, up to a limit."""

from __future__ import annotations

import socket
import threading
import time

from asyncckpt.budgets import NOTICE_S, SILENCE_S
from asyncckpt.link.calls import tell
from asyncckpt.shm.segment import Segment
from asyncckpt.transfer.api import ImageApi, Opened, TransferAddress
from asyncckpt.transfer.sealed_connection import SealedConnection
from asyncckpt.transfer.transport import Offering, Reading, TransportKind

# Maximum number of connections between two hosts. More are not faster, and each needs a thread at the other end.
CONNECTIONS = 4
# Number of attempts to connect, and the pause between attempts. The holder may drop a connection before its proof.
_TRIES, _PAUSE_S = 4, 0.3


def connect(address: TransferAddress, key: bytes, silence: float = SILENCE_S) -> SealedConnection:
    """Connect to the worker at ``address``. Raises ``OSError``."""
    reach_s = min(silence, NOTICE_S)
    for left in reversed(range(_TRIES)):
        connection = socket.create_connection((address.host, address.port), timeout=reach_s)
        try:
            return SealedConnection(connection, (key,), asks=True, silence=silence)
        except ConnectionResetError:  # too many processes connect at the same moment
            if not left:
                raise
            time.sleep(_PAUSE_S)
    raise ConnectionAbortedError("the worker serves no images")


class _SocketReading(Reading):
    def __init__(self, address: TransferAddress, key: bytes, lease: str) -> None:
        self._address, self._key, self._lease = address, key, lease
        self._changed = threading.Condition()
        self._free: list[SealedConnection] = []
        self._used: set[SealedConnection] = set()
        self._connecting = 0
        self._closed = False

    def read(self, offset: int, into: memoryview) -> None:
        connection = self._take()
        try:
            tell(connection, ImageApi.read, self._lease, offset, len(into))
            connection.receive_into(into)
        except BaseException:  # the rest of this answer would be taken for the next answer
            connection.close()
            self._give_back(connection, usable=False)
            raise
        self._give_back(connection, usable=True)

    def close(self) -> None:
        with self._changed:
            self._closed = True
            for connection in (*self._free, *self._used):
                connection.close()
            self._free.clear()
            self._changed.notify_all()
            self._changed.wait_for(lambda: not self._used and not self._connecting)

    def _take(self) -> SealedConnection:
        with self._changed:
            self._changed.wait_for(
                lambda: self._closed or self._free or len(self._used) + self._connecting < CONNECTIONS
            )
            self._check_open()
            if self._free:
                self._used.add(connection := self._free.pop())
                return connection
            self._connecting += 1
        made = None
        try:
            made = connect(self._address, self._key)
            return made
        finally:
            with self._changed:
                self._connecting -= 1
                if made is not None:
                    self._used.add(made)
                    if self._closed:
                        made.close()  # so that its reader gets an error
                self._changed.notify_all()

    def _check_open(self) -> None:
        if self._closed:
            raise ConnectionAbortedError("the reading of this image was ended")

    def _give_back(self, connection: SealedConnection, *, usable: bool) -> None:
        with self._changed:
            self._used.discard(connection)
            if usable and not self._closed:
                self._free.append(connection)
            self._changed.notify_all()


class _SocketOffering(Offering):
    """Does nothing, because the worker itself answers ``ImageApi.read``."""

    def close(self) -> None:
        pass


class SocketTransport(TransportKind):
    """The transport kind called ``sockets``."""

    def offer(self, segment: Segment) -> Offering:
        return _SocketOffering()

    def read_from(self, address: TransferAddress, key: bytes, opened: Opened) -> Reading:
        return _SocketReading(address, key, opened.lease)

    def close(self) -> None:
        pass
