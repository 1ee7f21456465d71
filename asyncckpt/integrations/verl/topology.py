"""The topology of a sync of weights: on which host each worker is, and which role it has; see ``engine.py``."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

from asyncckpt.worker.messages import Rendezvous

Part = Literal["send", "iterate", "map", "receive"]
"""The sender; an actor that only helps to make the weights; a rollout that maps what its host has; one that receives
the broadcast for itself."""


class Members(NamedTuple):
    """A broadcast group by its name, and the workers in it, by rank."""

    group: str
    workers: tuple[str, ...]


@dataclass(frozen=True)
class Peer:
    """What a worker tells before a sync.

    ``host``: text that workers have in common which can share memory. ``members``: of the broadcast group that it is
    in. ``rendezvous``, ``sync``: the sender's store, and how many syncs there have been. ``locator``: of what it
    publishes. ``group_port``: of the store by which its broadcast group meets.
    """

    name: str
    host: str
    bypass_cpu: bool
    members: Members | None
    rendezvous: Rendezvous | None
    sync: int
    locator: str | None = None
    group_port: int = 0


@dataclass(frozen=True)
class Role:
    """A worker's part in a sync. ``locator``: where its host gets the weights; None: they are published there."""

    part: Part
    sync: int
    rendezvous: Rendezvous
    members: Members
    locator: str | None
    group_port: int


def roles(actors: Sequence[Peer], rollouts: Sequence[Peer]) -> tuple[list[Role], list[Role]]:
    """The roles of the actors, the first of whom sends, and of the rollouts."""
    sender = actors[0]
    rendezvous = sender.rendezvous
    if rendezvous is None:
        raise ValueError("the first actor has to be the master, which opens the store")
    receivers = [peer.name for peer in rollouts] if sender.bypass_cpu else []
    members = _members((sender.name, *receivers), (sender, *rollouts), sender.sync)

    def role(part: Part, host: str) -> Role:
        locator = None if host == sender.host else sender.locator
        return Role(part, sender.sync, rendezvous, members, locator, sender.group_port)

    return (
        [role("send", sender.host), *(role("iterate", sender.host) for _ in actors[1:])],
        [role("receive" if sender.bypass_cpu else "map", rollout.host) for rollout in rollouts],
    )


def _members(workers: tuple[str, ...], peers: Sequence[Peer], sync: int) -> Members:
    """``workers`` as members of the group in which they all are already, or else of a new one."""
    found = {peer.members for peer in peers if peer.name in workers}
    members = found.pop() if len(found) == 1 else None
    return members if members is not None and members.workers == workers else Members(f"group-{sync}", workers)
