#!/usr/bin/env python3
"""Kills, damages and full disks, at random and by the hundreds: is anything ever lost?

    scripts/torture.py                                  # the whole of it: half an hour on two cores
    scripts/torture.py --kills 6 --damages 20 --full 4  # a taste

The same seed makes the same choices; what comes of them is up to the machine. Each wait has a limit of 30 seconds, and
running into it is a hang. Exits with 1 if anything was lost, hung, published half, loaded wrong, or left over.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import logging
import multiprocessing
import os
import random
import resource
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy
import psutil
import torch
import torch.distributed as dist
from tabulate import tabulate
from tqdm import tqdm

from asyncckpt import Checkpointer, Config
from asyncckpt.errors import CheckpointError, CheckpointNotFoundError, StorageError
from asyncckpt.loading.data_file import READ_THREADS
from asyncckpt.loading.source import verify
from asyncckpt.worker.endpoint import FOLDER_VARIABLE, endpoint_name
from asyncckpt.worker.storage import complete_steps, step_folder
from asyncckpt.worker.takeover import Takeover

LIMIT_S = 30.0
MARK = "ASYNCCKPT_TORTURE"
SIZES = (1_000_000, 200_000, 50_000, 3_000, 70, 1)
CONFIG = Config(keep_last=3, timeout=25.0, commit_timeout=25.0, linger=60.0, worker_restarts=10**9, restart_pause=0.0)

_context = multiprocessing.get_context("forkserver")


def state_of(step: int, rank: int = 0) -> dict[str, Any]:
    """A state that only this step of this rank has."""
    tensors = {f"w{rank}.{number}": torch.full((size,), float(step)) for number, size in enumerate(SIZES)}
    return {"model": tensors, "both": torch.full((1000,), float(step)), "step": step}


def is_of(state: dict[str, Any], step: int) -> bool:
    """Whether every byte is that of ``step``."""
    values = [*state["model"].values(), state["both"]]
    return state["step"] == step and all(bool((value == float(step)).all()) for value in values)


# Trainers. They tell all they do, until they are killed.


class Job:
    """The ranks of a job, each in a process of its own."""

    def __init__(self, world_size: int, function: Callable[..., None], *args: Any) -> None:
        self._folder = tempfile.mkdtemp(prefix="asyncckpt-meeting-")
        self.pipes: list[Connection] = []
        self.processes = []
        environment = {name: os.environ[name] for name in (FOLDER_VARIABLE, MARK)}
        for rank in range(world_size):
            ours, theirs = _context.Pipe()
            rendezvous = f"file://{self._folder}/meeting"
            process = _context.Process(
                target=_rank, args=(theirs, rank, world_size, rendezvous, environment, function, args)
            )
            process.start()
            theirs.close()
            self.pipes.append(ours)
            self.processes.append(process)

    def hear(self, rank: int, kind: str) -> tuple[Any, ...]:
        """The next thing of that ``kind`` that a rank says. Raises ``TimeoutError``, ``RuntimeError`` if it ends."""
        deadline = time.monotonic() + LIMIT_S
        while time.monotonic() < deadline:
            if not self.pipes[rank].poll(0.5):
                continue
            try:
                said = self.pipes[rank].recv()
            except (EOFError, ConnectionResetError) as error:
                raise RuntimeError(f"rank {rank} has ended") from error
            if said[0] == "error":
                raise RuntimeError(f"a trainer failed: {said[1]}")
            if said[0] == kind:
                return tuple(said[1:])
        raise TimeoutError(f"rank {rank} has not {kind} within {LIMIT_S:g} s")

    def kill(self, first: int) -> list[list[tuple[Any, ...]]]:
        """Kill a rank, then, as a launcher does, the others. Returns what each had still said."""
        for rank in [first, *range(len(self.processes))]:
            self.processes[rank].kill()
        said: list[list[tuple[Any, ...]]] = []
        for pipe in self.pipes:
            said.append([])
            with contextlib.suppress(EOFError, ConnectionResetError):
                while True:
                    said[-1].append(pipe.recv())
        return said

    def __enter__(self) -> Job:
        return self

    def __exit__(self, *_: object) -> None:
        for process, pipe in zip(self.processes, self.pipes, strict=True):
            process.kill()
            process.join()
            process.close()
            pipe.close()
        shutil.rmtree(self._folder, ignore_errors=True)


def _rank(
    pipe: Connection,
    rank: int,
    world_size: int,
    rendezvous: str,
    environment: dict[str, str],
    function: Callable[..., None],
    args: tuple[Any, ...],
) -> None:
    os.environ.update(environment)
    torch.set_num_threads(1)
    logging.getLogger("asyncckpt").setLevel(logging.CRITICAL)
    if world_size > 1:
        dist.init_process_group("gloo", init_method=rendezvous, rank=rank, world_size=world_size)
    try:
        function(pipe, rank, *args)
    except Exception as error:
        pipe.send(("error", f"{type(error).__name__}: {error}"))
        raise
    finally:
        pipe.close()
        if world_size > 1:
            dist.destroy_process_group()


def _train(pipe: Connection, rank: int, root: str, seed: int) -> None:
    """Load, from memory and from storage, then save without end."""
    choice = random.Random(seed)
    checkpointer = Checkpointer(root, CONFIG)
    last = 0
    for memory in (True, False):
        into, found, source = state_of(0, rank), 0, "nothing"
        with contextlib.suppress(CheckpointNotFoundError):
            found = checkpointer.load(into, memory=memory)
            source = checkpointer.loaded.source if checkpointer.loaded is not None else "nothing"
        pipe.send(("loaded", found, source, found == 0 or is_of(into, found)))
        last = max(last, found)
    pipe.send(("ready",))
    for step in range(last + 1, 10**9):
        state = state_of(step, rank)
        if dist.is_initialized():
            dist.barrier()
        save = checkpointer.save(step, state)
        pipe.send(("staged", step))
        if choice.random() < 0.3:
            save.result(LIMIT_S)
        time.sleep(choice.uniform(0, 0.02))


def _train_on(pipe: Connection, rank: int, root: str) -> None:
    """Save, whatever becomes of the workers, until the first rank is told to stop."""
    with Checkpointer(root, CONFIG) as checkpointer:
        for step in range(1, 10**9):
            # As in any training the ranks keep step.
            ends = torch.tensor(float(rank == 0 and pipe.poll()))
            if dist.is_initialized():
                dist.all_reduce(ends)
            if ends:
                break
            try:
                save = checkpointer.save(step, state_of(step, rank))
                pipe.send(("begun", step, worker := _worker(checkpointer)))
                save.result(LIMIT_S)
                pipe.send(("saved", step, worker))
            except CheckpointError as error:
                pipe.send(("failed", step, type(error).__name__))
    pipe.send(("ended",))


def _worker(checkpointer: Checkpointer) -> int:
    client = checkpointer._engine.worker
    if client is None:
        raise RuntimeError("there is no worker")
    return client.pid


# What is counted.


@dataclass
class Tally:
    """How often what was looked for came out; ``losses`` are what must never be."""

    counts: Counter[str] = field(default_factory=Counter)
    losses: list[str] = field(default_factory=list)

    def lose(self, what: str) -> None:
        self.losses.append(what)
        tqdm.write(f"LOST: {what}")


def kill_trainers(tally: Tally, folder: Path, kills: int, choice: random.Random, world_size: int) -> None:
    """Kill trainers at random instants; each next one has to find the newest step that all had staged."""
    root = str(folder / f"trainers-{world_size}")
    staged = 0
    for _ in tqdm(range(kills + 1), desc=f"trainer kills, {world_size} rank(s)", unit="kill"):
        victim = choice.randrange(world_size)
        with Job(world_size, _train, root, choice.randrange(1 << 30)) as job:
            try:
                when = choice.random()
                if when < 0.1:  # while it loads
                    time.sleep(choice.uniform(0, 0.3))
                else:
                    _check_loads(tally, job, root, staged)
                    if when > 0.3:  # else while it takes over
                        staged = min(job.hear(rank, "staged")[0] for rank in range(world_size))
                    time.sleep(choice.uniform(0, 0.4))
            except (TimeoutError, RuntimeError) as error:
                tally.lose(f"{root}: {error}")
            said = job.kill(victim)
        news = [max((each[1] for each in of_rank if each[0] == "staged"), default=0) for of_rank in said]
        staged = max(staged, min(news))
        tally.counts["trainers killed"] += 1
    _check_root(tally, root)


def _check_loads(tally: Tally, job: Job, root: str, staged: int) -> None:
    for rank in range(len(job.pipes)):
        for memory in (True, False):
            step, source, good = job.hear(rank, "loaded")
            if step < staged:
                tally.lose(f"{root}: rank {rank} found step {step} in {source}; {staged} had been staged on all ranks")
            if not good:
                tally.lose(f"{root}: rank {rank} loaded wrong bytes of step {step} from {source}")
            if memory and staged > 0 and rank == 0:
                tally.counts[f"recovered from {source}"] += 1
        job.hear(rank, "ready")


def kill_workers(tally: Tally, folder: Path, kills: int, choice: random.Random, world_size: int) -> None:
    """Kill workers at random instants; the save under way may fail, on all ranks, and the next has to work."""
    root = str(folder / f"workers-{world_size}")
    with Job(world_size, _train_on, root) as job:
        try:
            for _ in tqdm(range(kills), desc=f"worker kills, {world_size} rank(s)", unit="kill"):
                _kill_a_worker(tally, job, choice)
            job.pipes[0].send("stop")
            for rank in range(world_size):
                job.hear(rank, "ended")
        except (TimeoutError, RuntimeError) as error:
            tally.lose(f"{root}: {error}")
    _check_root(tally, root)


def _kill_a_worker(tally: Tally, job: Job, choice: random.Random) -> None:
    victim = choice.randrange(len(job.pipes))
    _, worker = job.hear(victim, "begun")
    time.sleep(choice.uniform(0, 0.1))
    with contextlib.suppress(ProcessLookupError):
        os.kill(worker, signal.SIGKILL)
    tally.counts["workers killed"] += 1
    least = 0
    for rank in [victim, *(rank for rank in range(len(job.pipes)) if rank != victim)]:
        step, its = job.hear(rank, "saved")
        while its == worker or step < least:  # that was before
            step, its = job.hear(rank, "saved")
        least = step


def _check_root(tally: Tally, root: str) -> None:
    """All that is published is whole, and what killed workers left is removed by a later save."""
    for step in complete_steps(root):
        tally.counts["checkpoints verified"] += 1
        for damage in verify(step_folder(root, step)).damages:
            tally.lose(f"published, and not whole: {damage}")
    hour_ago = time.time() - 3600
    for left in [*Path(root).glob(".*"), *Path(root).glob(".*/*")]:
        os.utime(left, (hour_ago, hour_ago))
    with Checkpointer(root, CONFIG) as checkpointer:
        checkpointer.prepare(state_of(0))  # which waits for a worker that may still be writing
        last = max(complete_steps(root), default=0) + 1
        checkpointer.save(last, state_of(last)).result(LIMIT_S)
    for left in Path(root).glob(".*"):
        tally.lose(f"left over: {left}")


def damage(tally: Tally, folder: Path, damages: int, choice: random.Random) -> None:
    """Damage checkpoints in every way: all has to be found by ``verify``, and nothing wrong may be loaded."""
    root = folder / "damages"
    with Checkpointer(root, CONFIG) as checkpointer:
        checkpointer.save(1, state_of(1)).result(LIMIT_S)
    good = Path(step_folder(str(root), 1))
    bad = root / "step-00000002"
    for _ in tqdm(range(damages), desc="damages", unit="damage"):
        shutil.copytree(good, bad)
        how = choice.choice(["flip", "truncate", "drop", "swap"])
        files = sorted(bad.iterdir())
        file = choice.choice(files)
        size = file.stat().st_size
        if how == "flip":
            with file.open("r+b") as opened:
                opened.seek(place := choice.randrange(size))
                byte = opened.read(1)[0]
                opened.seek(place)
                opened.write(bytes([byte ^ (1 << choice.randrange(8))]))
        elif how == "truncate":
            os.truncate(file, choice.randrange(size))
        elif how == "drop":
            file.unlink()
        else:
            other = choice.choice([each for each in files if each != file])
            file.rename(bad / "aside")
            other.rename(file)
            (bad / "aside").rename(other)
        _check_damaged(tally, bad, f"{how} {file.name}")
        shutil.rmtree(bad)


def _check_damaged(tally: Tally, bad: Path, what: str) -> None:
    try:
        found = bool(verify(str(bad)).damages)
    except CheckpointError:
        found = True
    tally.counts["damages found by verify"] += found
    if not found:
        tally.lose(f"verify has not found: {what}")
    into = state_of(0)
    try:
        with Checkpointer(bad.parent, CONFIG) as checkpointer:
            checkpointer.load(into, 2, memory=False)
    except CheckpointError:
        tally.counts["damages refused by load"] += 1
        return
    if not is_of(into, 1):
        tally.lose(f"loaded silently: {what}")
    tally.counts["damages in bytes that load does not need"] += 1


@contextlib.contextmanager
def small_disk(folder: Path, nbytes: int) -> Iterator[bool]:
    """A file system of its own at ``folder``, where this process may mount one."""
    folder.mkdir(parents=True)
    mounted = not subprocess.run(
        ["mount", "-t", "tmpfs", "-o", f"size={nbytes}", "tmpfs", str(folder)], capture_output=True, check=False
    ).returncode
    try:
        yield mounted
    finally:
        if mounted:
            subprocess.run(["umount", str(folder)], check=True)


def fill_disks(tally: Tally, folder: Path, fulls: int, choice: random.Random) -> None:
    """Let space run out: before a save, or at a random byte of it."""
    need = sum(SIZES) * 4
    with small_disk(folder / "disk", 8 * need) as mounted:
        root, ballast = folder / "disk" / "root", folder / "disk" / "ballast"
        with Checkpointer(root, CONFIG) as checkpointer:
            checkpointer.save(1, state_of(1)).result(LIMIT_S)
            process = psutil.Process(_worker(checkpointer))
            last = 1
            for number in tqdm(range(fulls), desc="full disks", unit="disk"):
                step = last + 1
                real = mounted and number % 2 == 0
                if real:
                    while len(list(root.iterdir())) > 3:  # what is old is just being removed, and frees space
                        time.sleep(0.01)
                    free = shutil.disk_usage(root).free
                    ballast.write_bytes(bytes(free - choice.randrange(need)))
                    kind = "file systems filled"
                else:
                    limit = choice.randrange(1, need)
                    process.rlimit(psutil.RLIMIT_FSIZE, (limit, resource.RLIM_INFINITY))
                    kind = "writes cut short"
                try:
                    checkpointer.save(step, state_of(step)).result(LIMIT_S)
                    tally.lose(f"a save of {need:,} bytes was said to succeed on a disk without room for it")
                except StorageError:
                    tally.counts[kind] += 1
                if checkpointer.load(into := state_of(0), memory=False) != last or not is_of(into, last):
                    tally.lose(f"the checkpoint before step {step} does not load")
                ballast.unlink(missing_ok=True)
                process.rlimit(psutil.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
                checkpointer.save(step, state_of(step)).result(LIMIT_S)
                last = step
        _check_root(tally, str(root))


# How fast a restart from memory is.


def _hold(pipe: Connection, rank: int, root: str, nbytes: int) -> None:
    checkpointer = Checkpointer(root, CONFIG)
    checkpointer.save(1, {"model": _weights(nbytes, 1.0)}).result(LIMIT_S)
    os.kill(os.getpid(), signal.SIGKILL)


def _weights(nbytes: int, value: float) -> dict[str, torch.Tensor]:
    return {f"layer{number}": torch.full((nbytes // 400 // 4,), value) for number in range(400)}


def _restart(pipe: Connection, rank: int, root: str, nbytes: int) -> None:
    """Seconds for a load from memory; for a memcpy of as many bytes; and for one out of memory just attached."""
    torch.set_num_threads(READ_THREADS)
    source, into = _weights(nbytes, 2.0), _weights(nbytes, 3.0)
    memcpy = []
    for _ in range(5):
        begun = time.perf_counter()
        for name, tensor in into.items():
            tensor.copy_(source[name])
        memcpy.append(time.perf_counter() - begun)
    with Checkpointer(root, CONFIG) as checkpointer:
        begun = time.perf_counter()
        checkpointer.load({"model": into})
        load = time.perf_counter() - begun
        if checkpointer.loaded is None or checkpointer.loaded.source != "memory":
            raise RuntimeError("not loaded from memory")
        begun = time.perf_counter()
        checkpointer.load({"model": into})
        again = time.perf_counter() - begun
    takeover = Takeover.find(endpoint_name(f"{os.path.realpath(root)}\n", 0), LIMIT_S)
    if takeover is None:
        raise RuntimeError("the worker has left")
    buffers = [numpy.ones(nbytes // READ_THREADS, dtype=numpy.uint8) for _ in range(READ_THREADS)]
    with takeover, ThreadPoolExecutor(READ_THREADS) as pool:
        memory = numpy.frombuffer(next(iter(takeover.segments.values())).view, dtype=numpy.uint8)
        begun = time.perf_counter()
        for task in [
            pool.submit(numpy.copyto, buffer, memory[number * len(buffer) : (number + 1) * len(buffer)])
            for number, buffer in enumerate(buffers)
        ]:
            task.result()
        attached = time.perf_counter() - begun
        del memory
    pipe.send(("took", statistics.median(memcpy), load, again, attached))


def time_restarts(folder: Path, rounds: int, nbytes: int) -> dict[str, float]:
    """Medians over restarts, each in a fresh process."""
    root = str(folder / "restarts")
    with Job(1, _hold, root, nbytes) as job:
        job.processes[0].join(LIMIT_S)
    took = []
    for _ in tqdm(range(rounds), desc="restarts from memory", unit="restart"):
        with Job(1, _restart, root, nbytes) as job:
            took.append(job.hear(0, "took"))
    names = ("memcpy_s", "load_s", "load_again_s", "memcpy_attached_s")
    return {name: statistics.median(each) for name, each in zip(names, zip(*took, strict=True), strict=True)}


# What is left.


def check_left(tally: Tally, runtime: Path) -> None:
    """Send the workers away that linger; no process, socket or file may be left then."""
    for lock in runtime.glob("*.lock"):
        if (takeover := Takeover.find(lock.stem, LIMIT_S)) is not None:
            with takeover:
                takeover.retire(LIMIT_S)
    deadline = time.monotonic() + LIMIT_S
    while (left := _processes()) and time.monotonic() < deadline:
        time.sleep(0.1)
    for process in left:
        tally.lose(f"left over: {process}")
    for file in runtime.glob("*"):
        tally.lose(f"left over: {file}")


def _processes() -> list[psutil.Process]:
    found = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            mine = process.environ().get(MARK) == os.environ[MARK] and "asyncckpt.worker" in process.cmdline()
            if mine and process.status() != psutil.STATUS_ZOMBIE:
                found.append(process)
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=300, help="of trainers, and as many of workers (default: 300)")
    parser.add_argument("--damages", type=int, default=1000, help="default: 1000")
    parser.add_argument("--full", type=int, default=50, help="times that space runs out (default: 50)")
    parser.add_argument("--restart-mib", type=int, default=1024, help="of a state that is restarted (default: 1024)")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--folder", type=Path, help="where to write; by default the folder for temporary files")
    parser.add_argument("--json", type=Path, help="file for the figures")
    args = parser.parse_args()

    logging.getLogger("asyncckpt").setLevel(logging.CRITICAL)  # thousands of saves are about to fail
    os.environ["TORCH_CPP_LOG_LEVEL"] = "ERROR"
    choice, tally = random.Random(args.seed), Tally()
    _context.set_forkserver_preload(["torch.distributed", "asyncckpt.checkpointer", "asyncckpt.worker.rounds"])
    begun = time.monotonic()
    with tempfile.TemporaryDirectory(dir=args.folder, prefix="asyncckpt-torture-") as name:
        folder = Path(name)
        runtime = folder / "runtime"
        os.environ[FOLDER_VARIABLE] = str(runtime)
        os.environ[MARK] = name
        for world_size, kills in ((1, args.kills - args.kills // 2), (2, args.kills // 2)):
            kill_trainers(tally, folder, kills, choice, world_size)
            kill_workers(tally, folder, kills, choice, world_size)
        damage(tally, folder, args.damages, choice)
        fill_disks(tally, folder, args.full, choice)
        took = time_restarts(folder, 5, args.restart_mib << 20)
        check_left(tally, runtime)

    rows: list[tuple[str, object]] = sorted(tally.counts.items())
    rows += [(name, f"{value:.3f}") for name, value in took.items()]
    rows.append(("restart from memory, of memcpy speed", f"{took['memcpy_s'] / took['load_s']:.2f}"))
    rows.append(("the same, of a memcpy out of attached memory", f"{took['memcpy_attached_s'] / took['load_s']:.2f}"))
    rows += [("minutes", f"{(time.monotonic() - begun) / 60:.1f}"), ("LOST", len(tally.losses))]
    print(tabulate(rows, tablefmt="github"))
    for loss in tally.losses:
        print(f"LOST: {loss}")
    if args.json is not None:
        facts = {**tally.counts, **took, "seed": args.seed, "losses": tally.losses}
        args.json.write_text(json.dumps(facts, indent=1) + "\n")
    return 1 if tally.losses else 0


if __name__ == "__main__":
    sys.exit(main())
