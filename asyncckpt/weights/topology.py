"""The topology of a sync of weights: where each worker is, and which part it takes.

Workers that can share memory (those of one user on one host) are at one *place*. The sender publishes at its own; at
each other place a rollout is the relay, which takes the broadcast and publishes it there.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from asyncckpt.worker.messages import Meeting

Part = Literal["send", "walk", "relay", "read", "take"]
"""The sender; an actor that only helps to make the weights; a relay; a rollout that maps what is at its place; one that
takes the broadcast for itself."""

Group = tuple[str, tuple[str, ...]]
"""The name of a process group, and the workers in it, by rank."""


@dataclass(frozen=True)
class Peer:
    """What a worker says before a sync: who it is, where, and which process group it is in.

    ``publishes``: it is the one that publishes at its place. ``meeting``, ``sync``: the sender's store, and how many
    syncs there have been.
    """

    name: str
    place: str
    publishes: bool
    bypass_cpu: bool
    group: Group | None
    meeting: Meeting | None
    sync: int


@dataclass(frozen=True)
class Seat:
    """A worker's part in a sync; ``place`` counts from the sender's, which is 0, to ``places``."""

    part: Part
    place: int
    places: int
    sync: int
    meeting: Meeting
    group: Group


def seats(actors: Sequence[Peer], rollouts: Sequence[Peer]) -> tuple[list[Seat], list[Seat]]:
    """The seats of the actors, the first of whom sends, and of the rollouts."""
    sender = actors[0]
    meeting = sender.meeting
    if meeting is None:
        raise ValueError("the first actor has to be the master, which opens the store")
    places = list(dict.fromkeys(peer.place for peer in (sender, *rollouts)))
    relays = [_relay_of(place, rollouts) for place in places[1:]]
    takers = [peer.name for peer in rollouts] if sender.bypass_cpu else relays
    group = _group_of((sender.name, *takers), (sender, *rollouts), sender.sync)

    def seat(part: Part, place: str) -> Seat:
        return Seat(part, places.index(place), len(places), sender.sync, meeting, group)

    def part_of(rollout: Peer) -> Part:
        if sender.bypass_cpu:
            return "take"
        return "relay" if rollout.name in relays else "read"

    return (
        [seat("send", sender.place), *(seat("walk", sender.place) for _ in actors[1:])],
        [seat(part_of(rollout), rollout.place) for rollout in rollouts],
    )


def _relay_of(place: str, rollouts: Sequence[Peer]) -> str:
    """The rollout that brings weights to ``place``: the one that has published there before, or the first."""
    there = [peer for peer in rollouts if peer.place == place]
    return next((peer for peer in there if peer.publishes), there[0]).name


def _group_of(members: tuple[str, ...], peers: Sequence[Peer], sync: int) -> Group:
    """The process group of ``members``: the one they all are in, if there is, or one by a new name."""
    groups = {peer.group for peer in peers if peer.name in members}
    group = groups.pop() if len(groups) == 1 else None
    return group if group is not None and group[1] == members else (f"group-{sync}", members)
