"""Measure the memory of a contestant in all its processes, and the page cache that its saves leave behind.

Each contestant runs in a process of its own, which makes a state, warms up and then saves several times. Meanwhile this
process samples that process and its descendants every few milliseconds. *Private* is anonymous memory. *Shared* is
shared memory (memory files, ``/dev/shm``): the sum of proportional shares, so each page counts once. The trainer's
memory before its first ``prepare`` is subtracted.
"""

from __future__ import annotations

import multiprocessing
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import psutil

from bench import contestants, files
from bench.contestants import ENTRIES, told
from bench.saves import Series
from bench.states import Request, make
from bench.trainer import Trainer

SAMPLE_S = 0.02
REST_S = 1.0
LIMIT_S = 600.0


@dataclass(frozen=True)
class Use:
    """Bytes at one moment."""

    trainer: int
    """Private bytes of the trainer's process."""
    others: int
    """Private bytes of all descendants of the trainer."""
    largest_other: int
    """Private bytes of the largest descendant."""
    shared: int
    processes: int
    """The number of descendants."""

    @property
    def total(self) -> int:
        return self.trainer + self.others + self.shared

    def since(self, base: Use) -> dict[str, int]:
        """Return the increase since ``base``."""
        return {
            "trainer": self.trainer - base.trainer,
            "others": self.others,
            "largest_other": self.largest_other,
            "shared": self.shared - base.shared,
            "processes": self.processes,
            "total": self.total - base.total,
        }


def look(pid: int) -> Use:
    """Sample a process and all its descendants."""
    trainer = psutil.Process(pid)
    private, shared = _rollup(pid)
    others = []
    for process in trainer.children(recursive=True):
        # A process may end meanwhile.
        with suppress(OSError, psutil.NoSuchProcess):
            theirs, of_all = _rollup(process.pid)
            others.append(theirs)
            shared += of_all
    return Use(private, sum(others), max(others, default=0), shared, len(others))


def _rollup(pid: int) -> tuple[int, int]:
    """Return the anonymous bytes of a process, and its share of shared memory."""
    sizes = {}
    for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()[1:]:
        name, _, rest = line.partition(":")
        sizes[name] = int(rest.split()[0]) * 1024
    return sizes["Pss_Anon"], sizes["Pss_Shmem"]


def measure(request: Request, names: Sequence[str], saves: int, folder: str) -> dict[str, Any]:
    """Measure one contestant after the other, each in a process of its own."""
    results: dict[str, Any] = {}
    left_out: dict[str, str] = {}
    facts: dict[str, Any] = {}
    for name in names:
        inside = Path(folder, name)
        inside.mkdir()
        try:
            results[name], facts = _measure_one(name, request, saves, str(inside))
        except Exception as error:
            left_out[name] = told(error)
    return {"state": facts, "results": results, "left_out": left_out}


def _measure_one(name: str, request: Request, saves: int, folder: str) -> tuple[dict[str, Any], dict[str, Any]]:
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=_run, args=(theirs, name, request, saves, folder))
    process.start()
    theirs.close()
    pid = process.pid
    if pid is None:
        raise RuntimeError("it has not started")
    try:
        facts = _hear(ours)
        base = look(pid)
        peak = base
        ours.send("save")
        deadline = time.monotonic() + LIMIT_S
        while not ours.poll(SAMPLE_S):
            peak = max(peak, look(pid), key=lambda use: use.total)
            if time.monotonic() > deadline:
                raise TimeoutError(f"it has not ended after {LIMIT_S:g} s")
        cached = _hear(ours)
        time.sleep(REST_S)
        steady = look(pid)
        ours.send("end")
        _hear(ours)
        process.join()
    finally:
        if process.is_alive():
            process.kill()
            process.join()
        ours.close()
    return {"peak": peak.since(base), "steady": steady.since(base), "page_cache": cached}, facts


def _hear(pipe: Connection) -> Any:
    """Return the next answer of the other process. Raises ``RuntimeError`` with the error of that process."""
    try:
        good, said = pipe.recv()
    except EOFError as error:
        raise RuntimeError("its process has died") from error
    if not good:
        raise RuntimeError(said)
    return said


def _run(pipe: Connection, name: str, request: Request, saves: int, folder: str) -> None:
    """Save, in a process of its own."""
    contestant = None
    try:
        made = make(request)
        trainer = Trainer(made.state, request.device)
        trainer.step()
        contestants.choose_sharing(made.state)
        contestant = ENTRIES[name].make(f"{folder}/checkpoints")
        pipe.send((True, made.facts()))
        pipe.recv()
        contestant.prepare(made.state)
        series = Series(contestant, trainer)
        for _ in range(saves):
            series.save()
        pipe.send((True, files.cached_bytes(series.path)))
        pipe.recv()
        contestants.close_all({name: contestant}, {})
        pipe.send((True, None))
    except Exception as error:
        if contestant is not None:
            contestants.close_all({name: contestant}, {})
        pipe.send((False, told(error)))
