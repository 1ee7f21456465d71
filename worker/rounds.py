"""Rounds: how the ranks of a job come to one outcome, over a store that the first rank's worker hosts.

In a round every rank reports a value, the first rank collects them all and concludes, and every rank learns the
outcome. Any rank may fail a round instead; then all get the same error, with the rank it came from. Planning is a few
rounds among the trainers; each commit is one among the workers.

Whoever reaches the store's port can read and write it. So every value carries a seal: a keyed hash of it and of its
key. A value without a good seal does not come from a rank of this job: an outsider can make saves fail, and no more.
"""

from __future__ import annotations

import hashlib
import hmac
import json
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from typing import Any, TypeVar

from asyncckpt.errors import CheckpointError, RankFailedError, SaveTimeoutError, WorkerDiedError, decode, encode
from asyncckpt.worker.messages import Rendezvous
from asyncckpt.worker.store_connection import HOST_KEY, StoreConnection, wait_for_key

T = TypeVar("T")

INLINE_BYTES = 64 << 10
"""Reports up to this size are appended to one value, which the first rank fetches in one go."""
KEPT_ROUNDS = 64
"""Rounds whose keys are kept in the store, for ranks that lag behind."""

# Below the 8 MiB that the store's server takes at once.
_CHUNK_BYTES = 4 << 20
# How often the first rank asks whether all have reported: at first, and later on.
_POLL_S = (0.0005, 0.02)
# How often it looks whether one of those missing has said that it is gone.
_CHECK_GONE_S = 0.5
_SEAL_CHARACTERS = 32
_FORGED = "a message to the ranks of this job comes from none of them"


class Rounds:
    """One rank's part in the rounds of its job.

    Any thread may call. A wait for an outcome occupies the connection: whoever has to do something meanwhile needs
    another one. Every method raises ``WorkerDiedError`` when the store is gone, and ``SaveTimeoutError`` when it does
    not answer.
    """

    def __init__(
        self,
        rendezvous: Rendezvous,
        timeout: float,
        patience: float | None = None,
        connection: StoreConnection | None = None,
    ) -> None:
        """No connection is made before it is needed.

        Args:
            rendezvous: Where the store is, and which rank this is.
            timeout: Seconds that anything but a wait for other ranks may take.
            patience: Seconds to wait for a store that does not listen yet; None: ``timeout``.
            connection: To share that of another; None: one of its own.
        """
        self.rendezvous = rendezvous
        self.connection = connection or StoreConnection(rendezvous.address, rendezvous.port)
        self._timeout = timeout
        self._patience = timeout if patience is None else patience

    def connect(self) -> None:
        """Begin to import torch and to connect, and do not wait for that."""
        self.connection.start(lambda _: None, self._patience)

    def report(self, name: str, value: bytes) -> None:
        """Report this rank's ``value`` in the round ``name``."""
        rank, keys = self.rendezvous.rank, self._keys(name)
        inline = len(value) <= INLINE_BYTES
        seal = self._seal(f"{keys}/value/{rank}", value)

        def send(store: Any) -> None:
            if not inline:
                _put(store, f"{keys}/value/{rank}", value)
            head = {"rank": rank, "bytes": len(value) if inline else None, "seal": seal}
            frame = json.dumps(head).encode() + b"\n"
            store.append(f"{keys}/reports", frame + (value if inline else b""))
            if store.add(f"{keys}/count", 1) == self.rendezvous.world_size:
                store.set(f"{keys}/ready", b"all")

        self._call(send)

    def fail(self, name: str, error: CheckpointError) -> None:
        """Fail the round ``name`` for all ranks, unless it is concluded already."""
        self._call(self._failing(name, error))

    def fail_soon(self, name: str, error: CheckpointError, timeout: float) -> None:
        """As ``fail``, as soon as the store can be reached; nobody waits for that, and nothing is raised.

        Args:
            name: The round.
            error: What it fails with.
            timeout: Seconds for which to try.
        """
        deadline = time.monotonic() + timeout

        def attempt(last: Future[None] | None = None) -> None:
            if last is None or (last.exception() is not None and time.monotonic() < deadline):
                self.connection.start(self._failing(name, error), self._patience).add_done_callback(attempt)

        attempt()

    def _failing(self, name: str, error: CheckpointError) -> Callable[[Any], None]:
        keys = self._keys(name)
        text = self._sealed(f"{keys}/failure", encode(error)).decode()

        def send(store: Any) -> None:
            store.compare_set(f"{keys}/failure", "", text)
            store.set(f"{keys}/ready", b"failed")

        return send

    def collect(self, name: str, timeout: float, also: str | None = None) -> list[bytes]:
        """First rank: wait for the reports of all ranks.

        Args:
            name: The round.
            timeout: Seconds to wait.
            also: Another round, whose failure ends this one too.

        Returns:
            The reported values, in the order of the ranks.

        Raises:
            CheckpointError: That of a rank which failed the round, or is gone, or has not reported in time.
        """
        keys = self._keys(name)
        begun = checked = time.monotonic()
        # The first rank polls, and no connection waits: torch warns of each wait that runs out.
        pause = _POLL_S[0]
        while not self._call(lambda store: store.check([f"{keys}/ready"])):
            now = time.monotonic()
            if now - checked >= _CHECK_GONE_S or now - begun >= timeout:
                checked = now
                if also is not None and (failure := self._failure(self._keys(also))) is not None:
                    raise failure
                self._check_missing(keys, timeout if now - begun >= timeout else None)
            time.sleep(pause)
            pause = min(1.5 * pause, _POLL_S[1])
        failure = self._failure(keys)
        reports = _split_reports(self._get(f"{keys}/reports"))
        values = self._call(lambda store: self._take_values(store, keys, reports, is_failed=failure is not None))
        if failure is not None:
            raise failure
        return [self._opened(f"{keys}/value/{rank}", value) for rank, value in enumerate(values)]

    def conclude(self, name: str, outcome: bytes, each: Mapping[int, bytes] | None = None) -> None:
        """First rank: conclude a round.

        Args:
            name: The round.
            outcome: What all are told.
            each: What single ranks are told beside that.
        """
        keys = self._keys(name)

        def send(store: Any) -> None:
            for rank, value in (each or {}).items():
                _put(store, f"{keys}/for/{rank}", self._sealed(f"{keys}/for/{rank}", value))
            store.set(f"{keys}/outcome", self._sealed(f"{keys}/outcome", b"+" + outcome))

        self._call(send)

    def conclude_failed(self, name: str, error: CheckpointError) -> None:
        """First rank: tell all that the round has failed, unless it is concluded already."""
        key = f"{self._keys(name)}/outcome"
        text = self._sealed(key, b"-" + encode(error)).decode()
        self._call(lambda store: store.compare_set(key, "", text))

    def outcome(self, name: str, timeout: float, *, own: bool = False) -> bytes | CheckpointError:
        """Wait for the outcome of a round.

        Args:
            name: The round.
            timeout: Seconds to wait; then there is a ``SaveTimeoutError``.
            own: Return what the first rank had for this rank alone.

        Returns:
            What the first rank concluded, or the error that the round has failed with.
        """
        keys = self._keys(name)
        margin = max(1.0, grace(timeout) / 2)  # for the store to say that the wait has run out
        if not self._call(lambda store: wait_for_key(store, f"{keys}/outcome", timeout), timeout + margin):
            raise SaveTimeoutError(f"rank 0 came to no conclusion within {timeout:g} s", rank=0)
        text = self._get(f"{keys}/outcome")
        if not text:  # it was there: this is another store, of a worker that took the place of a dead one
            raise WorkerDiedError("the worker of rank 0, which brings the ranks together, has died", rank=0)
        outcome = self._opened(f"{keys}/outcome", text)
        if outcome[:1] == b"-":
            return decode(outcome[1:])
        if own:
            key = f"{keys}/for/{self.rendezvous.rank}"
            return self._opened(key, self._call(lambda store: _pop(store, key)))
        return outcome[1:]

    def store_id(self, timeout: float) -> bytes:
        """Which store this is: a worker that takes the place of a dead one hosts another, at the same address."""
        return self._call(lambda store: _get(store, HOST_KEY), min(timeout, self._timeout))

    def clear(self, kind: str, number: int) -> None:
        """First rank: the round ``kind`` of save ``number`` is over. Its keys, and those before it, go in time."""
        keys = self._keys(round_name(kind, number))
        old = self._keys(round_name(kind, number - KEPT_ROUNDS))

        def send(store: Any) -> None:
            store.delete_key(f"{keys}/reports")
            if number > KEPT_ROUNDS:
                for part in ("count", "ready", "failure", "outcome", "reports"):
                    store.delete_key(f"{old}/{part}")

        self._call(send)

    def set_flag(self, name: str) -> None:
        """Set the flag ``name`` once and for all, for all ranks to see."""
        key = self._keys(f"flag/{name}")
        self._call(lambda store: store.set(key, self._sealed(key, b"1")))

    def is_flag_set(self, name: str) -> bool:
        """Whether some rank has set that flag."""
        key = self._keys(f"flag/{name}")
        flag = self._get(key)
        return bool(flag) and self._opened(key, flag) == b"1"

    def gone(self, error: CheckpointError) -> None:
        """Tell the first rank that this one will take part in no round any more."""
        text = self._sealed(self._keys("gone"), encode(error)) + b"\n"
        self._call(lambda store: store.append(self._keys("gone"), text))

    def leave(self) -> None:
        """Tell the first rank that this one needs the store no more."""

        def send(store: Any) -> None:
            if store.add(self._keys("left"), 1) == self.rendezvous.world_size - 1:
                store.set(self._keys("empty"), b"1")

        self._call(send)

    def wait_left(self, timeout: float) -> None:
        """First rank: wait until all others have left, or ``timeout`` seconds have passed."""
        self._call(lambda store: wait_for_key(store, self._keys("empty"), timeout), timeout + 1.0)

    def close(self) -> None:
        """Drop the connection; a later use makes another."""
        self.connection.close()

    def _keys(self, name: str) -> str:
        return f"asyncckpt/{self.rendezvous.token}/{name}"

    def _call(self, what: Callable[[Any], T], limit: float | None = None) -> T:
        return self.connection.call(what, self._timeout if limit is None else limit, self._patience)

    def _get(self, key: str) -> bytes:
        return self._call(lambda store: _get(store, key))

    def _check_missing(self, keys: str, timed_out: float | None) -> None:
        """Raise what is known of ranks that have not reported: one has said that it is gone, or the time is up."""
        reported = _split_reports(self._get(f"{keys}/reports"))
        for text in self._get(self._keys("gone")).splitlines():
            error = decode(self._opened(self._keys("gone"), text))
            if error.rank not in reported:
                raise error
        missing = [rank for rank in range(self.rendezvous.world_size) if rank not in reported]
        if timed_out is not None and missing:
            raise SaveTimeoutError(f"{_ranks(missing)} did not get here within {timed_out:g} s", rank=missing[0])

    def _failure(self, keys: str) -> CheckpointError | None:
        text = self._get(f"{keys}/failure")
        return decode(self._opened(f"{keys}/failure", text)) if text else None

    def _take_values(
        self, store: Any, keys: str, reports: Mapping[int, tuple[bytes | None, str]], *, is_failed: bool
    ) -> list[bytes]:
        """The sealed values of all ranks, which are removed. With ``is_failed`` some may be missing."""
        values = []
        for rank in range(self.rendezvous.world_size):
            value, seal = reports.get(rank, (b"", ""))
            key = f"{keys}/value/{rank}"
            if value is None:
                value = b"" if is_failed and not store.check([key]) else _pop(store, key)
            values.append(seal.encode() + value)
        return values

    def _seal(self, key: str, value: bytes) -> str:
        seal = hashlib.blake2b(key.encode() + b"\n", key=self.rendezvous.secret, digest_size=_SEAL_CHARACTERS // 2)
        seal.update(value)
        return seal.hexdigest()

    def _sealed(self, key: str, value: bytes) -> bytes:
        return self._seal(key, value).encode() + value

    def _opened(self, key: str, text: bytes) -> bytes:
        """The value in a sealed one. Raises ``RankFailedError`` if no rank of this job has sealed it."""
        seal, value = text[:_SEAL_CHARACTERS], text[_SEAL_CHARACTERS:]
        if not hmac.compare_digest(seal, self._seal(key, value).encode()):
            raise RankFailedError(_FORGED)
        return value


def grace(timeout: float) -> float:
    """Seconds beyond ``timeout``, the limit of the rank that collects, for its conclusion to get to the others."""
    return min(5.0, timeout / 4)


def round_name(kind: str, number: int) -> str:
    """The name of the round of save ``number``; the number is the same on all ranks."""
    return f"{kind}-{number}"


def _put(store: Any, key: str, value: bytes) -> None:
    for begin in range(0, len(value) or 1, _CHUNK_BYTES):
        store.append(key, value[begin : begin + _CHUNK_BYTES])


def _get(store: Any, key: str) -> bytes:
    """The value of ``key``; empty where there is none."""
    return bytes(store.get(key)) if store.check([key]) else b""


def _pop(store: Any, key: str) -> bytes:
    """The value of ``key``, which is removed."""
    value = bytes(store.get(key))
    store.delete_key(key)
    return value


def _split_reports(text: bytes) -> dict[int, tuple[bytes | None, str]]:
    """The reports in ``text`` by their ranks, with their seals; None for those that have keys of their own.

    None of it is trusted before the seals are checked. Raises ``RankFailedError`` for what is no report.
    """
    found: dict[int, tuple[bytes | None, str]] = {}
    at = 0
    try:
        while at < len(text):
            end = text.index(b"\n", at)
            head = json.loads(text[at:end])
            rank, nbytes, seal = head["rank"], head["bytes"], head["seal"]
            if type(rank) is not int or type(seal) is not str or not (nbytes is None or 0 <= nbytes <= INLINE_BYTES):
                raise ValueError("it is no report")
            at = end + 1 + (nbytes or 0)
            found[rank] = (None if nbytes is None else text[end + 1 : at]), seal
    except (ValueError, KeyError, TypeError) as error:
        raise RankFailedError(_FORGED) from error
    return found


def _ranks(ranks: list[int]) -> str:
    more = f" and {len(ranks) - 8} more" if len(ranks) > 8 else ""
    return ("rank " if len(ranks) == 1 else "ranks ") + ", ".join(map(str, ranks[:8])) + more
