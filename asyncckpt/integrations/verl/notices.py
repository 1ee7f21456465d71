"""What the workers tell each other in a sync: what was published, and the actors that publish, what each of them has.

The messages go over a store that the first actor hosts, in rounds (see ``asyncckpt/ranks/rounds.py``), sealed with a
key that verl passes on with the topology. Notices are JSON. The publishing actors, all of one host, send each other
pickles, as ranks do. The end of the store is noticed at once.
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
from typing import Any, Literal, NamedTuple

from asyncckpt.errors import CheckpointError, RankFailedError, WorkerDiedError, located
from asyncckpt.extension import Rendezvous, Rounds

logger = logging.getLogger(__name__)

Part = Literal["publish", "iterate", "map"]
"""An actor that publishes; one that only helps to make the weights; a rollout, which maps what its host has."""


class Member(NamedTuple):
    """A worker: its ``name``, and its process, by its id in the ``namespace`` of such."""

    name: str
    namespace: str
    pid: int


@dataclass(frozen=True)
class Peer:
    """What a worker tells before a sync.

    ``host``: text that workers have in common which can share memory. Of the first actor, ``rendezvous`` and ``sync``:
    its store, and how many syncs there have been; ``key``: of those who may read what is published.
    """

    member: Member
    host: str
    rendezvous: Rendezvous | None
    sync: int
    key: bytes


@dataclass(frozen=True)
class Role:
    """A worker's part in a sync. ``is_here``: its host is the one where the weights are published. ``publishers``: the
    actors that publish, by their ranks; one of them has its own in the ``rendezvous``.
    """

    part: Part
    sync: int
    rendezvous: Rendezvous
    key: bytes
    is_here: bool
    publishers: tuple[Member, ...]


def roles(actors: Sequence[Peer], rollouts: Sequence[Peer]) -> tuple[list[Role], list[Role]]:
    """The roles of the actors and of the rollouts. The first actor publishes, and so do the others of its host."""
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
# Seconds that a worker looks for the store, which is there before a sync begins.
_PATIENCE_S = 10.0
# Seconds beyond the first actor's limit, for its conclusion to get to the others.
_GRACE_S = 5.0


@dataclass(frozen=True)
class Notice:
    """What was published, and where other hosts get it: the locator without its key, which does not go this way."""

    version: int
    epoch: int
    places: str

    @classmethod
    def of(cls, version: int, epoch: int, locator: str) -> Notice:
        """Return the notice of what is published there."""
        return cls(version, epoch, locator.partition("@")[2])

    def locator(self, key: bytes) -> str:
        """Return the locator for those who have the ``key``."""
        return f"asyncckpt://{key.hex()}@{self.places}"

    def check(self, version: int | None) -> None:
        """Raises ``RankFailedError`` if it is not of that ``version`` (None: whichever)."""
        if version is not None and self.version != version:
            raise RankFailedError(f"version {version} was to come, and version {self.version} was sent", step=version)


class NoticeBoard:
    """A worker's connection to the store, for the sync in which it has ``role``.

    Where the first actor is gone, what waits raises ``RankFailedError``.
    """

    def __init__(self, role: Role, timeout: float) -> None:
        self.role = role
        self._timeout = timeout
        self._rounds = Rounds(role.rendezvous, timeout, _PATIENCE_S)
        self._gathered = 0

    @property
    def is_first(self) -> bool:
        """Whether this is the first actor, which says what comes."""
        return self.role.part == "publish" and self.role.rendezvous.rank == 0

    def post(self, notice: Notice) -> None:
        """The first actor: tell what was published. What is posted first stays."""
        self._rounds.conclude(Rounds.name(_KIND, self.role.sync), json.dumps(asdict(notice)).encode())

    def post_failure(self, error: BaseException) -> None:
        """The first actor: tell all who wait why nothing will be published in this sync."""
        found = located(error, otherwise=RankFailedError)
        try:
            for name in (Rounds.name(_KIND, self.role.sync), Rounds.name(self._of_actors, self._gathered + 1)):
                self._rounds.conclude_failed(name, found)
        except CheckpointError as trouble:  # the others will notice by themselves
            logger.warning("the other workers could not be told of a failure: %s", trouble)

    def wait(self) -> Notice:
        """Wait for what is published. Raises why it is not, or ``SaveTimeoutError``."""
        return Notice(**json.loads(self._outcome(Rounds.name(_KIND, self.role.sync), self._timeout)))

    def gather(self, value: bytes, processes: Processes) -> list[bytes]:
        """What each of the actors has that publish, in their order; by the same calls on all of them.

        Raises ``RankFailedError``: one of the ``processes`` has died, or does not answer.
        """
        self._gathered += 1
        name, rounds = Rounds.name(self._of_actors, self._gathered), self._rounds
        try:
            rounds.report(name, value)
            if self.role.rendezvous.rank:
                return list(pickle.loads(self._outcome(name, self._timeout + _GRACE_S)))
            values = rounds.collect(name, self._timeout, lost=processes.lost)
            rounds.conclude(name, pickle.dumps(values))
            rounds.clear(self._of_actors, self._gathered, keep=1)  # all have had what came of the one before
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
        """The first actor: the sync is over. What it left in the store is removed, now or in time."""
        self._rounds.clear(_KIND, self.role.sync)
        self._rounds.clear(self._of_actors, self._gathered + 1, keep=1)

    def close(self) -> None:
        """Drop the connection; a wait over it ends."""
        self._rounds.close()

    @property
    def _of_actors(self) -> str:
        return f"actors-{self.role.sync}"

    def _outcome(self, name: str, timeout: float) -> bytes:
        try:
            outcome = self._rounds.outcome(name, timeout)
        except WorkerDiedError as error:
            raise RankFailedError("the trainer is gone, in the midst of a sync") from error
        if isinstance(outcome, CheckpointError):
            raise outcome
        return outcome


class Processes:
    """The processes of workers of this host, of which this one hears when they die. ``close`` it."""

    def __init__(self, members: tuple[Member, ...], own: Member) -> None:
        """``members``: by their ranks. Those whose ids mean something else here are not watched."""
        self._fds: dict[int, int] = {}
        for rank, member in enumerate(members):
            if member != own and member.namespace == own.namespace:
                with contextlib.suppress(OSError):
                    self._fds[rank] = os.pidfd_open(member.pid)

    def lost(self, rank: int) -> CheckpointError | None:
        """Why nothing more will come of ``rank``; None: it may."""
        poll = select.poll()
        if (fd := self._fds.get(rank)) is not None:
            poll.register(fd, select.POLLIN)
        if not poll.poll(0):
            return None
        return RankFailedError(f"actor {rank}, of those that publish, has died in the midst of a sync", rank=rank)

    def close(self) -> None:
        while self._fds:
            os.close(self._fds.popitem()[1])


class PublishingActors:
    """The actors that publish together, as ``WeightPublisher`` is to have its ranks, in one sync after the other."""

    def __init__(self, notices: NoticeBoard, own: Member) -> None:
        self.members = notices.role.publishers
        self.rank, self.ranks = notices.role.rendezvous.rank, len(self.members)
        self.notices = notices
        """Those of the sync."""
        self._processes = Processes(self.members, own)

    def all_gather(self, value: Any) -> list[Any]:
        if self.ranks == 1:
            return [value]
        return [pickle.loads(each) for each in self.notices.gather(pickle.dumps(value), self._processes)]

    def close(self) -> None:
        """Watch no process any more."""
        self._processes.close()
