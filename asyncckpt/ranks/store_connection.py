"""A connection to the store of a job (``store.py``). Every wait has a timeout."""

from __future__ import annotations

import contextlib
import errno
import hmac
import secrets
import select
import socket
import threading
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, TypeVar

from asyncckpt.budgets import ANSWER_S
from asyncckpt.errors import SaveTimeoutError, WorkerDiedError
from asyncckpt.link.api import Rendezvous
from asyncckpt.ranks.store import ANSWER, FIELD, ID_BYTES, NONCE_BYTES, RANK, REQUEST, Operation, keep_alive, proof
from asyncckpt.threads import no_thread

T = TypeVar("T")

_PROBE_PAUSE_S = 0.1
# Timeout for a TCP connection to the host, because a lost host never answers.
_REACH_S = 3.0
_PIECE_BYTES = 1 << 20


class Patience:
    """The time to wait for a store that does not listen.

    The time begins at the first failed attempt. All users of this object share the time.
    """

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self._until: float | None = None

    def left(self) -> float:
        """Return the seconds left."""
        now, until = time.monotonic(), self._until
        if until is None:
            until = self._until = now + self._seconds
        return until - now

    def renew(self) -> None:
        """Restart the time at the next failed attempt, because the store was reached, or may be restarted."""
        self._until = None

    def end(self) -> None:
        """End the time, because no trainer will restart the store."""
        self._seconds, self._until = 0.0, None


class StoreClient:
    """A connected client of the store. Its calls raise ``TimeoutError`` or ``OSError``. After that it is unusable."""

    def __init__(self, rendezvous: Rendezvous, reach_s: float, deadline: float, silence: float | None) -> None:
        """Connect.

        Args:
            rendezvous: Address of the store, and the secret.
            reach_s: Timeout to reach the host, in seconds.
            deadline: Deadline of any call, by ``time.monotonic``.
            silence: Timeout in seconds for a store that does not answer at all; None: the deadline.
        """
        self.deadline, self.silence = deadline, silence
        try:
            self._socket = socket.create_connection((rendezvous.address, rendezvous.port), timeout=reach_s)
        except TimeoutError as error:
            raise ConnectionError(f"no connection within {reach_s:g} s") from error
        try:
            keep_alive(self._socket)
            nonces, rank = (self._receive(NONCE_BYTES), secrets.token_bytes(NONCE_BYTES)), RANK.pack(rendezvous.rank)
            self._send(nonces[1] + rank + proof(rendezvous.secret, b"rank", *nonces, rank))
            said = self._receive(len(proof(b"", b"")))
            self.id = self._receive(ID_BYTES)
            if not hmac.compare_digest(said, proof(rendezvous.secret, b"store", *nonces, self.id)):
                raise ConnectionError("the process that listens there is not of this job")
        except BaseException:
            self.close()
            raise

    def put(self, key: str, field: int, value: bytes) -> None:
        """Set a field."""
        self._ask(Operation.PUT, key, field, value)

    def offer(self, key: str, field: int, value: bytes) -> None:
        """Set a field, unless it is set."""
        self._ask(Operation.OFFER, key, field, value)

    def get(self, key: str) -> dict[int, bytes]:
        """Return all fields of a key."""
        return _fields(self._ask(Operation.GET, key)[1])

    def fields(self, key: str) -> set[int]:
        """Return the numbers of the fields of a key."""
        return set(_fields(self._ask(Operation.FIELDS, key)[1]))

    def wait(self, key: str, count: int, timeout: float) -> dict[int, bytes] | None:
        """Return the fields of a key, once it has ``count`` fields or ``ENDS``; None after ``timeout`` seconds."""
        until = time.monotonic() + timeout
        while True:
            left = max(0.0, until - time.monotonic())
            slice_s = min(left, ANSWER_S if self.silence is None else self.silence / 2)
            number, payload = self._ask(Operation.WAIT, key, count, seconds=slice_s)
            if number >= 0:
                return _fields(payload)
            if left <= slice_s:
                return None

    def remove(self, *keys: str) -> None:
        """Remove keys."""
        self._send(b"".join(_request(Operation.REMOVE, key) for key in keys))
        for _ in keys:
            self._answer()

    def is_lost(self) -> bool:
        """Return whether the store has closed the connection while no request was pending."""
        poll = select.poll()
        poll.register(self._socket, select.POLLIN)
        return bool(poll.poll(0))

    def close(self) -> None:
        """Close the connection. A thread that waits for an answer gets an ``OSError``. Safe to call twice."""
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()

    def _ask(
        self, operation: Operation, key: str, number: int = 0, value: bytes = b"", seconds: float = 0.0
    ) -> tuple[int, bytes]:
        self._send(_request(operation, key, number, value, seconds))
        return self._answer()

    def _answer(self) -> tuple[int, bytes]:
        found, nbytes = ANSWER.unpack(self._receive(ANSWER.size))
        return found, self._receive(nbytes)

    def _send(self, text: bytes) -> None:
        rest = memoryview(text)
        while rest:
            self._limit()
            rest = rest[self._socket.send(rest[:_PIECE_BYTES]) :]

    def _receive(self, nbytes: int) -> bytes:
        text = bytearray()
        while len(text) < nbytes:
            self._limit()
            piece = self._socket.recv(min(nbytes - len(text), _PIECE_BYTES))
            if not piece:
                raise ConnectionResetError("the connection was closed at the other end")
            text += piece
        return bytes(text)

    def _limit(self) -> None:
        left = self.deadline - time.monotonic()
        if left <= 0:
            raise TimeoutError
        self._socket.settimeout(left if self.silence is None else min(left, self.silence))


class StoreConnection:
    """A client of the store that connects at its first call, and again after a loss. Any thread may call.

    The client makes one call at a time, so a call that waits delays all other calls.
    """

    def __init__(self, rendezvous: Rendezvous) -> None:
        self._rendezvous = rendezvous
        self._calling = threading.Lock()
        self._client: StoreClient | None = None
        # Acquire the lock directly, not through the condition: there an asynchronous exception could leave it locked.
        self._lock = threading.Lock()
        self._changed = threading.Condition(self._lock)
        self._tasks: deque[tuple[Callable[[StoreClient], Any], float, Future[Any]]] = deque()
        self._is_busy = self._is_closing = self._closed = False

    def call(
        self, what: Callable[[StoreClient], T], limit: float, patience: Patience, silence: float | None = None
    ) -> T:
        """Call ``what`` with the connected client.

        Args:
            what: The operation on the store.
            limit: Timeout of the whole call, in seconds.
            patience: Time to look for a store that does not listen.
            silence: Timeout in seconds for a store that does not answer at all, e.g. because its process is stopped;
                None: ``limit``.

        Raises:
            WorkerDiedError: The store is gone or cannot be reached.
            SaveTimeoutError: The store was reached, but does not answer.
        """
        deadline = time.monotonic() + limit
        if not self._calling.acquire(timeout=max(0.0, limit)):
            raise self._silent(limit)
        try:
            client = self._connected(patience, deadline, silence)
            client.deadline, client.silence = deadline, silence
            return what(client)
        except OSError as error:
            self._drop()
            if isinstance(error, TimeoutError) and error.errno != errno.ETIMEDOUT:  # the kernel's code for a lost host
                raise self._silent(limit if silence is None else min(limit, silence)) from error
            raise WorkerDiedError(
                "the worker of rank 0, which brings the ranks together at"
                f" {self._rendezvous.address}:{self._rendezvous.port}, is gone or cannot be reached"
                f" ({'the connection was closed' if self._closed else error.strerror or error})",
                rank=0,
            ) from error
        except BaseException:  # after an interrupt, the answer may still arrive on this connection
            self._drop()
            raise
        finally:
            self._calling.release()

    def start(self, what: Callable[[StoreClient], T], limit: float) -> Future[T]:
        """Call ``what`` on another thread, after all earlier calls of ``start``, as soon as the store can be reached.

        ``limit``: seconds for which to retry. The future gets the errors of ``call``.
        """
        future: Future[T] = Future()
        with self._lock:
            if self._closed:
                future.set_exception(WorkerDiedError("the connection to rank 0 is closed", rank=0))
                return future
            self._tasks.append((what, time.monotonic() + limit, future))
            if not self._is_busy:
                try:
                    threading.Thread(target=self._work, name="asyncckpt-store", daemon=True).start()
                    self._is_busy = True
                except RuntimeError as error:
                    self._tasks.pop()
                    future.set_exception(WorkerDiedError(no_thread(error).message, rank=0))
        return future

    def close(self, timeout: float = 0.0) -> None:
        """Drop the connection once all started calls are done, at the latest after ``timeout`` seconds.

        After ``close`` begins, calls do not wait for a store that is gone.
        """
        with self._lock:
            self._is_closing = True
            self._changed.wait_for(lambda: not self._is_busy, timeout)
            self._closed = True
        self._drop()

    def _work(self) -> None:
        while True:
            with self._lock:
                if not self._tasks or self._closed:
                    self._is_busy = False
                    self._changed.notify_all()
                    return
                what, deadline, future = self._tasks.popleft()
            try:
                future.set_result(self._insist(what, deadline))
            except BaseException as error:
                future.set_exception(error)
            del what, future

    def _insist(self, what: Callable[[StoreClient], T], deadline: float) -> T:
        is_last = False
        while True:
            left = max(0.0, deadline - time.monotonic())
            patience = Patience(left)
            try:
                return self.call(what, left, patience)
            except WorkerDiedError:
                if is_last or self._closed or patience.left() <= _PROBE_PAUSE_S:
                    raise
                is_last = self._is_closing  # perhaps only the connection was lost, so try once more
                time.sleep(_PROBE_PAUSE_S)

    def _connected(self, patience: Patience, deadline: float, silence: float | None) -> StoreClient:
        if self._client is not None and not self._client.is_lost():
            return self._client
        self._drop()
        while not self._closed:
            try:
                reach_s = max(_PROBE_PAUSE_S, min(_REACH_S, deadline - time.monotonic(), silence or _REACH_S))
                self._client = StoreClient(self._rendezvous, reach_s, deadline, silence)
            except TimeoutError:
                raise
            except OSError:
                if self._is_closing or min(patience.left(), deadline - time.monotonic()) < _PROBE_PAUSE_S:
                    raise
                time.sleep(_PROBE_PAUSE_S)
            else:
                patience.renew()
                if not self._closed:  # another thread may have closed this object meanwhile
                    return self._client
        raise ConnectionAbortedError("the connection was closed")

    def _drop(self) -> None:
        client, self._client = self._client, None
        if client is not None:
            client.close()

    def _silent(self, seconds: float) -> SaveTimeoutError:
        return SaveTimeoutError(
            f"the worker of rank 0, which brings the ranks together, does not answer within {seconds:.1f} s", rank=0
        )


def _request(operation: Operation, key: str, number: int = 0, value: bytes = b"", seconds: float = 0.0) -> bytes:
    name = key.encode()
    return REQUEST.pack(operation, len(name), number, seconds, len(value)) + name + value


def _fields(payload: bytes) -> dict[int, bytes]:
    found: dict[int, bytes] = {}
    at = 0
    while at < len(payload):
        field, nbytes = FIELD.unpack_from(payload, at)
        at += FIELD.size
        found[field] = payload[at : at + nbytes]
        at += nbytes
    return found
