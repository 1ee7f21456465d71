"""Draw one picture for each measurement from its JSON."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import Any

import matplotlib
from matplotlib.figure import Figure

from bench import costs
from bench.contestants import OURS, title
from bench.figures import (
    COPY,
    COPY_FILE,
    READ_AND_COPY,
    LoopFigures,
    SaveFigures,
    SaveLimits,
    UnchangedFigures,
    copy_limit,
    load_figures,
)
from bench.hosts import LINK
from bench.results import Result
from bench.unchanged import COPY_CHANGING, WRITE_CHANGING

DPI = 110
MUCH = 20
OURS_COLOUR, KIN_COLOUR, PEER_COLOUR, LIMIT_COLOUR = "#1f6fb4", "#7fb2dd", "#b9b9b9", "#c0392b"

Bars = Sequence[tuple[str, float | None]]
"""Names and values, from top to bottom."""


def draw(found: Result, path: Path) -> None:
    """Draw a result into a PNG file."""
    with matplotlib.rc_context({"font.size": 9, "axes.spines.top": False, "axes.spines.right": False}):
        figure = _DRAWN[found["kind"]](found)
        # Without a date, the same figures give the same file.
        figure.savefig(path, dpi=DPI, format="png", metadata={"Software": None})


def draw_bars(axes: Any, bars: Bars, label: str, limit: float, milli: bool = True) -> None:
    """Draw horizontal bars and a line at ``limit``. The axis is logarithmic if the values differ much."""
    scale = 1e3 if milli else 1.0
    shown = [(name, value * scale) for name, value in bars if value is not None]
    values = [value for _, value in shown] or [limit * scale]
    rows = list(range(len(shown)))[::-1]
    axes.barh(rows, [value for _, value in shown], color=[_colour(name) for name, _ in shown], height=0.7)
    axes.set_yticks(rows, [title(name) for name, _ in shown])
    low, high = min(*values, limit * scale), max(*values, limit * scale)
    if low > 0 and high > MUCH * low:
        axes.set_xscale("log")
        axes.set_xlim(low / 2, high * 3)
    else:
        axes.set_xlim(min(0.0, low) * 1.1, high * 1.15)
    for row, (_, value) in zip(rows, shown, strict=True):
        axes.annotate(f" {_digits(value)}", (max(value, 0), row), va="center", fontsize=8)
    axes.axvline(limit * scale, color=LIMIT_COLOUR, linestyle="--", linewidth=1)
    axes.set_xlabel(label)


def _digits(value: float) -> str:
    return f"{value:,.0f}" if abs(value) >= 99.5 else f"{value:.3g}"


def _colour(name: str) -> str:
    if name == OURS:
        return OURS_COLOUR
    if name.startswith(OURS):
        return KIN_COLOUR
    return PEER_COLOUR


def _about(found: Result) -> str:
    return f"{found['state']['description']}, {found['state']['bytes'] / 2**30:.3g} GiB"


def _save(found: Result) -> Figure:
    figure = Figure(figsize=(10, 0.6 + 0.34 * (len(found["results"]) + 2)), layout="constrained")
    blocked, durable = figure.subplots(1, 2, sharey=True)
    limits = SaveLimits.of(found)
    rows = {name: SaveFigures.of(result, limits) for name, result in found["results"].items()}
    rows = {name: each for name, each in rows.items() if each.blocked is not None}
    draw_bars(blocked, [(name, each.blocked) for name, each in rows.items()], "blocked, ms", limits.copy)
    label = "durable after, s"
    draw_bars(durable, [(name, each.durable) for name, each in rows.items()], label, limits.durable, milli=False)
    figure.suptitle(f"A save of {_about(found)}; dashed: the limits", fontsize=10)
    return figure


def _unchanged(found: Result) -> Figure:
    figure = Figure(figsize=(10, 0.9 + 0.34 * (len(found["results"]) + 2)), layout="constrained")
    call, durable = figure.subplots(1, 2, sharey=True)
    rows = {name: UnchangedFigures.of(result) for name, result in found["results"].items()}
    copy = median(found["limits"][COPY_CHANGING])
    write = copy + median(found["limits"][WRITE_CHANGING])
    draw_bars(call, [(name, each.call) for name, each in rows.items()], "the call, ms", copy)
    draw_bars(durable, [(name, each.durable) for name, each in rows.items()], "durable after, ms", write)
    figure.suptitle(f"{found['title']}\ndashed: copying what changes, and writing it", fontsize=10)
    return figure


def _loop(found: Result) -> Figure:
    figure = Figure(figsize=(8, 0.9 + 0.34 * (len(found["results"]) + 2)), layout="constrained")
    axes = figure.subplots()
    copy = copy_limit(found)
    rows = {name: LoopFigures.of(result, copy) for name, result in found["results"].items()}
    draw_bars(axes, [(name, each.cost) for name, each in rows.items()], "a save costs the loop, ms", copy)
    threads = found["train_threads"]
    about = f"{_about(found)}; {threads} training thread{'s' * (threads != 1)}; dashed: one copy"
    figure.suptitle(f"What a save costs the training loop\n{about}", fontsize=10)
    return figure


def _load(found: Result) -> Figure:
    rows = load_figures(found)
    limit = rows.pop(READ_AND_COPY).load
    rows.pop(COPY)
    figure = Figure(figsize=(8, 0.9 + 0.34 * (len(rows) + 2)), layout="constrained")
    axes = figure.subplots()
    draw_bars(axes, [(name, each.load) for name, each in rows.items()], "load, s", limit, milli=False)
    figure.suptitle(f"A load of {_about(found)}; dashed: direct read and copy", fontsize=10)
    return figure


def _export(found: Result) -> Figure:
    figure = Figure(figsize=(8, 0.9 + 0.34 * (len(found["results"]) + 2)), layout="constrained")
    bars = [(name, median(result["export_s"])) for name, result in found["results"].items()]
    draw_bars(figure.subplots(), bars, "export, s", median(found["limits"][COPY_FILE]), milli=False)
    figure.suptitle(f"An export of {_about(found)}; dashed: direct read and write", fontsize=10)
    return figure


def _scale(found: Result) -> Figure:
    figure = Figure(figsize=(10, 4.2), layout="constrained")
    panels = figure.subplots(1, 2)
    points = found["points"]
    by_bytes = len({point["state"]["tensors"] for point in points}) == 1
    x_of = "bytes" if by_bytes else "tensors"
    names = list(dict.fromkeys(name for point in points for name in point["results"]))
    for axes, kind in zip(panels, ("blocked", "durable"), strict=True):
        xs = [point["state"][x_of] for point in points]
        limits = [SaveLimits.of(point) for point in points]
        bounds = [each.copy if kind == "blocked" else each.durable for each in limits]
        axes.plot(xs, bounds, color=LIMIT_COLOUR, linestyle="--", label="the limits")
        for name in names:
            line = []
            for x, point, limit in zip(xs, points, limits, strict=True):
                if name in point["results"]:
                    value = getattr(SaveFigures.of(point["results"][name], limit), kind)
                    line += [(x, value)] if value is not None else []
            ours = (
                {"color": _colour(name), "linewidth": 2.5, "zorder": 5} if name.startswith(OURS) else {"linewidth": 1}
            )
            axes.plot(*zip(*line, strict=True), marker="o", markersize=3, label=title(name), **ours) if line else None
        axes.set_xscale("log")
        axes.set_yscale("log")
        axes.set_xlabel(x_of)
        axes.set_ylabel(f"{kind}, s")
    panels[1].legend(fontsize=7, loc="center left", bbox_to_anchor=(1, 0.5))
    first = points[0]["state"]
    same = f"{first['tensors']:,} tensors" if by_bytes else f"{first['bytes'] / 2**20:.0f} MiB"
    figure.suptitle(f"A save of {same} against {x_of}", fontsize=10)
    return figure


def _cost(found: Result) -> Figure:
    figure = Figure(figsize=(8, 0.8 + 0.4 * (len(found["results"]) + 1)), layout="constrained")
    axes = figure.subplots()
    names = list(reversed(found["results"]))
    left = [0.0] * len(names)
    for key, label, colour in (("user_s", "user", PEER_COLOUR), ("system_s", "system", "#e0a458")):
        means = [sum(its[key]) / len(its[key]) for its in map(found["results"].__getitem__, names)]
        axes.barh(range(len(names)), means, left=left, color=colour, height=0.6, label=label)
        left = [one + other for one, other in zip(left, means, strict=True)]
    floor = sum(median(found["limits"][name]) for name in (costs.COPY, costs.WRITE))
    axes.axvline(floor, color=LIMIT_COLOUR, label="one copy and one direct write")
    axes.set_yticks(range(len(names)), list(map(title, names)))
    axes.set_xlabel("seconds of CPU for each save, in all processes")
    axes.legend(fontsize=7)
    figure.suptitle(f"What is computed for a save of {_about(found)}", fontsize=10)
    return figure


def _memory(found: Result) -> Figure:
    figure = Figure(figsize=(8, 0.8 + 0.5 * (len(found["results"]) + 1)), layout="constrained")
    axes = figure.subplots()
    ticks, labels = [], []
    kinds = {"trainer": PEER_COLOUR, "others": "#e0a458", "shared": KIN_COLOUR, "page_cache": "#dcd3ea"}
    names = {
        "trainer": "trainer",
        "others": "other processes",
        "shared": "shared memory",
        "page_cache": "page cache left",
    }
    for row, (name, each) in enumerate(reversed(found["results"].items())):
        left = 0.0
        for kind, colour in kinds.items():
            value = max(0, each["page_cache"] if kind == "page_cache" else each["steady"][kind]) / 2**30
            axes.barh(row, value, left=left, color=colour, height=0.6, label=names[kind] if not row else None)
            left += value
        axes.plot([each["peak"]["total"] / 2**30], [row], marker="|", markersize=14, color=LIMIT_COLOUR, linestyle="")
        ticks.append(row)
        labels.append(title(name))
    axes.set_yticks(ticks, labels)
    axes.set_xlabel("GiB, after saves; red: peak, without page cache")
    axes.legend(fontsize=7)
    figure.suptitle(f"Memory that saving takes beside {_about(found)}", fontsize=10)
    return figure


def _ways(found: Result) -> Figure:
    figure = Figure(figsize=(8, 0.9 + 0.34 * (len(found["results"]) + 2)), layout="constrained")
    axes = figure.subplots()
    rows = [(name, median(each["elapsed_s"])) for name, each in found["results"].items()]
    draw_bars(axes, rows, "until all are there, ms", copy_limit(found))
    figure.suptitle(f"{found['title']}\ndashed: one copy", fontsize=10)
    return figure


def _hosts(found: Result) -> Figure:
    figure = Figure(figsize=(8, 0.9 + 0.34 * (len(found["results"]) + 2)), layout="constrained")
    axes = figure.subplots()
    rows = [(name, median(each["elapsed_s"])) for name, each in found["results"].items()]
    draw_bars(axes, rows, "until all have them, s", found["limits"][LINK][0], milli=False)
    figure.suptitle(f"{found['title']}\ndashed: {LINK}", fontsize=10)
    return figure


def _vllm(found: Result) -> Figure:
    figure = Figure(figsize=(8, 0.9 + 0.34 * (len(found["results"]) + 2)), layout="constrained")
    axes = figure.subplots()
    rows = [(name, median(each["update_s"])) for name, each in found["results"].items()]
    draw_bars(axes, rows, "until the engine has them, ms", median(found["limits"]["one copy"]))
    figure.suptitle(f"{found['title']}\ndashed: one copy", fontsize=10)
    return figure


def _frameworks(found: Result) -> Figure:
    figure = Figure(figsize=(8, 0.9 + 0.34 * (len(found["results"]) + 2)), layout="constrained")
    axes = figure.subplots()
    rows = [(name, median(each["lost"] for each in turns[1:])) for name, turns in found["results"].items()]
    draw_bars(axes, rows, "lost by the training, ms", copy_limit(found))
    figure.suptitle(f"{found['title']}\ndashed: one copy", fontsize=10)
    return figure


def _ranks(found: Result) -> Figure:
    rows = found["rows"]
    keys = list(rows[0])
    figure = Figure(figsize=(6.5, 3.6), layout="constrained")
    axes = figure.subplots()
    xs = [row[keys[0]] for row in rows]
    for key in keys[1:]:
        if key.endswith(" s"):
            axes.plot(xs, [row[key] for row in rows], marker="o", markersize=3, label=key)
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.set_xticks(xs, [f"{x:,}" for x in xs])
    axes.set_xlabel(keys[0])
    axes.set_ylabel("s")
    axes.legend(fontsize=7)
    return figure


def _telemetry(found: Result) -> Figure:
    figure = Figure(figsize=(8, 2.4), layout="constrained")
    axes = figure.subplots()
    for name, result in found["results"].items():
        axes.ecdf([each * 1e3 for each in result["call_s"]], label=name)
    axes.set_xlabel("the call, ms")
    axes.set_ylabel("share of saves")
    axes.legend(fontsize=7)
    figure.suptitle(f"Saves of {_about(found)}, and who listens", fontsize=10)
    return figure


_DRAWN = {
    "save": _save,
    "unchanged": _unchanged,
    "loop": _loop,
    "load": _load,
    "store": _save,
    "export": _export,
    "telemetry": _telemetry,
    "frameworks": _frameworks,
    "scale": _scale,
    "cost": _cost,
    "memory": _memory,
    "ranks": _ranks,
    "simulation": _ranks,
    "publish": _ways,
    "hosts": _hosts,
    "sparse": _hosts,
    "vllm": _vllm,
}
