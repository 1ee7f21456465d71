"""The picture: how long each contestant's save holds the caller, beside the bytes over the link."""

from __future__ import annotations

from pathlib import Path

import matplotlib
from bench.pictures import DPI, draw_bars
from matplotlib.figure import Figure

from gpu_check.figures import Results
from gpu_check.parts import PEERS
from gpu_check.race import HELD
from gpu_check.saves import LABEL, MANY_LABELS

_HELD = f": {HELD}"


def draw(results: Results, path: Path) -> None:
    """Draw one panel for each state that was saved, on logarithmic axes; no panel, no picture."""
    panels = []
    many = [(["many"], label, f"{label}: bytes / link") for label in MANY_LABELS]
    for parts, label, link in [(["saves", *PEERS], LABEL, "bytes / link"), *many]:
        start = f"{label}, "
        held = {
            figure.name.removeprefix(start).removesuffix(_HELD): float(figure.value) / 1e3
            for part in parts
            for figure in results.figures(part)
            if figure.name.startswith(start) and figure.name.endswith(_HELD) and "first" not in figure.name
        }
        limit = results.value(parts[0], link)
        if limit is not None and held:
            panels.append((label, held, limit / 1e3))
    if not panels:
        return
    with matplotlib.rc_context({"font.size": 9, "axes.spines.top": False, "axes.spines.right": False}):
        figure = Figure(figsize=(7, 0.8 + 0.35 * sum(len(held) + 2 for _, held, _ in panels)), layout="constrained")
        axes = figure.subplots(len(panels), squeeze=False, height_ratios=[len(held) + 1 for _, held, _ in panels])
        for each, (label, held, limit) in zip(axes[:, 0], panels, strict=True):
            draw_bars(each, list(held.items()), "a save holds the caller, ms; dashed: bytes / link", limit)
            each.set_xscale("log")
            each.set_title(label, loc="left", fontsize=9)
        figure.savefig(path, dpi=DPI, format="png", metadata={"Software": None})
