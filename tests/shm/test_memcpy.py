"""Test copies by address: the compiled code and its fallback copy the same bytes, and no others."""

from __future__ import annotations

import os
import random
from array import array
from collections.abc import Callable

import pytest

from asyncckpt.shm import memcpy
from asyncckpt.shm.memcpy import IS_COMPILED, Destinations, address_of, copy_many

SIZES = (0, 1, 63, 64, 65, 1000, 1023, 1024, 1025, 1087, 1088, 4096, 10_000, 300_000)


@pytest.fixture(params=["compiled", "not compiled"], autouse=True)
def copying(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    if request.param == "not compiled":
        monkeypatch.setattr(memcpy, "_copy_many", None)
    elif not IS_COMPILED:
        pytest.skip("nothing was compiled here")


def test_every_byte_comes_and_no_other_is_touched() -> None:
    """Sources and targets lie at any distance from a cache line."""
    chance = random.Random(7)
    sizes = [chance.choice(SIZES) + chance.randrange(3) for _ in range(300)]
    gaps = [chance.randrange(1, 130) for _ in sizes]
    space = sum(sizes) + sum(gaps) + 200
    source, target = bytearray(os.urandom(space)), bytearray(b"\xaa" * space)
    at, until = [], chance.randrange(64)
    for nbytes, gap in zip(sizes, gaps, strict=True):
        at.append(until)
        until += nbytes + gap
    froms = [chance.randrange(space - nbytes) for nbytes in sizes]
    wanted = bytearray(target)
    for to, begin, nbytes in zip(at, froms, sizes, strict=True):
        wanted[to : to + nbytes] = source[begin : begin + nbytes]
    base, origin = address_of(memoryview(target)), address_of(memoryview(source))
    copy_many(array("Q", map(base.__add__, at)), array("Q", map(origin.__add__, froms)), array("Q", sizes))
    assert target == wanted
    copy_many(array("Q"), array("Q"), array("Q"))  # zero copies are no error


@pytest.mark.parametrize("layout", ["apart", "overlapping"])
@pytest.mark.parametrize("cut", [lambda _: [0, 1 << 20], lambda chance: sorted(chance.sample(range(1 << 20), 40))])
def test_what_is_read_in_pieces_is_filled_in(layout: str, cut: Callable[[random.Random], list[int]]) -> None:
    chance = random.Random(5)
    data = bytearray(os.urandom(1 << 20))
    begins = sorted(chance.sample(range(1 << 20), 200))
    limits = [*begins[1:], 1 << 20]
    if layout == "overlapping":
        limits = [min(1 << 20, limit + chance.choice([0, 0, 5000])) for limit in limits]
    ends = [max(begin + 1, limit - chance.choice([0, 7])) for begin, limit in zip(begins, limits, strict=True)]
    parts = [bytearray(end - begin) for begin, end in zip(begins, ends, strict=True)]
    destinations = Destinations(begins, ends, [address_of(memoryview(part)) for part in parts])
    bounds = [0, *cut(chance), 1 << 20]
    for begin, end in zip(bounds, bounds[1:], strict=False):
        destinations.fill(begin, memoryview(data)[begin:end])
    assert all(part == data[begin:end] for part, begin, end in zip(parts, begins, ends, strict=True))
