"""The ring: whose images each rank's worker keeps copies of.

The hosts stand in a ring, in the order of their first ranks, and the copies of one go to the next: an odd number of
them is as good as an even one. Hosts that may be lost together count as one (``Config.domain``).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from asyncckpt.errors import UnsavableStateError
from asyncckpt.format.held_image import CopiedRank


@dataclass(frozen=True)
class RankPlace:
    """Where a rank is: in which ``domain``; and how large a segment for copies of its images is, in bytes."""

    domain: str
    nbytes: int


def copied_ranks(places: Sequence[RankPlace], replicas: int) -> list[tuple[CopiedRank, ...]]:
    """The ranks that each rank is to keep copies of.

    Args:
        places: Where the ranks are, in their order.
        replicas: On how many other hosts there are to be copies.

    Raises:
        UnsavableStateError: There are not as many other hosts.
    """
    domains: dict[str, list[int]] = {}
    for rank, place in enumerate(places):
        domains.setdefault(place.domain, []).append(rank)
    if replicas >= len(domains):
        raise UnsavableStateError(
            f"Config.replicas is {replicas}, which takes {replicas + 1} hosts or more, and the ranks are on"
            f" {len(domains)}"
        )
    ring = list(domains.values())
    kept: list[list[CopiedRank]] = [[] for _ in places]
    for at, ranks in enumerate(ring):
        for jump in range(1, replicas + 1):
            others = ring[(at + jump) % len(ring)]
            for number, rank in enumerate(ranks):
                kept[others[number % len(others)]].append(CopiedRank(rank, places[rank].nbytes))
    return [tuple(each) for each in kept]
