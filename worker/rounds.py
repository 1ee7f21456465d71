"""Rounds: how the ranks of a job ask each other something, over a store that the first rank's worker hosts.

In a round every rank reports a value, the first rank collects them all and concludes, and every rank learns the
outcome. Any rank may fail a round instead; then all get the same error, with the rank it came from. Planning is a few
rounds among the trainers; each commit is one among the workers.

The store is ``torch.distributed.TCPStore``, imported by those who need it: a job of one process never does. What was
measured of it (torch 2.13): a value sent in one piece may have 8 MiB; a peer that dies is noticed at once; but a wait
on a server that is stopped never returns, whatever its timeout. So each connection has a thread of its own, and nobody
waits for that thread longer than was asked for.

Whoever reaches its port can read and write the store. So all that is said there carries a seal, a keyed hash of it and
of where it stands, and what has no good one was not said by a rank of this job: an outsider can make saves fail, and no
more than that.
"""

from __future__ import annotations

import hashlib
import hmac
import json
import socket
import threading
import time
import uuid
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeoutError
from datetime import timedelta
from queue import SimpleQueue
from typing import Any, TypeVar

from asyncckpt import errors
from asyncckpt.errors import CheckpointError, RankFailedError, SaveTimeoutError, WorkerDiedError
from asyncckpt.worker.messages import Meeting

T = TypeVar("T")

# Below the 8 MiB that the store's server takes at once.
_PIECE_BYTES = 4 << 20
# Reports up to this size stand one after the other in one value, which the first rank fetches in one go.
_INLINE_BYTES = 64 << 10
# How often the first rank asks whether all have reported: at first, and later on.
_POLL_S = (0.0005, 0.02)
# How often it looks whether one of those missing has said that it is gone.
_LOOK_S = 0.5
_HOST = "asyncckpt/host"
_SEAL_CHARACTERS = 32
_KNOCK_S = 0.1
# What the store's own client gives any operation; whoever waits for it has limits of its own.
_OPERATION_S = 300.0
# What a store that listens may take to answer a new connection. One that is just dying never will.
_CONNECT_S = 3.0
_CONNECT_TRIES_S = 5.0
# Rounds whose keys are kept in the store, for ranks that lag behind.
_KEPT_ROUNDS = 64


def host(port: int) -> Any:
    """A store, listening on ``port`` (0: any) until it is garbage. Raises ``OSError`` where the port is taken."""
    try:
        store = _store("0.0.0.0", port, 60.0, is_master=True)
    except RuntimeError as error:
        raise OSError(f"no store on port {port}: {_first_line(error)}") from error
    store.set(_HOST, uuid.uuid4().hex)
    return store


class Rounds:
    """One connection to the store, made when it is first used, and made again after it was lost.

    Any thread may use it, one at a time: who waits for an outcome keeps others out, and should have its own.
    """

    def __init__(self, meeting: Meeting, timeout: float, patience: float | None = None) -> None:
        """``timeout``: seconds that anything but a wait for others may take; ``patience``: that connecting may."""
        self.meeting = meeting
        self._timeout = timeout
        self._patience = timeout if patience is None else patience
        self._connection: _Connection | None = None
        self._lock = threading.RLock()

    def connect(self) -> None:
        """Begin to import torch and to connect; nobody has to wait for that now."""
        with self._lock:
            self._connection = self._connection or _Connection(self.meeting, self._patience)
            self._connection.do(_answers)

    def report(self, name: str, value: bytes) -> None:
        """Report this rank's ``value`` in the round ``name``. Raises ``WorkerDiedError``, ``SaveTimeoutError``."""
        rank, keys = self.meeting.rank, self._keys(name)
        inline = len(value) <= _INLINE_BYTES
        seal = self._seal(f"{keys}/value/{rank}", value)

        def send(store: Any) -> None:
            if not inline:
                _put(store, f"{keys}/value/{rank}", value)
            head = {"rank": rank, "bytes": len(value) if inline else None, "seal": seal}
            frame = json.dumps(head).encode() + b"\n"
            store.append(f"{keys}/reports", frame + (value if inline else b""))
            if store.add(f"{keys}/count", 1) == self.meeting.world_size:
                store.set(f"{keys}/ready", b"all")

        self._do(send)

    def fail(self, name: str, error: CheckpointError) -> None:
        """Fail the round ``name`` for all ranks, unless it is concluded already."""
        self._do(self._failing(name, error))

    def fail_soon(self, name: str, error: CheckpointError, timeout: float) -> None:
        """The same as soon as the store can be reached, within ``timeout`` seconds; nobody waits for that."""
        deadline = time.monotonic() + timeout

        def attempt(last: Future[None] | None = None) -> None:
            if last is None or (last.exception() is not None and time.monotonic() < deadline):
                with self._lock:
                    self._connection = self._connection or _Connection(self.meeting, self._patience)
                    self._connection.do(self._failing(name, error)).add_done_callback(attempt)

        attempt()

    def _failing(self, name: str, error: CheckpointError) -> Callable[[Any], None]:
        keys = self._keys(name)
        text = self._sealed(f"{keys}/failure", encode_error(error)).decode()

        def send(store: Any) -> None:
            store.compare_set(f"{keys}/failure", "", text)
            store.set(f"{keys}/ready", b"failed")

        return send

    def collect(self, name: str, timeout: float, also: str | None = None) -> list[bytes]:
        """First rank: wait for the reports of all ranks, and return them in the order of the ranks.

        Raises the error of a rank that failed the round, or the round ``also``, or has left; ``SaveTimeoutError``,
        naming those still missing after ``timeout`` seconds.
        """
        keys = self._keys(name)
        begun = looked = time.monotonic()
        # Asked for again and again, by this one rank, and not waited for: torch warns of each wait that runs out.
        pause = _POLL_S[0]
        while not self._do(lambda store: store.check([f"{keys}/ready"])):
            now = time.monotonic()
            if now - looked >= _LOOK_S or now - begun >= timeout:
                looked = now
                if also is not None and (failure := self._failure(self._keys(also))) is not None:
                    raise failure
                self._check_missing(keys, timeout if now - begun >= timeout else None)
            time.sleep(pause)
            pause = min(1.5 * pause, _POLL_S[1])
        failure = self._failure(keys)
        found = _frames(self._do(lambda store: _get(store, f"{keys}/reports")))
        values = self._do(lambda store: self._values(store, keys, found, dropped=failure is not None))
        if failure is not None:
            raise failure
        return [
            self._opened(f"{keys}/value/{rank}", found.get(rank, (b"", ""))[1].encode() + value)
            for rank, value in enumerate(values)
        ]

    def conclude(self, name: str, outcome: bytes, each: Mapping[int, bytes] | None = None) -> None:
        """First rank: tell all the ``outcome``, and each rank what ``each`` has for it."""
        keys = self._keys(name)

        def send(store: Any) -> None:
            for rank, value in (each or {}).items():
                _put(store, f"{keys}/for/{rank}", self._sealed(f"{keys}/for/{rank}", value))
            store.set(f"{keys}/outcome", self._sealed(f"{keys}/outcome", b"+" + outcome))

        self._do(send)

    def conclude_failed(self, name: str, error: CheckpointError) -> None:
        """First rank: tell all that the round has failed, unless it is concluded already."""
        key = f"{self._keys(name)}/outcome"
        text = self._sealed(key, b"-" + encode_error(error)).decode()
        self._do(lambda store: store.compare_set(key, "", text))

    def outcome(self, name: str, timeout: float, *, own: bool = False) -> bytes | CheckpointError:
        """Wait for the outcome, and return it: the first rank's word, or the error that the round has failed with.

        With ``own`` it is what the first rank had for this rank alone. What is raised is not the outcome, which is then
        unknown: ``SaveTimeoutError`` after ``timeout`` seconds, ``WorkerDiedError``.
        """
        keys = self._keys(name)
        if not self._wait(f"{keys}/outcome", timeout, spare=max(1.0, grace(timeout) / 2)):
            raise SaveTimeoutError(f"rank 0 came to no conclusion within {timeout:g} s", rank=0)
        outcome = self._opened(f"{keys}/outcome", self._do(lambda store: _get(store, f"{keys}/outcome")))
        if outcome[:1] == b"-":
            return decode_error(outcome[1:])
        if own:
            key = f"{keys}/for/{self.meeting.rank}"
            return self._opened(key, self._do(lambda store: _take(store, key)))
        return outcome[1:]

    def store_id(self, timeout: float) -> bytes:
        """Which store this is: a worker that takes the place of a dead one hosts another, at the same address."""
        return self._do(lambda store: _get(store, _HOST), min(timeout, self._timeout))

    def clear(self, kind: str, number: int) -> None:
        """First rank: the round ``kind`` of save ``number`` is over. What it and older ones left is removed in time."""
        keys = self._keys(round_name(kind, number))
        old = self._keys(round_name(kind, number - _KEPT_ROUNDS))

        def send(store: Any) -> None:
            store.delete_key(f"{keys}/reports")
            if number > _KEPT_ROUNDS:
                for part in ("count", "ready", "failure", "outcome", "reports"):
                    store.delete_key(f"{old}/{part}")

        self._do(send)

    def say(self, word: str) -> None:
        """Say something once and for all."""
        key = self._keys(f"said/{word}")
        self._do(lambda store: store.set(key, self._sealed(key, b"1")))

    def is_said(self, word: str) -> bool:
        """Whether some rank has said that."""
        key = self._keys(f"said/{word}")
        said = self._do(lambda store: _get(store, key))
        return bool(said) and self._opened(key, said) == b"1"

    def gone(self, error: CheckpointError) -> None:
        """Say that this rank will take part in no round any more."""
        text = self._sealed(self._keys("gone"), encode_error(error)) + b"\n"
        self._do(lambda store: store.append(self._keys("gone"), text))

    def leave(self) -> None:
        """Say that this rank needs the store no more."""

        def send(store: Any) -> None:
            if store.add(self._keys("left"), 1) == self.meeting.world_size - 1:
                store.set(self._keys("empty"), b"1")

        self._do(send)

    def wait_left(self, timeout: float) -> None:
        """First rank: wait until all others have left, or ``timeout`` seconds have passed."""
        self._wait(self._keys("empty"), timeout, spare=1.0)

    def close(self) -> None:
        """Drop the connection; a later use makes another."""
        with self._lock:
            connection, self._connection = self._connection, None
        if connection is not None:
            connection.close()

    def _keys(self, name: str) -> str:
        return f"asyncckpt/{self.meeting.token}/{name}"

    def _check_missing(self, keys: str, timed_out: float | None) -> None:
        """Raise what is known of ranks that have not reported: one has said that it is gone, or the time is up."""
        reported = _frames(self._do(lambda store: _get(store, f"{keys}/reports")))
        for text in self._do(lambda store: _get(store, self._keys("gone"))).splitlines():
            error = decode_error(self._opened(self._keys("gone"), text))
            if error.rank not in reported:
                raise error
        missing = [rank for rank in range(self.meeting.world_size) if rank not in reported]
        if timed_out is not None and missing:
            raise SaveTimeoutError(f"{_ranks(missing)} did not get here within {timed_out:g} s", rank=missing[0])

    def _failure(self, keys: str) -> CheckpointError | None:
        text = self._do(lambda store: _get(store, f"{keys}/failure"))
        return decode_error(self._opened(f"{keys}/failure", text)) if text else None

    def _values(
        self, store: Any, keys: str, found: Mapping[int, tuple[bytes | None, str]], *, dropped: bool
    ) -> list[bytes]:
        """The values of all ranks; with ``dropped`` nobody wants them."""
        values = []
        for rank in range(self.meeting.world_size):
            value, _ = found.get(rank, (b"", ""))
            key = f"{keys}/value/{rank}"
            if value is None:
                value = b"" if dropped and not store.check([key]) else _take(store, key)
            values.append(value)
        return values

    def _seal(self, key: str, value: bytes) -> str:
        seal = hashlib.blake2b(key.encode() + b"\n", key=self.meeting.secret, digest_size=_SEAL_CHARACTERS // 2)
        seal.update(value)
        return seal.hexdigest()

    def _sealed(self, key: str, value: bytes) -> bytes:
        return self._seal(key, value).encode() + value

    def _opened(self, key: str, text: bytes) -> bytes:
        """The value in a sealed one. Raises ``RankFailedError`` if no rank of this job has sealed it."""
        seal, value = text[:_SEAL_CHARACTERS], text[_SEAL_CHARACTERS:]
        if not hmac.compare_digest(seal, self._seal(key, value).encode()):
            raise RankFailedError("something was said to the ranks of this job that none of them has said")
        return value

    def _wait(self, key: str, timeout: float, spare: float) -> bool:
        """Whether ``key`` was set within ``timeout`` seconds; the store gets ``spare`` ones more to say so."""
        from torch.distributed import DistNetworkError, DistStoreError

        def wait(store: Any) -> bool:
            try:
                store.wait([key], timedelta(seconds=max(timeout, 0.001)))
            except DistNetworkError:
                raise
            except (DistStoreError, RuntimeError) as error:
                if "imeout" not in str(error) and "imed out" not in str(error):
                    raise
                return False
            return True

        return self._do(wait, timeout + spare)

    def _do(self, what: Callable[[Any], T], limit: float | None = None) -> T:
        """Have the connection's thread do ``what`` with the store, and wait for it, ``limit`` seconds at most."""
        limit = self._timeout if limit is None else limit
        with self._lock:
            if self._connection is None:
                self._connection = _Connection(self.meeting, self._patience)
            connection = self._connection
        future = connection.do(what)
        try:
            return future.result(limit)
        except FutureTimeoutError as error:
            self._lose(connection)
            if not connection.connected:
                raise self._unreachable(f"no connection within {limit:g} s") from error
            raise SaveTimeoutError(
                f"the worker of rank 0, which brings the ranks together, does not answer within {limit:g} s", rank=0
            ) from error
        except RuntimeError as error:
            self._lose(connection)
            raise self._unreachable(_first_line(error)) from error

    def _unreachable(self, why: str) -> WorkerDiedError:
        where = f"{self.meeting.address}:{self.meeting.port}"
        return WorkerDiedError(
            f"the worker of rank 0, which brings the ranks together at {where}, is gone or cannot be reached ({why})",
            rank=0,
        )

    def _lose(self, connection: _Connection) -> None:
        with self._lock:
            if self._connection is connection:
                self._connection = None
        connection.close()


class SoloRounds:
    """The same for a job of one rank: what is reported is all there is to collect."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._reports: dict[str, bytes | CheckpointError] = {}

    def report(self, name: str, value: bytes) -> None:
        """As ``Rounds.report``."""
        self._settle(name, value)

    def fail(self, name: str, error: CheckpointError) -> None:
        """As ``Rounds.fail``."""
        self._settle(name, error)

    def fail_soon(self, name: str, error: CheckpointError, timeout: float) -> None:
        """As ``Rounds.fail_soon``."""
        self._settle(name, error)

    def collect(self, name: str, timeout: float) -> list[bytes]:
        """As ``Rounds.collect``."""
        with self._changed:
            self._changed.wait_for(lambda: name in self._reports, timeout)
            report = self._reports.pop(name, None)
        if report is None:
            raise SaveTimeoutError(f"not written within {timeout:g} s; the storage may be stalled", rank=0)
        if isinstance(report, CheckpointError):
            raise report
        return [report]

    def outcome(self, name: str, timeout: float) -> bytes | CheckpointError:
        """Never asked: there is no rank but the first."""
        raise NotImplementedError

    def store_id(self, timeout: float) -> bytes:
        """There is but one."""
        return b"solo"

    def conclude(self, name: str, outcome: bytes) -> None:
        """Nobody else wants to know."""

    def conclude_failed(self, name: str, error: CheckpointError) -> None:
        """Nobody else wants to know."""

    def clear(self, kind: str, number: int) -> None:
        """Forget what came too late."""
        with self._changed:
            self._reports.pop(round_name(kind, number), None)

    def gone(self, error: CheckpointError) -> None:
        """Nobody else wants to know."""

    def leave(self) -> None:
        """There is nobody to leave."""

    def wait_left(self, timeout: float) -> None:
        """There is nobody to wait for."""

    def close(self) -> None:
        """Nothing is held."""

    def _settle(self, name: str, report: bytes | CheckpointError) -> None:
        with self._changed:
            self._reports.setdefault(name, report)
            self._changed.notify_all()


class _Connection:
    """A client of the store, used by one thread that may be left behind in a call that does not return."""

    def __init__(self, meeting: Meeting, timeout: float) -> None:
        self.connected = False
        self._meeting = meeting
        self._timeout = timeout
        self._tasks: SimpleQueue[tuple[Callable[[Any], Any], Future[Any]] | None] = SimpleQueue()
        threading.Thread(target=self._serve, name="asyncckpt-store", daemon=True).start()

    def do(self, what: Callable[[Any], T]) -> Future[T]:
        """Have the thread call ``what`` with the store."""
        future: Future[T] = Future()
        self._tasks.put((what, future))
        return future

    def close(self) -> None:
        """Let the thread end when it is done."""
        self._tasks.put(None)

    def _serve(self) -> None:
        store = None
        while (task := self._tasks.get()) is not None:
            what, future = task
            try:
                if store is not None and not _answers(store):
                    store = None  # its worker died while nobody asked for anything, and may have been replaced
                self.connected = store is not None
                if store is None:
                    store = _connected(self._meeting.address, self._meeting.port, self._timeout)
                    self.connected = True
                future.set_result(what(store))
            except BaseException as error:
                future.set_exception(error)
            del task, what, future


def _connected(address: str, port: int, timeout: float) -> Any:
    """A client of the store there. Somebody has to listen within ``timeout`` seconds. Raises ``RuntimeError``."""
    begun = time.monotonic()
    while True:
        _knock(address, port, timeout - (time.monotonic() - begun))
        try:
            store = _store(address, port, _CONNECT_S, is_master=False)
        except RuntimeError:
            if time.monotonic() - begun > max(timeout, _CONNECT_TRIES_S):
                raise
            continue
        store.set_timeout(timedelta(seconds=_OPERATION_S))
        return store


def _knock(address: str, port: int, timeout: float) -> None:
    """Wait until somebody listens there. The store's own client takes several times its timeout to give up."""
    deadline = time.monotonic() + timeout
    while True:
        try:
            socket.create_connection((address, port), timeout=max(0.1, deadline - time.monotonic())).close()
            return
        except OSError as error:
            if time.monotonic() + _KNOCK_S > deadline:
                raise RuntimeError(f"nobody listens there: {error.strerror or error}") from error
            time.sleep(_KNOCK_S)


def _answers(store: Any) -> bool:
    try:
        store.check([_HOST])
    except RuntimeError:
        return False
    return True


def _store(address: str, port: int, timeout: float, *, is_master: bool) -> Any:
    from torch import distributed

    store: Any = distributed.TCPStore  # type: ignore[attr-defined]
    return store(address, port, is_master=is_master, wait_for_workers=False, timeout=timedelta(seconds=timeout))


def grace(timeout: float) -> float:
    """Seconds beyond ``timeout``, the limit of the rank that collects, for its conclusion to get to the others."""
    return min(5.0, timeout / 4)


def round_name(kind: str, number: int) -> str:
    """The name of the round of save ``number``; the number is the same on all ranks."""
    return f"{kind}-{number}"


def encode_error(error: CheckpointError) -> bytes:
    """One line of JSON: what comes over a network is not unpickled by the workers."""
    where = {"path": error.path, "rank": error.rank, "step": error.step}
    return json.dumps({"kind": type(error).__name__, "message": error.message, **where}).encode()


def decode_error(text: bytes) -> CheckpointError:
    """The error again, of its own class if that is one of ours."""
    fields = json.loads(text)
    kind = getattr(errors, fields.pop("kind"), RankFailedError)
    error: CheckpointError = kind(fields.pop("message"), **fields)
    return error


def _put(store: Any, key: str, value: bytes) -> None:
    for begin in range(0, len(value) or 1, _PIECE_BYTES):
        store.append(key, value[begin : begin + _PIECE_BYTES])


def _get(store: Any, key: str) -> bytes:
    """The value of ``key``; empty where there is none."""
    return bytes(store.get(key)) if store.check([key]) else b""


def _take(store: Any, key: str) -> bytes:
    """The value of ``key``, which nobody else wants."""
    value = bytes(store.get(key))
    store.delete_key(key)
    return value


def _frames(text: bytes) -> dict[int, tuple[bytes | None, str]]:
    """The reports in ``text`` by their ranks, with their seals; None for those that stand elsewhere.

    Nothing of it is to be believed before the seals are looked at. Raises ``RankFailedError`` for what is no report.
    """
    found: dict[int, tuple[bytes | None, str]] = {}
    at = 0
    try:
        while at < len(text):
            end = text.index(b"\n", at)
            head = json.loads(text[at:end])
            rank, nbytes, seal = head["rank"], head["bytes"], head["seal"]
            if type(rank) is not int or type(seal) is not str or not (nbytes is None or 0 <= nbytes <= _INLINE_BYTES):
                raise ValueError("it is no report")
            at = end + 1 + (nbytes or 0)
            found[rank] = (None if nbytes is None else text[end + 1 : at]), seal
    except (ValueError, KeyError, TypeError) as error:
        raise RankFailedError("something was said to the ranks of this job that none of them has said") from error
    return found


def _ranks(ranks: list[int]) -> str:
    more = f" and {len(ranks) - 8} more" if len(ranks) > 8 else ""
    return ("rank " if len(ranks) == 1 else "ranks ") + ", ".join(map(str, ranks[:8])) + more


def _first_line(error: BaseException) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0]
