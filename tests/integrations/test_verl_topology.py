"""Which worker of verl has which role in a sync. It needs no verl."""

from __future__ import annotations

import pytest

from asyncckpt.integrations.verl.topology import Peer, roles
from asyncckpt.worker.messages import Rendezvous


def peer(host: str) -> Peer:
    return Peer(host, None, 0, None)


def test_topology() -> None:
    rendezvous = Rendezvous("host", 1, "token", b"secret", 0, 0)
    sender = Peer("a", rendezvous, 3, "there")
    rollouts = [peer("b"), peer("a"), peer("b")]
    actors, others = roles([sender, peer("d")], rollouts)
    assert [role.part for role in actors] == ["send", "iterate"]
    assert [(role.part, role.locator) for role in others] == [("map", "there"), ("map", None), ("map", "there")]
    assert {(role.sync, role.rendezvous) for role in (*actors, *others)} == {(3, rendezvous)}
    with pytest.raises(ValueError, match="master"):
        roles(rollouts, [])
