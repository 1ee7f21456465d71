"""Measure how a save grows with the number of tensors at the same bytes, and with the bytes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from bench import saves
from bench.states import Request
from bench.turns import Pace


def measure(
    requests: Sequence[Request], names: Sequence[str], pace: Pace, folder: str, checked: bool
) -> list[dict[str, Any]]:
    """Measure saves for each request, each with an equal part of the time budget."""
    pace = replace(pace, budget=pace.budget / len(requests))
    points = []
    for number, request in enumerate(requests):
        inside = Path(folder, f"point-{number}")
        inside.mkdir()
        points.append(saves.measure(request, names, pace, str(inside), checked=checked))
    return points
