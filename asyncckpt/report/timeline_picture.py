"""The picture of a timeline: the last saves, time from left to right, a row for each lane of each rank."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import matplotlib
from matplotlib.figure import Figure as Picture
from matplotlib.patches import Patch

from asyncckpt.report.formats import number
from asyncckpt.report.trace import LaneSpan, RankOfSave, lanes_of

_DPI = 110
_MOST_RANKS, _MOST_SAVES = 8, 8
# Older saves are shown while each still has some width: so many times as much as the longest takes.
_LONGEST = 12.0
# The blue of the pictures of scripts/bench is what keeps the training; the rest goes on beside it.
_COLOURS = {
    "plan": "#9467bd",
    "wait for a slot": "#c0392b",
    "copy": "#1f6fb4",
    "write": "#8c8c8c",
    "sync": "#4d4d4d",
    "checksum": "#c9a227",
    "commit": "#7fb27f",
}
# Of a row, of a bar in it, and between ranks.
_ROW_INCHES, _BAR, _GAP = 0.24, 0.8, 0.6


def draw(saves: Sequence[Sequence[RankOfSave]], path: str) -> None:
    """Into a PNG at ``path``. Raises ``OSError``."""
    shown = _last(saves)
    ranks = sorted({each.rank for save in shown for each in save})
    rows = [
        (rank, lane, spans)
        for rank in ranks[:_MOST_RANKS]
        for lane, spans in lanes_of(
            [span for save in shown for each in save if each.rank == rank for span in each.spans]
        )
    ]
    with matplotlib.rc_context({"font.size": 9, "axes.spines.top": False, "axes.spines.right": False}):
        picture = Picture(
            figsize=(11, 1.5 + _ROW_INCHES * (len(rows) + _GAP * min(len(ranks), _MOST_RANKS))), layout="constrained"
        )
        axes = picture.subplots()
        _draw_rows(axes, rows, min(span.begin for save in shown for each in save for span in each.spans))
        axes.set_title(_title(saves, shown, ranks), fontsize=10)
        used = {part.name for *_, spans in rows for span in spans for part in (span, *span.within)}
        patches = [Patch(color=colour, label=name) for name, colour in _COLOURS.items() if name in used]
        picture.legend(handles=patches, fontsize=8, loc="outside lower center", ncols=len(patches), frameon=False)
        # No date: the same saves make the same file.
        picture.savefig(path, dpi=_DPI, format="png", metadata={"Software": None})


def _last(saves: Sequence[Sequence[RankOfSave]]) -> list[Sequence[RankOfSave]]:
    """The last saves, as many as can be told apart in one picture."""
    shown: list[Sequence[RankOfSave]] = []
    longest = end = 0.0
    for save in sorted(saves, key=lambda save: -_bounds(save)[0])[:_MOST_SAVES]:
        first, last = _bounds(save)
        longest, end = max(longest, last - first), max(end, last)
        if shown and end - first > _LONGEST * longest:
            break
        shown.append(save)
    return shown[::-1]


def _bounds(save: Sequence[RankOfSave]) -> tuple[float, float]:
    spans = [span for each in save for span in each.spans]
    return min(span.begin for span in spans), max(span.end for span in spans)


def _title(saves: Sequence[Any], shown: Sequence[Any], ranks: Sequence[int]) -> str:
    title = number(len(saves), "save") if len(shown) == len(saves) else f"The last {len(shown)} of {len(saves):,} saves"
    title += f" of {number(len(ranks), 'rank')}"
    if left_out := ranks[_MOST_RANKS:]:
        title += f", of which {left_out[0]} to {left_out[-1]} are left out"
    return title


def _draw_rows(axes: Any, rows: Sequence[tuple[int, str, Sequence[LaneSpan]]], first: float) -> None:
    heights = [row + _GAP * sum(rows[at][0] != rows[at - 1][0] for at in range(1, row + 1)) for row in range(len(rows))]
    for y, (rank, lane, spans) in zip(heights, rows, strict=True):
        for span in spans:
            begin, width = span.begin - first, span.end - span.begin
            if span.name in _COLOURS:
                axes.barh(y, width, _BAR, begin, color=_COLOURS[span.name])
            else:  # the call, around what it is made of
                axes.barh(y, width, _BAR, begin, facecolor="none", edgecolor=_COLOURS["copy"], linewidth=0.8)
                if rank == rows[0][0] and lane == rows[0][1]:
                    axes.annotate(span.name, (begin, y - _BAR / 2 - 0.1), va="bottom", fontsize=7)
            for part in span.within:
                axes.barh(y, part.end - part.begin, _BAR, part.begin - first, color=_COLOURS[part.name])
    axes.set_yticks(heights, [f"rank {rank}  {lane}" for rank, lane, _ in rows], fontsize=8)
    axes.set_ylim(heights[-1] + 0.6, -1.2)
    axes.set_xlim(left=0)
    axes.set_xlabel("s since the first call")
