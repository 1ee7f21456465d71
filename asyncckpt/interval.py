"""How often to save: the interval that loses the least time to saves and failures, and the arithmetic of that.

J. W. Young, "A first order approximation to the optimum checkpoint interval", Communications of the ACM 17 (1974);
J. T. Daly, "A higher order estimate of the optimum checkpoint interval for restart dumps", Future Generation Computer
Systems 22 (2006). Both minimize the time that goes into saves and into work that is done again.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass

_UNITS = {"": 1.0, "s": 1.0, "m": 60.0, "min": 60.0, "h": 3600.0, "d": 86400.0}
_DURATION = re.compile(r"(\d+(?:\.\d*)?|\.\d+)\s*([a-z]*)")


def parse_duration(text: str) -> float:
    """Seconds, from "90s", "30m", "4h", "2d", or a plain number of seconds. Raises ``ValueError``."""
    match = _DURATION.fullmatch(text.strip().lower())
    seconds = math.inf if match is None else float(match[1]) * _UNITS.get(match[2], math.inf)
    if not math.isfinite(seconds):  # 0 of what is no unit is no number
        raise ValueError(f"{text!r} is no duration: write 90s, 30m, 4h or 2d")
    return seconds


@dataclass(frozen=True)
class Loss:
    """What a failure costs on average, and which part of all time is lost, with an interval of ``interval_s``.

    ``save_part`` of the time goes into calls of ``save``, ``failure_part`` into what is done again after failures, and
    into restarts, where it is known how long these take.
    """

    interval_s: float
    per_failure_s: float
    save_part: float
    failure_part: float

    @property
    def part(self) -> float:
        """Of all time, how much is lost; 0.01 is one percent, and from 1 on the training gets nowhere."""
        return self.save_part + self.failure_part


@dataclass(frozen=True)
class Advice:
    """How often to save, and from what that follows. All are seconds, from call to call, but ``saves``, a number.

    ``stall_s`` and ``durable_s`` are the medians of that many ``saves``: how long a call keeps the training, and how
    long after it the checkpoint is durable, both without waiting for a free slot. ``mtbf_s``: the mean time between
    failures. ``restart_s``: how long a restart takes; None: not known, and left out.
    """

    stall_s: float
    durable_s: float
    mtbf_s: float
    saves: int
    restart_s: float | None = None

    def __post_init__(self) -> None:
        """Raises ``ValueError`` for times that cannot be."""
        if not (0 < self.mtbf_s < math.inf):
            raise ValueError(f"the mean time between failures is a number of seconds above 0, not {self.mtbf_s!r}")
        if self.restart_s is not None and not (0 <= self.restart_s < math.inf):
            raise ValueError(f"a restart takes a number of seconds, not {self.restart_s!r}")

    def __str__(self) -> str:
        return f"a save every {self.interval_s:.3g} s"

    @property
    def young_s(self) -> float:
        """Young's interval: sqrt(2 C M), of a cost C and a mean time M between failures."""
        return math.sqrt(2 * self.stall_s * self.mtbf_s)

    @property
    def daly_s(self) -> float:
        """Daly's: sqrt(2 C M) (1 + x / 3 + x^2 / 9), where x = sqrt(C / 2 M), if C < 2 M; else M + C.

        The paper has this without C, as it counts the training between two saves alone.
        """
        if self.stall_s >= 2 * self.mtbf_s:
            return self.mtbf_s + self.stall_s
        x = math.sqrt(self.stall_s / (2 * self.mtbf_s))
        return self.young_s * (1 + x / 3 + x * x / 9)

    @property
    def interval_s(self) -> float:
        """What is suggested: Daly's, but no less than a save takes to be durable.

        Who saves more often than storage takes it waits for a free slot, sooner or later; with two slots that is a
        little more often than this.
        """
        return max(self.daly_s, self.durable_s)

    @property
    def is_bound_by_storage(self) -> bool:
        """Whether it is the durable lag that decides."""
        return self.durable_s > self.daly_s

    def loss(self, interval_s: float) -> Loss:
        """What saving every ``interval_s`` seconds costs.

        A failure comes, on average, half an interval after the last call; the checkpoint of the call that is the last
        durable one is older than that by the durable lag.
        """
        lost = interval_s / 2 + self.durable_s + (self.restart_s or 0.0)
        save_part = self.stall_s / interval_s if self.stall_s else 0.0
        return Loss(interval_s, lost, save_part, lost / self.mtbf_s)
