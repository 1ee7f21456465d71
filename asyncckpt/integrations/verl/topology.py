"""The topology of a sync of weights: on which host each worker is, and which role it has; see ``engine.py``."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

from asyncckpt.worker.messages import Rendezvous

Part = Literal["send", "iterate", "relay", "map", "receive"]
"""The sender; an actor that only helps to make the weights; a relay; a rollout that maps what is published on its host;
one that receives the broadcast for itself."""


class Members(NamedTuple):
    """A broadcast group by its name, and the workers in it, by rank."""

    group: str
    workers: tuple[str, ...]


@dataclass(frozen=True)
class Peer:
    """What a worker tells before a sync.

    ``publishes``: on its host. ``members``: of the broadcast group that it is in. ``rendezvous``, ``sync``: the
    sender's store, and how many syncs there have been. ``group_port``: of the store by which its broadcast group meets.
    """

    name: str
    host: str
    publishes: bool
    bypass_cpu: bool
    members: Members | None
    rendezvous: Rendezvous | None
    sync: int
    group_port: int = 0


@dataclass(frozen=True)
class Role:
    """A worker's part in a sync. ``host`` counts from the sender's, which is 0, to ``hosts``."""

    part: Part
    host: int
    hosts: int
    sync: int
    rendezvous: Rendezvous
    members: Members
    group_port: int


def roles(actors: Sequence[Peer], rollouts: Sequence[Peer]) -> tuple[list[Role], list[Role]]:
    """The roles of the actors, the first of whom sends, and of the rollouts."""
    sender = actors[0]
    rendezvous = sender.rendezvous
    if rendezvous is None:
        raise ValueError("the first actor has to be the master, which opens the store")
    hosts = list(dict.fromkeys(peer.host for peer in (sender, *rollouts)))
    relays = [_relay_of(host, rollouts) for host in hosts[1:]]
    receivers = [peer.name for peer in rollouts] if sender.bypass_cpu else relays
    members = _members((sender.name, *receivers), (sender, *rollouts), sender.sync)

    def role(part: Part, host: str) -> Role:
        return Role(part, hosts.index(host), len(hosts), sender.sync, rendezvous, members, sender.group_port)

    def part_of(rollout: Peer) -> Part:
        if sender.bypass_cpu:
            return "receive"
        return "relay" if rollout.name in relays else "map"

    return (
        [role("send", sender.host), *(role("iterate", sender.host) for _ in actors[1:])],
        [role(part_of(rollout), rollout.host) for rollout in rollouts],
    )


def _relay_of(host: str, rollouts: Sequence[Peer]) -> str:
    """The rollout that publishes on ``host``: the one that has done so before, or the first."""
    there = [peer for peer in rollouts if peer.host == host]
    return next((peer for peer in there if peer.publishes), there[0]).name


def _members(workers: tuple[str, ...], peers: Sequence[Peer], sync: int) -> Members:
    """``workers`` as members of the group in which they all are already, or else of a new one."""
    found = {peer.members for peer in peers if peer.name in workers}
    members = found.pop() if len(found) == 1 else None
    return members if members is not None and members.workers == workers else Members(f"group-{sync}", workers)
