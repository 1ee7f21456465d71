"""Contestants of the bench that save the same state in turns, as long as a budget lasts."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from statistics import median

from bench import contestants, files
from bench.contestants import told
from bench.contestants.contestant import Contestant
from bench.costs import look
from bench.saves import Series
from bench.states import Made, Request, make
from bench.trainer import Trainer
from torch.distributed.checkpoint.api import CheckpointException

from gpu_check.budget import Budget
from gpu_check.device import Device
from gpu_check.figures import Figure

OURS = ("asyncckpt", "asyncckpt-overlap")
_CLOSE_S = 10.0


HELD, DURABLE, CPU = "save holds the caller", "durable after", "CPU of a save"


@dataclass
class Saves:
    """Seconds of one contestant's saves. The first save is the cold one."""

    columns: dict[str, list[float]] = field(default_factory=lambda: {HELD: [], DURABLE: [], CPU: []})
    longest: float = 0.0
    """Seconds of the longest warm turn, all in all. A cold one may take many times as long."""


def _warm(seconds: list[float]) -> float | None:
    return median(seconds[1:]) if len(seconds) > 1 else None


class Race:
    """One state, and the contestants that save it; to be used in ``racing``."""

    def __init__(self, device: Device, request: Request, folder: str) -> None:
        self._device, self._request, self._folder = device, request, folder
        self._trainers: dict[str, tuple[Made, Trainer]] = {}
        self._made: dict[str, Contestant] = {}
        self._series: dict[str, Series] = {}
        self.saves: dict[str, Saves] = {}
        self.left_out: dict[str, str] = {}

    @property
    def nbytes(self) -> int:
        """Return the bytes of the state."""
        return self._trainer(OURS[0])[0].nbytes

    def run(self, names: Sequence[str], rounds: int, budget: Budget) -> None:
        """Have each of ``names`` save once, cold, and then ``rounds`` times in turns. One that fails is left out."""
        for name in names:
            self._enter(name, budget)
        for _ in range(rounds + 1):
            for name in [name for name in names if name in self._series]:
                self._turn(name, budget)

    def check_newest(self, name: str, budget: Budget) -> None:
        """Save once more, and load that checkpoint. Raises ``RuntimeError`` if it has other values."""
        with budget.limit():
            self._series[name].save()
            self._series[name].check(self._trainer(name)[0])

    def close(self) -> None:
        """End all contestants, but none that hangs."""
        for name, contestant in self._made.items():
            with contextlib.suppress(TimeoutError), Budget(_CLOSE_S).limit():
                contestants.close_all({name: contestant}, self.left_out)
        self._made.clear()
        self._series.clear()
        self._trainers.clear()

    def held(self, name: str) -> float | None:
        """Return the median seconds that a warm save of that contestant holds the caller; None without one."""
        return self.value(name, HELD)

    def value(self, name: str, what: str) -> float | None:
        """Return the median of a contestant's warm saves, in seconds; None without one."""
        return _warm(self.saves[name].columns[what]) if name in self.saves else None

    def figures(self, label: str) -> Iterator[Figure]:
        """Yield the figures of all who have saved, and why others have not."""
        for name, saves in self.saves.items():
            who = f"{label}, {name}"
            if not saves.columns[HELD]:
                continue
            yield Figure(f"{who}: first {HELD}", saves.columns[HELD][0] * 1e3, "ms")
            for what, seconds in saves.columns.items():
                unit, scale = ("ms", 1e3) if what == HELD else ("s", 1.0)
                if (value := _warm(seconds)) is not None:
                    samples = tuple(each * scale for each in seconds[1:])
                    yield Figure(f"{who}: {what}", value * scale, unit, samples=samples)
        for name, why in self.left_out.items():
            yield Figure(f"{label}, {name}: left out", why)

    def _trainer(self, name: str) -> tuple[Made, Trainer]:
        """Return the state that this contestant saves; all have the same one, if they know the device."""
        where = str(self._device.device) if name in OURS else self._device.of_peers
        if where not in self._trainers:
            made = make(replace(self._request, device=where))
            self._trainers[where] = made, Trainer(made.state, where)
        return self._trainers[where]

    def _enter(self, name: str, budget: Budget) -> None:
        if name in self._series:
            return
        made, trainer = self._trainer(name)
        contestants.choose_sharing(made.state)
        try:
            with budget.limit():
                self._made |= contestants.make_all([name], self._folder, made.state, self.left_out)
        except TimeoutError as error:
            self.left_out[name] = told(error)
        if name in self._made:
            self._series[name] = Series(self._made[name], trainer)
            self.saves[name] = Saves()

    def _turn(self, name: str, budget: Budget) -> None:
        saves, begun = self.saves[name], time.monotonic()
        if saves.longest * 1.2 > budget.left:
            return
        before = look()
        try:
            with budget.limit():
                held, _, durable = self._series[name].save()
        except (Exception, CheckpointException) as error:  # DCP's is no Exception
            self.left_out[name] = f"after {len(saves.columns[HELD])} saves: {told(error)}"
            del self._series[name]
            return
        for what, seconds in ((HELD, held), (DURABLE, durable), (CPU, look().since(before).cpu_s)):
            saves.columns[what].append(seconds)
        self._series[name].remove()
        if len(saves.columns[HELD]) > 1:
            saves.longest = max(saves.longest, time.monotonic() - begun)


@contextlib.contextmanager
def racing(device: Device, request: Request, inside: str | None = None) -> Iterator[Race]:
    """Make a race in a temporary folder in ``inside``, by default the system's, and close it in the end."""
    with files.working_folder(inside) as folder:
        race = Race(device, request, folder)
        try:
            yield race
        finally:
            race.close()
