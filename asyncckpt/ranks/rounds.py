"""Rounds: the ranks of a job agree on one outcome, over a store that the first rank's worker hosts.

In a round every rank reports a value, the first rank collects all values and concludes, and every rank learns the
outcome. Any rank may fail a round instead. Then all ranks get the same error, with the rank that caused it. Planning is
a few rounds among the trainers. Each commit is a round among the workers.

The store serves only processes that know the job's secret. Still, others may see and change messages on the network. So
every value carries a seal: a keyed hash of the value and its key. A value without a valid seal does not come from a
rank of this job. An attacker in the network can make saves fail, and no more.
"""

from __future__ import annotations

import contextlib
import hashlib
import hmac
import os
import pickle
import time
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from functools import partial
from typing import Any, NamedTuple, TypeVar

from asyncckpt.budgets import ANSWER_S, CHECK_S
from asyncckpt.errors import (
    CheckpointError,
    RankFailedError,
    SaveTimeoutError,
    WorkerDiedError,
    decode,
    encode,
)
from asyncckpt.link.api import Rendezvous
from asyncckpt.protocol.commit import KEPT_SAVES, grace, in_words
from asyncckpt.ranks.store import ENDS
from asyncckpt.ranks.store_connection import Patience, StoreClient, StoreConnection


def pack(value: object) -> bytes:
    """Return ``value`` as bytes for the store. Sealing comes later."""
    return zlib.compress(pickle.dumps(value), 1)


def unpack(data: bytes) -> Any:
    """Return the value that ``pack`` made ``data`` of."""
    return pickle.loads(zlib.decompress(data))


T = TypeVar("T")

SAVE, REPLICATED = "save", "replicated"
"""Kinds of rounds among the workers: the commit of a save, and its copies on other hosts."""
COPIES_BEGIN = "copies"
"""The key under which a worker tells the first save whose images it copies."""
COMMITTED, UNKNOWN = b"", b"unknown"
"""Outcomes of the commit of a save. ``UNKNOWN``: the first rank cannot ask storage."""
KEPT_ROUNDS = KEPT_SAVES
"""Number of rounds to keep in the store for each kind, for ranks that lag behind."""

_SEAL_CHARACTERS = 32
# Seconds to look for the store, because the first rank may be restarting it. All saves under way share this time.
PATIENCE_S = 20.0
# Seconds for one question to the first rank's worker, including the time to look for that worker.
_HEAR_S = PATIENCE_S + ANSWER_S
# First byte of an outcome.
_FOR_ALL, _FOR_EACH, _FAILED = b"+", b"=", b"-"


def round_name(kind: str, number: int) -> str:
    """Return the name of the round of save ``number``. The number is the same on all ranks."""
    return f"{kind}-{number}"


def key_of(rendezvous: Rendezvous, *parts: str) -> str:
    """Return the key of a part of a round in the store of the job."""
    return "/".join(("asyncckpt", rendezvous.token, *parts))


def sealed(secret: bytes, key: str, value: bytes) -> bytes:
    """Return ``value`` with its seal."""
    return _seal(secret, key, value).encode() + value


def opened(secret: bytes, key: str, text: bytes) -> bytes:
    """Return the value of a sealed text. Raises ``RankFailedError`` if no rank of this job has sealed it."""
    seal, value = text[:_SEAL_CHARACTERS], text[_SEAL_CHARACTERS:]
    if not hmac.compare_digest(seal, _seal(secret, key, value).encode()):
        raise RankFailedError("a message to the ranks of this job was sent by no rank of it")
    return value


def sealed_outcome(rendezvous: Rendezvous, name: str, outcome: bytes | CheckpointError) -> tuple[str, int, bytes]:
    """Return key, field and sealed value of the ``outcome`` of a round for all ranks."""
    key = key_of(rendezvous, name, "outcome")
    text = _FAILED + encode(outcome) if isinstance(outcome, CheckpointError) else _FOR_ALL + outcome
    return key, 0, sealed(rendezvous.secret, key, text)


def keys_to_clear(rendezvous: Rendezvous, kind: str, number: int, keep: int = KEPT_ROUNDS) -> list[str]:
    """Return the keys to remove at the end of a round of save ``number``.

    The list has the reports of that round, and the other keys of the round of save ``number - keep``.
    """
    old = round_name(kind, number - keep)
    gone = [key_of(rendezvous, old, part) for part in ("failure", "outcome", "reports")] if number > keep else []
    return [key_of(rendezvous, round_name(kind, number), "reports"), *gone]


def _seal(secret: bytes, key: str, value: bytes) -> str:
    seal = hashlib.blake2b(key.encode() + b"\n", key=secret, digest_size=_SEAL_CHARACTERS // 2)
    seal.update(value)
    return seal.hexdigest()


class Rounds:
    """One rank's part in the rounds of its job.

    Any thread may call. A wait for an outcome occupies the connection, so another call at that time needs its own
    connection. The methods ``..._soon`` use a second connection in the background. Every other method raises
    ``WorkerDiedError`` if the store is gone, and ``SaveTimeoutError`` if it does not answer.
    """

    name = staticmethod(round_name)

    def __init__(
        self,
        rendezvous: Rendezvous,
        timeout: float,
        patience: Patience | float | None = None,
        connection: StoreConnection | None = None,
        silence: float | None = None,
    ) -> None:
        """Prepare the rounds. The connection is made when it is first needed.

        Args:
            rendezvous: The address of the store, and the rank of this process.
            timeout: Timeout in seconds of every call, except for waits for other ranks.
            patience: Time to look for a store that does not listen yet, also given in seconds; None: ``timeout``.
            connection: A connection to share with other rounds; None: use a new connection.
            silence: Timeout in seconds for a store that does not answer at all, for example because its process is
                stopped; None: the timeout of the call.
        """
        self.rendezvous = rendezvous
        self._keys = partial(key_of, rendezvous)
        self._sealed, self._opened = partial(sealed, rendezvous.secret), partial(opened, rendezvous.secret)
        self.connection = connection or StoreConnection(rendezvous)
        self.patience = patience if isinstance(patience, Patience) else Patience(patience or timeout)
        self._behind = StoreConnection(rendezvous)
        self._timeout, self._silence = timeout, silence

    def report(self, name: str, value: bytes) -> None:
        """Report this rank's ``value`` in the round ``name``."""
        self._call(self._reporting(name, value))

    def report_soon(self, name: str, value: bytes, timeout: float) -> Future[None]:
        """Report as ``report`` does, as soon as the store can be reached. The future gets the errors of ``report``.

        Args:
            name: Name of the round.
            value: Value to report.
            timeout: Seconds for which to retry.
        """
        return self._behind.start(self._reporting(name, value), timeout)

    def fail_soon(self, name: str, error: CheckpointError, timeout: float) -> Future[None]:
        """Fail the round ``name`` for all ranks as soon as the store can be reached, unless it is concluded already.

        Args:
            name: Name of the round.
            error: Error for all ranks.
            timeout: Seconds for which to retry.
        """
        keys = self._keys(name)
        text = self._sealed(f"{keys}/failure", encode(error))

        def send(store: StoreClient) -> None:
            store.offer(f"{keys}/failure", 0, text)
            store.put(f"{keys}/reports", ENDS, b"")

        return self._behind.start(send, timeout)

    def collect(
        self,
        name: str,
        timeout: float,
        also: str | None = None,
        lost: Callable[[int], CheckpointError | None] = lambda _: None,
    ) -> list[bytes]:
        """First rank: wait for the reports of all ranks.

        Args:
            name: Name of the round.
            timeout: Maximum seconds to wait.
            also: Another round. Its failure ends this round too.
            lost: Called with a rank that has not reported. Returns the reason if the rank never will, otherwise None.

        Returns:
            The reported values, in the order of the ranks.

        Raises:
            CheckpointError: A rank has failed the round, is gone, or has not reported in time.
        """
        keys, every = self._keys(name), self.rendezvous.world_size
        until = time.monotonic() + timeout
        while True:
            left = until - time.monotonic()
            slice_s = max(0.0, min(left, CHECK_S))
            waiting = partial(StoreClient.wait, key=f"{keys}/reports", count=every, timeout=slice_s)
            reports = self._call(waiting)
            if reports is not None:
                break
            if also is not None and (failure := self._failure(self._keys(also))) is not None:
                raise failure
            self._check_missing(keys, timeout if left <= slice_s else None, lost)
        if ENDS in reports and (failure := self._failure(keys)) is not None:
            raise failure
        return [self._opened(f"{keys}/value/{rank}", reports.get(rank, b"")) for rank in range(every)]

    def conclude(self, name: str, outcome: bytes) -> None:
        """First rank: conclude the round ``name`` with one ``outcome`` for all ranks."""
        concluded = sealed_outcome(self.rendezvous, name, outcome)
        self._call(lambda store: store.put(*concluded))

    def conclude_each(self, name: str, outcomes: Mapping[int, bytes]) -> None:
        """First rank: conclude the round ``name`` with a separate outcome for each rank in ``outcomes``."""
        if len(outcomes) > 1 == len(alike := {*outcomes.values()}):  # one message instead of one for each rank
            self.conclude(name, alike.pop())
            return
        keys = self._keys(name)

        def send(store: StoreClient) -> None:
            for rank, outcome in outcomes.items():
                store.put(f"{keys}/for/{rank}", 0, self._sealed(f"{keys}/for/{rank}", outcome))
            store.put(f"{keys}/outcome", 0, self._sealed(f"{keys}/outcome", _FOR_EACH))

        self._call(send)

    def conclude_soon(self, name: str, outcome: bytes, timeout: float) -> Future[None]:
        """Conclude the round ``name`` by ``outcome`` in the background, unless it is concluded already.

        ``timeout``: see ``report_soon``.
        """
        concluded = sealed_outcome(self.rendezvous, name, outcome)
        return self._behind.start(lambda store: store.offer(*concluded), timeout)

    def conclude_failed(self, name: str, error: CheckpointError) -> None:
        """First rank: conclude the round ``name`` with ``error`` for all ranks, unless it is concluded already."""
        outcome = sealed_outcome(self.rendezvous, name, error)
        self._call(lambda store: store.offer(*outcome))

    def outcome(self, name: str, timeout: float, limit: float = 0.0) -> bytes | CheckpointError:
        """Wait for the outcome of a round.

        Args:
            name: Name of the round.
            timeout: Maximum seconds to wait before a ``SaveTimeoutError``.
            limit: Timeout in seconds to reach the store and to get its answer. A value below ``timeout`` is raised to
                somewhat more than ``timeout``.

        Returns:
            The outcome that the first rank concluded for this rank, or the error that the round has failed with.
        """
        keys = self._keys(name)
        limit = max(limit, timeout + max(1.0, grace(timeout) / 2))  # leaves time for the store to report the timeout
        found = self._call(lambda store: store.wait(f"{keys}/outcome", 1, timeout), limit)
        if found is None:
            raise SaveTimeoutError(f"rank 0 sent no outcome within {timeout:.1f} s", rank=0)
        outcome = self._opened(f"{keys}/outcome", found.get(0, b""))
        if outcome[:1] == _FAILED:
            return decode(outcome[1:])
        if outcome == _FOR_EACH:
            return self._opened(key := f"{keys}/for/{self.rendezvous.rank}", self._take(key))
        return outcome[1:]

    def store_id(self, timeout: float) -> bytes:
        """Return the id of the store, within ``timeout`` seconds. The store of a new worker has another id."""
        return self._call(lambda store: store.id, timeout)

    def hear(self, name: str, often_s: float, is_open: Callable[[], bool]) -> bytes | CheckpointError | None:
        """Wait for the outcome of a round until the store is gone.

        Args:
            name: Name of the round.
            often_s: Interval in seconds between two questions. The first rank considers a silent rank lost.
            is_open: Returns whether the outcome is still needed.

        Returns:
            The outcome, as ``outcome`` returns it; None: the outcome is not needed any more.

        Raises:
            CheckpointError: The store is gone, or another one is in its place.
        """
        store = b""
        while is_open():
            try:
                found = self.store_id(_HEAR_S)
                if store and found != store:
                    raise WorkerDiedError("the worker of rank 0 died, and another one is in its place", rank=0)
                store = found
                return self.outcome(name, often_s, _HEAR_S)
            except SaveTimeoutError:
                continue
            except WorkerDiedError:
                if is_open() and not (store and self._is_there(store)):
                    raise
        return None

    @contextlib.contextmanager
    def probe(self, timeout: float) -> Iterator[Rounds]:
        """Yield other rounds of the same job that do not wait for a store that is gone.

        ``timeout``: timeout of their calls, in seconds.
        """
        others = Rounds(self.rendezvous, timeout, Patience(0.0))
        try:
            yield others
        finally:
            others.close(0.0)

    def _is_there(self, store: bytes) -> bool:
        """Return whether the same store still answers."""
        try:
            with self.probe(ANSWER_S) as others:
                return others.store_id(ANSWER_S) == store
        except CheckpointError:
            return False

    def impatient(self, silence: float) -> Rounds:
        """Return rounds on the same connection that do not wait for a store that is gone.

        ``silence``: timeout in seconds for a store that does not answer at all.
        """
        return Rounds(self.rendezvous, self._timeout, Patience(0.0), self.connection, silence)

    def ping(self) -> None:
        """Check that the store answers."""
        self._call(lambda store: store.fields(self._keys("gone")))

    def clear(self, kind: str, number: int, keep: int = KEPT_ROUNDS) -> None:
        """First rank: end the round ``kind`` of save ``number``.

        This removes the reports of the round now, and its other keys after ``keep`` further rounds.
        """
        gone = keys_to_clear(self.rendezvous, kind, number, keep)
        self._call(lambda store: store.remove(*gone))

    def put_soon(self, name: str, value: bytes, timeout: float) -> Future[None]:
        """Store ``value`` under ``name`` and this rank's number, for all ranks; ``timeout``: see ``report_soon``."""
        key = f"{self._keys(name)}/{self.rendezvous.rank}"
        sealed = self._sealed(key, value)
        return self._behind.start(lambda store: store.put(key, 0, sealed), timeout)

    def get(self, name: str, rank: int) -> bytes | None:
        """Return the value that ``rank`` has stored under ``name``; None if there is none."""
        key = f"{self._keys(name)}/{rank}"
        found = self._get(key)
        return None if found is None else self._opened(key, found)

    def set_flag(self, name: str) -> None:
        """Set the flag ``name`` for all ranks. The flag is never reset."""
        key = self._keys(f"flag/{name}")
        self._call(lambda store: store.put(key, 0, self._sealed(key, b"1")))

    def is_flag_set(self, name: str) -> bool:
        """Return whether some rank has set the flag ``name``."""
        key = self._keys(f"flag/{name}")
        flag = self._get(key)
        return flag is not None and self._opened(key, flag) == b"1"

    def gone_soon(self, error: CheckpointError, timeout: float) -> Future[None]:
        """Tell the first rank that this rank takes part in no further rounds, after all earlier messages.

        Args:
            error: The reason.
            timeout: Seconds for which to retry.
        """
        key = self._keys("gone")
        text = self._sealed(key, encode(error))
        return self._behind.start(lambda store: store.put(key, self.rendezvous.rank, text), timeout)

    def leave(self) -> None:
        """Tell the first rank that this rank does not need the store any more."""
        self._call(lambda store: store.put(self._keys("left"), self.rendezvous.rank, b""))

    def close(self, timeout: float = 0.0) -> None:
        """Drop the connections. ``timeout``: maximum seconds to wait for pending ``..._soon`` calls."""
        self._behind.close(timeout)
        self.connection.close()

    def _call(self, what: Callable[[StoreClient], T], limit: float | None = None) -> T:
        limit = self._timeout if limit is None else limit
        return self.connection.call(what, limit, self.patience, self._silence)

    def _reporting(self, name: str, value: bytes) -> Callable[[StoreClient], None]:
        rank, keys = self.rendezvous.rank, self._keys(name)
        sealed = self._sealed(f"{keys}/value/{rank}", value)
        return lambda store: store.put(f"{keys}/reports", rank, sealed)

    def _get(self, key: str) -> bytes | None:
        return self._call(lambda store: store.get(key)).get(0)

    def _take(self, key: str) -> bytes:
        """Return the value of ``key``, and remove the key."""
        value = self._get(key)
        if value is None:
            raise WorkerDiedError("the worker of rank 0 died with the answer for this rank", rank=0)
        self._call(lambda store: store.remove(key))
        return value

    def _check_missing(self, keys: str, timed_out: float | None, lost: Callable[[int], CheckpointError | None]) -> None:
        """Raise an error for a rank that has not reported, if the rank is gone or lost, or if the time is up."""
        # Ask for gone ranks first. A rank sends its reports before it reports that it is gone, so the second question
        # finds these reports.
        gone = self._call(lambda store: store.get(self._keys("gone")))
        reported = self._call(lambda store: store.fields(f"{keys}/reports"))
        for text in gone.values():
            error = decode(self._opened(self._keys("gone"), text))
            if error.rank not in reported:
                raise error
        missing = [rank for rank in range(self.rendezvous.world_size) if rank not in reported]
        if losses := [*filter(None, map(lost, missing))]:
            raise losses[0]
        if timed_out is not None and missing:
            raise SaveTimeoutError(f"{in_words(missing)} did not make the call within {timed_out:g} s", rank=missing[0])

    def _failure(self, keys: str) -> CheckpointError | None:
        text = self._get(f"{keys}/failure")
        return decode(self._opened(f"{keys}/failure", text)) if text else None


class Call(NamedTuple):
    """A call of a rank. ``words`` describe it; ``key`` has to be the same on all ranks."""

    words: str
    key: str

    @classmethod
    def of_save(cls, step: int | None, path: str) -> Call:
        """Return the call of a save. Only the name of its folder is compared, because hosts may have it elsewhere."""
        return cls(f"saves to {path}" if step is None else f"saves step {step}", f"{step} {os.path.basename(path)}")


def check_same_call(calls: Sequence[Call]) -> None:
    """Raise ``RankFailedError`` for the first rank with another call than rank 0.

    ``calls`` are in the order of the ranks.
    """
    for rank, call in enumerate(calls):
        if call.key != calls[0].key:
            raise RankFailedError(
                f"rank 0 {calls[0].words}, and rank {rank} {call.words}: all ranks have to make the same calls in the"
                " same order",
                rank=rank,
            )
