"""The part ``load``: 4 GiB to the device from storage, out of the page cache."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from pathlib import Path
from statistics import median

from bench import files, loads
from bench.limits import ReadLimit
from bench.states import Request, State, blank, make, same_tensors, tensors_of

import asyncckpt
from asyncckpt.storage import step_folder
from gpu_check import environment
from gpu_check.device import Device
from gpu_check.figures import Figure
from gpu_check.task import Task

_GIB, _ROUNDS = 4.0, 3
_READ, _OURS, _DCP = "direct read", "asyncckpt", "DCP"


def measure(task: Task) -> Iterator[Figure]:
    """Save once, and load in turns with DCP and a direct read of the file."""
    device, budget = task.device, task.budget
    # A slow disk gets a smaller state: one that it reads some ten times within the budget.
    disk = (task.found.value("env", environment.DISK) or 2.0) * 1e9
    gib = min(_GIB * task.scale, disk * budget.left / 14 / 2**30)
    made = make(Request(name="400", gib=gib, device=str(device.device)))
    yield Figure("bytes", made.nbytes / 1e9, "GB")
    with files.working_folder(None) as folder:
        with asyncckpt.Checkpointer(f"{folder}/ours") as checkpointer:
            path = checkpointer.save(loads.STEP, made.state).result(budget.left)
        read = ReadLimit(str(Path(step_folder(f"{folder}/ours", loads.STEP), "__0_0.distcp")))
        state = blank(made.state)
        # The simulated device is unknown to DCP's reader.
        by_dcp = state if device.is_real else blank(make(Request(name="400", gib=gib)).state)
        turns: dict[str, Callable[[], float]] = {
            _READ: read.direct_read,
            _OURS: lambda: _load(device, loads.load_from_storage, folder, state),
            _DCP: lambda: _load(device, loads.load_by_dcp, folder, by_dcp),
        }
        seconds: dict[str, list[float]] = {name: [] for name in turns}
        for number in range(_ROUNDS):
            if number and budget.left < 1.5 * sum(map(max, seconds.values())):
                break
            for name, turn in turns.items():
                files.forget(str(path))
                with budget.limit():
                    seconds[name].append(turn())
                if name == _OURS and not same_tensors(made.state, state):
                    raise RuntimeError("the load gave other values")
    for name, each in seconds.items():
        yield Figure(f"{name}: seconds", median(each), "s", samples=tuple(each))
    ours = median(seconds[_OURS])
    yield Figure("speed of a load to the device, by a direct read", median(seconds[_READ]) / ours, at_least=0.7)
    yield Figure("speed of a load to the device, by DCP's", median(seconds[_DCP]) / ours, at_least=2.0)


def _load(device: Device, load: loads.Load, folder: str, state: State) -> float:
    for tensor in tensors_of(state):
        tensor.fill_(1)
    device.synchronize()
    elapsed = load(folder, state)
    begun = time.perf_counter()
    device.synchronize()
    return elapsed + time.perf_counter() - begun
