"""Which worker of verl has which role in a sync. It needs no verl."""

from __future__ import annotations

from dataclasses import replace

import pytest

from asyncckpt.integrations.verl.topology import Members, Peer, roles
from asyncckpt.worker.messages import Rendezvous


def peer(name: str, host: str, **more: object) -> Peer:
    return replace(Peer(name, host, False, None, None, 0), **more)  # type: ignore[arg-type]


def test_topology() -> None:
    rendezvous = Rendezvous("host", 1, "token", b"secret", 0, 0)
    sender = peer("sender", "a", rendezvous=rendezvous, sync=3, locator="there")
    rollouts = [peer("1", "b"), peer("2", "a"), peer("3", "b")]
    actors, others = roles([sender, peer("actor", "d")], rollouts)
    assert [role.part for role in actors] == ["send", "iterate"]
    assert [(role.part, role.locator) for role in others] == [("map", "there"), ("map", None), ("map", "there")]
    assert {role.members for role in (*actors, *others)} == {Members("group-3", ("sender",))}
    with pytest.raises(ValueError, match="master"):
        roles(rollouts, [])


def test_a_group_goes_on_as_long_as_all_of_it_are_in_it() -> None:
    """And nobody else is."""
    rendezvous = Rendezvous("host", 1, "token", b"secret", 0, 0)
    sender = peer("sender", "a", rendezvous=rendezvous, sync=3, bypass_cpu=True)
    rollouts = [peer("1", "b"), peer("2", "a")]
    _, others = roles([sender], rollouts)
    members = Members("group-3", ("sender", "1", "2"))
    assert [(role.part, role.members) for role in others] == [("receive", members)] * 2
    sender, *rollouts = (replace(each, members=members, sync=4) for each in (sender, *rollouts))
    assert roles([sender], rollouts)[0][0].members == members
    assert roles([sender], rollouts[:1])[0][0].members == ("group-4", ("sender", "1"))
    rollouts[1] = replace(rollouts[1], members=None)
    assert roles([sender], rollouts)[0][0].members == ("group-4", ("sender", "1", "2"))
