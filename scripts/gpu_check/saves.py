"""The parts ``saves`` and ``many``: how long saves hold the caller and when they are durable, beside those of peers."""

from __future__ import annotations

from collections.abc import Iterator

from bench.states import Request

from gpu_check import environment
from gpu_check.figures import Figure
from gpu_check.parts import PEERS
from gpu_check.race import OURS, Race, racing
from gpu_check.task import Task

_BY_IPC = "nvrx-ipc"
SAVES_LABEL = "2,000 tensors"
_GIB, _ROUNDS = 4.0, 3
_MANY = {"10,000 tensors": (10_000, 10.0), "100,000 tensors": (100_000, 20.0)}
"""How many, and the milliseconds that an overlapped save may hold the caller."""
MANY_LABELS = tuple(_MANY)
_MANY_BYTES = 1_000_000_000
_SLOW_GB_S = 1.0
_MEMORY = "/dev/shm"


def measure(task: Task) -> Iterator[Figure]:
    """Save a state as AdamW has it; on tmpfs if the disk is slow, and then ours on the disk, too."""
    device, budget = task.device, task.budget
    request = Request(name="adamw2000", gib=_GIB * task.scale)
    slow = (task.found.value("env", environment.DISK) or 0.0) < _SLOW_GB_S
    yield Figure("checkpoints are written to", "tmpfs, as the disk is slow" if slow else "the disk")
    with racing(device, request, _MEMORY if slow else None) as race:
        link = device.link_seconds(race.nbytes)[0]
        yield Figure("bytes", race.nbytes / 1e9, "GB")
        yield Figure("bytes / link", link * 1e3, "ms")
        race.run([*OURS, *task.peers], _ROUNDS, budget.share(0.85))
        yield from race.figures(SAVES_LABEL)
        yield from _compared(race, link)
        for name in OURS:
            try:
                race.check_newest(name, budget.share(0.5))
                yield Figure(f"{name}: its checkpoint has the values of the call", "yes")
            except (RuntimeError, TimeoutError, KeyError) as error:
                yield Figure(f"{name}: its checkpoint has the values of the call", f"not known: {error!r}")
    if slow:
        with racing(device, request) as race:
            race.run(OURS, 1, budget.share(0.9), turn=0.5)
            yield from race.figures(f"{SAVES_LABEL}, on the disk")


def measure_by_ipc(task: Task) -> Iterator[Figure]:
    """Save the state of ``measure`` by nvrx over CUDA IPC: two queues of nvrx cannot be in one process."""
    device, budget = task.device, task.budget
    with racing(device, Request(name="adamw2000", gib=_GIB * task.scale)) as race:
        race.run([_BY_IPC], _ROUNDS, budget.share(0.9), turn=0.8)
        yield from race.figures(SAVES_LABEL)
        theirs, ours = race.durable(_BY_IPC), task.found.value("saves", f"{SAVES_LABEL}, {OURS[0]}: durable after")
        if theirs is not None and ours is not None:
            yield Figure("durable, by nvrx over CUDA IPC", ours / theirs, at_most=1.0)


def measure_many(task: Task) -> Iterator[Figure]:
    """Save many small tensors: ours first, then the two peers that held the caller for the least time in ``saves``."""
    device, budget = task.device, task.budget
    for number, (label, (_, most_ms)) in enumerate(_MANY.items()):
        with racing(device, _many(label, task.scale)) as race:
            link = device.link_seconds(race.nbytes)[0]
            yield Figure(f"{label}: bytes / link", link * 1e3, "ms")
            race.run(OURS, _ROUNDS, budget.share((0.35, 0.55)[number]), turn=0.8)
            yield from race.figures(label)
            if (value := race.held(OURS[1])) is not None:
                yield Figure(f"overlapped save of {label} holds the caller", value * 1e3, "ms", at_most=most_ms)
    held = {name: task.found.value("saves", f"{SAVES_LABEL}, {name}: save holds the caller") for name in task.peers}
    best = sorted((name for name in task.peers if held[name] is not None), key=lambda name: held[name] or 0.0)[:2]
    for number, label in enumerate(_MANY):
        # Some peers need a minute for so many tensors: then the limit says so.
        with racing(device, _many(label, task.scale)) as race:
            race.run(best or task.peers[:2], 1, budget.share((0.5, 0.9)[number]), turn=0.6)
            yield from race.figures(label)


def _many(label: str, scale: float) -> Request:
    count = _MANY[label][0]
    return Request(name=f"{max(100, int(count * min(scale, 1.0)))}x{_MANY_BYTES // count // 1000}kB")


def _compared(race: Race, link: float) -> Iterator[Figure]:
    """Compare ours with the link and with the peers that could save."""
    ours, overlap = race.held(OURS[0]), race.held(OURS[1])
    if ours is not None:
        yield Figure("save holds the caller, by bytes / link", ours / link, at_most=1.05)
    if overlap is not None:
        yield Figure("overlapped save holds the caller", overlap * 1e3, "ms", at_most=3)
        if (nvrx := race.held("nvrx")) is not None:
            yield Figure("overlapped save holds the caller, by nvrx", overlap / nvrx, at_most=0.05)
    for what, of in (("durable", race.durable), ("CPU", race.cpu)):
        peers = [value for value in map(of, PEERS) if value is not None]
        if peers and (mine := of(OURS[0])) is not None:
            yield Figure(f"{what}, by the best of the others", mine / min(peers), at_most=1.0)
