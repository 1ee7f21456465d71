"""Gaps and overlaps of a tensor's parts, checked against an array of counts."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from asyncckpt.weights.layout import Ranges, common, missing, ranges, shown


@st.composite
def _cut(draw: st.DrawFn) -> tuple[list[int], list[Ranges]]:
    whole = draw(st.lists(st.integers(0, 4), max_size=3))
    sides = [st.tuples(st.integers(0, size), st.integers(0, size)).map(sorted) for size in whole]
    cuts = draw(st.lists(st.tuples(*sides), max_size=5))
    return whole, [tuple(range(*side) for side in cut) for cut in cuts]


@given(_cut())
def test_what_is_missing_and_what_is_there_twice(cut: tuple[list[int], list[Ranges]]) -> None:
    whole, parts = cut
    counts = np.zeros(whole, int)
    for part in parts:
        counts[tuple(slice(side.start, side.stop) for side in part)] += 1
    gap, twice = missing(whole, parts), common(parts)
    assert (gap is None) == bool((counts > 0).all()) and (twice is None) == bool((counts < 2).all())
    if gap is not None:
        found = counts[tuple(slice(side.start, side.stop) for side in gap)]
        assert found.size and not found.any()
    if twice is not None:
        assert (counts[tuple(slice(side.start, side.stop) for side in twice)] > 1).all()


def test_they_are_shown_as_slices() -> None:
    assert shown(ranges((5, 0), (5, 7))) == "[5:10, 0:7]"
