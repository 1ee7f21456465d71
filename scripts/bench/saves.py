"""Measure how long ``save`` blocks the trainer, and how long it takes until the checkpoint is durable.

*Blocked*: the time of the call, and of the work that the trainer has to do after the write. *Free*: from the call until
the tensors may change. This is longer than the call only if the copy continues after the call. *Durable*: from the call
until data and metadata are on storage. The suite syncs the files of contestants that do not, and counts that time.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from bench import contestants, files
from bench.contestants import told
from bench.contestants.contestant import Contestant
from bench.limits import Limits
from bench.states import Made, Request, blank, make, same_tensors
from bench.trainer import Trainer, are_of
from bench.turns import Pace, take

COLUMNS = ("blocked_s", "free_s", "durable_s")


class Series:
    """The saves of one contestant, one after the other. Only the newest checkpoint is kept."""

    def __init__(self, contestant: Contestant, trainer: Trainer) -> None:
        self._contestant = contestant
        self._trainer = trainer
        self._number = 0
        self._step_number = 0

    def save(self) -> list[float]:
        """Change the state, save it, and wait until the checkpoint is on storage. Returns ``COLUMNS``."""
        contestant = self._contestant
        if self._number:
            self.remove()
        self._number += 1
        with contestant.changing():
            self._trainer.change()
        self._step_number = self._trainer.step_number
        self._trainer.synchronize()
        begun = time.perf_counter()
        pending = contestant.save(self._number, self._trainer.state)
        returned = time.perf_counter()
        with contestant.changing():
            free = time.perf_counter()
        pending.wait()
        waited = time.perf_counter()
        pending.finish()
        finished = time.perf_counter()
        if not contestant.fsyncs:
            files.sync(contestant.path(self._number))
        durable = time.perf_counter()
        return [returned - begun + finished - waited, free - begun, durable - begun]

    @property
    def path(self) -> str:
        """The folder of the newest checkpoint."""
        return self._contestant.path(self._number)

    def remove(self) -> None:
        """Delete the newest checkpoint."""
        self._contestant.remove(self._number)

    def check(self, made: Made) -> float:
        """Check that the newest checkpoint has the values of its step, and return the seconds of the load.

        Raises ``RuntimeError``.
        """
        return check(self._contestant, self._number, self._step_number, self._trainer, made)


def check(contestant: Contestant, number: int, step_number: int, trainer: Trainer, made: Made) -> float:
    """Check that checkpoint ``number`` has step ``step_number`` and the values of ``made``, which ``trainer`` trains.

    Returns the seconds of the load. Raises ``RuntimeError``.
    """
    into = blank(made.state)
    begun = time.perf_counter()
    loaded = contestant.load(number, into)
    elapsed = time.perf_counter() - begun
    if loaded["step"] != step_number or not are_of(loaded, step_number):
        raise RuntimeError(f"its checkpoint is not of step {step_number}")
    trainer.set_marks(loaded)
    if not same_tensors(made.state, loaded):
        raise RuntimeError("its checkpoint has other values")
    return elapsed


def measure(
    request: Request, names: Sequence[str], pace: Pace, folder: str, *, changing: int = 0, checked: bool = True
) -> dict[str, Any]:
    """Measure the saves of these contestants, and the limits."""
    made = make(request)
    trainer = Trainer(made.state, request.device, changing)
    left_out: dict[str, str] = {}
    sharding = contestants.choose_sharing(made.state)
    there = contestants.make_all(names, folder, made.state, left_out)
    series = {name: Series(contestant, trainer) for name, contestant in there.items()}
    with Limits(made.nbytes, folder, request.device) as limits:
        turns: dict[str, Callable[[], list[float]]] = {
            name: partial(alone, limit) for name, limit in limits.of_saves().items()
        }
        taken = take(turns | {name: each.save for name, each in series.items()}, pace, f"save {request.label}")
    left_out |= taken.left_out
    found = taken.found
    for name, each in series.items():
        if checked and name in found:
            try:
                each.check(made)
            except Exception as error:
                left_out[name] = told(error)
                del found[name]
        each.remove()
    contestants.close_all(there, left_out)
    return {
        "state": made.facts(),
        "limits": {name: [row[0] for row in rows[1:]] for name, rows in found.items() if name in turns},
        "results": {name: columns(rows) for name, rows in found.items() if name not in turns},
        "left_out": left_out,
        "sharing": sharding,
        "checked": checked,
    }


def alone(limit: Callable[[], float]) -> list[float]:
    """Return a row for a limit, which has one column."""
    return [limit()]


def columns(rows: list[list[float]]) -> dict[str, Any]:
    """Return the columns of the warm saves, and the first, cold save separately."""
    columns = dict(zip(COLUMNS, map(list, zip(*rows[1:], strict=True)), strict=True)) if rows[1:] else {}
    first = dict(zip((f"first_{name}" for name in COLUMNS), rows[0], strict=True))
    return columns | first
