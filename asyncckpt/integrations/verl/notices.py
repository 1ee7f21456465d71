"""Provide the roles of the workers in a weight sync, and their messages: the notice and the rounds of the actors.

The messages go through a store on the first actor, in rounds (see ``asyncckpt/ranks/rounds.py``). They are sealed with
a key that verl distributes with the topology. Notices are JSON. The publishing actors, which are all on one host, send
each other pickles, as ranks do. All workers notice at once if the store's process ends.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import pickle
import select
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Literal, NamedTuple, TypeVar

from asyncckpt.errors import CheckpointError, RankFailedError, WorkerDiedError, located
from asyncckpt.extension import Ranks, Rendezvous, Rounds

T = TypeVar("T")

logger = logging.getLogger(__name__)

Part = Literal["publish", "iterate", "map"]
"""The part of an actor that publishes, of an actor that only iterates over the weights, or of a rollout."""


class Member(NamedTuple):
    """A worker: its ``name``, and its process id ``pid`` in the process id ``namespace``."""

    name: str
    namespace: str
    pid: int


@dataclass(frozen=True)
class Peer:
    """The report of a worker before a sync.

    ``host`` is equal for workers that can share memory. The first actor also reports its store (``rendezvous``), the
    number of syncs so far (``sync``), and the readers' key (``key``).
    """

    member: Member
    host: str
    rendezvous: Rendezvous | None
    sync: int
    key: bytes


@dataclass(frozen=True)
class Role:
    """A worker's part in a sync.

    ``is_here``: whether the weights are published on the worker's host. ``publishers``: the publishing actors, in the
    order of their ranks. The ``rendezvous`` of a publishing actor has the actor's rank.
    """

    part: Part
    sync: int
    rendezvous: Rendezvous
    key: bytes
    is_here: bool
    publishers: tuple[Member, ...]


def roles(actors: Sequence[Peer], rollouts: Sequence[Peer]) -> tuple[list[Role], list[Role]]:
    """Return the roles of the actors and of the rollouts. The actors on the first actor's host publish."""
    first = actors[0]
    rendezvous = first.rendezvous
    if rendezvous is None:
        raise ValueError("the first actor has to be the master, which opens the store")
    publishers = tuple(actor.member for actor in actors if actor.host == first.host)

    def role(part: Part, peer: Peer) -> Role:
        here = peer.host == first.host
        rank = publishers.index(peer.member) if part == "publish" else 0
        meeting = replace(rendezvous, rank=rank, world_size=len(publishers))
        return Role(part, first.sync, meeting, first.key, here, publishers)

    return (
        [role("publish" if actor.host == first.host else "iterate", actor) for actor in actors],
        [role("map", rollout) for rollout in rollouts],
    )


_KIND = "weights"
# Seconds to wait for a connection to the store. The store exists before a sync begins.
_PATIENCE_S = 10.0
# Seconds that the other actors wait beyond the first actor's timeout, to receive its conclusion.
_GRACE_S = 5.0


@dataclass(frozen=True)
class Notice:
    """The notice of a publication: its version, and its ``places``, the locator without the key.

    The key never goes over the store.
    """

    version: int
    epoch: int
    places: str

    @classmethod
    def of(cls, version: int, epoch: int, locator: str) -> Notice:
        """Return the notice of the publication at ``locator``."""
        return cls(version, epoch, locator.partition("@")[2])

    def locator(self, key: bytes) -> str:
        """Return the locator for readers that have the ``key``."""
        return f"asyncckpt://{key.hex()}@{self.places}"

    def check(self, version: int | None) -> None:
        """Raise ``RankFailedError`` if the notice is not of that ``version`` (None: accept any)."""
        if version is not None and self.version != version:
            raise RankFailedError(f"version {version} was expected, and version {self.version} was sent", step=version)


class NoticeBoard:
    """A worker's connection to the store for one sync, in which the worker has ``role``.

    A wait raises ``RankFailedError`` if the first actor is gone.
    """

    def __init__(self, role: Role, timeout: float) -> None:
        self.role = role
        self._timeout = timeout
        self._rounds = Rounds(role.rendezvous, timeout, _PATIENCE_S)
        self._gathered = 0

    @property
    def is_first(self) -> bool:
        """Whether this is the first actor, which chooses the version."""
        return self.role.part == "publish" and self.role.rendezvous.rank == 0

    def post(self, notice: Notice) -> None:
        """Post the notice of a publication. Only the first actor calls this. A later failure does not replace it."""
        self._rounds.conclude(Rounds.name(_KIND, self.role.sync), json.dumps(asdict(notice)).encode())

    def post_failure(self, error: BaseException) -> None:
        """Post the error that ends this sync to all waiting workers. Only the first actor calls this."""
        found = located(error, otherwise=RankFailedError)
        try:
            for name in (Rounds.name(_KIND, self.role.sync), Rounds.name(self._of_actors, self._gathered + 1)):
                self._rounds.conclude_failed(name, found)
        except CheckpointError as trouble:  # the other workers notice the failure by themselves
            logger.warning("the failure could not be sent to the other workers: %s", trouble)

    def wait(self) -> Notice:
        """Wait for the notice. Raise the first actor's error, or ``SaveTimeoutError``."""
        return Notice(**json.loads(self._outcome(Rounds.name(_KIND, self.role.sync), self._timeout)))

    def gather(self, value: bytes, processes: Processes) -> list[bytes]:
        """Return the values of all publishing actors, in the order of ranks. All publishing actors make the same calls.

        Raises ``RankFailedError`` if one of the ``processes`` has died, or does not answer.
        """
        self._gathered += 1
        name, rounds = Rounds.name(self._of_actors, self._gathered), self._rounds
        try:
            rounds.report(name, value)
            if self.role.rendezvous.rank:
                return list(pickle.loads(self._outcome(name, self._timeout + _GRACE_S)))
            values = rounds.collect(name, self._timeout, lost=processes.lost)
            rounds.conclude(name, pickle.dumps(values))
            rounds.clear(self._of_actors, self._gathered, keep=1)  # all actors have read the round before
            return values
        except CheckpointError as error:
            if not self.role.rendezvous.rank:
                with contextlib.suppress(CheckpointError):
                    rounds.conclude_failed(name, error)
            if isinstance(error, RankFailedError):
                raise
            message = f"the actors that publish together lost each other: {error.message}"
            raise RankFailedError(message, rank=error.rank) from error

    def clear(self) -> None:
        """Remove the sync's messages from the store, now or later. Only the first actor calls this."""
        self._rounds.clear(_KIND, self.role.sync)
        self._rounds.clear(self._of_actors, self._gathered + 1, keep=1)

    def close(self) -> None:
        """Close the connection. Any wait on the connection ends."""
        self._rounds.close()

    @property
    def _of_actors(self) -> str:
        return f"actors-{self.role.sync}"

    def _outcome(self, name: str, timeout: float) -> bytes:
        try:
            outcome = self._rounds.outcome(name, timeout)
        except WorkerDiedError as error:
            raise RankFailedError("the trainer has died during a sync") from error
        if isinstance(outcome, CheckpointError):
            raise outcome
        return outcome


class Processes:
    """The watched processes of workers on this host. Call ``close`` at the end."""

    def __init__(self, members: tuple[Member, ...], own: Member) -> None:
        """Watch the processes of ``members``, by rank. A process in another process id namespace is not watched."""
        self._fds: dict[int, int] = {}
        for rank, member in enumerate(members):
            if member != own and member.namespace == own.namespace:
                with contextlib.suppress(OSError):
                    self._fds[rank] = os.pidfd_open(member.pid)

    def lost(self, rank: int) -> CheckpointError | None:
        """Return the error if the process of ``rank`` has died; None if it may still answer."""
        poll = select.poll()
        if (fd := self._fds.get(rank)) is not None:
            poll.register(fd, select.POLLIN)
        if not poll.poll(0):
            return None
        return RankFailedError(f"actor {rank}, which publishes, has died during a sync", rank=rank)

    def close(self) -> None:
        while self._fds:
            os.close(self._fds.popitem()[1])


class PublishingActors(Ranks):
    """The publishing actors, as the ranks of a ``WeightPublisher``. One object serves several syncs."""

    def __init__(self, notices: NoticeBoard, own: Member) -> None:
        self.members = notices.role.publishers
        self.rank, self.size = notices.role.rendezvous.rank, len(self.members)
        self.notices = notices
        """The board of the current sync."""
        self._processes = Processes(self.members, own)

    def gather(self, value: T) -> list[T]:
        if self.size == 1:
            return [value]
        return [pickle.loads(each) for each in self.notices.gather(pickle.dumps(value), self._processes)]

    def close(self) -> None:
        """Stop watching processes."""
        self._processes.close()
