"""The store: a small key-value server that joins the ranks of a job. The first rank's worker hosts it.

A key has numbered fields, each with some bytes. The store sends a nonce to each new client, and the client must answer
with its rank and a keyed hash of both. A client that does not know the secret of the job gets no other answer, and its
requests are ignored. The store proves its knowledge of the secret in the same way, and sends its id. After a crash, a
new worker hosts a store with another id.

One thread serves all clients. A request is a head (``REQUEST``), a key and a value. An answer is a head (``ANSWER``)
and bytes:

    put, offer   set a field (offer: unless it is set); the answer has the number of fields
    get, fields  all fields, or only their numbers
    wait         the fields, once the key has that number of fields, or ``ENDS`` is set; -1 after a timeout
    remove       remove a key

The process that hosts the store gets a call for each field that a client sets (``watch``). This process can change keys
without a connection (``post``).
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import heapq
import hmac
import itertools
import logging
import secrets
import selectors
import socket
import struct
import threading
import time
from collections import defaultdict, deque
from collections.abc import Callable, Mapping
from enum import IntEnum
from itertools import pairwise

from asyncckpt.budgets import NOTICE_S
from asyncckpt.threads import start

logger = logging.getLogger(__name__)

# Operation, size of the key, field or number of fields, seconds to wait, size of the value. Sizes are in bytes.
REQUEST = struct.Struct("!BHqdQ")
# A number, and the size in bytes of the payload that follows.
ANSWER = struct.Struct("!qQ")
FIELD = struct.Struct("!qQ")
"""A field of an answer: its number and its size. The bytes follow."""
ENDS = -1
"""The field that ends every wait for its key."""
NONCE_BYTES = 32
RANK = struct.Struct("!i")
"""The rank of a client, as part of its proof."""
ID_BYTES = 16

_PROOF_BYTES = 32
# Maximum number of clients that have not yet proved that they know the secret.
_STRANGERS = 128
_BACKLOG = 4096
_PIECE_BYTES = 256 << 10
# Pause after running out of descriptors.
_PAUSE_S = 1.0
# Connections are idle between two saves, and network devices on the way may forget idle connections.
_KEEP_ALIVE = {
    socket.TCP_KEEPIDLE: 60,
    socket.TCP_KEEPINTVL: 10,
    socket.TCP_KEEPCNT: 3,
    socket.TCP_USER_TIMEOUT: 15_000,
}


class Operation(IntEnum):
    """The operation of a request."""

    PUT = 1
    OFFER = 2
    GET = 3
    FIELDS = 4
    WAIT = 5
    REMOVE = 6


def proof(secret: bytes, who: bytes, *nonces: bytes) -> bytes:
    """Return a hash that only processes with the ``secret`` can make. ``who``: the side that sends it."""
    return hashlib.blake2b(b"".join((who, *nonces)), key=secret, digest_size=_PROOF_BYTES).digest()


def keep_alive(connection: socket.socket) -> None:
    """Make the kernel check whether the other end is alive, and send without delay. Raises ``OSError``."""
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for option, value in _KEEP_ALIVE.items():
        connection.setsockopt(socket.IPPROTO_TCP, option, value)


class _Peer:
    """A client's connection: received bytes of a request, unsent bytes of answers, and the current wait."""

    def __init__(self, connection: socket.socket) -> None:
        self.socket = connection
        self.nonce = secrets.token_bytes(NONCE_BYTES)
        self.since = time.monotonic()
        self.is_known = False
        self.rank = -1
        self.received = bytearray()
        self.unsent = bytearray()
        self.wait: tuple[str, int, int] | None = None  # the key, the number of fields, and the number of this wait


class Store:
    """Serve the ranks that know the secret, until ``close``. ``port``, ``address``: the listener; "": all addresses."""

    def __init__(
        self,
        secret: bytes,
        ports: tuple[int, int] = (0, 0),
        address: str = "",
        watch: Callable[[str, int, bytes], object] = lambda *_: None,
    ) -> None:
        """Listen.

        Args:
            secret: The job's secret, up to 64 bytes.
            ports: The first and the last port to try; (0, 0): any free port.
            address: A numeric address of this host, to listen there alone. If it is "", or not of this host, listen at
                all addresses.
            watch: Called with key, field and value when a client has set a field, on the thread of the store. The
                function must not wait.

        Raises:
            OSError: All of the ports are taken.
        """
        self._secret = secret
        self._id = secrets.token_bytes(ID_BYTES)
        self._listener, self.address = listen(address, ports)
        self.port: int = self._listener.getsockname()[1]
        self._keys: dict[str, dict[int, bytes]] = {}
        self._waiting: defaultdict[str, set[_Peer]] = defaultdict(set)
        self._waits = itertools.count(1)
        self._due: list[tuple[float, int, _Peer]] = []  # deadlines of waits
        self._strangers: dict[_Peer, None] = {}  # clients without proof, in the order of their arrival
        self._watch = watch
        self._heard: dict[int, float] = {}
        self._posted: deque[tuple[Operation, str, int, bytes]] = deque()
        self._closed = False
        self._listen_at: float | None = None  # when to accept connections again; None: now
        self._listener.setblocking(False)
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._listener, selectors.EVENT_READ)
        self._wakes, self._woken = socket.socketpair()
        for each in (self._wakes, self._woken):
            each.setblocking(False)
        self._selector.register(self._woken, selectors.EVENT_READ, self._woken)
        self._thread = threading.Thread(target=self._serve, name="asyncckpt-store", daemon=True)
        start(self._thread)

    def __len__(self) -> int:
        """Return the number of keys."""
        return len(self._keys)

    def post(self, operation: Operation, key: str, field: int = 0, value: bytes = b"") -> None:
        """Change ``field`` of ``key`` without a connection. Any thread may call. Does not wait.

        Args:
            operation: ``PUT``, ``OFFER`` or ``REMOVE``.
            key: The key.
            field: Number of the field.
            value: The value of the field.
        """
        self._posted.append((operation, key, field, value))
        with contextlib.suppress(OSError):  # the socket is full, so the thread will wake, or it is closed
            self._wakes.send(b"x")

    def heard(self) -> dict[int, float]:
        """Return the time of the last request of each rank, by ``time.monotonic``. Any thread may call."""
        return self._heard.copy()

    def close(self) -> None:
        """Carry out all posted operations, drop all connections, and close the listening port."""
        self._closed = True
        with contextlib.suppress(OSError):
            self._wakes.send(b"x")
        self._thread.join()
        self._wakes.close()

    def _serve(self) -> None:
        try:
            while not self._closed:
                for key, events in self._selector.select(self._pause()):
                    if key.data is None:
                        self._accept()
                    elif isinstance(key.data, _Peer):
                        self._attend_guarded(key.data, events)
                    else:
                        self._woken.recv(_PIECE_BYTES)
                self._carry_out_posted()
                self._end_waits()
            self._carry_out_posted()
        except Exception:
            logger.exception("the store that joins the ranks has failed: please report this")
        finally:
            for key in list(self._selector.get_map().values()):
                key.fileobj.close()  # type: ignore[union-attr]
            self._listener.close()
            self._selector.close()

    def _carry_out_posted(self) -> None:
        while self._posted:
            operation, key, field, value = self._posted.popleft()
            self._change(operation, key, field, value)

    def _pause(self) -> float | None:
        """Return the seconds until the next deadline; None if there is none."""
        times = [due for due, *_ in self._due[:1]]
        if self._listen_at is not None:
            times.append(self._listen_at)
        if self._strangers:
            times.append(next(iter(self._strangers)).since + NOTICE_S)
        return max(0.0, min(times) - time.monotonic()) if times else None

    def _accept(self) -> None:
        try:
            connection, _ = self._listener.accept()
        except BlockingIOError:
            return
        except OSError as error:
            if not self._closed:  # perhaps too many open files; connected clients are still served
                logger.warning("no rank can connect to the store, for now: %s (see ulimit -n)", error)
                self._selector.unregister(self._listener)
                self._listen_at = time.monotonic() + _PAUSE_S
            return
        connection.setblocking(False)
        with contextlib.suppress(OSError):  # the client has left already
            keep_alive(connection)
        peer = _Peer(connection)
        self._selector.register(connection, selectors.EVENT_READ, peer)
        self._strangers[peer] = None
        if len(self._strangers) > _STRANGERS:
            self._drop(next(iter(self._strangers)))
        self._send(peer, peer.nonce)

    def _attend_guarded(self, peer: _Peer, events: int) -> None:
        """Serve a client, and drop the client after an error, so that no client can stop the store for the others."""
        if peer.socket.fileno() < 0:
            return  # an earlier event has dropped the client
        try:
            self._attend(peer, events)
        except Exception:
            logger.exception("a connection to the store that joins the ranks is dropped: please report this")
            self._drop(peer)

    def _attend(self, peer: _Peer, events: int) -> None:
        if events & selectors.EVENT_WRITE:
            self._flush(peer)
        if not events & selectors.EVENT_READ:
            return
        try:
            piece = peer.socket.recv(_PIECE_BYTES)
        except BlockingIOError:
            return
        except OSError:
            piece = b""
        if not piece:
            self._drop(peer)
            return
        peer.received += piece
        if peer.is_known or self._is_proved(peer):
            self._take_requests(peer)

    def _is_proved(self, peer: _Peer) -> bool:
        """Return whether the client has just proved that it knows the secret. Drop a client with a wrong proof."""
        sizes = NONCE_BYTES, NONCE_BYTES + RANK.size, NONCE_BYTES + RANK.size + _PROOF_BYTES
        if len(peer.received) < sizes[2]:
            return False
        nonce, rank, said = (bytes(peer.received[begin:end]) for begin, end in pairwise((0, *sizes)))
        if not hmac.compare_digest(said, proof(self._secret, b"rank", peer.nonce, nonce, rank)):
            self._drop(peer)
            return False
        del peer.received[: sizes[2]]
        peer.is_known = True
        (peer.rank,) = RANK.unpack(rank)
        self._strangers.pop(peer, None)
        self._send(peer, proof(self._secret, b"store", peer.nonce, nonce, self._id) + self._id)
        return True

    def _take_requests(self, peer: _Peer) -> None:
        self._heard[peer.rank] = time.monotonic()
        while len(peer.received) >= REQUEST.size:
            operation, key_bytes, number, seconds, value_bytes = REQUEST.unpack_from(peer.received)
            end = REQUEST.size + key_bytes + value_bytes
            if len(peer.received) < end:
                return
            key = peer.received[REQUEST.size :][:key_bytes].decode(errors="replace")
            value = bytes(memoryview(peer.received)[end - value_bytes : end])
            del peer.received[:end]
            self._carry_out(peer, operation, key, number, seconds, value)

    def _change(self, operation: int, key: str, field: int, value: bytes) -> int:
        """Change a key. Return the number of its fields."""
        if operation == Operation.REMOVE:
            self._keys.pop(key, None)
            return 0
        fields = self._keys.setdefault(key, {})
        if operation == Operation.PUT or field not in fields:
            fields[field] = value
        self._wake(key, fields)
        return len(fields)

    def _carry_out(self, peer: _Peer, operation: int, key: str, number: int, seconds: float, value: bytes) -> None:
        fields = self._keys.get(key, {})
        match operation:
            case Operation.PUT | Operation.OFFER | Operation.REMOVE:
                self._answer(peer, self._change(operation, key, number, value))
                if operation != Operation.REMOVE:
                    self._watch(key, number, value)
            case Operation.GET:
                self._answer(peer, len(fields), _packed(fields))
            case Operation.FIELDS:
                self._answer(peer, len(fields), _packed(dict.fromkeys(fields, b"")))
            case Operation.WAIT if _is_enough(fields, number):
                self._answer(peer, len(fields), _packed(fields))
            case Operation.WAIT:
                self._end_wait(peer)
                peer.wait = key, number, next(self._waits)
                self._waiting[key].add(peer)
                heapq.heappush(self._due, (time.monotonic() + seconds, peer.wait[2], peer))
            case _:
                self._drop(peer)

    def _wake(self, key: str, fields: Mapping[int, bytes]) -> None:
        """Answer the clients that wait for this key, if it has enough fields now."""
        for peer in list(self._waiting.get(key, ())):
            if peer.wait is not None and _is_enough(fields, peer.wait[1]):
                self._end_wait(peer)
                self._answer(peer, len(fields), _packed(fields))

    def _end_waits(self) -> None:
        """Answer waits that have timed out, and drop clients that have not proved themselves in time."""
        now = time.monotonic()
        if self._listen_at is not None and self._listen_at <= now:
            self._listen_at = None
            self._selector.register(self._listener, selectors.EVENT_READ)
        while self._due and self._due[0][0] <= now:
            _, wait, peer = heapq.heappop(self._due)
            if peer.wait is not None and peer.wait[2] == wait:
                self._end_wait(peer)
                self._answer(peer, -1)
        while self._strangers and (oldest := next(iter(self._strangers))).since + NOTICE_S <= now:
            self._drop(oldest)

    def _end_wait(self, peer: _Peer) -> None:
        if peer.wait is not None:
            key, peer.wait = peer.wait[0], None
            self._waiting[key].discard(peer)
            if not self._waiting[key]:
                del self._waiting[key]

    def _answer(self, peer: _Peer, number: int, payload: bytes = b"") -> None:
        self._send(peer, ANSWER.pack(number, len(payload)) + payload)

    def _send(self, peer: _Peer, text: bytes) -> None:
        peer.unsent += text
        if len(peer.unsent) == len(text):  # otherwise the text follows when the earlier bytes are sent
            self._flush(peer)

    def _flush(self, peer: _Peer) -> None:
        try:
            del peer.unsent[: peer.socket.send(peer.unsent)]
        except BlockingIOError:
            pass
        except OSError:
            self._drop(peer)
            return
        events = selectors.EVENT_READ | (selectors.EVENT_WRITE if peer.unsent else 0)
        if self._selector.get_key(peer.socket).events != events:
            self._selector.modify(peer.socket, events, peer)

    def _drop(self, peer: _Peer) -> None:
        if peer.socket.fileno() < 0:
            return
        self._end_wait(peer)
        self._strangers.pop(peer, None)
        self._selector.unregister(peer.socket)
        peer.socket.close()
        peer.unsent.clear()
        peer.received.clear()


def listen(address: str, ports: tuple[int, int]) -> tuple[socket.socket, str]:
    """Return a listening socket, and the only address that it listens at ("": all addresses of this host).

    Args:
        address: A numeric address of this host, to listen there alone. If it is "", or not of this host, listen at all
            addresses.
        ports: The first and the last port to try; (0, 0): any free port.

    Raises:
        OSError: All of the ports are taken.
    """
    for port in range(*ports):
        try:
            return _listen(address, port)
        except OSError as error:
            if error.errno != errno.EADDRINUSE:
                raise
    return _listen(address, ports[1])


def _listen(address: str, port: int) -> tuple[socket.socket, str]:
    if address:
        family = socket.AF_INET6 if ":" in address else socket.AF_INET
        try:
            return socket.create_server((address, port), family=family, backlog=_BACKLOG), address
        except OSError as error:
            if error.errno == errno.EADDRINUSE:
                raise
            logger.info("listening at all addresses, as %s cannot be listened at: %s", address, error)
    if socket.has_dualstack_ipv6():
        with contextlib.suppress(OSError):  # IPv6 is switched off on this host
            both = socket.create_server(("", port), family=socket.AF_INET6, backlog=_BACKLOG, dualstack_ipv6=True)
            return both, ""
    return socket.create_server(("", port), backlog=_BACKLOG), ""


def _is_enough(fields: Mapping[int, bytes], number: int) -> bool:
    return len(fields) >= number or ENDS in fields


def _packed(fields: Mapping[int, bytes]) -> bytes:
    return b"".join(FIELD.pack(field, len(value)) + value for field, value in fields.items())
