"""Assign a holder to each host that reads a version: chains without cycles and without lost hosts."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from asyncckpt.shm.slots import VersionKey
from asyncckpt.transfer.api import TransferAddress
from asyncckpt.transfer.distribution import Distribution

VERSION = VersionKey(1, 7)


def host(number: int) -> TransferAddress:
    return TransferAddress(f"host-{number}", 1)


def test_hosts_that_come_together_are_a_chain() -> None:
    distribution = Distribution()
    holders = [distribution.assign(number, host(number), VERSION, ()) for number in range(4)]
    assert holders == [None, host(0), host(1), host(2)]


def test_who_has_it_all_is_read_from_first() -> None:
    distribution = Distribution()
    for number in range(3):
        distribution.assign(number, host(number), VERSION, ())
    distribution.has(0, host(0), VERSION)
    # Host 1 still reads from host 0. Host 2 has no reader, and no host is sent to the publisher.
    assert distribution.assign(3, host(3), VERSION, ()) == host(2)
    distribution.has(1, host(1), VERSION)
    assert distribution.assign(4, host(4), VERSION, ()) == host(0)


def test_who_is_refused_or_gone_is_left_out() -> None:
    distribution = Distribution()
    for number in range(3):
        distribution.assign(number, host(number), VERSION, ())
    # Host 0, the holder of the refused host, takes its place, even before the refused host is known to be gone.
    assert distribution.assign(2, host(2), VERSION, [host(1)]) == host(0)
    distribution.leave(0)
    distribution.leave(1)
    assert distribution.assign(2, host(2), VERSION, ()) is None


def test_who_turns_to_another_version_is_not_read_from() -> None:
    distribution = Distribution()
    distribution.assign(0, host(0), VERSION, ())
    distribution.has(0, host(0), None)
    distribution.assign(0, host(0), VersionKey(1, 8), ())
    assert distribution.assign(1, host(1), VERSION, ()) is None


@given(st.lists(st.tuples(st.integers(0, 5), st.sampled_from(["ask", "refuse", "has", "leave"])), max_size=60))
def test_nobody_waits_for_what_comes_by_way_of_itself(calls: list[tuple[int, str]]) -> None:
    distribution = Distribution()
    reads: dict[TransferAddress, TransferAddress | None] = {}
    for number, call in calls:
        own = host(number)
        if call == "leave":
            distribution.leave(number)
            reads.pop(own, None)
        elif call == "has":
            distribution.has(number, own, VERSION)
            reads.pop(own, None)
        else:
            before = reads.get(own)
            refused = [before] if call == "refuse" and before is not None else []
            reads[own] = distribution.assign(number, own, VERSION, refused)
            assert reads[own] not in refused
        for begin in reads:
            at: TransferAddress | None = begin
            for _ in range(len(reads) + 1):
                at = None if at is None else reads.get(at)
            assert at is None, "a cycle"
