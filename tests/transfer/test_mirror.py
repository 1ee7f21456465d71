"""Mirrors: each host fetches a version once, from any host that has it, even if other hosts are lost."""

from __future__ import annotations

import os
import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from support.published import KEY, Gate, MirrorHere, Publishing, Reads, spied_read
from support.workers import wait_for

from asyncckpt.errors import OutOfMemoryError
from asyncckpt.transfer import holder as holders
from asyncckpt.transfer import mirror as mirrors
from asyncckpt.transfer.api import TransferAddress
from asyncckpt.transfer.locator import Locator
from asyncckpt.transfer.versions import SPAN_BYTES

# Not a whole number of spans.
NBYTES = 40 * SPAN_BYTES + 4097

Before = Callable[[TransferAddress, int, memoryview], object]


def data_of(version: int, nbytes: int = NBYTES) -> bytes:
    return random.Random(version).randbytes(nbytes)


@pytest.fixture
def spy(monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[Reads, list[Before]]]:
    """The list of all reads, and the list of functions to call before each read."""
    reads: Reads = []
    before: list[Before] = []

    def call(address: TransferAddress, offset: int, into: memoryview) -> None:
        for each in before:
            each(address, offset, into)

    monkeypatch.setattr(holders.RemoteImage, "read", spied_read(holders.RemoteImage.read, reads, call))
    yield reads, before


@pytest.fixture
def hosts() -> Iterator[list[MirrorHere | Publishing]]:
    """The hosts of a test. They are closed at the end, in reverse order."""
    made: list[MirrorHere | Publishing] = []
    yield made
    for each in reversed(made):
        each.close()


def test_each_host_gets_each_version_once(
    hosts: list[MirrorHere | Publishing], spy: tuple[Reads, list[Before]]
) -> None:
    reads, _ = spy
    hosts.append(publishing := Publishing(NBYTES))
    publishing.publish(1, data_of(1))
    mirrored = [MirrorHere(publishing) for _ in range(4)]
    hosts += mirrored
    assert all(each.wait(1) == data_of(1) for each in mirrored)
    assert sum(nbytes for *_, nbytes in reads) == len(mirrored) * NBYTES
    # The publisher sends each byte once, because the other hosts come before the first one has all bytes. A host that
    # comes later may read from the publisher, too.
    sent = sum(nbytes for address, _, nbytes in reads if address == publishing.address)
    assert NBYTES <= sent <= 2 * NBYTES
    publishing.publish(2, data_of(2))
    assert all(each.wait(2) == data_of(2) for each in mirrored)


def test_what_has_not_changed_does_not_travel(
    hosts: list[MirrorHere | Publishing], spy: tuple[Reads, list[Before]]
) -> None:
    reads, _ = spy
    hosts.append(publishing := Publishing(NBYTES))
    publishing.publish(1, data_of(1))
    hosts.append(one := MirrorHere(publishing))
    one.wait(1)
    reads.clear()
    changed = bytearray(data_of(1))
    changed[5 * SPAN_BYTES : 6 * SPAN_BYTES] = bytes(SPAN_BYTES)
    changed[-1] ^= 1
    publishing.publish(2, bytes(changed))
    assert one.wait(2) == bytes(changed)
    assert sorted((offset, nbytes) for _, offset, nbytes in reads) == [
        (5 * SPAN_BYTES, SPAN_BYTES),
        (40 * SPAN_BYTES, NBYTES - 40 * SPAN_BYTES),
    ]


def test_a_host_that_is_lost_in_the_middle_holds_up_nobody(
    hosts: list[MirrorHere | Publishing], spy: tuple[Reads, list[Before]]
) -> None:
    """The bytes from the lost host are kept. The next host fetches the rest from another holder."""
    reads, before = spy
    hosts.append(publishing := Publishing(NBYTES))
    publishing.publish(1, data_of(1))
    gate = Gate()
    # The publisher sends the second half only after the gate opens.

    def hold(address: TransferAddress, offset: int, _: memoryview) -> None:
        if address == publishing.address and offset > NBYTES // 2:
            gate.wait()

    before.append(hold)
    hosts.append(first := MirrorHere(publishing))
    assert gate.reached.wait(60)
    hosts.append(second := MirrorHere(publishing))
    own = TransferAddress("127.0.0.1", first.server.port)
    wait_for(lambda: second.arrived() > 0 and any(address == own for address, *_ in reads))
    before.clear()
    first.die()
    reads.clear()
    gate.opened.set()
    assert second.wait(1) == data_of(1)
    # Bytes that had arrived are not fetched again.
    assert sum(nbytes for address, _, nbytes in reads if address != own) < NBYTES
    hosts.append(third := MirrorHere(publishing))
    assert third.wait(1) == data_of(1)


def test_a_byte_that_is_flipped_on_the_way_goes_no_further(
    hosts: list[MirrorHere | Publishing], monkeypatch: pytest.MonkeyPatch
) -> None:
    flips = [True]
    original = holders.RemoteImage.read

    def read(self: holders.RemoteImage[Any], offset: int, into: memoryview) -> None:
        original(self, offset, into)
        if flips and offset > 0:
            flips.clear()
            into[len(into) // 2] ^= 4

    monkeypatch.setattr(holders.RemoteImage, "read", read)
    hosts.append(publishing := Publishing(NBYTES))
    publishing.publish(1, data_of(1))
    hosts.append(one := MirrorHere(publishing))
    hosts.append(other := MirrorHere(publishing))
    assert one.wait(1) == other.wait(1) == data_of(1)
    assert not flips


def test_a_byte_that_flips_where_it_lies_goes_no_further(hosts: list[MirrorHere | Publishing]) -> None:
    """Unchanged spans are copied from the previous version only if their digests still match."""
    hosts.append(publishing := Publishing(NBYTES))
    publishing.publish(1, data_of(1))
    hosts.append(one := MirrorHere(publishing))
    one.wait(1)
    last = one.mirror._last
    assert last is not None
    last.memory.segment.view[NBYTES // 2] ^= 1
    publishing.publish(2, data_of(1))
    assert one.wait(2) == data_of(1)


def test_ranks_that_publish_together_are_fetched_together(hosts: list[MirrorHere | Publishing]) -> None:
    sizes = (3 * SPAN_BYTES + 8, 4096, 5 * SPAN_BYTES)
    ranks = [Publishing(nbytes, ranks=len(sizes)) for nbytes in sizes]
    hosts += ranks
    for version in (1, 2):
        for number, each in enumerate(reversed(ranks)):  # the first rank publishes last
            each.publish(version, data_of(10 * version + number, each._images[0].nbytes))
    whole = b"".join(data_of(20 + number, nbytes) for number, nbytes in zip((2, 1, 0), sizes, strict=True))
    hosts.append(one := MirrorHere(*ranks))
    hosts.append(other := MirrorHere(*ranks))
    assert one.wait(2) == other.wait(2) == whole


def test_another_structure_takes_the_place(hosts: list[MirrorHere | Publishing]) -> None:
    hosts.append(publishing := Publishing(NBYTES))
    publishing.publish(1, data_of(1))
    locator = str(Locator(KEY, (publishing.address,), "sockets"))
    hosts.append(one := MirrorHere(locator=locator))
    one.wait(1)
    hosts.append(later := Publishing(SPAN_BYTES))
    later.publish(2, data_of(2, SPAN_BYTES), epoch=2)
    one.mirror.locator = str(Locator(KEY, (later.address,), "sockets"))
    publishing.server.close()
    assert one.wait(2, epoch=2) == data_of(2, SPAN_BYTES)
    assert [version.version for version in one.versions()] == [2]


@pytest.mark.parametrize("epoch", [2, 0])
def test_a_publisher_that_is_started_anew_is_found_by_its_file(
    hosts: list[MirrorHere | Publishing], tmp_path: Path, epoch: int
) -> None:
    """The last version counts, not the greatest epoch, because the clock of the new host may be behind."""
    file = str(tmp_path / "policy")
    hosts.append(first := Publishing(NBYTES))
    first.publish(5, data_of(1))
    Locator(KEY, (first.address,), "sockets").write(file)
    assert os.stat(file).st_mode & 0o777 == 0o600
    hosts.append(one := MirrorHere(locator=file))
    one.wait(5)
    hosts.append(second := Publishing(NBYTES))
    second.publish(3, data_of(3), epoch=epoch)
    Locator(KEY, (second.address,), "sockets").write(file)
    first.server.close()
    assert one.wait(3, epoch=epoch) == data_of(3)
    assert max(one.versions()).version == 3


def test_strangers_get_nothing(hosts: list[MirrorHere | Publishing], monkeypatch: pytest.MonkeyPatch) -> None:
    hosts.append(publishing := Publishing(NBYTES))
    publishing.publish(1, data_of(1))
    hosts.append(stranger := MirrorHere(locator=str(Locator(b"another key", (publishing.address,), "sockets"))))
    said: list[str] = []
    monkeypatch.setattr(mirrors.logger, "warning", lambda text, *arguments: said.append(text % arguments))
    stranger.mirror._said = ""
    wait_for(lambda: bool(said))
    assert not stranger.versions()


@pytest.mark.parametrize(
    "text", ["", "policy", "asyncckpt://", "asyncckpt://zz@host:1?transport=sockets", "asyncckpt://00@host?transport=x"]
)
def test_what_is_no_locator(text: str) -> None:
    with pytest.raises(ValueError, match="no locator"):
        Locator.parse(text)


@pytest.mark.parametrize("host", ["10.0.0.1", "::1", "trainer-0.jobs"])
def test_locators(host: str) -> None:
    locator = Locator(b"\x00\xff", (TransferAddress(host, 1), TransferAddress(host, 65535)), "nixl")
    assert Locator.parse(str(locator)) == Locator.read(f" {locator}\n") == locator


def _another_size(hosts: list[MirrorHere | Publishing]) -> tuple[Publishing, MirrorHere, Publishing]:
    """Return a publisher, a mirror with its version, and another publisher with a larger next version."""
    hosts.append(small := Publishing(SPAN_BYTES))
    small.publish(1, data_of(1, SPAN_BYTES))
    hosts.append(here := MirrorHere(small))
    here.wait(1)
    hosts.append(large := Publishing(NBYTES))
    large.publish(2, data_of(2))
    return small, here, large


def test_memory_for_another_size_is_taken_once(
    hosts: list[MirrorHere | Publishing], spy: tuple[Reads, list[Before]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Memory is not taken again when the holder's connection breaks repeatedly."""
    left = 20

    def break_off(address: TransferAddress, *_: object) -> None:
        nonlocal left
        if address == large.address and left:
            left -= 1
            raise ConnectionResetError("as the test wants")

    small, here, large = _another_size(hosts)
    taken: list[object] = []
    allocate = here.store.allocate

    def counted(*given: Any) -> Any:
        taken.append(given)
        return allocate(*given)

    monkeypatch.setattr(here.store, "allocate", counted)
    spy[1].append(break_off)
    here.mirror.locator = str(Locator(KEY, (large.address,), "sockets"))
    small.server.close()
    assert here.wait(2) == data_of(2) and not left and len(taken) <= 3


def test_a_size_that_there_is_no_memory_for_takes_none(
    hosts: list[MirrorHere | Publishing], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Repeated attempts take no memory either."""
    small, here, large = _another_size(hosts)
    taken: list[int] = []
    refused: list[int] = []
    allocate = here.store.allocate

    def allocate_small(nbytes: int) -> Any:
        if nbytes == NBYTES:
            refused.append(nbytes)
            raise OutOfMemoryError("there is too little (as the test wants)")
        taken.append(nbytes)
        return allocate(nbytes)

    monkeypatch.setattr(here.store, "allocate", allocate_small)
    here.mirror.locator = str(Locator(KEY, (large.address,), "sockets"))
    small.server.close()
    wait_for(lambda: len(refused) >= 4)
    assert taken.count(SPAN_BYTES) <= 1
