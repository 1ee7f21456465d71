"""The picture of the demo: the losses, with the kill and the resume, and what saves cost."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import matplotlib
from matplotlib.figure import Figure as Picture
from matplotlib.patches import Patch

from asyncckpt.demo.costs import CANNOT_TELL, OURS

_DPI = 110
# Those of the pictures of scripts/bench.
_OURS_COLOUR, _PEER_COLOUR, _KILL_COLOUR = "#1f6fb4", "#b9b9b9", "#c0392b"
_KEYS = {"call_s": "the call", "wall_s": "lost in all", "cpu_s": "processor time"}
_MILLI = 1e3


def draw(summary: Mapping[str, Any], path: str) -> None:
    """Into a PNG at ``path``."""
    with matplotlib.rc_context({"font.size": 9, "axes.spines.top": False, "axes.spines.right": False}):
        picture = Picture(figsize=(11, 4.2), layout="constrained")
        losses, costs = picture.subplots(1, 2)
        _draw_losses(losses, summary)
        _draw_costs(costs, summary["costs"])
        picture.savefig(path, dpi=_DPI, format="png", metadata={"Software": None})


def _draw_losses(axes: Any, summary: Mapping[str, Any]) -> None:
    losses = summary["losses"]
    axes.plot(*_points(losses["not killed"]), color=_PEER_COLOUR, linewidth=4, label="not killed")
    axes.plot(*_points(losses["killed"]), "o", color=_KILL_COLOUR, markersize=4, label="killed")
    axes.plot(*_points(losses["resumed"]), "o", color=_OURS_COLOUR, markersize=4, label="resumed")
    axes.axvline(summary["killed_at"], color=_KILL_COLOUR, linestyle="--", linewidth=1)
    text = f" killed at step {summary['killed_at']},\n resumed from step {summary['resumed_from']}"
    axes.annotate(text, (summary["killed_at"], 1), xycoords=("data", "axes fraction"), va="top", fontsize=8)
    axes.set_xlabel("step")
    axes.set_ylabel("loss")
    axes.legend(fontsize=8, loc="lower left")
    equal = "equal, bit for bit" if summary["ok"] else "DIFFERENT"
    axes.set_title(f"The losses of both trainings are {equal}", fontsize=10)


def _points(losses: Mapping[int, float]) -> tuple[list[int], list[float]]:
    return list(losses), list(losses.values())


def _draw_costs(axes: Any, costs: Mapping[str, Any]) -> None:
    """Bars for each contestant, with the bounds of the medians."""
    height = 0.8 / len(costs)
    named: list[Patch] = []
    ends = [max(f["median"], f["high"] or 0) for each in costs.values() for key in _KEYS if (f := each[key])]
    for place, (name, each) in enumerate(costs.items()):
        colour = _OURS_COLOUR if name == OURS else _PEER_COLOUR
        named.append(Patch(color=colour, label=name))
        for row, key in enumerate(_KEYS):
            y = row + (place - (len(costs) - 1) / 2) * height
            if (figure := each[key]) is None:
                axes.annotate(f" {CANNOT_TELL}", (0, y), va="center", fontsize=8)
                continue
            middle, high = figure["median"] * _MILLI, (figure["high"] or figure["median"]) * _MILLI
            axes.barh(y, middle, height * 0.9, color=colour)
            if figure["low"] is not None:
                axes.plot([figure["low"] * _MILLI, high], [y, y], color="black", linewidth=1)
            axes.annotate(f"  {middle:.3g}", (max(middle, high), y), va="center", fontsize=8)
    axes.set_xlim(0, max(ends) * _MILLI * 1.15)
    axes.set_yticks(range(len(_KEYS)), _KEYS.values())
    axes.set_ylim(len(_KEYS) - 0.5, -0.5)  # also around what cannot be told
    axes.set_xlabel("ms; lines: where the median lies with 95 % confidence")
    axes.legend(handles=named, fontsize=8, loc="upper center", bbox_to_anchor=(0.5, -0.14), ncols=2, frameon=False)
    axes.set_title("What one save costs", fontsize=10)
