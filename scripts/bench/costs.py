"""Count the machine's resources that a save takes. Only CPU time grows if others use the memory too.

Each contestant runs in a process of its own, with its child processes. The counters are read before a save, and after
the save is durable and all processes are idle. They count CPU time in user and kernel mode, page faults (each one
is a newly touched page), read and write calls, and bytes sent to storage.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import suppress
from dataclasses import asdict, astuple, dataclass
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import psutil

from bench import contestants, files
from bench.contestants import ENTRIES, told
from bench.contestants.contestant import Contestant
from bench.limits import Limits
from bench.states import Request, make
from bench.trainer import Trainer

COPY, WRITE, DIGESTS = "one copy", "one direct write", "reading once with XXH3"
# Saves before the counted ones. The second save may still allocate memory.
WARM = 3
REST_S = 0.2
LIMIT_S = 1200.0


@dataclass(frozen=True)
class Counts:
    """Counters of a process and all its descendants since their start."""

    cpu_s: float
    """CPU time, to the nanosecond."""
    user_s: float
    """CPU time in user mode, in hundredths of a second."""
    system_s: float
    """CPU time in the kernel, in hundredths of a second."""
    faults: float
    calls: float
    """Calls of ``read``, ``write`` and similar."""
    written: float
    """Bytes sent to storage."""

    def since(self, before: Counts) -> Counts:
        return Counts(*(now - then for now, then in zip(astuple(self), astuple(before), strict=True)))


def look() -> Counts:
    """Read the counters of this process and all its descendants."""
    mine = psutil.Process()
    found: list[tuple[float, ...]] = [(0.0,) * 6]
    for process in (mine, *mine.children(recursive=True)):
        # A process may end meanwhile.
        with suppress(OSError, psutil.NoSuchProcess):
            found.append(_of(process))
    return Counts(*map(sum, zip(*found, strict=True)))


def _of(process: psutil.Process) -> tuple[float, ...]:
    """Return the counters of one process, including its ended children."""
    times = process.cpu_times()
    user, system = times.user + times.children_user, times.system + times.children_system
    cpu = computed_s(process.pid) + times.children_user + times.children_system
    # The name may contain any character. The fields after the name start with number 3; see proc(5).
    fields = Path(f"/proc/{process.pid}/stat").read_text().rpartition(")")[2].split()
    faults = sum(int(fields[number - 3]) for number in (10, 11, 12, 13))
    counters = process.io_counters()
    return cpu, user, system, faults, counters.read_count + counters.write_count, counters.write_bytes


def computed_s(pid: int) -> float:
    """Return the CPU seconds of a process, to the nanosecond. psutil counts only in hundredths of a second."""
    return time.clock_gettime((~pid << 3) | 2)  # the clock id that clock_getcpuclockid returns


def measure(request: Request, names: Sequence[str], saves: int, folder: str) -> dict[str, Any]:
    """Count for one contestant after the other, each in its own process, and for the limits in another process."""
    facts, limits = _apart(_count_limits, request, saves, folder)
    results: dict[str, Any] = {}
    left_out: dict[str, str] = {}
    for name in names:
        inside = Path(folder, name)
        inside.mkdir()
        try:
            results[name] = _apart(_count, name, request, saves, str(inside))
        except Exception as error:
            left_out[name] = told(error)
    return {"state": facts, "limits": limits, "results": results, "left_out": left_out}


def _apart(call: Callable[..., Any], *args: Any) -> Any:
    with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as pool:
        return pool.submit(call, *args).result(LIMIT_S)


def _count_limits(request: Request, saves: int, folder: str) -> tuple[dict[str, Any], dict[str, list[float]]]:
    made = make(request)
    found: dict[str, list[float]] = {}
    with Limits(made.nbytes, folder, request.device) as limits:
        calls = {COPY: limits.memcpy, WRITE: limits.direct_write, DIGESTS: limits.digests_all_cores}
        for number in range(saves + 1):
            for name, call in calls.items():
                before = time.process_time()
                call()
                if number:  # the first call is cold
                    found.setdefault(name, []).append(time.process_time() - before)
    return made.facts(), found


def _count(name: str, request: Request, saves: int, folder: str) -> dict[str, list[float]]:
    made = make(request)
    trainer = Trainer(made.state, request.device)
    contestants.choose_sharing(made.state)
    contestant = ENTRIES[name].make(os.path.join(folder, "checkpoints"))
    try:
        contestant.prepare(made.state)
        rows = [asdict(_count_save(contestant, trainer, number)) for number in range(1, saves + WARM + 1)]
    finally:
        contestants.close_all({name: contestant}, {})
    return {key: [row[key] for row in rows[WARM:]] for key in rows[0]}


def _count_save(contestant: Contestant, trainer: Trainer, number: int) -> Counts:
    """Count one save, until it is durable and all processes are idle."""
    with contestant.changing():
        trainer.change()
    trainer.synchronize()
    before = look()
    pending = contestant.save(number, trainer.state)
    pending.wait()
    pending.finish()
    if not contestant.fsyncs:
        files.sync(contestant.path(number))
    time.sleep(REST_S)
    found = look().since(before)
    contestant.remove(number)
    return found
