"""Measure the cost of a save to the training loop: the time of steps with a save, minus that of steps without.

Steps run in pairs of equal blocks, one with a save at its beginning and one without, in alternating order. A block is
long enough for the save to be durable before its end. The cost is the median of the differences.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch

from bench import contestants, files
from bench.contestants import told
from bench.contestants.contestant import LIMIT_S, Contestant
from bench.limits import Limits
from bench.saves import check
from bench.states import Made, Request, make
from bench.trainer import Trainer
from bench.turns import Pace, take

LONGER = 2.0
"""The length of a block, as a multiple of the first warm save. ``SPARE_STEPS`` are added."""
SPARE_STEPS = 4
ROW = ("cost_s", "with_s", "without_s", "steps", "fitted")


class Blocks:
    """The pairs of blocks of one contestant."""

    def __init__(self, contestant: Contestant, trainer: Trainer) -> None:
        self._contestant = contestant
        self._trainer = trainer
        self._number = 0
        self._step_number = 0
        self._steps = 0
        self._save_first = False

    def calibrate(self) -> None:
        """Run a cold and a warm save, and count the steps until the warm save is durable."""
        for _ in range(2):
            self.remove()
            steps, saved = 0, self._begin()
            deadline = time.monotonic() + LIMIT_S
            while not saved.poll():
                if time.monotonic() > deadline:
                    raise TimeoutError(f"not durable after {LIMIT_S:g} s")
                self._step()
                steps += 1
        self._steps = int(steps * LONGER) + SPARE_STEPS

    def pair(self) -> list[float]:
        """Return ``ROW``: the cost of the save, the seconds of both blocks, their steps, and 1 if durable in time."""
        self._save_first = not self._save_first
        if self._save_first:
            with_s, fitted = self._block(save=True)
            without_s, _ = self._block(save=False)
        else:
            without_s, _ = self._block(save=False)
            with_s, fitted = self._block(save=True)
        return [with_s - without_s, with_s, without_s, float(self._steps), float(fitted)]

    def _block(self, save: bool) -> tuple[float, bool]:
        if save:
            self.remove()
        self._trainer.synchronize()
        fitted = True
        begun = time.perf_counter()
        saved = self._begin() if save else None
        for _ in range(self._steps):
            self._step()
            if saved is not None:
                saved.poll()
        self._trainer.synchronize()
        elapsed = time.perf_counter() - begun
        if saved is not None:
            fitted = saved.poll()
            deadline = time.monotonic() + LIMIT_S
            while not saved.poll() and time.monotonic() < deadline:
                time.sleep(0.01)
        return elapsed, fitted

    def _step(self) -> None:
        self._trainer.step(self._contestant.changing)

    def _begin(self) -> _Saved:
        self._number += 1
        self._step_number = self._trainer.step_number
        return _Saved(self._contestant, self._number, self._trainer)

    def check(self, made: Made) -> None:
        """Check that later steps did not tear the newest checkpoint. Raises ``RuntimeError``."""
        check(self._contestant, self._number, self._step_number, self._trainer, made)

    def remove(self) -> None:
        """Delete the newest checkpoint."""
        self._contestant.remove(self._number)


class _Saved:
    """A save in the loop. A thread syncs the written files if the contestant does not."""

    def __init__(self, contestant: Contestant, number: int, trainer: Trainer) -> None:
        self._pending = contestant.save(number, trainer.state)
        self._written = False
        self._syncing: threading.Thread | None = None
        if not contestant.fsyncs:
            self._syncing = threading.Thread(target=files.sync, args=(contestant.path(number),))

    def poll(self) -> bool:
        """Return whether the save is durable. Must be called between steps."""
        if not self._written:
            self._written = self._pending.poll()
            if self._written and self._syncing is not None:
                self._syncing.start()
        return self._written and not (self._syncing is not None and self._syncing.is_alive())


def measure(
    request: Request, names: Sequence[str], threads: int, pace: Pace, folder: str, *, checked: bool = True
) -> dict[str, Any]:
    """Measure the cost with each contestant and a trainer of ``threads`` threads, and the copy of the bytes."""
    usual = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        return _measure(request, names, pace, folder, checked) | {"train_threads": threads}
    finally:
        torch.set_num_threads(usual)


def _measure(request: Request, names: Sequence[str], pace: Pace, folder: str, checked: bool) -> dict[str, Any]:
    made = make(request)
    trainer = Trainer(made.state, request.device)
    left_out: dict[str, str] = {}
    sharding = contestants.choose_sharing(made.state)
    for _ in range(SPARE_STEPS):
        trainer.step()
    there = contestants.make_all(names, folder, made.state, left_out)
    blocks = {name: Blocks(contestant, trainer) for name, contestant in there.items()}
    with Limits(made.nbytes, folder, request.device) as limits:
        copies: dict[str, Callable[[], list[float]]] = {
            name: partial(_alone, limit) for name, limit in limits.of_copies().items()
        }
        # The first round calibrates.
        taken = take(copies | {name: _Turn(each) for name, each in blocks.items()}, pace, f"loop {request.label}")
    left_out |= taken.left_out
    for name, each in blocks.items():
        if checked and name in taken.found:
            try:
                each.check(made)
            except Exception as error:
                left_out[name] = told(error)
                del taken.found[name]
        each.remove()
    contestants.close_all(there, left_out)
    return {
        "state": made.facts(),
        "limits": {name: [row[0] for row in rows[1:]] for name, rows in taken.found.items() if name in copies},
        "results": {
            name: dict(zip(ROW, map(list, zip(*rows[1:], strict=True)), strict=True))
            for name, rows in taken.found.items()
            if name in blocks and rows[1:]
        },
        "left_out": left_out,
        "sharing": sharding,
        "checked": checked,
    }


def _alone(limit: Callable[[], float]) -> list[float]:
    return [limit()]


class _Turn:
    """A turn of one contestant. The first turn calibrates."""

    def __init__(self, blocks: Blocks) -> None:
        self._blocks = blocks
        self._calibrated = False

    def __call__(self) -> list[float]:
        if not self._calibrated:
            self._blocks.calibrate()
            self._calibrated = True
            return []
        return self._blocks.pair()
