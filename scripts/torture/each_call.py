"""Fail each call of a save, a load, an open and a restart: number 1, 2, 3 ..., once and for ever, with each error.

A trainer runs in a process of its own. The library ``failing_calls.c`` is loaded in the trainer and in its worker. One
round arms the library for one call of the trainer or the worker, runs one act (for example a save), disarms the library
and checks that:

- the act succeeds, or raises one error of asyncckpt;
- a save that raises leaves no checkpoint, and a save that succeeds leaves a whole one;
- the next save works, and all promises hold (``promises.judge``);
- nothing waits longer than ``LIMIT_S``.

The calls of an act are counted first. ``--each-call N`` fails each call with N of six errors, in turns, so that each
error meets each kind of call even with N = 1.
"""

from __future__ import annotations

import contextlib
import errno
import json
import logging
import mmap
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import IO, Any, cast

import torch
from tqdm import tqdm

from asyncckpt import Checkpointer
from asyncckpt.errors import CheckpointError, SaveTimeoutError, StorageError, WorkerDiedError
from torture import promises
from torture.scenarios import CONFIG, SCENARIOS, Files, Pointers, Saver, Scenario, Steps, state_of
from torture.system_calls import Calls, build, preloaded, variables_of
from torture.tally import LIMIT_S, Tally

ERRORS = (errno.EIO, errno.ENOSPC, errno.EINTR, errno.EAGAIN, errno.EMFILE, errno.ENOMEM)
_SIDES = ("trainer", "worker")
_ACTS = ("save", "load", "open", "restart")
_MEMORY = "memory, once"
# A silent worker is killed 9 seconds after its timeout.
_CONFIG = replace(CONFIG, timeout=8.0, commit_timeout=8.0)
# The kinds of calls to count and fail, and how long they fail.
_KINDS = ("files, once", "files, once, but done", "files, for ever", "anywhere, once", "anywhere, for ever", _MEMORY)
# A new interpreter makes thousands of calls and a million allocations. Only this number of them fail, evenly spread.
# With more errors, more calls fail.
_PLACES = 250
# Faults of Python and torch without memory: a crash; a new thread that dies early, so that its starter waits for ever;
# a thread pool that loses a result or the end of one of its threads.
_FOREIGN = re.compile(
    r"^ended with -11|threading.py\", line \d+ in wait .*threading.py\", line \d+ in start"
    r"|futures/_base.py.* in result|futures/thread.py\", line \d+ in shutdown"
)
# A call number that no act reaches.
_NEVER = 1 << 30


@dataclass(frozen=True)
class Round:
    """An act, and the number of the call that fails."""

    scenario: str
    side: str
    act: str
    number: int
    error: int
    kind: str

    @property
    def forever(self) -> bool:
        return "for ever" in self.kind

    @property
    def everywhere(self) -> bool:
        return "anywhere" in self.kind

    @property
    def memory(self) -> bool:
        return self.kind == _MEMORY

    @property
    def does(self) -> bool:
        return "done" in self.kind

    def __str__(self) -> str:
        name = errno.errorcode[self.error]
        return f"{self.scenario}, {self.act}: call {self.number} of the {self.side} fails ({self.kind}) with {name}"


def fail_each(
    tally: Tally, folder: Path, errors: int, scenarios: Iterable[Scenario], choice: random.Random, share: float
) -> None:
    """Fail each call of each act of each scenario of one rank.

    Args:
        tally: Gets the outcomes.
        folder: The folder to save in.
        errors: The number of errors, of six, with which each call fails in turn.
        scenarios: The kinds of saves.
        choice: Chooses the calls.
        share: The share of the calls to fail, 0 to 1.
    """
    if shutil.which("cc") is None:
        tally.counts["no compiler: no call failed"] += 1
        return
    library = folder / "failing_calls.so"
    build(library)
    for scenario in scenarios:
        if scenario.ranks > 1:
            continue
        acts = _ACTS if type(scenario) is Steps else _ACTS[:1]
        for side in _SIDES:
            for act in acts:
                with _Trainer(folder / "each-call", library, scenario, side) as trainer:
                    none = Round(scenario.name, side, act, _NEVER, errno.EIO, "")
                    counts = {kind: _count(trainer, replace(none, kind=kind)) for kind in _KINDS}
                if rounds := [each for each in _rounds(none, errors, counts) if choice.random() < share]:
                    _fail_act(tally, folder, library, scenario, rounds)


def _fail_act(tally: Tally, folder: Path, library: Path, scenario: Scenario, rounds: list[Round]) -> None:
    """Run the rounds of one act. After a trainer dies or hangs, start a new trainer."""
    side, act = rounds[0].side, rounds[0].act
    progress = tqdm(rounds, desc=f"each call: {scenario.name}, {act}, {side}", unit="call", disable=None)
    pending = iter(progress)
    while (round_ := next(pending, None)) is not None:
        with _Trainer(folder / "each-call", library, scenario, side) as trainer:
            while round_ is not None:
                said = trainer.go(round_)
                if said is None:
                    end = trainer.end()
                    if round_.memory and round_.side == "trainer" and _FOREIGN.search(end):
                        tally.counts["each call: Python or torch in the trainer crashed or hung without memory"] += 1
                    else:
                        tally.lose(f"{round_}: the trainer {end}")
                    break
                if said["call"]:
                    tally.counts["each call: places"] += 1
                    tally.counts[f"each call: {act} of the {side} {said['outcome']}"] += 1
                    tally.wait(f"each call: longest {act}, s", said["took"])
                for broken in said["broken"]:
                    tally.lose(f"{round_} ({said['call']}, {said['outcome']}): {broken}")
                round_ = next(pending, None)


def _count(trainer: _Trainer, round_: Round) -> int:
    """Return the number of calls of the kind of ``round_`` in its act: the maximum of three runs, which may differ."""
    counts = []
    for _ in range(3):
        said = trainer.go(round_)
        if said is None or said["broken"]:
            raise RuntimeError(f"{round_.act} fails although no call does: {said or trainer.end()}")
        counts.append(int(said["counted"]))
    return max(counts)


def _rounds(act: Round, errors: int, counts: dict[str, int]) -> Iterator[Round]:
    """Yield the rounds of an act. The errors take turns from call to call and from kind to kind."""
    for shift, kind in enumerate(_KINDS):
        # Python repeats a call after EINTR, without an end.
        usable = [error for error in ERRORS if error != errno.EINTR or "for ever" not in kind]
        turns = min(errors, len(usable))
        if kind == _MEMORY:
            usable, turns = [errno.ENOMEM], 1
        for number in range(1, counts[kind] + 1, max(1, counts[kind] // (errors * _PLACES))):
            for turn in range(turns):
                error = usable[(number * errors + shift + turn) % len(usable)]
                yield replace(act, number=number, error=error, kind=kind)


class _Trainer:
    """The process that runs the rounds. It reads rounds from standard input, and writes results to standard output."""

    def __init__(self, place: Path, library: Path, scenario: Scenario, side: str) -> None:
        shutil.rmtree(place, ignore_errors=True)
        place.mkdir()
        controls = {each: place / f"{each}.calls" for each in _SIDES}
        for control in controls.values():
            control.write_bytes(bytes(mmap.PAGESIZE))
        variables = [
            "PYTHONMALLOC=malloc",  # the worker inherits this
            "PYTHONFAULTHANDLER=1",  # a hung trainer prints its stacks
            *variables_of(library, controls["trainer"], place),
            f"PYTHONPATH={os.pathsep.join(sys.path)}",
        ]
        command = [sys.executable, "-m", "torture.each_call", str(place), str(library), scenario.name, side]
        self._errors = (place / "errors").open("wb")
        self._process = subprocess.Popen(
            ["env", *variables, *command],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._errors,
            text=True,
        )
        self._to, self._from = cast("IO[str]", self._process.stdin), cast("IO[str]", self._process.stdout)
        self._place = place

    def go(self, round_: Round) -> dict[str, Any] | None:
        """Run a round. Return None if the trainer dies or does not answer in time."""
        try:
            self._to.write(json.dumps(vars(round_)) + "\n")
            self._to.flush()
        except BrokenPipeError:
            return None
        with _Watchdog(self._process, 2 * LIMIT_S):
            line = self._from.readline()
        return json.loads(line) if line.endswith("\n") else None

    def end(self) -> str:
        """Kill the trainer. Return how it ended, and the position of its main thread."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(1)
        ended = self._process.poll()
        self._process.kill()
        self._process.wait()
        stack = (self._place / "errors").read_text(errors="replace").rpartition("Current thread")[2].splitlines()[1:5]
        return f"{'hung' if ended in (None, -signal.SIGABRT) else f'ended with {ended}'}: {' '.join(stack)}"

    def __enter__(self) -> _Trainer:
        return self

    def __exit__(self, *_: object) -> None:
        with contextlib.suppress(BrokenPipeError):
            self._to.close()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(LIMIT_S)
        self._process.kill()
        self._process.wait()
        self._from.close()
        self._errors.close()


class _Watchdog:
    """Abort a process that does not answer in time."""

    def __init__(self, process: subprocess.Popen[str], limit: float) -> None:
        self._timer = threading.Timer(limit, process.send_signal, [signal.SIGABRT])

    def __enter__(self) -> None:
        self._timer.start()

    def __exit__(self, *_: object) -> None:
        self._timer.cancel()


def _train(place: Path, library: Path, scenario: Scenario, side: str) -> None:
    """Run rounds from standard input."""
    logging.getLogger("asyncckpt").setLevel(logging.CRITICAL)
    torch.set_num_threads(1)
    root = place / "root"
    root.mkdir(exist_ok=True)
    scenario.config = _CONFIG
    calls = Calls(place / f"{side}.calls")
    with preloaded(library, place / "worker.calls", place), _acting(scenario, root) as acts:
        for line in sys.stdin:
            round_ = Round(**json.loads(line))
            print(json.dumps(_go(round_, acts, calls, scenario, root)), flush=True)


class _Acts:
    """The acts of a trainer, and its newest durable step."""

    def __init__(self, root: Path, save: Saver | None) -> None:
        """Save step 1. If ``save`` is None, create a checkpointer, which all acts except "save" need."""
        self._root = root
        self._other = root.with_name("other-0")
        self._opens = 0
        self._checkpointer = Checkpointer(root / "steps", _CONFIG) if save is None else None
        self._saver = save
        self.begun = self.done = 0
        self.save()

    def save(self) -> None:
        """Save the next step."""
        self.begun = step = self.begun + 1
        if self._checkpointer is not None:
            self._checkpointer.save(step, state_of(step)).result(LIMIT_S)
        elif self._saver is not None:
            self._saver(step)
        self.done = step

    def load(self) -> None:
        """Load the newest step from storage."""
        self._load(memory=False)

    def open(self) -> None:
        """Save once in another folder: start a worker, take memory, save, close."""
        with Steps().saving(self._other) as save:
            save(1)

    def get_ready(self) -> None:
        """Remove the folder of the last ``open``, and choose a new one, because the last worker may still write."""
        shutil.rmtree(self._other, ignore_errors=True)
        self._opens += 1
        self._other = self._root.with_name(f"other-{self._opens}")

    def restart(self) -> None:
        """Restart the training in this process, as after an exception: load from memory, and save."""
        self._checkpointer = Checkpointer(self._root / "steps", _CONFIG)
        self._load(memory=True)
        self.save()

    def _load(self, *, memory: bool) -> None:
        if self._checkpointer is None:
            raise TypeError("only a scenario with a checkpointer loads")
        expected = state_of(self.done)
        found = self._checkpointer.load(into := promises.blank(expected), memory=memory)
        if found != self.done or not promises.equal(into, expected):
            raise AssertionError(f"step {found} was loaded in the place of {self.done}, or other values")

    def close(self) -> None:
        if self._checkpointer is not None:
            self._checkpointer.close()


@contextlib.contextmanager
def _acting(scenario: Scenario, root: Path) -> Iterator[_Acts]:
    if type(scenario) is Steps:
        with contextlib.closing(_Acts(root, None)) as acts:
            yield acts
    else:
        with scenario.saving(root) as save:
            yield _Acts(root, save)


def _go(round_: Round, acts: _Acts, calls: Calls, scenario: Scenario, root: Path) -> dict[str, Any]:
    """Run one round: the act with a failing call, then a save that must work."""
    act: Callable[[], None] = getattr(acts, round_.act)
    broken: list[str] = []
    error: Exception | None = None
    acts.get_ready()
    begun = time.monotonic()
    calls.fail(
        round_.number,
        round_.error,
        only="",
        does=round_.does,
        forever=round_.forever,
        everywhere=round_.everywhere,
        memory=round_.memory,
    )
    left = 0
    try:
        act()
        left = calls.left()  # the failing allocation may be on one of these lines
        calls.failed()
    except Exception as raised:
        error = raised
    call = calls.failed()
    took = time.monotonic() - begun
    if error is not None:
        said = f"{type(error).__name__}: {error}"
        # Python and torch in the trainer may have no memory for a variable, a module or a lock. Every program raises
        # all kinds of errors then.
        if not isinstance(error, CheckpointError) and not (round_.memory and round_.side == "trainer"):
            where = [f"{frame.filename}:{frame.lineno}" for frame in traceback.extract_tb(error.__traceback__)]
            broken.append(f"no error of ours: {said}, from {', '.join(where[-4:])}")
        if not call:
            broken.append(f"no call failed, and yet: {said}")
        # A save that raised leaves no checkpoint, unless the outcome is unknown. A timeout leaves it unknown. So does a
        # dead worker for a file, which has no attempt folder. An error about a pointer says that the checkpoint stands.
        # A trainer without memory for an object may lose the answer.
        unknown: tuple[type[CheckpointError], ...] = (SaveTimeoutError,)
        if isinstance(scenario, Files):
            unknown += (WorkerDiedError,)
        if isinstance(scenario, Pointers) and "is saved, but not named as the newest" in str(error):
            unknown += (StorageError,)
        newest = acts.begun if round_.memory or isinstance(error, unknown) else acts.done
        broken += promises.judge(scenario, root, newest, acts.done)
    begun = time.monotonic()
    try:
        try:
            acts.save()
        except CheckpointError:
            # The failed call belongs to the worker's work after the act.
            acts.save()
    except Exception as raised:
        broken.append(f"the next save failed: {type(raised).__name__}: {raised}")
    took = max(took, time.monotonic() - begun)
    if took > LIMIT_S:
        broken.append(f"it took {took:.1f} s")
    broken += promises.judge(scenario, root, acts.begun, acts.done)
    outcome = "succeeded" if error is None else f"raised {type(error).__name__}"
    return {"call": call, "counted": round_.number - left, "outcome": outcome, "took": took, "broken": broken}


if __name__ == "__main__":
    _, _place, _library, _name, _side = sys.argv
    _train(Path(_place), Path(_library), next(each for each in SCENARIOS if each.name == _name), _side)
