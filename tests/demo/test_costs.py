"""What a save costs, from made-up measurements of a noisy machine."""

from __future__ import annotations

import random

import pytest

from asyncckpt.demo.costs import Block, Pair, cost_of, figure_of

PAIRS = 14


def noisy(cost: float, seed: int) -> list[float]:
    """Differences of pairs: of most the noise is small, of some it is a hundred times the cost."""
    chance = random.Random(seed)
    return [cost + chance.gauss(0, 0.2) + chance.choice([0] * 8 + [100, -100]) for _ in range(PAIRS)]


def test_a_cost_is_told_where_a_few_pairs_are_far_off() -> None:
    told = [figure for seed in range(200) if (figure := cost_of(noisy(1.0, seed)))]
    assert len(told) > 140
    assert all(0 < figure.low <= figure.median <= figure.high for figure in told if figure.low and figure.high)
    assert sum(figure.low <= 1.0 <= figure.high for figure in told if figure.low and figure.high) > 0.9 * len(told)


def test_no_cost_is_told_where_there_is_none() -> None:
    """Half of the naive differences are negative, and so are half of their means."""
    naive = [sum(noisy(0.0, seed)) for seed in range(200)]
    assert min(naive) < 0
    assert sum(cost_of(noisy(0.0, seed)) is not None for seed in range(200)) < 0.05 * 200


def test_what_is_negative_cannot_be_told() -> None:
    assert cost_of([-1.0] * PAIRS) is None
    assert cost_of([0.0] * PAIRS) is None
    assert cost_of([1.0] * 10 + [-100.0] * 4) is None


@pytest.mark.parametrize("count", [1, 2, 5])
def test_few_pairs_tell_nothing(count: int) -> None:
    figure = figure_of([1.0] * count)
    assert (figure.median, figure.low, figure.high, figure.count) == (1.0, None, None, count)
    assert cost_of([1.0] * count) is None


@pytest.mark.parametrize(("count", "low", "high"), [(6, 1, 6), (8, 1, 8), (9, 2, 8), (12, 3, 10), (14, 3, 12)])
def test_the_bounds_are_those_of_the_tables(count: int, low: int, high: int) -> None:
    """Of the sign test, at 95 %: which of the sorted values enclose the median."""
    values = [float(value) for value in range(1, count + 1)]
    random.Random(count).shuffle(values)
    figure = figure_of(values)
    assert (figure.low, figure.high) == (low, high)


def test_what_changes_slowly_is_no_cost() -> None:
    """Steps take longer and longer: the mean of the neighbours is what the block with a save would have taken."""
    before, after = Block(3, 3.0, 1.5, 0.0), Block(3, 6.0, 3.0, 0.0)
    saving = Block(4, 4 * 1.5 + 0.25, 4 * 0.75 + 0.25, 0.5, 0.2)
    pair = Pair(before, saving, after)
    assert pair.wall_s == pytest.approx(0.25)
    assert pair.cpu_s == pytest.approx(0.75)
