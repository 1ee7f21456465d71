"""Kill what launchers kill: trainers, workers, containers, job steps, cgroups without memory, and hosts.

A training runs in a container (a PID namespace, and a memory cgroup) or in a job step of Slurm. Its worker is one that
the trainer has started, or one that the platform runs. After each kill the training has to resume as docs/launchers.md
says.
"""

from __future__ import annotations

import contextlib
import os
import random
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path

import psutil
from tqdm import tqdm

from asyncckpt.link.endpoint import FOLDER_VARIABLE
from asyncckpt.link.running_workers import RunningWorker, running_workers
from asyncckpt.publication import facts_of_job
from asyncckpt.threads import wait_until
from torture.loop_disks import DiskError, LoopDisk, missing
from torture.slurm import Allocation, NoSlurmError, one_node
from torture.tally import LIMIT_S, Tally

VICTIMS = ("trainer", "worker", "container", "memory", "step", "host")
KEEPS = {"spawned": ("trainer",), "platform": ("trainer", "container", "memory", "step")}
"""The deaths after which a restart reads the newest staged state from memory: for each kind of worker."""
_NAMESPACE = ("unshare", "--pid", "--fork", "--kill-child", "--mount-proc")
_MEMORY_BYTES = 3 << 30
_V1, _V2 = Path("/sys/fs/cgroup/memory"), Path("/sys/fs/cgroup")
# The longest time that a training runs on before the kill.
_SLEEP_S = 0.4


class _Training:
    """A training, its worker, and the lines that its trainers have written."""

    def __init__(self, folder: Path, root: Path) -> None:
        self._root, self._log, self.stop = root, folder / "trainer.log", folder / "stop"
        self._log.touch()
        program = (sys.executable, "-m", "torture.contained_trainer", str(root), str(self._log))
        # The first process of a container or a step starts the trainer again, as torchrun does.
        self.trainer = ("sh", "-c", f'while [ ! -e {self.stop} ]; do "$0" "$@"; done', *program)
        self.worker = (sys.executable, "-m", "asyncckpt", "worker", "--root", str(root))

    def lines(self) -> list[list[str]]:
        return [line.split() for line in self._log.read_text().splitlines()]

    def wait(self, word: str, count: int = 1) -> list[str]:
        """Return the ``count``-th line with ``word``. Raises ``TimeoutError``."""
        found = wait_until(lambda: [line for line in self.lines() if line[0] == word][count - 1 :], LIMIT_S)
        if not found:
            raise TimeoutError(f"nothing is {word} within {LIMIT_S:g} s: {self.lines()[-8:]}")
        return found[0]

    def count(self, word: str) -> int:
        return sum(line[0] == word for line in self.lines())

    def wait_for_worker(self) -> None:
        """Wait until the platform's worker listens. Raises ``TimeoutError``."""
        if not wait_until(lambda: any(each.doing == "lingering" for each in self._workers()), LIMIT_S):
            raise TimeoutError("the platform's worker does not listen")

    def kill_trainer(self) -> None:
        _kill_running(self.trainer[-5:])

    def kill_worker(self) -> None:
        for each in self._workers():
            with contextlib.suppress(psutil.Error):
                each.process.kill()

    def end(self) -> None:
        """Kill all processes, so that the container or step starts none again."""
        self.stop.touch()
        self.kill_trainer()
        _kill_running(self.worker)
        self.kill_worker()

    def _workers(self) -> list[RunningWorker]:
        mine = os.path.realpath(self._root)
        return [each for each in running_workers() if facts_of_job(each.command_line.options.job)["root"] == mine]


def _kill_running(command: Sequence[str]) -> None:
    for process in psutil.process_iter(["cmdline"]):
        if process.info["cmdline"] == [*command]:
            with contextlib.suppress(psutil.Error):
                process.kill()


class _Container:
    """A container for the trainer, and another one for the platform's worker."""

    def __init__(self, training: _Training, cgroup: Path | None) -> None:
        self._training, self._cgroup = training, cgroup
        self._started: list[subprocess.Popen[bytes]] = []

    def start_worker(self) -> None:
        self._start(self._training.worker)

    def start_trainer(self) -> None:
        self._start(self._training.trainer, self._cgroup)

    def kill(self) -> None:
        """Kill the first process of the trainer's container, and with it all others."""
        self._started[-1].kill()
        self._started[-1].wait()

    def take_memory(self, cgroup: Path) -> None:
        """Take memory in the trainer's container until the kernel kills a process. Then all of them are killed."""
        enter = partial(_enter, cgroup)
        subprocess.run(["tail", "/dev/zero"], preexec_fn=enter, check=False, stderr=subprocess.DEVNULL)
        if not (cgroup / "memory.oom.group").exists():  # version 1: a container runtime sees the event, and kills
            self._started[-1].kill()
        self._started[-1].wait(LIMIT_S)

    def end(self) -> None:
        for each in self._started:
            each.kill()
            each.wait()

    def _start(self, command: Sequence[str], cgroup: Path | None = None) -> None:
        enter = None if cgroup is None else partial(_enter, cgroup)
        command = [*_NAMESPACE, *command]
        self._started.append(subprocess.Popen(command, stderr=subprocess.DEVNULL, preexec_fn=enter))


class _Steps:
    """A job step for the trainer, and another one for the platform's worker."""

    def __init__(self, training: _Training, allocation: Allocation) -> None:
        self._training, self._allocation = training, allocation
        self._started: list[subprocess.Popen[bytes]] = []

    def start_worker(self) -> None:
        self._started.append(self._allocation.step(*self._training.worker))

    def start_trainer(self) -> None:
        self._started.append(self._allocation.step(*self._training.trainer))

    def kill(self) -> None:
        """Cancel the trainer's step, and wait for its end."""
        self._allocation.cancel([line for line in self._training.lines() if line[0] == "loaded"][-1][4])
        self._started[-1].wait(LIMIT_S)

    def end(self) -> None:
        for each in self._started:
            with contextlib.suppress(subprocess.TimeoutExpired):
                each.wait(LIMIT_S)
            each.kill()


def kill_in_launchers(tally: Tally, folder: Path, count: int, choice: random.Random) -> None:
    """Make ``count`` rounds of each victim with each kind of worker."""
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, sys.path))
    for victim in VICTIMS:
        try:
            with one_node(folder / "slurm") if victim == "step" else contextlib.nullcontext() as allocation:
                for kind in KEEPS:
                    name = f"launchers: {victim} dies, {kind} worker"
                    for number in tqdm(range(count), desc=name, unit="kill", disable=None):
                        try:
                            _kill(tally, folder / f"{victim}-{kind}-{number}", victim, kind, choice, allocation)
                        except (TimeoutError, subprocess.TimeoutExpired) as error:
                            tally.lose(f"{name}: {error}")
                        tally.counts[name] += 1
        except (NoSlurmError, DiskError) as error:
            tally.counts[f"launchers: {victim} left out: {error}"] += 1


def _kill(
    tally: Tally, folder: Path, victim: str, kind: str, choice: random.Random, allocation: Allocation | None
) -> None:
    """Start a training, kill the victim, and judge how the training resumes."""
    folder.mkdir()
    os.environ[FOLDER_VARIABLE] = str(folder / "runtime")
    with contextlib.ExitStack() as held:
        disk = _disk(folder / "disk") if victim == "host" else None
        if disk is not None:
            held.callback(disk.remove)
        cgroup = held.enter_context(_cgroup()) if victim == "memory" else None
        training = _Training(folder, (disk.mount_point if disk else folder) / "root")
        place = _Steps(training, allocation) if allocation else _Container(training, cgroup)
        held.callback(place.end)
        held.callback(training.end)
        if kind == "platform":
            place.start_worker()
            training.wait_for_worker()
        place.start_trainer()
        training.wait("durable", 2)
        time.sleep(choice.random() * _SLEEP_S)
        if victim == "worker":
            training.kill_worker()
            training.wait("durable", training.count("durable") + 2)  # another worker has started
            return
        if victim == "trainer":
            training.kill_trainer()
        elif cgroup is not None and isinstance(place, _Container):
            place.take_memory(cgroup)
        else:
            place.kill()
        if disk is not None:
            training.end()
            place.end()
            disk.cut(choice)
            disk.mount_again()
            training.stop.unlink()
        if victim != "trainer":
            place.start_trainer()
        _judge(tally, folder.name, training, keeps=victim in KEEPS[kind])


def _judge(tally: Tally, name: str, training: _Training, *, keeps: bool) -> None:
    """Judge the first load after the kill, and wait for a save after that."""
    _, step, source, values, *_ = training.wait("loaded", 2)
    (first, second) = (number for number, line in enumerate(training.lines()) if line[0] == "loaded")
    before = training.lines()[first:second]
    staged, durable = (max(int(line[1]) for line in before if line[0] == word) for word in ("staged", "durable"))
    if int(step) < durable or values != "right":
        tally.lose(f"{name}: step {durable} was durable, and {step} is loaded from {source}: {values}")
    elif keeps and (int(step) < staged or source != "memory"):
        tally.lose(f"{name}: step {staged} was staged, and {step} is loaded from {source}")
    tally.counts[f"launchers: loaded from {source}"] += 1
    training.wait("durable", training.count("durable") + 1)


def _disk(folder: Path) -> LoopDisk:
    """Make a disk that can lose power. Raises ``DiskError``."""
    if why := missing(["ext4"]):
        raise DiskError(why)
    return LoopDisk(folder, "ext4", "")


@contextlib.contextmanager
def _cgroup() -> Iterator[Path]:
    """Make a memory cgroup for processes that die together. Kubernetes makes one for each container."""
    is_v1 = _V1.is_dir()
    folder = (_V1 if is_v1 else _V2) / f"asyncckpt-torture-{os.getpid()}-{time.monotonic_ns()}"
    try:
        folder.mkdir()
        (folder / ("memory.limit_in_bytes" if is_v1 else "memory.max")).write_text(str(_MEMORY_BYTES))
        if not is_v1:
            (folder / "memory.oom.group").write_text("1")
    except OSError as error:
        raise DiskError(f"no memory cgroup can be made: {error}") from error
    try:
        yield folder
    finally:
        wait_until(lambda: not (folder / "cgroup.procs").read_text(), LIMIT_S)
        with contextlib.suppress(OSError):
            folder.rmdir()


def _enter(cgroup: Path) -> None:
    (cgroup / "cgroup.procs").write_text("0")
