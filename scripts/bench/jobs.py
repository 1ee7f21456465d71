"""The measurements with their choices, and the standard set of them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from asyncckpt.shm.segment import PAGE
from bench import (
    costs,
    exports,
    frameworks,
    hosts,
    loads,
    loads_by_ranks,
    loop,
    memory,
    publications,
    ranks,
    saves,
    scale,
    simulation,
    store,
    telemetry,
    unchanged,
    unchanged_ranks,
    vllm_updates,
)
from bench.contestants import ENTRIES
from bench.models import ARCHITECTURES
from bench.states import GIB, Request
from bench.turns import Pace

SCALE_TENSORS = (100, 1000, 10_000, 100_000)
SCALE_SHARES = (1 / 16, 1 / 4, 1.0)
"""Shares of the bytes."""
SIMULATED = (64, 512, 4096, 16384)
SIMULATED_ITEMS = 25
FEWER = ("asyncckpt-nvrx", "torchsnapshot", "dcp-process", "dcp-save")
"""Contestants left out if the standard set has no time for all."""
PROCESSES = (1, 2, 4, 8)
WEIGHTS_TENSORS = (400, 8000)


@dataclass(frozen=True)
class Job:
    """One measurement. ``measure`` takes the folder to write in."""

    kind: str
    label: str
    measure: Callable[[str], dict[str, Any]]
    settings: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class Choices:
    """Choices that all measurements share."""

    names: Sequence[str] = tuple(ENTRIES)
    pace: Pace = Pace()
    check: bool = True

    def settings(self) -> dict[str, Any]:
        return {"rounds": self.pace.rounds, "pause_s": self.pace.pause, "patience_s": self.pace.patience}


def save(request: Request, choices: Choices, changing: int = 0) -> Job:
    def measure(folder: str) -> dict[str, Any]:
        return saves.measure(request, choices.names, choices.pace, folder, changing=changing, checked=choices.check)

    return Job("save", _label(request), measure, choices.settings() | {"changing_values": changing})


def train(request: Request, choices: Choices, threads: int) -> Job:
    def measure(folder: str) -> dict[str, Any]:
        return loop.measure(request, choices.names, threads, choices.pace, folder, checked=choices.check)

    return Job("loop", f"{_label(request)}-{threads}-threads", measure, choices.settings())


def load(request: Request, choices: Choices) -> Job:
    def measure(folder: str) -> dict[str, Any]:
        return loads.measure(request, choices.pace, folder)

    return Job("load", _label(request), measure, choices.settings())


def load_by_ranks(gib: float, layers: int, count: int, pace: Pace, *, replicas: bool) -> Job:
    def measure(folder: str) -> dict[str, Any]:
        return loads_by_ranks.measure(gib, layers, count, pace, folder, replicas=replicas)

    label = f"{layers}-layers-{count}-{'replicas' if replicas else 'ranks'}"
    return Job("load", label, measure, {"rounds": pace.rounds, "pause_s": pace.pause})


def save_to_store(gib: float, tensors: int, pace: Pace) -> Job:
    def measure(folder: str) -> dict[str, Any]:
        return store.measure(Request(name=str(tensors), gib=gib), pace, folder)

    return Job("store", f"{gib * 1024:g}MiB", measure, {"rounds": pace.rounds, "pause_s": pace.pause})


def export(gib: float, tensors: int, pace: Pace) -> Job:
    def measure(folder: str) -> dict[str, Any]:
        return exports.measure(Request(name=str(tensors), gib=gib), pace, folder)

    return Job("export", str(tensors), measure, {"rounds": pace.rounds, "pause_s": pace.pause})


def listen(request: Request, pace: Pace) -> Job:
    def measure(folder: str) -> dict[str, Any]:
        return telemetry.measure(request, pace, folder)

    return Job("telemetry", _label(request), measure, {"rounds": pace.rounds, "pause_s": pace.pause})


def train_by_frameworks(gib: float, pace: Pace) -> Job:
    def measure(folder: str) -> dict[str, Any]:
        return frameworks.measure(gib, pace, folder)

    return Job("frameworks", f"{gib:g}GiB", measure, {"rounds": pace.rounds, "pause_s": pace.pause})


def reach_hosts(gib: float, tensors: int, count: int, mbit: int, rounds: int) -> Job:
    def measure(folder: str) -> dict[str, Any]:
        return hosts.measure(gib, tensors, count, mbit, rounds, folder)

    return Job("hosts", f"{count}x{gib:g}GiB", measure, {"rounds": rounds, "mbit": mbit})


def reach_hosts_sparsely(gib: float, tensors: int, count: int, mbit: int, rounds: int) -> Job:
    def measure(folder: str) -> dict[str, Any]:
        return hosts.measure_sparse(gib, tensors, count, mbit, rounds, folder)

    return Job("sparse", f"{count}x{gib:g}GiB", measure, {"rounds": rounds, "mbit": mbit})


def save_unchanged(gib: float, changing_mib: float, pace: Pace) -> Job:
    def measure(folder: str) -> dict[str, Any]:
        return unchanged.measure(gib, changing_mib, pace, folder)

    label = f"{gib:g}GiB-{changing_mib:g}MiB"
    return Job("unchanged", label, measure, {"rounds": pace.rounds, "pause_s": pace.pause})


def save_unchanged_by_ranks(gib: float, changing_mib: float, count: int, pace: Pace, *, peft: bool) -> Job:
    def measure(folder: str) -> dict[str, Any]:
        return unchanged_ranks.measure(gib, changing_mib, count, pace, folder, peft=peft)

    label = f"{gib:g}GiB-{changing_mib:g}MiB-{count}-ranks" + ("-peft" if peft else "")
    return Job("unchanged", label, measure, {"rounds": pace.rounds, "pause_s": pace.pause})


def count(request: Request, choices: Choices) -> Job:
    def measure(folder: str) -> dict[str, Any]:
        return costs.measure(request, choices.names, choices.pace.rounds, folder)

    return Job("cost", _label(request), measure, {"saves": choices.pace.rounds})


def take_memory(request: Request, choices: Choices) -> Job:
    def measure(folder: str) -> dict[str, Any]:
        return memory.measure(request, choices.names, choices.pace.rounds, folder)

    return Job("memory", _label(request), measure, {"saves": choices.pace.rounds})


def by_tensors(base: Request, choices: Choices, counts: Sequence[int]) -> Job:
    requests = [replace(base, name=str(count)) for count in counts]
    return _scale("tensors", requests, choices)


def by_bytes(base: Request, choices: Choices) -> Job:
    return _scale("bytes", [replace(base, gib=base.gib * share) for share in SCALE_SHARES], choices)


def _scale(label: str, requests: list[Request], choices: Choices) -> Job:
    def measure(folder: str) -> dict[str, Any]:
        points = scale.measure(requests, choices.names, choices.pace, folder, choices.check)
        return {"title": f"By {'number of tensors' if label == 'tensors' else label}", "points": points}

    return Job("scale", label, measure, choices.settings())


def many_ranks(processes: Sequence[int], gib: float, tensors: int, rounds: int) -> Job:
    def measure(folder: str) -> dict[str, Any]:
        nbytes = int(gib * GIB) // PAGE * PAGE
        title = f"{gib:g} GiB in {tensors:,} tensors, each sharded over all processes"
        return {"title": title, "rows": ranks.measure(processes, nbytes, tensors, rounds, folder)}

    return Job("ranks", str(tensors), measure, {"saves": rounds})


def simulated(counts: Sequence[int], items: int, rounds: int) -> Job:
    def measure(folder: str) -> dict[str, Any]:
        title = f"{items} tensors, each sharded over all ranks"
        return {"title": title, "rows": simulation.measure(counts, items, rounds + 1, folder)}

    return Job("simulation", str(items), measure, {"saves": rounds})


def publish(request: Request, pace: Pace) -> Job:
    def measure(folder: str) -> dict[str, Any]:
        return publications.measure(request, pace, folder)

    return Job("publish", _label(request), measure, {"rounds": pace.rounds, "pause_s": pace.pause})


def update_vllm(gib: float, pace: Pace) -> Job:
    def measure(folder: str) -> dict[str, Any]:
        return vllm_updates.measure(gib, pace, folder)

    return Job("vllm", f"{gib:g}GiB", measure, {"rounds": pace.rounds, "pause_s": pace.pause})


def _label(request: Request) -> str:
    return request.label + ("" if request.device == "cpu" else f"-{request.device.replace(':', '')}")


def standard(gib: float, device: str, choices: Choices, minutes: float, cores: int) -> Iterator[Job]:
    """Yield the measurements of ``docs/benchmarks``. They take about ``minutes`` on a small machine."""

    def request(name: str, of_gib: float = gib) -> Request:
        return Request(name=name, gib=of_gib, device=device)

    def within(share: float, *, but: Sequence[str] = ()) -> Choices:
        """Return choices with a share of the time, at most a fourth for each contestant, and without ``but``."""
        budget = share * minutes * 60
        pace = replace(choices.pace, budget=budget, patience=min(choices.pace.patience, budget / 4))
        return replace(choices, pace=pace, names=[name for name in choices.names if name not in but])

    yield save(request("400"), within(0.1))
    yield save(request("8000x50kB"), within(0.08))
    yield save(request("100000x10kB"), replace(within(0.05, but=["asyncckpt-nvrx", "dcp-save"]), check=False))
    for model in ARCHITECTURES:
        yield save(request(model), within(0.03, but=FEWER))
    # Leave out contestants that block until the write ends. Their cost to the loop is that time, measured above.
    yield train(request("400"), within(0.2, but=["asyncckpt-nvrx", "dcp-save", "torch-save"]), 1)
    if cores > 1:
        yield train(request("400"), within(0.08, but=[*FEWER, "torch-save"]), cores)
    yield load(request("400"), within(0.03))
    yield load(request("8000x50kB"), within(0.03))
    yield by_tensors(request("100", gib / 4), replace(within(0.06, but=FEWER), check=False), SCALE_TENSORS)
    yield by_bytes(request("400"), within(0.03, but=FEWER))
    yield count(request("400"), replace(choices, pace=replace(choices.pace, rounds=7)))
    yield take_memory(request("400"), replace(choices, pace=replace(choices.pace, rounds=2)))
    yield many_ranks(PROCESSES, gib, 400, choices.pace.rounds)
    for tensors in WEIGHTS_TENSORS:
        yield publish(request(str(tensors), gib / 2), choices.pace)
    yield simulated(SIMULATED[:3], SIMULATED_ITEMS, min(3, choices.pace.rounds))
