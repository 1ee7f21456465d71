"""The role of each verl worker in a sync. No verl is needed."""

from __future__ import annotations

from dataclasses import replace

import pytest

from asyncckpt.extension import Rendezvous
from asyncckpt.integrations.verl.notices import Member, Peer, roles


def peer(name: str, host: str) -> Peer:
    return Peer(Member(name, "pid:[1]", 7), host, None, 0, b"")


def test_topology() -> None:
    rendezvous = Rendezvous("host", 1, "token", b"secret", 0, 0)
    first = replace(peer("first", "a"), rendezvous=rendezvous, sync=3, key=b"key")
    third = peer("third", "a")
    rollouts = [peer("1", "b"), peer("2", "a"), peer("3", "b")]
    actors, others = roles([first, peer("second", "d"), third], rollouts)
    assert [role.part for role in actors] == ["publish", "iterate", "publish"]
    assert [role.rendezvous for role in actors if role.part == "publish"] == [
        replace(rendezvous, rank=rank, world_size=2) for rank in range(2)
    ]
    assert [(role.part, role.is_here) for role in others] == [("map", False), ("map", True), ("map", False)]
    assert {(role.sync, role.key, role.publishers) for role in (*actors, *others)} == {
        (3, b"key", (first.member, third.member))
    }
    with pytest.raises(ValueError, match="master"):
        roles(rollouts, [])
