"""A connection between two processes of one job. Every message proves that its sender knows the job's key.

An attacker on the network can see the data, but cannot change, replay or drop bytes unnoticed. Each piece carries an
AES-GCM tag that depends on the key, on the connection, and on the number of earlier pieces. Computing a tag takes a
tenth of the time that the kernel needs to transfer the bytes.
"""

from __future__ import annotations

import contextlib
import hmac
import io
import pickle
import secrets
import socket
import struct
import time
from collections.abc import Iterator, Sequence
from typing import Any

try:
    from cryptography.exceptions import InvalidTag
    from cryptography.hazmat.primitives.ciphers.aead import AESGCM
except ImportError as error:
    raise ImportError(f"{error}; what goes between hosts needs it: pip install 'asyncckpt[hosts]'") from error

from asyncckpt.ranks.store import NONCE_BYTES, keep_alive, proof
from asyncckpt.shm.slots import PublishedVersion, VersionKey

_LENGTH = struct.Struct("!Q")
_NONCE = struct.Struct("!4xQ")
_TAG_BYTES = 16
_PROOF_BYTES = len(proof(b"", b""))
# Bytes with one tag. A piece this small is still in the cache for the check, and holds Python's lock only briefly.
_PIECE_BYTES = 512 << 10
# Maximum size of a message. The descriptions of some images of 100,000 tensors take some MiB.
_MOST_BYTES = 1 << 30
# The modules with the classes of all messages. Creating objects of these classes has no side effect.
_VOCABULARY = frozenset(
    f"asyncckpt.{module}"
    for module in ("transfer.api", "format.manifest", "format.segment_layout", "format.write_request")
)
_NAMES = {(each.__module__, each.__name__) for each in (PublishedVersion, VersionKey)}
_FORGED = "the data does not come from a process of this job"


class KeyRefusedError(ConnectionResetError):
    """The other end did not answer the proof, because it knows another key or is shutting down."""


class SealedConnection:
    """One end of a connection. One thread at a time may send, and one may receive. Any thread may ``close``.

    Sending and receiving raise ``OSError``: ``TimeoutError`` if the other end is silent for too long, and
    ``ConnectionError`` if the other end is gone, or if forged data arrives.
    """

    def __init__(self, connection: socket.socket, keys: Sequence[bytes], *, asks: bool, silence: float) -> None:
        """Shake hands.

        Args:
            connection: A socket that is connected to the other end. This object closes the socket.
            keys: On the connecting end, the job's key, up to 64 bytes. On the accepting end, all accepted keys.
            asks: Whether this end is the connecting end.
            silence: Timeout in seconds for silence of the other end, and for the whole handshake.

        Raises:
            KeyRefusedError: The other end closed the connection at the proof.
            OSError: The other end does not know the key, is silent, or is gone.
        """
        self._socket = connection
        self.peer = _name(connection)
        """The address at the other end, for errors."""
        self._sent = self._received = 0
        try:
            keep_alive(connection)
            until = time.monotonic() + silence
            mine = secrets.token_bytes(NONCE_BYTES)
            if asks:
                nonces = self._receive_by(until, NONCE_BYTES), mine
                connection.sendall(mine + proof(keys[0], b"asks", *nonces))
                try:
                    said, other = self._receive_by(until, _PROOF_BYTES), b"answers"
                except ConnectionResetError as error:
                    raise KeyRefusedError(f"{self.peer} refuses the key") from error
            else:
                connection.sendall(mine)
                nonces = mine, self._receive_by(until, NONCE_BYTES)
                said, other = self._receive_by(until, _PROOF_BYTES), b"asks"
            key = next((each for each in keys if hmac.compare_digest(said, proof(each, other, *nonces))), None)
            if key is None:
                raise ConnectionAbortedError(_FORGED)
            if not asks:
                connection.sendall(proof(key, b"answers", *nonces))
            ways = [AESGCM(proof(key, who, *nonces)) for who in (b"sent by asks", b"sent by answers")]
            self._out, self._in = ways if asks else reversed(ways)
            self.limit(silence)
        except BaseException:
            self.close()
            raise

    def limit(self, silence: float, before: float | None = None) -> None:
        """Set the timeouts of this end.

        Args:
            silence: Timeout in seconds for sending, if the other end stops receiving.
            before: Timeout in seconds for receiving (None: ``silence``; 0: no limit).
        """
        self._socket.settimeout(None)
        before = silence if before is None else before
        for option, seconds in ((socket.SO_SNDTIMEO, silence), (socket.SO_RCVTIMEO, before)):
            self._socket.setsockopt(socket.SOL_SOCKET, option, struct.pack("ll", int(seconds), int(seconds % 1 * 1e6)))

    def send(self, message: object) -> None:
        """Send a message."""
        self.send_bytes(memoryview(pickle.dumps(message)))

    def receive(self) -> Any:
        """Receive the next message."""
        text = bytearray(self._receive_length())
        self._receive_pieces(memoryview(text))
        return _Unpickler(io.BytesIO(text)).load()

    def send_bytes(self, data: memoryview) -> None:
        """Send bytes. The bytes must not change during this call."""
        length = _LENGTH.pack(len(data))
        self._send_all([length, self._out.encrypt(self._next_sent(), b"", length)])
        for piece in _pieces(data):
            self._send_all([piece, self._out.encrypt(self._next_sent(), b"", piece)])

    def receive_into(self, into: memoryview) -> None:
        """Fill ``into`` with bytes from the other end. If this raises, ``into`` may contain a forged piece."""
        nbytes = self._receive_length()
        if nbytes != len(into):
            raise ConnectionAbortedError(f"{nbytes} bytes came where {len(into)} were asked for")
        self._receive_pieces(into)

    def close(self) -> None:
        """Close the connection. Threads that send or receive get an ``OSError``. Safe to call twice."""
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()

    def _receive_length(self) -> int:
        head = bytearray(_LENGTH.size + _TAG_BYTES)
        self._receive_all([memoryview(head)])
        self._check(head[_LENGTH.size :], memoryview(head)[: _LENGTH.size])
        (nbytes,) = _LENGTH.unpack_from(head)
        if nbytes > _MOST_BYTES:
            raise ConnectionAbortedError(f"a message of {nbytes} bytes came")
        return int(nbytes)

    def _receive_pieces(self, into: memoryview) -> None:
        tag = bytearray(_TAG_BYTES)
        for piece in _pieces(into):
            self._receive_all([piece, memoryview(tag)])
            self._check(tag, piece)

    def _check(self, tag: bytearray, data: memoryview) -> None:
        nonce, self._received = _NONCE.pack(self._received), self._received + 1
        try:
            self._in.decrypt(nonce, bytes(tag), data)
        except InvalidTag:
            self.close()
            raise ConnectionAbortedError(_FORGED) from None

    def _next_sent(self) -> bytes:
        nonce, self._sent = _NONCE.pack(self._sent), self._sent + 1
        return nonce

    def _send_all(self, parts: list[bytes | memoryview]) -> None:
        left = [memoryview(part) for part in parts]
        while left:
            try:
                done = self._socket.sendmsg(left)
            except BlockingIOError:
                raise TimeoutError(f"{self.peer} receives no more data") from None
            left = _rest(left, done)

    def _receive_all(self, parts: list[memoryview]) -> None:
        left = parts
        while left:
            try:
                done, *_ = self._socket.recvmsg_into(left, 0, socket.MSG_WAITALL)
            except BlockingIOError:
                raise TimeoutError(f"{self.peer} sends no data") from None
            if not done:
                raise ConnectionResetError(f"{self.peer} has closed the connection")
            left = _rest(left, done)

    def _receive_by(self, until: float, nbytes: int) -> bytes:
        """Receive bytes during the handshake, before the proof of the other end. They must arrive before ``until``."""
        text = b""
        while len(text) < nbytes:
            if (left := until - time.monotonic()) <= 0:
                raise TimeoutError(f"{self.peer} sends no data")
            self._socket.settimeout(left)
            if not (piece := self._socket.recv(nbytes - len(text))):
                raise ConnectionResetError(f"{self.peer} has closed the connection")
            text += piece
        return text


class _Unpickler(pickle.Unpickler):
    """Accepts only the messages of this protocol, so that a peer with the key can read, but cannot run code here."""

    def find_class(self, module: str, name: str) -> Any:
        is_known = module in _VOCABULARY or (module, name) in _NAMES
        found = super().find_class(module, name) if is_known else None
        if not isinstance(found, type) or found.__module__ != module:
            raise ConnectionAbortedError(f"a message has {module}.{name}, which is not part of this protocol")
        return found


def _pieces(data: memoryview) -> Iterator[memoryview]:
    return (data[at : at + _PIECE_BYTES] for at in range(0, len(data), _PIECE_BYTES))


def _rest(parts: list[memoryview], done: int) -> list[memoryview]:
    """Return the parts that remain after the first ``done`` bytes."""
    for number, part in enumerate(parts):
        if done < len(part):
            return [part[done:], *parts[number + 1 :]]
        done -= len(part)
    return []


def _name(connection: socket.socket) -> str:
    with contextlib.suppress(OSError):
        host, port, *_ = connection.getpeername()
        return f"{host}:{port}"
    return "somebody"
