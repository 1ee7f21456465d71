"""The channel: how the ranks that share weights talk to each other, and how all of them end when one does.

A gloo group of its own, whatever the backend of the caller's group: so it can carry small messages while the caller's
is busy, and can be torn down without harm to that. All goes between the *source* and each other rank, in lockstep: the
others ``say`` how they are, the source ``collect``s that and ``tell``s everybody what comes next. Messages are JSON.

There are two kinds of failures. One that a rank can still tell of (an exception, a damaged bucket) travels in these
messages: all ranks raise it, and the channel is as good as new. One that it cannot tell of (it was killed, or does not
come) breaks the connections, of which each rank that notices closes all of its own, so that everybody notices at once.
Then the survivors sign in the store of the job, and who has not signed is named.
"""

from __future__ import annotations

import contextlib
import json
import logging
import time
import weakref
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from typing import Any, NoReturn, TypeVar

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import PrefixStore, Store, _get_default_store

from asyncckpt import errors
from asyncckpt.errors import CheckpointError, RankFailedError

logger = logging.getLogger(__name__)

Message = dict[str, Any]
Gloo = Any
"""A ``ProcessGroupGloo``, of whose methods torch's stubs know nothing."""
T = TypeVar("T")

# A message has room for an error's text, in which JSON makes up to six bytes of one. So small, it travels no slower
# than an empty one.
_MESSAGE_BYTES = 8192
_TEXT_BYTES = 1300
# How long the survivors wait for each other. They notice at once, unless they are busy with what they were given.
_GRACE_S = 5.0
_READING_S = 0.5
_POLL_S = 0.01
_STATUS_TAG, _WORD_TAG, _BLOB_TAG, _NEVER_TAG = 1, 2, 3, 4

_meetings: weakref.WeakKeyDictionary[dist.ProcessGroup, int] = weakref.WeakKeyDictionary()


class Channel:
    """Between rank ``src`` and the others, of ``world_size`` ranks that have a ``store`` for themselves.

    To make one is a collective. ``timeout``, in seconds, limits every wait for another rank.
    """

    def __init__(self, rank: int, world_size: int, src: int, store: Store, timeout: float) -> None:
        """All ranks have met, see ``meet``. Raises ``RankFailedError`` if one of them is gone again."""
        self.rank, self.world_size, self.src = rank, world_size, src
        self.timeout = timeout
        self.others = [each for each in range(world_size) if each != src]
        self._store = store
        self._gloo: Gloo | None = None
        self._parts: list[Gloo] = []
        self._awaited: dict[int, dist.Work] = {}
        self._received = torch.empty(self.world_size, _MESSAGE_BYTES, dtype=torch.uint8)
        self._gloo = self._connect("all", self.rank, self.world_size)
        # What comes next is always waited for already: gloo sends nothing before it is, and would have to ask first.
        for rank in self.others if self.is_source else [src]:
            self._await(rank)

    @classmethod
    def of(cls, group: dist.ProcessGroup, src: int, timeout: float) -> Channel:
        """Of the ranks of ``group``, which ``meet``; ``src`` is a number in it."""
        number = _meetings.get(group, 0) + 1
        # The store of the job, and not the group's own: that has no public name.
        store = PrefixStore(f"asyncckpt-weights/{group.group_name}/{number}", _get_default_store())
        meet(group.rank(), group.size(), store, timeout)
        # Not before: if they did not meet, whoever comes late comes to the same place as who tries again.
        _meetings[group] = number
        return cls(group.rank(), group.size(), src, store, timeout)

    @property
    def is_source(self) -> bool:
        return self.rank == self.src

    @property
    def usable(self) -> bool:
        """Whether it is neither closed nor broken."""
        return self._gloo is not None

    def part(self, name: str, rank: int, world_size: int) -> Gloo:
        """A gloo group of some of the ranks, of another ``name`` each time; only they make it. It takes the place of
        the one before, and ends with the channel."""
        self._parts = [self._connect(name, rank, world_size)]
        return self._parts[0]

    def _connect(self, name: str, rank: int, world_size: int) -> Gloo:
        store = PrefixStore(name, self._store)
        return self.attempt(
            lambda: dist.ProcessGroupGloo(store, rank, world_size, timedelta(seconds=self.timeout)), "a connection"
        )

    def collect(self) -> list[Message]:
        """On the source: what each of ``others`` says."""
        return [self._take(rank) for rank in self.others]

    def tell(self, words: Message | Sequence[Message], blobs: Mapping[int, bytes] | None = None) -> None:
        """On the source: tell the others the same, or each its own; and after it, a ``blob`` to some ranks."""
        each = [words] * len(self.others) if isinstance(words, dict) else words
        sent = [self._send(rank, _encode(word), _WORD_TAG) for rank, word in zip(self.others, each, strict=True)]
        for rank, blob in (blobs or {}).items():
            sent.append(self._send(rank, torch.frombuffer(bytearray(blob), dtype=torch.uint8), _BLOB_TAG))
        for each_sent in sent:
            self._wait(*each_sent)

    def say(self, status: Message) -> None:
        """On the others: what the source collects."""
        self._wait(*self._send(self.src, _encode(status), _STATUS_TAG))

    def hear(self) -> Message:
        """On the others: what the source tells."""
        return self._take(self.src)

    def hear_blob(self, nbytes: int) -> bytes:
        """On the others, where the source sends one."""
        data = torch.empty(nbytes, dtype=torch.uint8)
        self._wait(self.src, self._receive(self.src, data, _BLOB_TAG), data)
        return data.numpy().tobytes()

    def _await(self, rank: int) -> None:
        tag = _STATUS_TAG if self.is_source else _WORD_TAG
        self._awaited[rank] = self._get().recv([self._received[rank]], rank, tag)

    def _take(self, rank: int) -> Message:
        data = self._received[rank]
        if rank not in self._awaited:
            self.attempt(lambda: self._await(rank), f"rank {rank}", rank)
        self._wait(rank, self._awaited.pop(rank), data)
        message: Message = json.loads(data.numpy().tobytes())
        with contextlib.suppress(RuntimeError):  # it was the last of a rank that is through
            self._await(rank)
        return message

    def _send(self, rank: int, data: torch.Tensor, tag: int) -> tuple[int, dist.Work, torch.Tensor]:
        gloo = self._get()
        return rank, self.attempt(lambda: gloo.send([data], rank, tag), f"rank {rank}", rank), data

    def _receive(self, rank: int, data: torch.Tensor, tag: int) -> dist.Work:
        gloo = self._get()
        work: dist.Work = self.attempt(lambda: gloo.recv([data], rank, tag), f"rank {rank}", rank)
        return work

    def _wait(self, rank: int, work: dist.Work, data: torch.Tensor) -> None:
        """Until it is done; ``data`` is what it needs meanwhile."""
        self.attempt(lambda: work.wait(timedelta(seconds=self.timeout)), f"rank {rank}", rank)
        del data

    def attempt(self, wait: Callable[[], T], what: str, rank: int | None = None) -> T:
        """Call ``wait``, which waits for ``what``, of ``rank`` if it is one's. Where it fails, all end."""
        begun = time.monotonic()
        try:
            return wait()
        except RuntimeError as error:
            told = None
            # Gloo has one class for all; what it says of a timeout has changed with its versions.
            if time.monotonic() - begun >= 0.95 * self.timeout:
                told = RankFailedError(f"{what} has not answered for {self.timeout:g} s", rank=rank)
            self.break_off(told, error)
        except BaseException as error:  # somebody interrupts this wait
            self.leave(error)
            raise

    def leave(self, error: BaseException) -> None:
        """This rank goes, at once, because of ``error``. The others will be told of that, and end."""
        if self.usable:
            self._disconnect()
            self._sign(RankFailedError(f"it left with {type(error).__name__}", rank=self.rank))

    def break_off(self, told: CheckpointError | None, cause: BaseException) -> NoReturn:
        """End for all ranks: because of ``told``, or of what another rank knows, or for that one is missing."""
        self._disconnect()
        raise self._inquire(told, cause) from cause

    def close(self) -> None:
        """Drop the connections. Between two broadcasts that is no failure."""
        self._gloo = None
        self._parts = []
        self._awaited = {}

    def _get(self) -> Gloo:
        if self._gloo is None:
            raise errors.ClosedError("the ranks are no longer connected to share weights", rank=self.rank)
        return self._gloo

    def _disconnect(self) -> None:
        groups = [*self._parts, *([self._gloo] if self._gloo is not None else [])]
        self.close()
        # A wait that runs out of its time closes all connections of a gloo group, those that others wait for too: the
        # one way there is to end what is under way. (ProcessGroupGloo.abort, where there is one, leaves it waiting.)
        # It must be for a rank to which there is a connection: so for each of them.
        for gloo in groups:
            for peer in set(range(gloo.size())) - {gloo.rank()}:
                try:
                    gloo.recv([torch.empty(1, dtype=torch.uint8)], peer, _NEVER_TAG).wait(timedelta(milliseconds=1))
                except RuntimeError:
                    pass  # as it should

    def _sign(self, told: CheckpointError | None) -> None:
        try:
            self._store.set(f"left/{self.rank}", json.dumps(None if told is None else pack(told, self.rank)))
        except RuntimeError as error:
            logger.warning("the other ranks could not be told of a failure: %s", str(error).split("\n")[0])

    def _inquire(self, told: CheckpointError | None, cause: BaseException) -> CheckpointError:
        """Why the connections broke: the same answer on all ranks, that of who is first to have one."""
        try:
            self._sign(told)
            left: dict[int, CheckpointError | None] = {self.rank: told}
            deadline = time.monotonic() + _GRACE_S
            while len(left) < self.world_size and time.monotonic() < deadline and not self._store.check(["verdict"]):
                for rank in set(range(self.world_size)) - set(left):
                    if self._store.check([f"left/{rank}"]):
                        signed = json.loads(self._store.get(f"left/{rank}"))
                        left[rank] = None if signed is None else unpack(signed)
                time.sleep(_POLL_S)
            mine = json.dumps(pack(self._judge(left, cause), self.rank))
            verdict = self._store.compare_set("verdict", "", mine)
            # This process may be about to end, and the store with it: the others are to have read it before.
            readers = self._store.add("readers", 1)
            deadline = time.monotonic() + _READING_S
            while readers < len(left) and time.monotonic() < deadline:
                time.sleep(_POLL_S)
                readers = self._store.add("readers", 0)
            return unpack(json.loads(verdict))
        except RuntimeError as error:
            return _lost_store(error)

    def _judge(self, left: Mapping[int, CheckpointError | None], cause: BaseException) -> CheckpointError:
        missing = [rank for rank in range(self.world_size) if rank not in left]
        known = [error for _, error in sorted(left.items()) if error is not None]
        if missing:
            which = ", ".join(map(str, missing))
            return RankFailedError(f"rank {which} died, or does not answer, while weights were shared", rank=missing[0])
        if known:
            return known[0]
        return RankFailedError(f"the ranks lost their connections: {str(cause).splitlines()[0]}", rank=self.rank)


def meet(rank: int, world_size: int, store: Store, timeout: float) -> None:
    """Wait until all ranks have signed in ``store`` that they are here.

    Raises ``RankFailedError`` if one of them does not come within ``timeout``; then this one has not been here, either.
    """
    missing = list(range(world_size))
    deadline = time.monotonic() + timeout
    try:
        store.set(f"here/{rank}", "")
        while missing := [each for each in missing if not store.check([f"here/{each}"])]:
            if time.monotonic() > deadline:
                store.delete_key(f"here/{rank}")
                which = ", ".join(map(str, missing))
                raise RankFailedError(
                    f"rank {which} has not come to share weights within {timeout:g} s", rank=missing[0]
                )
            time.sleep(_POLL_S)
    except RuntimeError as error:
        raise _lost_store(error) from error


def _lost_store(error: BaseException) -> CheckpointError:
    # Who hosts it is not known to torch.distributed; without a launcher that does, it is the first rank.
    return RankFailedError(
        f"the ranks lost their connections and the store of the job, which rank 0 hosts as a rule: it may have"
        f" died ({str(error).splitlines()[0]})",
        rank=0,
    )


def pack(error: BaseException, rank: int) -> Message:
    """``error``, which is of ``rank`` if it does not say more, as a message's part."""
    if not isinstance(error, CheckpointError):
        error = RankFailedError(f"{type(error).__name__}: {error}")
    return {
        "kind": type(error).__name__,
        "text": error.message.encode()[:_TEXT_BYTES].decode(errors="ignore"),
        "rank": rank if error.rank is None else error.rank,
    }


def unpack(packed: Message) -> CheckpointError:
    """The same error again."""
    named = getattr(errors, packed["kind"], None)
    kind = named if isinstance(named, type) and issubclass(named, CheckpointError) else CheckpointError
    return kind(packed["text"], rank=packed["rank"])


def _encode(message: Message) -> torch.Tensor:
    data = json.dumps(message, ensure_ascii=False).encode()
    if len(data) > _MESSAGE_BYTES:
        raise ValueError(f"a message of {len(data)} bytes is too long")
    return torch.frombuffer(bytearray(data.ljust(_MESSAGE_BYTES)), dtype=torch.uint8)
