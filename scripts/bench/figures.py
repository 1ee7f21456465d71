"""Compute the figures of a report from measurements: medians, and ratios to the limits of the same run."""

from __future__ import annotations

import statistics
from collections.abc import Collection
from dataclasses import dataclass
from typing import Any

from bench.contestants import ASYNC_PEERS, OURS
from bench.results import Result


def median(values: list[float]) -> float | None:
    """Return the median, or None for an empty list."""
    return statistics.median(values) if values else None


def copy_limit(found: dict[str, Any]) -> float:
    """Return the median seconds of the fastest measured way to copy the bytes once.

    For a device this is the copy into pinned memory.
    """
    limits: dict[str, list[float]] = found["limits"]
    if "pinned copy" in limits:
        return statistics.median(limits["pinned copy"])
    return min(statistics.median(limits[name]) for name in ("memcpy", "memcpy, all cores") if limits.get(name))


COPY_FILE = "direct read and write"
"""The limit of an export."""

UPLOADS = ("one PUT", "multipart upload")
"""The ways to upload the bytes of a state without a checkpoint library."""


@dataclass(frozen=True)
class SaveLimits:
    """Median seconds of the limits: a copy of the bytes, and a copy and a write. For a store: the upload alone."""

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
    """The figures of one contestant: median seconds of warm saves, and ratios to the limits.

    A figure is None if there is no warm save.
    """

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
    """The figures of one contestant: medians of the counted saves, in seconds and bytes."""

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
    """Return the ratio of the best peer's durable time to asyncckpt's, and the name of that peer."""
    medians = {name: median(result.get("durable_s", [])) for name, result in found["results"].items()}
    ours = medians.get(OURS)
    others = [(value, name) for name in peers if (value := medians.get(name)) is not None]
    if ours is None or not others:
        return None
    best, name = min(others)
    return best / ours, name


@dataclass(frozen=True)
class LoopFigures:
    """The cost of a save to the loop: median and quartiles in seconds, in steps, and relative to one copy."""

    cost: float
    low: float
    high: float
    steps: float
    ratio: float
    pairs: int
    late: int
    """Pairs with a save that is not durable by the end of its block. The save costs more than measured."""

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
    """Median seconds of warm loads, ratios to a direct read and a copy and to a copy, and seconds of the first load."""

    load: float
    read_ratio: float
    copy_ratio: float
    first: float | None


def load_figures(found: Result) -> dict[str, LoadFigures]:
    """Return the figures of the limits, then those of each contestant."""
    copy = copy_limit(found)
    limit = copy + statistics.median(found["limits"]["direct read"])
    rows = {COPY: LoadFigures(copy, copy / limit, 1, None)}
    rows[READ_AND_COPY] = LoadFigures(limit, 1, limit / copy, None)
    for name, result in found["results"].items():
        load = statistics.median(result["load_s"])
        rows[name] = LoadFigures(load, load / limit, load / copy, result["first_load_s"])
    return rows
