"""The topology of a sync of weights: on which host each worker is, and which role it has; see ``engine.py``."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from asyncckpt.worker.messages import Rendezvous

Part = Literal["send", "iterate", "map"]
"""The sender; an actor that only helps to make the weights; a rollout, which maps what its host has."""


@dataclass(frozen=True)
class Peer:
    """What a worker tells before a sync.

    ``host``: text that workers have in common which can share memory. ``rendezvous``, ``sync``: the sender's store, and
    how many syncs there have been. ``locator``: of what it publishes.
    """

    host: str
    rendezvous: Rendezvous | None
    sync: int
    locator: str | None


@dataclass(frozen=True)
class Role:
    """A worker's part in a sync. ``locator``: where its host gets the weights; None: they are published there."""

    part: Part
    sync: int
    rendezvous: Rendezvous
    locator: str | None


def roles(actors: Sequence[Peer], rollouts: Sequence[Peer]) -> tuple[list[Role], list[Role]]:
    """The roles of the actors, the first of whom sends, and of the rollouts."""
    sender = actors[0]
    rendezvous = sender.rendezvous
    if rendezvous is None:
        raise ValueError("the first actor has to be the master, which opens the store")

    def role(part: Part, host: str) -> Role:
        return Role(part, sender.sync, rendezvous, None if host == sender.host else sender.locator)

    return (
        [role("send", sender.host), *(role("iterate", sender.host) for _ in actors[1:])],
        [role("map", rollout.host) for rollout in rollouts],
    )
