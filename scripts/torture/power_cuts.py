"""Cut the power of a disk while a job saves, mount the disk again, judge it, and resume with a new job.

A step counts as done only if its rank reported so before the cut.
"""

from __future__ import annotations

import contextlib
import itertools
import multiprocessing.connection
import os
import random
import shutil
import signal
import sys
import time
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from pathlib import Path
from types import FrameType

import psutil
import torch
from torch.distributed.checkpoint.api import CheckpointException
from tqdm import tqdm

from asyncckpt.link import process as worker_process
from asyncckpt.link.endpoint import FOLDER_VARIABLE
from torture.jobs import Job
from torture.loop_disks import DiskError, KernelError, LoopDisk, ServedDisk, missing
from torture.promises import go_on, judge, make_old
from torture.scenarios import SCENARIOS, Files, Saver, Scenario, state_of
from torture.system_calls import Calls, build, preloaded
from torture.tally import LIMIT_S, Tally

# Make a new file system after this number of rounds.
_ROUNDS_PER_DISK = 50
_NAIVE_ROUNDS = 4
# Stop after this number of kernel crashes, because more of them may take the machine down.
_KERNEL_ERRORS = 5
_SWEPT = ("at a call", "at a request")
# The share of rounds in which the next job starts at once, so a second cut may come before the cleanup is complete.
_AT_ONCE = 0.4
# A swept save is at least the fourth of a folder, so older steps are removed. The removal ends within this time.
_SWEPT_STEP, _BACKGROUND_S = 4, 0.1
# Maximum sleep before a cut at random. A save takes a third of it.
_SLEEP_S = 0.15
_POLL_S = 0.002


class _Naive(Files):
    """A saver that replaces one file without any fsync. If no power cut loses the file, the torture is blind."""

    name = "naive"

    @contextlib.contextmanager
    def saving(self, root: Path, rank: int = 0) -> Iterator[Saver]:
        def save(step: int) -> None:
            torch.save(state_of(step, rank), root / "new")
            os.replace(root / "new", root / "model.pt")

        yield save


@dataclass
class _Sweep:
    """The calls of a save, in order. A sweep cuts the power before each of them, and the next sweep after each."""

    after: bool
    number: int = 1
    ended: int = 0

    def key(self) -> tuple[int, int]:
        """Return a sort key for the progress of this sweep."""
        return self.ended, self.number

    def end(self) -> None:
        """Start the next sweep, because the save has no call with this number."""
        self.number, self.after, self.ended = 1, not self.after, self.ended + 1


@dataclass
class _Place:
    """The root of a scenario on the disk, and the newest begun and done steps there."""

    root: Path
    begun: int = 0
    done: int = 0


@dataclass
class _Heard:
    """All reports of the ranks of a job."""

    begun: int
    done: int
    is_idle: bool = False
    failed: str = ""

    def add(self, said: list[tuple[str, int, str]]) -> None:
        for kind, step, text in said:
            if kind == "begun":
                self.begun = max(self.begun, step)
            elif kind == "done":
                self.done = max(self.done, step)
            elif kind == "idle":
                self.is_idle = True
            else:
                self.failed = f"step {step} failed: {text}"


@dataclass
class _Disks:
    """The disk of some rounds, and the folders of the scenarios on it."""

    make: Callable[[], LoopDisk]
    disk: LoopDisk | None = None
    rounds: int = 0
    places: dict[str, _Place] = field(default_factory=dict)

    def for_round(self) -> LoopDisk:
        """Return the disk for the next round, sometimes a new one. Raises ``DiskError``."""
        if self.disk is None or self.rounds == _ROUNDS_PER_DISK:
            self.drop()
            self.disk = self.make()
        self.rounds += 1
        return self.disk

    def place(self, disk: LoopDisk, scenario: Scenario) -> _Place:
        """Return the place of a scenario. Its root folder is durable, because a user has created it before."""
        if scenario.name not in self.places:
            root = disk.mount_point / f"{scenario.name.replace(' ', '-')}-{self.rounds}"
            root.mkdir()
            fd = os.open(disk.mount_point, os.O_RDONLY)
            try:
                os.fsync(fd)
            finally:
                os.close(fd)
            self.places[scenario.name] = _Place(root)
        return self.places[scenario.name]

    def forget(self, scenario: Scenario) -> None:
        """Remove the place of a scenario, so that the next round uses another folder."""
        shutil.rmtree(self.places.pop(scenario.name).root, ignore_errors=True)

    def drop(self) -> None:
        if self.disk is not None:
            self.disk.remove()
        self.disk, self.rounds = None, 0
        self.places.clear()


def cut_power(
    tally: Tally, folder: Path, rounds: int, seed: int, file_system: str, options: str, *, caches: bool
) -> None:
    """Cut the power of disks of ``file_system`` ``rounds`` times. ``caches``: disks have a volatile write cache."""
    name = f"{file_system}{f' {options}' if options else ''}{', write cache' if caches else ''}"
    if reason := missing([file_system]):
        tally.counts[f"{name}: {reason}, no power cut"] += 1
        return
    place = folder / ("cached" if caches else "cut") / file_system
    with _orderly(), warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*torch.distributed is disabled")  # the judge has one process
        cuts = _Cuts(tally, folder, place, name, seed, file_system, options, caches)
        try:
            if reason := cuts.begin():
                tally.counts[f"{name}: {reason}, no power cut"] += 1
                return
            cuts.check_losses()
            for number in tqdm(range(rounds), desc=f"power cuts, {name}", unit="cut", disable=None):
                if cuts.kernel_errors == _KERNEL_ERRORS:
                    tally.lose(f"{name}: ended before round {number}, as the kernel has crashed so often")
                    break
                cuts.round(number)
        finally:
            cuts.close()


class _Cuts:
    """Rounds on one kind of disk."""

    def __init__(
        self,
        tally: Tally,
        folder: Path,
        place: Path,
        name: str,
        seed: int,
        file_system: str,
        options: str,
        caches: bool,
    ) -> None:
        self.kernel_errors = 0
        self._tally = tally
        self._runtime = Path(os.environ[FOLDER_VARIABLE])
        self._name = name
        self._seed = seed
        place.mkdir(parents=True)
        numbers = itertools.count()

        def make() -> LoopDisk:
            at = place / str(next(numbers))
            if caches:
                return ServedDisk(at, file_system, options, "mix")
            # btrfs has no FS_IOC_SHUTDOWN before Linux 6.19.
            if file_system == "btrfs":
                return ServedDisk(at, file_system, options, "keep")
            return LoopDisk(at, file_system, options)

        self._disks = _Disks(make)
        self._library = folder / "stopping_calls.so"
        self._control = folder / "stops"
        self._calls: Calls | None = None
        if shutil.which("cc") is not None:
            build(self._library)
            self._calls = Calls(self._control)
        # Half of the seeds begin with cuts after calls.
        self._sweeps = {kind: {scenario.name: _Sweep(after=seed % 2 == 0) for scenario in SCENARIOS} for kind in _SWEPT}
        swept = [*["at a call"] * (self._calls is not None), *["at a request"] * caches]
        self._instants = ["at random", *swept, "after done", *swept]

    def begin(self) -> str:
        """Make the first disk. Return the error if that fails, as in a container without loop devices, otherwise ""."""
        if self._calls is None:
            self._tally.counts["no compiler: no power cut at a call"] += 1
        try:
            self._disks.for_round()
        except DiskError as error:
            return str(error).splitlines()[0]
        return ""

    def check_losses(self) -> None:
        """Check that the torture detects losses: files without a flush must be lost."""
        choice = random.Random(f"{self._seed} naive")
        lost = 0
        for _ in range(_NAIVE_ROUNDS):
            disk = self._disks.for_round()
            place = self._disks.place(disk, scenario := _Naive())
            heard, _ = self._cut(disk, scenario, place, "after done", choice, hard=True)
            disk.mount_again()
            lost += bool(judge(scenario, place.root, heard.begun, heard.done))
            self._disks.forget(scenario)
        self._tally.counts[f"{self._name}: losses seen of a writer without fsync, of {_NAIVE_ROUNDS}"] += lost
        if not lost:
            self._tally.lose(f"{self._name}: a writer without fsync has lost nothing, so this torture sees no losses")

    def round(self, number: int) -> None:
        choice = random.Random(f"{self._seed} {self._name} {number}")
        instant = self._instants[number % len(self._instants)]
        scenario = SCENARIOS[number // len(self._instants) % len(SCENARIOS)]
        if instant in _SWEPT:
            scenario = min(SCENARIOS, key=lambda each: self._sweeps[instant][each.name].key())
        what = f"{self._name}, seed {self._seed}, round {number}, {scenario.name}, {instant}"
        began = time.monotonic()
        try:
            disk = self._disks.for_round()
            place = self._disks.place(disk, scenario)
            heard, how = self._cut(disk, scenario, place, instant, choice)
            what = f"{what}, {how}; done {heard.done}, begun {heard.begun}"
            disk.mount_again()
            broken = judge(scenario, place.root, heard.begun, heard.done)
            left = sorted(str(path.relative_to(place.root)) for path in place.root.rglob("*"))
            if is_at_once := choice.random() < _AT_ONCE:
                make_old(place.root)
                place.begun, place.done = heard.begun, heard.done
            else:
                try:
                    broken += [f"after going on: {each}" for each in go_on(scenario, place.root, heard.begun)]
                finally:
                    self._end_workers()
                place.begun = place.done = heard.begun + 2
            if broken or (scenario.ranks > 1 and not is_at_once):
                self._disks.forget(scenario)
            for each in broken:
                self._tally.lose(f"{what}: {each}; left by the cut: {left}")
        except KernelError as error:
            # No step can be judged. On Linux 6.18 btrfs sometimes crashes in a log replay: "open_ctree failed: 1".
            self.kernel_errors += 1
            self._tally.counts[f"{self._name}: mounts in which the kernel crashed, not judged"] += 1
            tqdm.write(f"{what}: {error}")
            self._disks.drop()
        except (Exception, CheckpointException) as error:  # the exception of stock DCP is a BaseException
            self._tally.lose(f"{what}: {type(error).__name__}: {error}")
            self._end_workers()
            self._disks.drop()
        self._tally.counts[f"{self._name}: power cuts {instant}"] += 1
        self._tally.wait("longest round with a power cut, s", time.monotonic() - began)

    def close(self) -> None:
        for kind in {*_SWEPT} & {*self._instants}:
            ended = sum(sweep.ended > 0 for sweep in self._sweeps[kind].values())
            self._tally.counts[f"{self._name}: of {len(SCENARIOS)} scenarios, those cut {kind}, at each"] += ended
        self._end_workers()
        self._disks.drop()

    def _cut(
        self,
        disk: LoopDisk,
        scenario: Scenario,
        place: _Place,
        instant: str,
        choice: random.Random,
        *,
        hard: bool = False,
    ) -> tuple[_Heard, str]:
        """Run a job until the power is cut, and kill it. Return its reports before the cut, and the kind of cut."""
        first = place.begun + 1
        swept = max(first + 1, _SWEPT_STEP) if instant in _SWEPT else 0
        calls = (self._library, self._control, disk.mount_point) if instant == "at a call" else None
        if self._calls is not None:
            self._calls.failed()
        with Job(scenario.ranks, _train, scenario, str(place.root), first, swept, calls) as job:
            try:
                heard = _Heard(place.begun, place.done)
                at = self._wait(disk, job, heard, scenario, instant, swept or first, choice)
                if not disk.is_cut:
                    _listen(disk, job, heard)
                sure = heard.done
                how = disk.cut(choice, hard=hard)
                for said in job.kill(0):
                    heard.add(said)
                heard.done = sure
            finally:
                job.kill(0)
                self._end_workers()
        return heard, f"{at}{how}"

    def _wait(
        self,
        disk: LoopDisk,
        job: Job,
        heard: _Heard,
        scenario: Scenario,
        instant: str,
        step: int,
        choice: random.Random,
    ) -> str:
        """Wait for the instant of the cut, in ``step`` or soon after. Return the job's position, if known."""
        if instant == "at random":
            step += choice.randrange(3)
            _listen(disk, job, heard, lambda: heard.begun >= step)
            time.sleep(choice.uniform(0, _SLEEP_S))
            return ""
        if instant == "after done":
            step += choice.randrange(3)
            _listen(disk, job, heard, lambda: heard.done >= step)
            return ""
        _listen(disk, job, heard, lambda: heard.done >= step - 1)
        time.sleep(_BACKGROUND_S)
        sweep, calls = self._sweeps[instant][scenario.name], self._calls
        if instant == "at a call" and calls is not None:
            calls.stop(sweep.number, after=sweep.after)
        elif isinstance(disk, ServedDisk):
            disk.cut_at(sweep.number, choice)
        for pipe in job.pipes:
            pipe.send("go on")
        _listen(disk, job, heard, lambda: heard.is_idle or (calls is not None and calls.stopped() != ""))
        call = calls.stopped() if calls is not None else ""
        side, kind = "after" if sweep.after else "before", instant.split()[-1]
        at = f"{side} {kind} {sweep.number}{f' ({call})' if call else ''}, "
        sweep.number += 1
        if heard.is_idle:
            sweep.end()
        return at

    def _end_workers(self) -> None:
        """Kill all workers, and empty the runtime folder, as a power cut does."""
        deadline = time.monotonic() + LIMIT_S
        while workers := [process for process in psutil.process_iter() if self._is_worker(process)]:
            for worker in workers:
                with contextlib.suppress(psutil.Error):
                    worker.kill()
            while any(map(self._is_worker, workers)):  # a zombie has closed its files; init may reap it much later
                if time.monotonic() > deadline:
                    raise TimeoutError(f"killed workers still run: {workers}")
                time.sleep(_POLL_S)
        for path in self._runtime.glob("*"):
            path.unlink(missing_ok=True)

    def _is_worker(self, process: psutil.Process) -> bool:
        with contextlib.suppress(psutil.Error):
            said = worker_process.parse(process.cmdline())
            is_ours = said is not None and said.runtime == str(self._runtime)
            return is_ours and process.status() != psutil.STATUS_ZOMBIE
        return False


def _listen(disk: LoopDisk, job: Job, heard: _Heard, until: Callable[[], bool] = lambda: True) -> None:
    """Collect reports until ``until`` returns True. Raises ``TimeoutError``, or ``RuntimeError`` if a save failed."""
    deadline = time.monotonic() + LIMIT_S
    while True:
        new = [one for rank in range(len(job.pipes)) for one in job.heard(rank)]
        if disk.is_cut:  # the new reports may come from after the cut
            for kind, step, text in new:
                if kind == "begun":
                    heard.add([(kind, step, text)])
            return
        heard.add(new)
        if heard.failed:
            raise RuntimeError(f"before the cut {heard.failed}")
        if until():
            return
        if not all(process.is_alive() for process in job.processes):
            raise RuntimeError(f"a trainer has ended after step {heard.begun}")
        if time.monotonic() > deadline:
            raise TimeoutError(f"the job has said nothing more after step {heard.begun}, done {heard.done}")
        multiprocessing.connection.wait(job.pipes, _POLL_S)


def _train(
    pipe: Connection,
    rank: int,
    scenario: Scenario,
    root: str,
    first: int,
    swept: int,
    calls: tuple[Path, Path, Path] | None,
) -> None:
    """Save without end. After a failed save, wait to be killed.

    Before step ``swept``, wait for a message. After step ``swept``, report when the worker is idle. 0: no such step.
    """
    step = first
    with preloaded(*calls) if calls is not None else contextlib.nullcontext():
        try:
            with scenario.saving(Path(root), rank) as save:
                for step in range(first, 10**9):
                    if step == swept:
                        pipe.recv()
                    pipe.send(("begun", step, ""))
                    save(step)
                    pipe.send(("done", step, ""))
                    if step == swept:
                        time.sleep(_BACKGROUND_S)
                        pipe.send(("idle", step, ""))
                        time.sleep(2 * LIMIT_S)
        except Exception as error:
            pipe.send(("failed", step, f"{type(error).__name__}: {error}"))
            time.sleep(2 * LIMIT_S)


@contextlib.contextmanager
def _orderly() -> Iterator[None]:
    """Exit in order after SIGTERM, so that disks are unmounted and detached."""

    def leave(number: int, frame: FrameType | None) -> None:
        sys.exit(128 + number)

    before = signal.signal(signal.SIGTERM, leave)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
