"""From what was measured to what a report says: medians, and ratios to the limits of the same run."""

from __future__ import annotations

import statistics
from collections.abc import Collection
from dataclasses import dataclass
from typing import Any

from bench.contestants import ASYNC_PEERS, OURS
from bench.results import Result


def median(values: list[float]) -> float | None:
    """None of nothing."""
    return statistics.median(values) if values else None


def copy_limit(found: dict[str, Any]) -> float:
    """Seconds: of the ways to copy the bytes once that were measured, the median of the fastest.

    From a device that is the copy into pinned memory.
    """
    limits: dict[str, list[float]] = found["limits"]
    if "pinned copy" in limits:
        return statistics.median(limits["pinned copy"])
    return min(statistics.median(limits[name]) for name in ("memcpy", "memcpy, all cores") if limits.get(name))


COPY_FILE = "direct read and write"
"""The limit of an export."""

UPLOADS = ("one PUT", "multipart upload")
"""How a store is given the bytes of a state by itself."""


@dataclass(frozen=True)
class SaveLimits:
    """Seconds, medians: of copying the bytes once, and of that and writing them; of a store, of sending them alone."""

    copy: float
    durable: float

    @classmethod
    def of(cls, found: dict[str, Any]) -> SaveLimits:
        copy, limits = copy_limit(found), found["limits"]
        if all(name in limits for name in UPLOADS):
            return cls(copy, min(statistics.median(limits[name]) for name in UPLOADS))
        return cls(copy, copy + statistics.median(limits["direct write"]))


@dataclass(frozen=True)
class SaveFigures:
    """Of one contestant: seconds, medians of warm saves; and ratios to the limits. None where it had no warm save."""

    blocked: float | None
    blocked_ratio: float | None
    free: float | None
    durable: float | None
    durable_ratio: float | None
    first_blocked: float
    saves: int

    @classmethod
    def of(cls, result: dict[str, Any], limits: SaveLimits) -> SaveFigures:
        blocked, free, durable = (median(result.get(name, [])) for name in ("blocked_s", "free_s", "durable_s"))
        return cls(
            blocked,
            None if blocked is None else blocked / limits.copy,
            free,
            durable,
            None if durable is None else durable / limits.durable,
            result["first_blocked_s"],
            len(result.get("blocked_s", [])),
        )


@dataclass(frozen=True)
class UnchangedFigures:
    """Of one contestant, medians of the saves that count: seconds and bytes."""

    call: float
    durable: float
    written: float
    allocated: float
    memory: float
    trainer_cpu: float
    worker_cpu: float
    saves: int

    @classmethod
    def of(cls, result: dict[str, Any]) -> UnchangedFigures:
        middle = {name: statistics.median(values) for name, values in result.items() if name != "first"}
        return cls(
            call=middle["call_s"],
            durable=middle["durable_s"],
            written=middle["written"],
            allocated=middle["allocated"],
            memory=middle["memory"],
            trainer_cpu=middle["trainer_cpu_s"],
            worker_cpu=middle["worker_cpu_s"],
            saves=len(result["call_s"]),
        )


def sooner_than_peers(found: dict[str, Any], peers: Collection[str] = ASYNC_PEERS) -> tuple[float, str] | None:
    """How many times sooner asyncckpt is durable than the best of ``peers``, and which that is."""
    medians = {name: median(result.get("durable_s", [])) for name, result in found["results"].items()}
    ours = medians.get(OURS)
    others = [(value, name) for name in peers if (value := medians.get(name)) is not None]
    if ours is None or not others:
        return None
    best, name = min(others)
    return best / ours, name


@dataclass(frozen=True)
class LoopFigures:
    """What a save costs the loop: seconds, median and quartiles of the pairs; in steps; over copying the bytes once."""

    cost: float
    low: float
    high: float
    steps: float
    ratio: float
    pairs: int
    late: int
    """Pairs in which the save was not durable by the end of its block: it costs more than was measured."""

    @classmethod
    def of(cls, result: dict[str, Any], copy: float) -> LoopFigures:
        costs = result["cost_s"]
        cost = statistics.median(costs)
        low, _, high = statistics.quantiles(costs, method="inclusive") if len(costs) > 1 else (cost, cost, cost)
        step = statistics.median(
            seconds / steps for seconds, steps in zip(result["without_s"], result["steps"], strict=True)
        )
        late = sum(1 for fitted in result["fitted"] if not fitted)
        return cls(cost, low, high, cost / step, cost / copy, len(costs), late)


COPY, READ_AND_COPY = "copying the bytes once", "direct read and copy"


@dataclass(frozen=True)
class LoadFigures:
    """Seconds, the median of warm loads; over a direct read and a copy; over a copy alone; of the first."""

    load: float
    read_ratio: float
    copy_ratio: float
    first: float | None


def load_figures(found: Result) -> dict[str, LoadFigures]:
    """By contestant; before them that of the limits."""
    copy = copy_limit(found)
    limit = copy + statistics.median(found["limits"]["direct read"])
    rows = {COPY: LoadFigures(copy, copy / limit, 1, None)}
    rows[READ_AND_COPY] = LoadFigures(limit, 1, limit / copy, None)
    for name, result in found["results"].items():
        load = statistics.median(result["load_s"])
        rows[name] = LoadFigures(load, load / limit, load / copy, result["first_load_s"])
    return rows
