"""The channel: how the ranks that share weights talk to each other, and how all of them end when one does.

A gloo group of its own, whatever the backend of the caller's group: so it can carry small messages while the caller's
is in use, and can be torn down without harm to that. All goes between the *source* and each other rank, in lockstep:
the others ``say`` their status, the source ``collect``s that and ``tell``s everybody what comes next, a notice.
Messages are JSON.

There are two kinds of failures. One that a rank can still tell of (an exception, a damaged bucket) travels in these
messages: all ranks raise it, and the channel is as good as new. One that it cannot tell of (it was killed, or does not
come) breaks the connections. Each rank that notices closes all of its own, so that everybody notices at once. Then the
survivors record in the store of the job that they have left, and the ranks that have not are named.
"""

from __future__ import annotations

import contextlib
import json
import logging
import time
import weakref
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import PrefixStore, Store, _get_default_store

from asyncckpt.errors import CheckpointError, ClosedError, RankFailedError, decode, encode, located

logger = logging.getLogger(__name__)

Message = dict[str, Any]
Gloo = Any
"""A ``ProcessGroupGloo``, of whose methods torch's stubs know nothing."""
WirePlace = tuple[str, int, int]
"""In a group of some of the ranks: its name, this one's rank in it, and its world size."""
T = TypeVar("T")

# So small, a message travels no slower than an empty one. An error of more bytes is cut; JSON in JSON makes up to 14 of
# a character.
_MESSAGE_BYTES = 8192
_ERROR_BYTES = 7500
_ERROR_CHARACTERS = 500
# How long the survivors wait for each other. They notice at once, unless they are loading.
_GRACE_S = 5.0
_READING_S = 0.5
_POLL_S = 0.01
_STATUS_TAG, _NOTICE_TAG, _BLOB_TAG, _NEVER_TAG = 1, 2, 3, 4

_channels_made: weakref.WeakKeyDictionary[dist.ProcessGroup, int] = weakref.WeakKeyDictionary()


class Channel:
    """Between rank ``src`` and the others, of ``world_size`` ranks that have a ``store`` for themselves.

    ``timeout``, in seconds, limits every wait for another rank.
    """

    def __init__(self, rank: int, world_size: int, src: int, store: Store, timeout: float) -> None:
        """Connect; a collective, after ``wait_for_ranks``.

        Args:
            rank: This one's number.
            world_size: How many ranks there are.
            src: The number of the source.
            store: Theirs alone.
            timeout: Seconds that a wait for another rank may last.

        Raises:
            RankFailedError: One of them is gone again.
        """
        self.rank, self.world_size, self.src = rank, world_size, src
        self.timeout = timeout
        self.others = [each for each in range(world_size) if each != src]
        self._store = store
        self._gloo: Gloo | None = None
        self._part: Gloo | None = None
        self._awaited: dict[int, dist.Work] = {}
        self._received = torch.empty(self.world_size, _MESSAGE_BYTES, dtype=torch.uint8)
        self._gloo = self._connect("all", self.rank, self.world_size)
        # What comes next is always waited for already: gloo sends nothing before it is, and would have to ask first.
        for rank in self.others if self.is_source else [src]:
            self._await(rank)

    @classmethod
    def of(cls, group: dist.ProcessGroup, src: int, timeout: float) -> Channel:
        """Between the ranks of a group; a collective of them.

        Args:
            group: The group.
            src: The number of the source in it.
            timeout: Seconds that a wait for another rank may last.

        Raises:
            RankFailedError: One of them does not come, or is gone again.
        """
        number = _channels_made.get(group, 0) + 1
        # The store of the job, and not the group's own: that has no public name.
        store = PrefixStore(f"asyncckpt-weights/{group.group_name}/{number}", _get_default_store())
        wait_for_ranks(group.rank(), group.size(), store, timeout)
        # Not before: where a rank has not come, one that comes late comes to the same store as those that try again.
        _channels_made[group] = number
        return cls(group.rank(), group.size(), src, store, timeout)

    @property
    def is_source(self) -> bool:
        return self.rank == self.src

    @property
    def usable(self) -> bool:
        """Whether it is neither closed nor broken."""
        return self._gloo is not None

    def part(self, name: str, rank: int, world_size: int) -> Gloo:
        """A gloo group of some of the ranks; only they make it. It replaces the one before, and ends with the channel.

        Args:
            name: Another one each time.
            rank: This one's number in it.
            world_size: How many ranks are in it.
        """
        self._part = self._connect(name, rank, world_size)
        return self._part

    def _connect(self, name: str, rank: int, world_size: int) -> Gloo:
        store = PrefixStore(name, self._store)
        return self.attempt(
            lambda: dist.ProcessGroupGloo(store, rank, world_size, timedelta(seconds=self.timeout)), "a connection"
        )

    def collect(self) -> list[Message]:
        """On the source: what each of ``others`` says."""
        return [self._take(rank) for rank in self.others]

    def tell(self, notices: Message | Sequence[Message], blobs: Mapping[int, bytes] | None = None) -> None:
        """On the source: tell all the same notice, or each its own; some of them with a blob of any size."""
        blobs = blobs or {}
        each = [notices] * len(self.others) if isinstance(notices, dict) else notices
        sent = []
        for rank, notice in zip(self.others, each, strict=True):
            blob = blobs.get(rank, b"")
            sent.append(self._send(rank, _pad(notice | {"blob": len(blob)}), _NOTICE_TAG))
            if blob:
                sent.append(self._send(rank, torch.frombuffer(bytearray(blob), dtype=torch.uint8), _BLOB_TAG))
        for each_sent in sent:
            self._wait(*each_sent)

    def say(self, status: Message) -> None:
        """On the others: what the source collects."""
        self._wait(*self._send(self.src, _pad(status), _STATUS_TAG))

    def hear(self) -> Message:
        """On the others: what the source tells. Its ``blob`` is the bytes that came with it."""
        notice = self._take(self.src)
        data = torch.empty(notice["blob"], dtype=torch.uint8)
        if data.numel():
            gloo = self._connected()
            work = self.attempt(lambda: gloo.recv([data], self.src, _BLOB_TAG), f"rank {self.src}", self.src)
            self._wait(self.src, work, data)
        return notice | {"blob": data.numpy().tobytes()}

    def _await(self, rank: int) -> None:
        tag = _STATUS_TAG if self.is_source else _NOTICE_TAG
        self._awaited[rank] = self._connected().recv([self._received[rank]], rank, tag)

    def _take(self, rank: int) -> Message:
        data = self._received[rank]
        if rank not in self._awaited:
            self.attempt(lambda: self._await(rank), f"rank {rank}", rank)
        self._wait(rank, self._awaited.pop(rank), data)
        message: Message = json.loads(data.numpy().tobytes())
        with contextlib.suppress(RuntimeError):  # it was the last message of a rank that has left
            self._await(rank)
        return message

    def _send(self, rank: int, data: torch.Tensor, tag: int) -> tuple[int, dist.Work, torch.Tensor]:
        """Begin to send; returns what to wait for."""
        gloo = self._connected()
        return rank, self.attempt(lambda: gloo.send([data], rank, tag), f"rank {rank}", rank), data

    def _wait(self, rank: int, work: dist.Work, data: torch.Tensor) -> None:
        """Until it is done; ``data`` is what it needs meanwhile."""
        self.attempt(lambda: work.wait(timedelta(seconds=self.timeout)), f"rank {rank}", rank)
        del data

    def attempt(self, wait: Callable[[], T], what: str, rank: int | None = None) -> T:
        """Wait for another rank; where that fails, all ranks end.

        Args:
            wait: Waits, and raises ``RuntimeError``, as gloo does.
            what: Its name in the error.
            rank: Whose it is, if it is one rank's.

        Raises:
            RankFailedError: With the same text on all ranks.
        """
        begun = time.monotonic()
        try:
            return wait()
        except RuntimeError as error:
            told = None
            # Gloo has one class for all; what it says of a timeout has changed with its versions.
            if time.monotonic() - begun >= 0.95 * self.timeout:
                told = RankFailedError(f"{what} has not answered for {self.timeout:g} s", rank=rank)
            self._disconnect()
            raise self._inquire(told, error) from error
        except BaseException as error:  # somebody interrupts this wait
            self.leave(error)
            raise

    def leave(self, error: BaseException) -> None:
        """This rank leaves, at once, because of ``error``. The others will be told of that, and end."""
        if self.usable:
            self._disconnect()
            self._record(RankFailedError(f"it left with {type(error).__name__}", rank=self.rank))

    def close(self) -> None:
        """Drop the connections. Between two broadcasts that is no failure."""
        self._gloo = self._part = None
        self._awaited = {}

    def _connected(self) -> Gloo:
        if self._gloo is None:
            raise ClosedError("the ranks are no longer connected to share weights", rank=self.rank)
        return self._gloo

    def _disconnect(self) -> None:
        groups = [group for group in (self._part, self._gloo) if group is not None]
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

    def _record(self, told: CheckpointError | None) -> None:
        """That this rank has left, and what it knows of the reason."""
        try:
            self._store.set(f"left/{self.rank}", "" if told is None else pack(told, self.rank))
        except RuntimeError as error:
            logger.warning("the other ranks could not be told of a failure: %s", str(error).split("\n")[0])

    def _inquire(self, told: CheckpointError | None, cause: BaseException) -> CheckpointError:
        """Why the connections broke: the same answer on all ranks, that of the first rank that has one."""
        try:
            self._record(told)
            left: dict[int, CheckpointError | None] = {self.rank: told}
            deadline = time.monotonic() + _GRACE_S
            while len(left) < self.world_size and time.monotonic() < deadline and not self._store.check(["verdict"]):
                for rank in set(range(self.world_size)) - set(left):
                    if self._store.check([f"left/{rank}"]):
                        recorded = self._store.get(f"left/{rank}")
                        left[rank] = decode(recorded) if recorded else None
                time.sleep(_POLL_S)
            verdict = self._store.compare_set("verdict", "", pack(self._judge(left, cause), self.rank))
            # This process may be about to end, and the store with it: the others are to have read it before.
            readers = self._store.add("readers", 1)
            deadline = time.monotonic() + _READING_S
            while readers < len(left) and time.monotonic() < deadline:
                time.sleep(_POLL_S)
                readers = self._store.add("readers", 0)
            return decode(verdict)
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


def wait_for_ranks(rank: int, world_size: int, store: Store, timeout: float) -> None:
    """Wait until all ranks have recorded in their store that they have come.

    Args:
        rank: This one's number.
        world_size: How many ranks there are.
        store: Theirs alone.
        timeout: Seconds to wait.

    Raises:
        RankFailedError: One of them does not come; then this one takes back that it has.
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
    # Which process hosts it is not known to torch.distributed; without a launcher that does, it is the first rank.
    return RankFailedError(
        f"the ranks lost their connections and the store of the job, which rank 0 hosts as a rule: it may have"
        f" died ({str(error).splitlines()[0]})",
        rank=0,
    )


def pack(error: BaseException, rank: int) -> str:
    """``error``, which is of ``rank`` if it does not say more, as text that a message has space for."""
    found = located(error, rank=rank, otherwise=RankFailedError)
    text = encode(found).decode()
    if len(json.dumps(text)) > _ERROR_BYTES:
        cut = type(found)(found.message[:_ERROR_CHARACTERS], rank=found.rank, step=found.step)
        text = encode(cut).decode()
    return text


def unpack(text: str) -> CheckpointError:
    """The same error again."""
    return decode(text.encode())


def _pad(message: Message) -> torch.Tensor:
    data = json.dumps(message, ensure_ascii=False).encode()
    if len(data) > _MESSAGE_BYTES:
        raise ValueError(f"a message of {len(data)} bytes is too long")
    return torch.frombuffer(bytearray(data.ljust(_MESSAGE_BYTES)), dtype=torch.uint8)
