"""The part ``train``: what saves cost the steps of a model of 1.3 billion parameters."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from statistics import median

from bench import contestants, files
from bench.contestants import told
from bench.contestants.contestant import Contestant
from torch.distributed.checkpoint.api import CheckpointException

from gpu_check import environment
from gpu_check.budget import Budget
from gpu_check.device import Device
from gpu_check.figures import Figure
from gpu_check.model import Training
from gpu_check.saves import peers_by_held
from gpu_check.task import Task

_EVERY = 5
_STEPS = 15
_LINK_BYTES = 1 << 30
_SAVES = 4
_OURS, _PEERS = "asyncckpt-overlap", ("nvrx", "dcp-process")
_SHARE, _LAST_SHARE = 0.6, 0.95
"""Of what is left of the budget when a contestant's turn comes, and of the last one."""


@dataclass
class _Steps:
    """Seconds, without the first save, which is cold."""

    plain: list[float] = field(default_factory=list)
    """Steps that begin with no save."""
    saving: list[float] = field(default_factory=list)
    """Steps that begin with a save, the call of ``save`` among them."""
    held: list[float] = field(default_factory=list)
    update: list[float] = field(default_factory=list)
    """The calls of the optimizer after a save."""
    durable: list[float] = field(default_factory=list)


def measure(task: Task) -> Iterator[Figure]:
    """Train without saves first, and then with those of one contestant after the other."""
    device, budget = task.device, task.budget
    training = Training(device, task.scale)
    yield Figure("state", training.nbytes / 1e9, "GB")
    loop = _Loop(device, training)
    for _ in range(3):
        loop.step(nullcontext())
    usual = [loop.step(nullcontext()) for _ in range(_STEPS)]
    yield Figure("a step", median(usual) * 1e3, "ms", samples=_ms(usual))
    yield Figure("slowest step, over the median", (max(usual) - median(usual)) * 1e3, "ms")
    # The weights change behind the last copy: what the link needs longer than forward and backward, a save costs.
    link = training.nbytes / _LINK_BYTES * device.link_seconds(_LINK_BYTES)[0]
    before = median(loop.backward() for _ in range(3))
    yield Figure("forward and backward", before * 1e3, "ms")
    yield Figure("what the link makes a save cost, by a step", max(0.0, link - before) / median(usual))
    # A slow disk writes three of them for longer than there is time: then into memory.
    disk = (task.found.value("env", environment.DISK) or 0.0) * 1e9
    inside = None if 3 * training.nbytes < disk * budget.left * _SHARE / 2 else "/dev/shm"
    yield Figure("checkpoints are written to", "the disk" if inside is None else "tmpfs, as the disk is slow")
    names = [_OURS, *(name for name in _PEERS if name in peers_by_held(task))]
    for name in names:
        share = budget.share(_SHARE if name != names[-1] else _LAST_SHARE)
        with files.working_folder(inside) as folder:
            yield from _with_saves(name, loop, training, folder, share, median(usual))


def _with_saves(
    name: str, loop: _Loop, training: Training, folder: str, budget: Budget, usual: float
) -> Iterator[Figure]:
    left_out: dict[str, str] = {}
    made: dict[str, Contestant] = {}
    found = _Steps()
    try:
        with budget.limit():
            state = training.state()
            contestants.choose_sharing(state)
            made = contestants.make_all([name], folder, state, left_out)
            if name in made:
                loop.save(made[name], found, budget)
    except (Exception, CheckpointException) as error:  # DCP's is no Exception
        left_out[name] = told(error)
    contestants.close_all(made, left_out)
    yield from _figures(name, found, usual)
    if name in left_out or not found.saving:
        saved = f"after {len(found.saving)} warm saves: {left_out.get(name, 'there was no time for more')}"
        yield Figure(f"{name}: left out", saved)


class _Loop:
    """The loop of a training."""

    def __init__(self, device: Device, training: Training) -> None:
        self._device, self._training, self._number = device, training, 0

    def step(self, changing: AbstractContextManager[object], update: list[float] | None = None) -> float:
        """Train one step; ``changing`` is entered while the weights change. Returns its seconds."""
        self._device.synchronize()
        begun = time.perf_counter()
        self._number += 1
        self._training.backward(self._number)
        before = time.perf_counter()
        with changing:
            self._training.update()
        if update is not None:
            update.append(time.perf_counter() - before)
        self._device.synchronize()
        return time.perf_counter() - begun

    def backward(self) -> float:
        """Compute gradients, and no more. Returns the seconds."""
        self._device.synchronize()
        begun = time.perf_counter()
        self._training.backward(self._number)
        self._device.synchronize()
        took = time.perf_counter() - begun
        self._training.update()
        return took

    def save(self, contestant: Contestant, found: _Steps, budget: Budget) -> None:
        """Save before each fifth step, as often as the budget allows. A save begins when the one before is durable."""
        longest = 0.0
        for number in range(1, _SAVES + 2):
            if number > 2 and budget.left < longest * 1.2:
                break
            self._device.synchronize()
            turn = begun = time.perf_counter()
            pending = contestant.save(number, self._training.state())
            held = time.perf_counter() - begun
            update: list[float] = []
            saving = held + self.step(contestant.changing(), update)
            plain = [self.step(nullcontext()) for _ in range(_EVERY - 1)]
            pending.wait()
            waited = time.perf_counter()
            pending.finish()
            held += time.perf_counter() - waited
            if not contestant.fsyncs:
                files.sync(contestant.path(number))
            durable = time.perf_counter() - begun
            contestant.remove(number)
            longest = max(longest, time.perf_counter() - turn)
            if number > 1:  # the first one is cold
                found.held.append(held)
                found.saving.append(saving)
                found.plain.extend(plain)
                found.update.extend(update)
                found.durable.append(durable)


def _figures(name: str, found: _Steps, usual: float) -> Iterator[Figure]:
    """Yield the figures of one contestant; ours have thresholds."""
    if not found.saving:
        return
    ours = name.startswith("asyncckpt")
    slowest = max(found.saving + found.plain) - usual
    # What a save costs the step that it falls into, and the four after it.
    cost = sum(found.saving + found.plain) / len(found.saving) - _EVERY * usual
    yield Figure(f"{name}: save holds the caller", median(found.held) * 1e3, "ms", None, None, _ms(found.held))
    yield Figure(f"{name}: durable after", median(found.durable), "s", samples=tuple(found.durable))
    yield Figure(f"{name}: step with a save", median(found.saving) * 1e3, "ms", samples=_ms(found.saving))
    yield Figure(f"{name}: steps while it is written", median(found.plain) * 1e3, "ms", samples=_ms(found.plain))
    yield Figure(f"{name}: optimizer's call after a save", max(found.update) * 1e3, "ms", samples=_ms(found.update))
    yield Figure(f"{name}: cost of a save, by a step", cost / usual, at_most=0.02 if ours else None)
    yield Figure(f"{name}: slowest step, over the median", slowest * 1e3, "ms", at_most=10 if ours else None)


def _ms(seconds: list[float]) -> tuple[float, ...]:
    return tuple(each * 1e3 for each in seconds)
