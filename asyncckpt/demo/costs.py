"""What a save costs, told from pairs of measurements with and without a save.

A busy machine makes single differences worthless: one of them may well be negative. The median of many is robust, and
the sign test says between which bounds it lies, whatever the distribution of the noise.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median

CANNOT_TELL = "cannot be told on this machine now"

# The contestants.
OURS, DCP = "asyncckpt", "torch.distributed.checkpoint.save"

_CONFIDENCE = 0.95


@dataclass(frozen=True)
class Figure:
    """The ``median`` of ``count`` values. With 95 % confidence it lies between ``low`` and ``high``.

    Both are None where there are too few values to say so.
    """

    median: float
    low: float | None
    high: float | None
    count: int


@dataclass(frozen=True)
class Block:
    """Some training steps in a row, which may begin with a save: seconds of the clock and of the processors."""

    steps: int
    wall_s: float
    trainer_s: float
    """Of the processors, by the process that trains."""
    worker_s: float
    """Of the processors, by the worker."""
    call_s: float = 0.0
    """How long the call of the save took."""

    @property
    def cpu_s(self) -> float:
        """Of the processors, by both processes."""
        return self.trainer_s + self.worker_s


@dataclass(frozen=True)
class Pair:
    """A block with a save, and the blocks without one before and after it."""

    before: Block
    saving: Block
    after: Block

    @property
    def wall_s(self) -> float:
        """How much longer the training took than its steps take without a save."""
        return self._difference([each.wall_s for each in (self.before, self.saving, self.after)])

    @property
    def cpu_s(self) -> float:
        """How much more both processes computed."""
        return self._difference([each.cpu_s for each in (self.before, self.saving, self.after)])

    def _difference(self, seconds: Sequence[float]) -> float:
        before, saving, after = seconds
        # The mean of both neighbours: what changes slowly on the machine is no cost of the save.
        step_s = (before / self.before.steps + after / self.after.steps) / 2
        return saving - self.saving.steps * step_s


def figure_of(values: Sequence[float]) -> Figure:
    """The median of ``values`` and its bounds, which are two of the sorted values (sign test)."""
    ordered = sorted(values)
    outside = _values_outside(len(ordered))
    if outside is None:
        return Figure(median(ordered), None, None, len(ordered))
    return Figure(median(ordered), ordered[outside], ordered[-1 - outside], len(ordered))


def cost_of(differences: Sequence[float]) -> Figure | None:
    """What a save costs, from the differences of pairs.

    Returns:
        None where that cannot be told: the bounds of the median reach to zero or below, or there are too few pairs.
    """
    figure = figure_of(differences)
    return figure if figure.low is not None and figure.low > 0 else None


def _values_outside(count: int) -> int | None:
    """How many of ``count`` sorted values can be left out at each end, so that the median lies between the others.

    Returns:
        None where not even the least and the greatest value enclose it with that confidence.
    """
    outside, miss = None, 0.0
    for below in range(count // 2):
        # Each value is below the true median with probability 1/2.
        miss += 2 * math.comb(count, below) / 2**count
        if miss > 1 - _CONFIDENCE:
            break
        outside = below
    return outside
