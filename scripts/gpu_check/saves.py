"""The parts of saves: how long saves hold the caller and when they are durable, ours and those of each peer."""

from __future__ import annotations

from collections.abc import Iterator

from bench.states import Request

from gpu_check import environment
from gpu_check.figures import Figure
from gpu_check.parts import PEERS
from gpu_check.race import CPU, DURABLE, HELD, OURS, racing
from gpu_check.task import Task

LABEL = "2,000 tensors"
_GIB, _ROUNDS = 4.0, 3
_MANY = {"10,000 tensors": (10_000, 10.0), "100,000 tensors": (100_000, 20.0)}
"""How many, and the milliseconds that an overlapped save may hold the caller."""
MANY_LABELS = tuple(_MANY)
_MANY_BYTES = 1_000_000_000
_SLOW_GB_S = 1.0
_MEMORY = "/dev/shm"


def measure(task: Task) -> Iterator[Figure]:
    """Save a state as AdamW has it; on tmpfs if the disk is slow, and then on the disk, too."""
    device, budget = task.device, task.budget
    yield Figure("checkpoints are written to", "the disk" if _folder(task) is None else "tmpfs, as the disk is slow")
    with racing(device, _adamw(task), _folder(task)) as race:
        link = device.link_seconds(race.nbytes)[0]
        yield Figure("bytes", race.nbytes / 1e9, "GB")
        yield Figure("bytes / link", link * 1e3, "ms")
        race.run(OURS, _ROUNDS, budget.share(0.7))
        yield from race.figures(LABEL)
        if (held := race.held(OURS[0])) is not None:
            yield Figure("save holds the caller, by bytes / link", held / link, at_most=1.05)
        if (held := race.held(OURS[1])) is not None:
            yield Figure("overlapped save holds the caller", held * 1e3, "ms", at_most=3)
        for name in OURS:
            try:
                race.check_newest(name, budget.share(0.7))
                yield Figure(f"{name}: its checkpoint has the values of the call", "yes")
            except (RuntimeError, TimeoutError, KeyError) as error:
                yield Figure(f"{name}: its checkpoint has the values of the call", f"not known: {error!r}")
    if _folder(task) is not None:
        with racing(device, _adamw(task)) as race:
            race.run(OURS, 1, budget.share(0.9))
            yield from race.figures(f"{LABEL}, on the disk")


def measure_peer(task: Task) -> Iterator[Figure]:
    """Save the state of ``measure`` by the peer of the part's name, and compare."""
    with racing(task.device, _adamw(task), _folder(task)) as race:
        race.run([task.name], _ROUNDS, task.budget.share(0.9))
        yield from race.figures(LABEL)
    for what in (DURABLE, CPU):
        ours, theirs = _ours(task, OURS[0], what), race.value(task.name, what)
        if ours is not None and theirs is not None:
            yield Figure(f"{what}: ours, by theirs", ours / theirs, at_most=1.0)
    ours, theirs = _ours(task, OURS[1], HELD), race.held(task.name)
    if ours is not None and theirs is not None:
        at_most = 0.05 if task.name == "nvrx" else None
        yield Figure("overlapped save holds the caller: ours, by theirs", ours / 1e3 / theirs, at_most=at_most)


def measure_many(task: Task) -> Iterator[Figure]:
    """Save many small tensors: ours first, then the two peers that held the caller for the least time."""
    device, budget = task.device, task.budget
    for number, (label, (_, most_ms)) in enumerate(_MANY.items()):
        with racing(device, _many(label, task.scale)) as race:
            link = device.link_seconds(race.nbytes)[0]
            yield Figure(f"{label}: bytes / link", link * 1e3, "ms")
            race.run(OURS, _ROUNDS, budget.share((0.35, 0.55)[number]))
            yield from race.figures(label)
            if (value := race.held(OURS[1])) is not None:
                yield Figure(f"overlapped save of {label} holds the caller", value * 1e3, "ms", at_most=most_ms)
    for number, label in enumerate(_MANY):
        # Some peers need a minute for so many tensors: then the limit says so.
        for place, name in enumerate(peers_by_held(task)[:2]):
            with racing(device, _many(label, task.scale)) as race:
                race.run([name], 1, budget.share(0.9 / (4 - 2 * number - place)))
                yield from race.figures(label)


def peers_by_held(task: Task) -> list[str]:
    """Return the peers that could save, the one first that held the caller for the least time."""
    held = {name: task.found.value(name, f"{LABEL}, {name}: {HELD}") for name in PEERS}
    return sorted((name for name, ms in held.items() if ms is not None), key=lambda name: held[name] or 0.0)


def _ours(task: Task, name: str, what: str) -> float | None:
    return task.found.value("saves", f"{LABEL}, {name}: {what}")


def _adamw(task: Task) -> Request:
    return Request(name="adamw2000", gib=_GIB * task.scale)


def _folder(task: Task) -> str | None:
    """Return where to write: None for the disk, memory if the disk is slow."""
    disk = task.found.value("env", environment.DISK)
    return _MEMORY if disk is not None and disk < _SLOW_GB_S else None


def _many(label: str, scale: float) -> Request:
    count = _MANY[label][0]
    return Request(name=f"{max(100, int(count * min(scale, 1.0)))}x{_MANY_BYTES // count // 1000}kB")
