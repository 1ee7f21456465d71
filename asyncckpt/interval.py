"""Compute how often to save: the interval that loses the least time to saves and failures.

J. W. Young, "A first order approximation to the optimum checkpoint interval", Communications of the ACM 17 (1974);
J. T. Daly, "A higher order estimate of the optimum checkpoint interval for restart dumps", Future Generation Computer
Systems 22 (2006). Both minimize the time of saves and of work that is repeated after failures.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass

_UNITS = {"": 1.0, "s": 1.0, "m": 60.0, "min": 60.0, "h": 3600.0, "d": 86400.0}
_DURATION = re.compile(r"(\d+(?:\.\d*)?|\.\d+)\s*([a-z]*)")


def parse_duration(text: str) -> float:
    """Return seconds, from "90s", "30m", "4h", "2d", or a plain number of seconds. Raises ``ValueError``."""
    match = _DURATION.fullmatch(text.strip().lower())
    seconds = math.inf if match is None else float(match[1]) * _UNITS.get(match[2], math.inf)
    if not math.isfinite(seconds):  # also "0x": 0 times infinity is not a number
        raise ValueError(f"{text!r} is no duration: write 90s, 30m, 4h or 2d")
    return seconds


@dataclass(frozen=True)
class Loss:
    """Average cost of a failure, and the fraction of all time that is lost, with an interval of ``interval_s`` seconds.

    ``per_failure_s``: seconds lost at each failure. ``save_part``: fraction of the time that goes into calls of
    ``save``. ``failure_part``: fraction that goes into repeated work and, if their duration is known, into restarts.
    """

    interval_s: float
    per_failure_s: float
    save_part: float
    failure_part: float

    @property
    def part(self) -> float:
        """Return the fraction of all time that is lost. 0.01 is one percent; from 1 on there is no progress."""
        return self.save_part + self.failure_part


@dataclass(frozen=True)
class Advice:
    """Suggested interval between saves, and its measurements. All values are seconds, except ``saves``, a count.

    ``stall_s`` and ``durable_s`` are medians over that many ``saves``: the time that a call blocks the training, and
    the time from the call until the checkpoint is durable. Both leave out waits for a free slot. ``mtbf_s``: mean time
    between failures. ``restart_s``: duration of a restart; None if it is unknown and left out. Intervals count from
    call to call.
    """

    stall_s: float
    durable_s: float
    mtbf_s: float
    saves: int
    restart_s: float | None = None

    def __post_init__(self) -> None:
        """Raise ``ValueError`` if a time is invalid."""
        if not (0 < self.mtbf_s < math.inf):
            raise ValueError(f"the mean time between failures is a number of seconds above 0, not {self.mtbf_s!r}")
        if self.restart_s is not None and not (0 <= self.restart_s < math.inf):
            raise ValueError(f"a restart takes a number of seconds, not {self.restart_s!r}")

    def __str__(self) -> str:
        return f"a save every {self.interval_s:.3g} s"

    @property
    def young_s(self) -> float:
        """Return Young's interval: sqrt(2 C M), with the cost C of a save and the mean time M between failures."""
        return math.sqrt(2 * self.stall_s * self.mtbf_s)

    @property
    def daly_s(self) -> float:
        """Return Daly's interval.

        If C < 2 M, the interval is sqrt(2 C M) (1 + x / 3 + x^2 / 9), with x = sqrt(C / 2 M); otherwise M + C.

        The paper subtracts C from this, because it counts only the training between two saves.
        """
        if self.stall_s >= 2 * self.mtbf_s:
            return self.mtbf_s + self.stall_s
        x = math.sqrt(self.stall_s / (2 * self.mtbf_s))
        return self.young_s * (1 + x / 3 + x * x / 9)

    @property
    def interval_s(self) -> float:
        """Return the suggested interval: Daly's, but at least the time until a save is durable.

        With shorter intervals a save has to wait for a free slot, sooner or later. With two slots the limit is a little
        lower than this.
        """
        return max(self.daly_s, self.durable_s)

    @property
    def is_bound_by_storage(self) -> bool:
        """Return whether the time until a save is durable is the limit, instead of Daly's interval."""
        return self.durable_s > self.daly_s

    def loss(self, interval_s: float) -> Loss:
        """Return the loss if a save is made every ``interval_s`` seconds.

        On average a failure comes half an interval after the last call. The last durable checkpoint is older than that
        call by the time until a save is durable.

        Raises:
            ValueError: The interval is negative, or 0 although a save takes time.
        """
        if not 0 <= interval_s < math.inf or (interval_s == 0 and self.stall_s):
            raise ValueError(f"no interval between saves: {interval_s} s")
        lost = interval_s / 2 + self.durable_s + (self.restart_s or 0.0)
        save_part = self.stall_s / interval_s if self.stall_s else 0.0
        return Loss(interval_s, lost, save_part, lost / self.mtbf_s)
