"""The topology of a sync of weights: on which host each worker is, and which role it has; see ``engine.py``."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal, NamedTuple

from asyncckpt.extension import Rendezvous

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
