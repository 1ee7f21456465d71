"""More faults of hosts: flipped bytes of copies in the memory of workers, and workers stopped by a signal."""

from __future__ import annotations

import contextlib
import os
import random
import threading
import time
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import psutil

from asyncckpt.format.segment_layout import Region
from asyncckpt.format.write_request import HeldImage
from asyncckpt.link import process as worker_process
from asyncckpt.link.endpoint import FOLDER_VARIABLE, trainer_of
from asyncckpt.link.takeover import Takeover
from torture.tally import LIMIT_S, Tally

# The minimum CPU share, the sample time, and the number of samples in a row that mark a worker as busy for ever.
_BURNS, _WHILE_S, _TIMES = 0.5, 1.0, 8


@dataclass(frozen=True)
class _Place:
    """The place of an image: the process id of a worker, a segment and a slot."""

    worker: int
    segment: int
    slot: int


class Memory:
    """The images of the workers on some hosts with dead trainers, and which images are reliable."""

    def __init__(self, place: Path, hosts: Iterable[int]) -> None:
        """Read the images from the workers, and compute missing checksums."""
        self.images: dict[_Place, HeldImage] = {}
        self._bad: set[_Place] = set()
        with contextlib.ExitStack() as held:
            self._takeovers = {each.worker: held.enter_context(each) for host in hosts for each in _found(place, host)}
            for worker, takeover in self._takeovers.items():
                for image in (*takeover.images, *takeover.copies):
                    self.images[_Place(worker, image.request.segment, image.request.slot)] = image
            self._held = held.pop_all()

    def flip(self, choice: random.Random) -> int:
        """Flip bytes in some copies, at least in one if there are any. Return the number of changed copies."""
        copies = [each for each, image in self.images.items() if image.is_copy]
        share = choice.choice((0.0, 0.5, 1.0))
        flipped = {each for each in copies if choice.random() < share} or {*copies[:1]}
        for each in flipped:
            in_constants = _flip(self._takeovers[each.worker], self.images[each], choice)
            # All images of a segment share its constants.
            self._bad |= {other for other in self.images if _is_beside(other, each, in_constants)}
        return len(flipped)

    def rule_out(self, workers: Iterable[int]) -> None:
        """Mark all images of these stopped workers as unreliable."""
        gone = {*workers}
        self._bad |= {each for each in self.images if each.worker in gone}

    def has_lost(self, step: int) -> bool:
        """Return whether all images of some rank are unreliable, for the newest attempt to save ``step``."""
        of_step = [image.request for image in self.images.values() if image.request.step == step]
        if not of_step:
            return False
        newest = max(of_step, key=lambda request: request.called_at).attempt
        usable: defaultdict[int, bool] = defaultdict(bool)
        for each, image in self.images.items():
            if image.request.attempt == newest:
                usable[image.request.rank] |= each not in self._bad
        return not all(usable.values())

    def close(self) -> None:
        """Release the images. The workers stay."""
        self._held.close()

    def __enter__(self) -> Memory:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class Stopped:
    """Workers stopped by a signal, with or without their child processes, until ``end``."""

    def __init__(self, workers: Iterable[psutil.Process], *, with_children: bool, after: float = 0.0) -> None:
        """``after``: stop after this number of seconds. 0: stop now."""
        self.workers = list(workers)
        self._processes = list(self.workers)
        for worker in self.workers:
            with contextlib.suppress(psutil.Error):
                self._processes += worker.children(recursive=True) if with_children else []
        self._timer = threading.Timer(after, self._stop)
        if after:
            self._timer.start()
        else:
            self._stop()

    def end(self, *, kill: bool) -> None:
        """Resume the processes, or kill the workers. Safe to call twice."""
        self._timer.cancel()
        if self._timer.is_alive():
            self._timer.join()
        for process in self._processes:
            with contextlib.suppress(psutil.Error):
                if kill and process in self.workers:
                    process.kill()
                process.resume()

    def _stop(self) -> None:
        for process in self._processes:
            with contextlib.suppress(psutil.Error):
                process.suspend()


def workers_of(place: Path, host: int) -> dict[psutil.Process, int]:
    """Return the workers of a host, including those of earlier jobs, with the process ids of their trainers."""
    runtime = str(runtime_of(place, host))
    found = {}
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            said = worker_process.parse(process.cmdline())
            if said is not None and said.runtime == runtime and process.status() != psutil.STATUS_ZOMBIE:
                its = trainer_of(said.options.endpoint or "", process.pid, runtime)
                found[process] = said.trainer if its is None else its[0]
    return found


def runtime_of(place: Path, host: int) -> Path:
    """Return the runtime folder of a host."""
    return place / f"host-{host}"


def check_idle(tally: Tally, place: Path, hosts: Iterable[int]) -> None:
    """Check that no worker, and no child of a worker, burns a core after its trainer is gone."""
    workers = [worker for host in hosts for worker in workers_of(place, host)]
    for _ in range(_TIMES):
        before = {worker: _cpu_s(worker) for worker in workers}
        time.sleep(_WHILE_S)
        workers = [worker for worker in workers if _cpu_s(worker) - before[worker] > _BURNS * _WHILE_S]
        if not workers:
            return
    for worker in workers:
        tally.lose(f"the worker {worker.pid} burns a core")


def _cpu_s(worker: psutil.Process) -> float:
    total = 0.0
    with contextlib.suppress(psutil.Error):
        for process in (worker, *worker.children(recursive=True)):
            times = process.cpu_times()
            total += times.user + times.system
    return total


def _found(place: Path, host: int) -> Iterable[Takeover]:
    runtime = runtime_of(place, host)
    os.environ[FOLDER_VARIABLE] = str(runtime)
    for lock in sorted(runtime.glob("*.lock")):
        if (takeover := Takeover.find(lock.stem, LIMIT_S)) is not None:
            yield takeover


def _flip(takeover: Takeover, image: HeldImage, choice: random.Random) -> bool:
    """Flip some bits of an image. Return whether they belong to the constants of its segment."""
    layout, slot = image.layout, image.request.slot
    data = [Region(layout.data(slot, file).offset, file.length) for file in layout.data_files() if file.length]
    constants = [region for region in layout.constants() if region.nbytes]
    in_constants = not data or choice.random() < 0.2
    region = choice.choice(constants if in_constants else data)
    view = takeover.segments[image.request.segment].view
    for at in choice.sample(range(region.nbytes), min(region.nbytes, choice.choice((1, 1, 8, 64)))):
        view[region.offset + at] ^= 1 << choice.randrange(8)
    return in_constants


def _is_beside(other: _Place, flipped: _Place, in_constants: bool) -> bool:
    same_segment = (other.worker, other.segment) == (flipped.worker, flipped.segment)
    return same_segment and (in_constants or other.slot == flipped.slot)
