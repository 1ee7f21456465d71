"""Contestants of the bench that save the same state in turns, as long as a budget lasts."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from statistics import median

import psutil
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


@dataclass
class Saves:
    """Seconds of one contestant's saves. The first save is the cold one."""

    held: list[float] = field(default_factory=list)
    durable: list[float] = field(default_factory=list)
    cpu: list[float] = field(default_factory=list)
    longest: float = 0.0
    """Seconds of the longest turn, all in all."""


class Race:
    """One state, and the contestants that save it; to be used in ``racing``."""

    def __init__(self, device: Device, request: Request, folder: str) -> None:
        self._device, self._request, self._folder = device, request, folder
        self._trainers: dict[str, tuple[Made, Trainer]] = {}
        self._made: dict[str, Contestant] = {}
        self._series: dict[str, Series] = {}
        self._turn_share = 1.0
        self._processes: dict[str, set[int]] = {}
        self.saves: dict[str, Saves] = {}
        self.left_out: dict[str, str] = {}

    @property
    def nbytes(self) -> int:
        """Return the bytes of the state."""
        return self._trainer(OURS[0])[0].nbytes

    def run(self, names: Sequence[str], rounds: int, budget: Budget, *, turn: float = 0.3) -> None:
        """Have each of ``names`` save once, cold, and then ``rounds`` times in turns. One that fails is left out.

        A single turn gets the fraction ``turn`` of the seconds left: a peer that hangs leaves time for the others.
        """
        self._turn_share = turn
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
        return self._warm(name, self.saves[name].held) if name in self.saves else None

    def durable(self, name: str) -> float | None:
        """Return the median seconds until a warm save of that contestant is durable; None without one."""
        return self._warm(name, self.saves[name].durable) if name in self.saves else None

    def cpu(self, name: str) -> float | None:
        """Return the median seconds of all cores that a warm save costs; None without one."""
        return self._warm(name, self.saves[name].cpu) if name in self.saves else None

    def figures(self, label: str) -> Iterator[Figure]:
        """Yield the figures of all who have saved, and why others have not."""
        for name, saves in self.saves.items():
            who = f"{label}, {name}"
            if not saves.held:
                continue
            yield Figure(f"{who}: first save holds the caller", saves.held[0] * 1e3, "ms")
            for what, unit, scale, seconds in (
                ("save holds the caller", "ms", 1e3, saves.held),
                ("durable after", "s", 1.0, saves.durable),
                ("CPU of a save", "s", 1.0, saves.cpu),
            ):
                if (value := self._warm(name, seconds)) is not None:
                    samples = tuple(each * scale for each in seconds[1:])
                    yield Figure(f"{who}: {what}", value * scale, unit, samples=samples)
        for name, why in self.left_out.items():
            yield Figure(f"{label}, {name}: left out", why)

    def _warm(self, name: str, seconds: list[float]) -> float | None:
        return median(seconds[1:]) if len(seconds) > 1 else None

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
            with budget.share(self._turn_share).limit():
                self._made |= contestants.make_all([name], self._folder, made.state, self.left_out)
        except TimeoutError as error:
            self.left_out[name] = told(error)
        self._processes[name] = self._new_processes()
        if name in self._made:
            self._series[name] = Series(self._made[name], trainer)
            self.saves[name] = Saves()

    def _new_processes(self) -> set[int]:
        """Return the children of this process that belong to no contestant so far."""
        known = set().union(*self._processes.values())
        return {each.pid for each in psutil.Process().children(recursive=True)} - known

    def _drop(self, name: str) -> None:
        """Let go of a contestant that has failed. Its processes must not be in the way of others."""
        del self._series[name], self._made[name]
        for pid in self._processes.pop(name) | self._new_processes():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)

    def _turn(self, name: str, budget: Budget) -> None:
        saves, begun = self.saves[name], time.monotonic()
        if saves.longest * 1.2 > budget.left:
            return
        before = look()
        try:
            with budget.share(self._turn_share).limit():
                held, _, durable = self._series[name].save()
        except (Exception, CheckpointException) as error:  # DCP's is no Exception
            self.left_out[name] = f"after {len(saves.held)} saves: {told(error)}"
            self._drop(name)
            return
        saves.held.append(held)
        saves.durable.append(durable)
        saves.cpu.append(look().since(before).cpu_s)
        self._series[name].remove()
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
