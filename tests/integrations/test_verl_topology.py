"""Which worker of verl has which role in a sync. It needs no verl."""

from __future__ import annotations

from dataclasses import replace

import pytest

from asyncckpt.integrations.verl.topology import Members, Peer, roles
from asyncckpt.worker.messages import Rendezvous


def peer(name: str, host: str, **more: object) -> Peer:
    return replace(Peer(name, host, False, False, None, None, 0), **more)  # type: ignore[arg-type]


def test_topology() -> None:
    rendezvous = Rendezvous("host", 1, "token", b"secret", 0, 0)
    sender = peer("sender", "a", rendezvous=rendezvous, sync=3)
    rollouts = [peer("1", "b"), peer("2", "a"), peer("3", "b", publishes=True), peer("4", "c")]
    actors, others = roles([sender, peer("actor", "d")], rollouts)
    assert [role.part for role in actors] == ["send", "iterate"]
    assert [(role.part, role.host) for role in others] == [("map", 1), ("map", 0), ("relay", 1), ("relay", 2)]
    members = Members("group-3", ("sender", "3", "4"))
    assert {role.members for role in (*actors, *others)} == {members}
    assert {role.hosts for role in (*actors, *others)} == {3}
    # A group goes on as long as all of it are in it, and nobody else is.
    sender, rollouts[2], rollouts[3] = (
        replace(each, members=members, sync=4) for each in (sender, rollouts[2], rollouts[3])
    )
    assert roles([sender], rollouts)[0][0].members == members
    assert roles([sender], rollouts[:3])[0][0].members == ("group-4", ("sender", "3"))
    rollouts[3] = replace(rollouts[3], members=None)
    assert roles([sender], rollouts)[0][0].members == ("group-4", ("sender", "3", "4"))
    with pytest.raises(ValueError, match="master"):
        roles(rollouts, [])
