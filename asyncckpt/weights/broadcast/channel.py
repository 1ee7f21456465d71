"""The channel: how the ranks that share weights talk to each other, and how all of them end when one does.

A gloo group of its own, whatever the backend of the caller's group: so it can carry small messages while the caller's
is in use, and can be torn down without harm to that. All goes between the *source* and each other rank, in rounds: the
others tell their status, the source ``collect``s that and ``tell``s everybody what comes next, a notice. Messages are
JSON.

There are two kinds of failures. One that a rank can still tell of (an exception, a damaged bucket) travels in these
messages: all ranks raise it, and the channel is as good as new. One that it cannot tell of (it was killed, or does not
come) breaks the connections. Each rank that notices closes all of its own, so that everybody notices at once. Then the
survivors record that they have left (``membership.py``), and the ranks that have not are named.
"""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import timedelta
from functools import partial
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import PrefixStore

from asyncckpt.errors import CheckpointError, ClosedError, RankFailedError, decode, encode, located
from asyncckpt.weights.broadcast.membership import Membership

Message = dict[str, Any]
Gloo = Any
"""A ``ProcessGroupGloo``, of whose methods torch's stubs know nothing."""
T = TypeVar("T")

# So small, a message travels no slower than an empty one. An error of more bytes is cut; JSON in JSON makes up to 14 of
# a character.
_MESSAGE_BYTES = 8192
_ERROR_BYTES = 7500
_ERROR_CHARACTERS = 500
_STATUS_TAG, _NOTICE_TAG, _BLOB_TAG, _NEVER_TAG = 1, 2, 3, 4


class _ToldError(Exception):
    """All ranks have been told that it is over, and raise this ``error``."""

    def __init__(self, error: CheckpointError) -> None:
        super().__init__(error)
        self.error = error


class Channel:
    """Between rank ``src``, the source, and the ``others``. ``timeout`` may be changed."""

    def __init__(self, membership: Membership, src: int, timeout: float) -> None:
        """Connect; a collective of all members, who have come. Raises ``RankFailedError`` if one is gone again.

        Args:
            membership: This rank's.
            src: The source.
            timeout: Seconds that a wait for another rank may last.
        """
        self.rank, self.src, self.timeout = membership.rank, src, timeout
        self.others = [each for each in range(membership.world_size) if each != src]
        self._membership = membership
        self._part: Gloo | None = None
        self._awaited: dict[int, dist.Work] = {}
        self._received = torch.empty(membership.world_size, _MESSAGE_BYTES, dtype=torch.uint8, device="cpu")
        self._in_round = False
        """On the source: the others have told their status, and wait for a notice."""
        self._gloo: Gloo | None = None
        self._gloo = self._connect("all", self.rank, membership.world_size)
        # What comes next is always waited for already: gloo sends nothing before it is, and would have to ask first.
        for rank in self.others if self.is_source else [src]:
            self._await(rank)

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

    def collect(self) -> list[Message]:
        """On the source: the status of each of ``others``, who then wait for a notice.

        If one of them tells of an error, all are told, and raise it; see ``failing_together``.
        """
        answers = [self._take(rank) for rank in self.others]
        self._in_round = True
        for answer in answers:
            if "error" in answer:
                self.tell({"error": answer["error"]})
                raise _ToldError(unpack(answer["error"]))
        return answers

    def tell(self, notices: Message | Sequence[Message], blobs: Mapping[int, bytes] | None = None) -> None:
        """On the source: tell all the same notice, or each its own; some of them with a blob of any size."""
        self._in_round = False
        blobs = blobs or {}
        each = [notices] * len(self.others) if isinstance(notices, dict) else notices
        under_way = []
        for rank, notice in zip(self.others, each, strict=True):
            blob = blobs.get(rank, b"")
            under_way.append(self._send(rank, _pad(notice | {"blob": len(blob)}), _NOTICE_TAG))
            if blob:
                under_way.append(self._send(rank, torch.frombuffer(bytearray(blob), dtype=torch.uint8), _BLOB_TAG))
        for wait in under_way:
            wait()

    def exchange(self, status: Message) -> Message:
        """On the others: a round. Returns the notice; its ``blob`` is the bytes that came with it."""
        notice = self._exchange(status)
        if "error" in notice:
            raise _ToldError(unpack(notice["error"]))
        return notice

    def give_up(self, error: BaseException) -> CheckpointError:
        """Have all ranks raise ``error``; returns what all raise."""
        packed = pack(error, self.rank)
        if not self.is_source:
            return unpack(self._exchange({"error": packed})["error"])
        if not self._in_round:
            for rank in self.others:
                self._take(rank)
        self.tell({"error": packed})
        return unpack(packed)

    @contextlib.contextmanager
    def failing_together(self, settle: Callable[[], object]) -> Iterator[None]:
        """What is raised in here, all ranks raise. ``settle`` ends what is under way, before they are told of it.

        If the channel is broken, the others know; if this rank is interrupted, it leaves, and they find out.
        """
        try:
            yield
        except _ToldError as told:
            raise told.error from None
        except GeneratorExit:
            if self.usable:
                settle()
                self.give_up(RankFailedError("it stopped taking weights before all had come"))
            raise
        except Exception as error:
            if not self.usable:
                raise
            settle()
            raise self.give_up(error) from error
        except BaseException as error:
            self._leave(error)
            raise

    def attempt(self, wait: Callable[[], T], what: str, rank: int | None = None) -> T:
        """Wait for another rank; where that fails, all ranks end with the same ``RankFailedError``.

        Args:
            wait: Waits, and raises ``RuntimeError``, as gloo does.
            what: Its name in the error.
            rank: Whose it is; None: nobody's, or everybody's.
        """
        begun = time.monotonic()
        try:
            return wait()
        except RuntimeError as error:
            reason = None
            # Gloo has one class for all; what it says of a timeout has changed with its versions.
            if time.monotonic() - begun >= 0.95 * self.timeout:
                whose = self.rank if rank is None else rank
                reason = RankFailedError(f"{what} has not answered for {self.timeout:g} s", rank=whose)
            self._disconnect()
            raise self._membership.find_reason(reason, error) from error
        except BaseException as error:  # somebody interrupts this wait
            self._leave(error)
            raise

    def close(self) -> None:
        """Drop the connections. Between two broadcasts that is no failure."""
        self._gloo = self._part = None
        self._awaited = {}

    def _connect(self, name: str, rank: int, world_size: int) -> Gloo:
        store = PrefixStore(name, self._membership.store)
        limit = timedelta(seconds=self.timeout)
        return self.attempt(lambda: dist.ProcessGroupGloo(store, rank, world_size, limit), "a connection")

    def _exchange(self, status: Message) -> Message:
        self._send(self.src, _pad(status), _STATUS_TAG)()
        notice = self._take(self.src)
        data = torch.empty(notice["blob"], dtype=torch.uint8, device="cpu")
        if data.numel():
            gloo = self._connected()
            self._wait(self.src, self._begin(self.src, lambda: gloo.recv([data], self.src, _BLOB_TAG)))
        return notice | {"blob": data.numpy().tobytes()}

    def _await(self, rank: int) -> None:
        tag = _STATUS_TAG if self.is_source else _NOTICE_TAG
        self._awaited[rank] = self._connected().recv([self._received[rank]], rank, tag)

    def _take(self, rank: int) -> Message:
        if rank not in self._awaited:
            self._begin(rank, lambda: self._await(rank))
        self._wait(rank, self._awaited.pop(rank))
        message: Message = json.loads(self._received[rank].numpy().tobytes())
        with contextlib.suppress(RuntimeError):  # it was the last message of a rank that has left
            self._await(rank)
        return message

    def _send(self, rank: int, data: torch.Tensor, tag: int) -> Callable[[], None]:
        """Begin to send; returns what waits until it is sent."""
        gloo = self._connected()
        work = self._begin(rank, lambda: gloo.send([data], rank, tag))
        return partial(self._wait, rank, work, data)  # which is needed until then

    def _begin(self, rank: int, call: Callable[[], T]) -> T:
        return self.attempt(call, f"rank {rank}", rank)

    def _wait(self, rank: int, work: dist.Work, _keep: object = None) -> None:
        self.attempt(lambda: work.wait(timedelta(seconds=self.timeout)), f"rank {rank}", rank)

    def _connected(self) -> Gloo:
        if self._gloo is None:
            raise ClosedError("the ranks are no longer connected to share weights", rank=self.rank)
        return self._gloo

    def _leave(self, error: BaseException) -> None:
        """This rank leaves, at once, because of ``error``. The others find out, and end."""
        if self.usable:
            self._disconnect()
            self._membership.leave(RankFailedError(f"it left with {type(error).__name__}", rank=self.rank))

    def _disconnect(self) -> None:
        groups = [group for group in (self._part, self._gloo) if group is not None]
        self.close()
        # A wait that runs out of its time closes all connections of a gloo group, those that others wait for too: the
        # one way there is to end what is under way. (ProcessGroupGloo.abort, where there is one, leaves it waiting.)
        # It must be for a rank to which there is a connection: so for each of them.
        for gloo in groups:
            for peer in set(range(gloo.size())) - {gloo.rank()}:
                try:
                    nothing = torch.empty(1, dtype=torch.uint8, device="cpu")
                    gloo.recv([nothing], peer, _NEVER_TAG).wait(timedelta(milliseconds=1))
                except RuntimeError:
                    pass  # as it should


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
