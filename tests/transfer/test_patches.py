"""Patches of spans: they give the same bytes, or nothing. A mirror takes them from any host that has both versions."""

from __future__ import annotations

import os
import random
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
from support.published import Gate, MirrorHere, Publishing

from asyncckpt.shm import memcpy
from asyncckpt.transfer import holder as holders
from asyncckpt.transfer import patches
from asyncckpt.transfer.api import TransferAddress
from asyncckpt.transfer.patches import apply_patch, patch_of
from asyncckpt.transfer.versions import SPAN_BYTES

NBYTES = 40 * SPAN_BYTES + 4097
Hosts = list[MirrorHere | Publishing]


def changed(data: bytes, share: float, itemsize: int = 2) -> bytes:
    """Change a share of the elements of this size, scattered."""
    elements = np.frombuffer(data, np.uint8)[: len(data) // itemsize * itemsize].reshape(-1, itemsize)
    at = np.random.default_rng(len(data)).random(len(elements)) < share
    return (elements ^ at[:, None]).astype(np.uint8).tobytes() + data[elements.size :]


@pytest.fixture(params=["compiled", "not compiled"])
def comparing(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    if request.param == "not compiled":
        monkeypatch.setattr(patches, "differing", None)
    elif not memcpy.IS_COMPILED:
        pytest.skip("nothing was compiled here")


@pytest.mark.usefixtures("comparing")
@pytest.mark.parametrize("itemsize", [1, 2, 4])
@pytest.mark.parametrize("nbytes", [2, 30, 34, 512, 514, 4094, 4096, SPAN_BYTES - 2, SPAN_BYTES])
def test_a_patch_gives_the_same_bytes(nbytes: int, itemsize: int) -> None:
    old = os.urandom(nbytes)
    for share in (0.0, 0.001, 0.01, 0.1, 0.3, 0.5, 1.0):
        new = changed(old, share, itemsize)
        words = np.frombuffer(old, np.uint16) != np.frombuffer(new, np.uint16)
        patch = patch_of(memoryview(bytearray(old)), memoryview(bytearray(new)))
        assert bool(patch) == (int(words.sum()) <= len(words) // 3)
        if patch:
            assert len(patch) == 2 * -(-len(words) // 256) + 3 * int(words.sum())
            target = bytearray(old)
            apply_patch(patch, memoryview(target))
            assert target == new


@pytest.mark.usefixtures("comparing")
def test_an_odd_size_has_no_patch() -> None:
    assert patch_of(memoryview(bytearray(7)), memoryview(bytearray(7))) == b""


def test_a_damaged_patch_raises_nothing_and_writes_nowhere_else() -> None:
    chance = random.Random(3)
    old = bytearray(chance.randbytes(1000))
    patch = patch_of(memoryview(old), memoryview(bytearray(changed(bytes(old), 0.1))))
    for _ in range(300):
        damaged = bytearray(patch)
        for _ in range(chance.randrange(1, 5)):
            damaged[chance.randrange(len(damaged))] = chance.randrange(256)
        memory = bytearray(3000)
        memory[1000:2000] = old
        apply_patch(
            bytes(damaged[: chance.choice([len(patch), chance.randrange(len(patch))])]), memoryview(memory)[1000:2000]
        )
        assert not any(memory[:1000]) and not any(memory[2000:])


@pytest.fixture
def hosts() -> Iterator[Hosts]:
    made: Hosts = []
    yield made
    for each in reversed(made):
        each.close()


class Spy:
    """Counts the bytes that were fetched, by holder. ``damage``: changes each patch before it is used."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.read: dict[TransferAddress, int] = {}
        self.patched: dict[TransferAddress, int] = {}
        self.damage: Callable[[bytes], bytes] = bytes
        self.before: Callable[[int], object] = lambda first: None
        read, ask = holders.RemoteImage.read, holders.RemoteImage.patches

        def counted_read(image: holders.RemoteImage[Any], offset: int, into: memoryview) -> None:
            address = image._holder.address
            self.read[address] = self.read.get(address, 0) + len(into)
            read(image, offset, into)

        def counted_patches(image: holders.RemoteImage[Any], first: int, bases: bytes) -> list[bytes]:
            self.before(first)
            found = ask(image, first, bases)
            address = image._holder.address
            self.patched[address] = self.patched.get(address, 0) + sum(map(len, found))
            return list(map(self.damage, found))

        monkeypatch.setattr(holders.RemoteImage, "read", counted_read)
        monkeypatch.setattr(holders.RemoteImage, "patches", counted_patches)

    def clear(self) -> None:
        self.read.clear()
        self.patched.clear()


@pytest.fixture
def spy(monkeypatch: pytest.MonkeyPatch) -> Spy:
    return Spy(monkeypatch)


def begin(hosts: Hosts, mirrors: int = 1, nbytes: int = NBYTES) -> tuple[Publishing, list[MirrorHere], bytes]:
    """Publish version 1 and wait until the mirrors have it."""
    data = os.urandom(nbytes)
    hosts.append(publishing := Publishing(nbytes))
    publishing.publish(1, data)
    mirrored = [MirrorHere(publishing) for _ in range(mirrors)]
    hosts += mirrored
    assert all(each.wait(1) == data for each in mirrored)
    return publishing, mirrored, data


@pytest.mark.parametrize("itemsize", [1, 2, 4])
@pytest.mark.parametrize(("share", "most"), [(0.0, 0.0), (0.01, 0.06), (0.5, 1.0)])
@pytest.mark.parametrize("nbytes", [NBYTES, 3 * SPAN_BYTES, 12])
def test_only_changes_are_fetched(
    hosts: Hosts, spy: Spy, share: float, most: float, itemsize: int, nbytes: int
) -> None:
    publishing, (mirror,), data = begin(hosts, nbytes=nbytes)
    spy.clear()
    data = changed(data, share, itemsize)
    publishing.publish(2, data)
    assert mirror.wait(2) == data
    beside = (nbytes % SPAN_BYTES if nbytes % 2 else 0) + (64 if share else 0)
    assert sum(spy.read.values()) + sum(spy.patched.values()) <= most * nbytes + beside


def test_mirrors_pass_changes_on(hosts: Hosts, spy: Spy) -> None:
    publishing, mirrored, data = begin(hosts, mirrors=4, nbytes=40 * SPAN_BYTES)
    for version in range(2, 5):
        spy.clear()
        data = changed(data, 0.01)
        publishing.publish(version, data)
        assert all(each.wait(version) == data for each in mirrored)
        assert not spy.read
        assert sum(spy.patched.values()) < len(mirrored) * 0.03 * len(data)
    # The publisher is not the only source.
    assert len(spy.patched) > 1


def test_a_holder_without_the_reader_s_version_sends_whole_spans(hosts: Hosts, spy: Spy) -> None:
    publishing, (mirror,), data = begin(hosts, nbytes=4 * SPAN_BYTES)
    spy.clear()
    publishing.server.versions._images.clear()  # as after a restart of the publisher's worker
    publishing.publish(2, data := changed(data, 0.01))
    assert mirror.wait(2) == data
    assert sum(spy.read.values()) == len(data) and not sum(spy.patched.values())


def test_a_reader_of_an_older_version(hosts: Hosts, spy: Spy) -> None:
    """A mirror that has missed a version gets patches while the holder still has the mirror's version."""
    publishing, (mirror,), data = begin(hosts, nbytes=4 * SPAN_BYTES)
    gate, spy.before = Gate(), lambda first: gate.wait()
    publishing.publish(2, data := changed(data, 0.01))
    assert gate.reached.wait(60)
    spy.clear()
    publishing.publish(3, data := changed(data[::-1], 0.01)[::-1])
    gate.opened.set()
    assert mirror.wait(3) == data


@pytest.mark.parametrize("damage", [lambda patch: patch[:-1], lambda patch: patch[:-2] + b"ab", lambda patch: b"x" * 9])
def test_a_damaged_patch_is_never_used(hosts: Hosts, spy: Spy, damage: Any) -> None:
    publishing, mirrored, data = begin(hosts, mirrors=2, nbytes=4 * SPAN_BYTES)
    spy.damage = damage
    spy.clear()
    publishing.publish(2, data := changed(data, 0.01))
    assert all(each.wait(2) == data for each in mirrored)
    assert sum(spy.read.values()) == 2 * len(data)


def test_a_previous_version_that_was_damaged_here(hosts: Hosts, spy: Spy) -> None:
    publishing, (mirror,), data = begin(hosts, nbytes=4 * SPAN_BYTES)
    image = mirror.mirror._last
    assert image is not None
    image.memory.segment.view[SPAN_BYTES + 77] ^= 1
    spy.clear()
    publishing.publish(2, data := changed(data, 0.01))
    assert mirror.wait(2) == data
    assert sum(spy.read.values()) == SPAN_BYTES


def test_a_source_that_is_lost_in_the_middle(hosts: Hosts, spy: Spy, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("asyncckpt.transfer.versions._AT_ONCE", 8)
    publishing, (first, second), data = begin(hosts, mirrors=2, nbytes=40 * SPAN_BYTES)
    gate = Gate()
    spy.before = lambda at: gate.wait() if at >= 16 else None
    publishing.publish(2, data := changed(data, 0.01))
    assert gate.reached.wait(60)
    first.die()
    gate.opened.set()
    assert second.wait(2) == data
