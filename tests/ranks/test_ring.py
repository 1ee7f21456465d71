"""The assignment of image copies to ranks."""

from __future__ import annotations

import pytest

from asyncckpt.errors import UnsavableStateError
from asyncckpt.ranks.group import RankPlace, copied_ranks


@pytest.mark.parametrize("hosts", [[2, 2], [1, 1, 1], [3, 2, 2, 1], [8, 8, 8, 8, 8]])
@pytest.mark.parametrize("replicas", [1, 2])
def test_each_rank_has_copies_on_as_many_other_hosts(hosts: list[int], replicas: int) -> None:
    places = [RankPlace(f"host {host}", 100 + host) for host, ranks in enumerate(hosts) for _ in range(ranks)]
    if replicas >= len(hosts):
        with pytest.raises(UnsavableStateError, match=f"are on {len(hosts)}"):
            copied_ranks(places, replicas)
        return
    kept = copied_ranks(places, replicas)
    for rank, place in enumerate(places):
        holders = [other for other, its in enumerate(kept) if rank in [each.rank for each in its]]
        domains = {places[holder].domain for holder in holders}
        assert len(domains) == len(holders) == replicas and place.domain not in domains
    assert all(each.nbytes == places[each.rank].nbytes for its in kept for each in its)
    # No rank keeps many more copies than another.
    most = max(len(its) for its in kept)
    assert most <= replicas * -(-max(hosts) // min(hosts))


def test_hosts_of_one_domain_count_as_one() -> None:
    places = [RankPlace(domain, 1) for domain in ("a", "a", "b", "b")]
    kept = [[each.rank for each in its] for its in copied_ranks(places, 1)]
    assert kept == [[2], [3], [0], [1]]
