"""A connection to the store of a job: how the store is hosted, and the thread through which it is used.

The store is ``torch.distributed.TCPStore``. torch is imported inside the functions here and nowhere else in the worker:
a job of one process never calls them. What was measured of the store (torch 2.13): a value sent in one piece may have
8 MiB; the death of a peer is noticed at once; but a wait on a server that is stopped never returns, whatever its
timeout. So each connection has a thread of its own, and nobody waits for that thread longer than was asked for.
"""

from __future__ import annotations

import socket
import threading
import time
import uuid
from collections.abc import Callable
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeoutError
from datetime import timedelta
from queue import SimpleQueue
from typing import Any, TypeVar

from asyncckpt.errors import SaveTimeoutError, WorkerDiedError

T = TypeVar("T")

HOST_KEY = "asyncckpt/host"
"""Where every store says which one it is: a text that no other store has."""

_PROBE_PAUSE_S = 0.1
# What the store's own client gives any operation; whoever waits for it has limits of its own.
_OPERATION_S = 300.0
# What a store that listens may take to answer a new connection. One that is just dying never will.
_CONNECT_S = 3.0
_CONNECT_TRIES_S = 5.0


def host_store(port: int) -> Any:
    """A store, listening on ``port`` (0: any) until it is garbage. Raises ``OSError`` where the port is taken."""
    try:
        store = _store("0.0.0.0", port, 60.0, is_master=True)
    except RuntimeError as error:
        raise OSError(f"no store on port {port}: {_first_line(error)}") from error
    store.set(HOST_KEY, uuid.uuid4().hex)
    return store


def wait_for_key(store: Any, key: str, timeout: float) -> bool:
    """Whether a key is there in time.

    Args:
        store: As ``StoreConnection`` gives it.
        key: Set by some other rank.
        timeout: Seconds to wait.

    Raises:
        RuntimeError: The store is lost.
    """
    from torch.distributed import DistStoreError

    try:
        store.wait([key], timedelta(seconds=max(timeout, 0.001)))
    except DistStoreError:  # raised by a wait that ran out and by nothing else in it: a lost store is another class
        return False
    return True


class StoreConnection:
    """A client of the store at ``address`` and ``port``, made when it is first used, and again after it was lost.

    Any thread may call. What is asked of it is done in order, by a thread of its own.
    """

    def __init__(self, address: str, port: int) -> None:
        self._address, self._port = address, port
        self._lock = threading.Lock()
        self._thread: _ClientThread | None = None

    def start(self, what: Callable[[Any], T], patience: float) -> Future[T]:
        """Have ``what`` called with the store. ``patience``: seconds to wait for a store that does not listen yet."""
        return self._start(what, patience)[1]

    def call(self, what: Callable[[Any], T], limit: float, patience: float) -> T:
        """Have ``what`` called with the store, and wait for that.

        Args:
            what: What to do with the store.
            limit: Seconds to wait. What takes longer is left behind, with its thread.
            patience: Seconds to wait for a store that does not listen yet.

        Raises:
            WorkerDiedError: The store is gone or cannot be reached.
            SaveTimeoutError: It was reached, and does not answer.
        """
        thread, future = self._start(what, patience)
        try:
            return future.result(limit)
        except FutureTimeoutError as error:
            self._drop(thread)
            if not thread.connected:
                raise self._unreachable(f"no connection within {limit:g} s") from error
            raise SaveTimeoutError(
                f"the worker of rank 0, which brings the ranks together, does not answer within {limit:g} s", rank=0
            ) from error
        except RuntimeError as error:
            self._drop(thread)
            raise self._unreachable(_first_line(error)) from error

    def close(self) -> None:
        """Drop the connection when all that was asked is done; a later use makes another."""
        if (thread := self._thread) is not None:
            self._drop(thread)

    def _start(self, what: Callable[[Any], T], patience: float) -> tuple[_ClientThread, Future[T]]:
        with self._lock:  # also while it is queued: nothing is queued behind the end of a thread
            self._thread = self._thread or _ClientThread(self._address, self._port)
            return self._thread, self._thread.start(what, patience)

    def _drop(self, thread: _ClientThread) -> None:
        with self._lock:
            if self._thread is thread:
                self._thread = None
        thread.stop()

    def _unreachable(self, why: str) -> WorkerDiedError:
        return WorkerDiedError(
            f"the worker of rank 0, which brings the ranks together at {self._address}:{self._port}, is gone or cannot"
            f" be reached ({why})",
            rank=0,
        )


class _ClientThread:
    """A thread with a client of the store. It may be left behind in a call that does not return."""

    def __init__(self, address: str, port: int) -> None:
        self.connected = False
        self._address, self._port = address, port
        self._tasks: SimpleQueue[tuple[Callable[[Any], Any], float, Future[Any]] | None] = SimpleQueue()
        threading.Thread(target=self._run, name="asyncckpt-store", daemon=True).start()

    def start(self, what: Callable[[Any], T], patience: float) -> Future[T]:
        future: Future[T] = Future()
        self._tasks.put((what, patience, future))
        return future

    def stop(self) -> None:
        """Let the thread end when it is done."""
        self._tasks.put(None)

    def _run(self) -> None:
        store = None
        while (task := self._tasks.get()) is not None:
            what, patience, future = task
            try:
                if store is not None and not _answers(store):
                    store = None  # its worker died while nobody asked for anything, and may have been replaced
                self.connected = store is not None
                if store is None:
                    store = _connect(self._address, self._port, patience)
                    self.connected = True
                future.set_result(what(store))
            except BaseException as error:
                future.set_exception(error)
            del task, what, future


def _connect(address: str, port: int, patience: float) -> Any:
    """A client of the store there, if one listens within ``patience`` seconds. Raises ``RuntimeError``."""
    begun = time.monotonic()
    while True:
        _wait_for_listener(address, port, patience - (time.monotonic() - begun))
        try:
            store = _store(address, port, _CONNECT_S, is_master=False)
        except RuntimeError:
            if time.monotonic() - begun > max(patience, _CONNECT_TRIES_S):
                raise
            continue
        store.set_timeout(timedelta(seconds=_OPERATION_S))
        return store


def _wait_for_listener(address: str, port: int, timeout: float) -> None:
    """Wait until somebody listens there. The store's own client takes several times its timeout to give up."""
    deadline = time.monotonic() + timeout
    while True:
        try:
            socket.create_connection((address, port), timeout=max(0.1, deadline - time.monotonic())).close()
            return
        except OSError as error:
            if time.monotonic() + _PROBE_PAUSE_S > deadline:
                raise RuntimeError(f"nobody listens there: {error.strerror or error}") from error
            time.sleep(_PROBE_PAUSE_S)


def _answers(store: Any) -> bool:
    try:
        store.check([HOST_KEY])
    except RuntimeError:
        return False
    return True


def _store(address: str, port: int, timeout: float, *, is_master: bool) -> Any:
    from torch import distributed

    store: Any = distributed.TCPStore  # type: ignore[attr-defined]
    return store(address, port, is_master=is_master, wait_for_workers=False, timeout=timedelta(seconds=timeout))


def _first_line(error: BaseException) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0]
