"""Figures: what was measured, and what it has to reach."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class Figure:
    """``value`` in ``unit``, which has to be ``at_most`` or ``at_least`` so much; both None: it is for reading."""

    name: str
    value: float | str
    unit: str = ""
    at_most: float | None = None
    at_least: float | None = None

    @property
    def outcome(self) -> str:
        """Whether it reaches that: "pass", "miss", or "" where nothing is asked of it."""
        if isinstance(self.value, str) or (self.at_most is None and self.at_least is None):
            return ""
        too_much = self.at_most is not None and not self.value <= self.at_most
        too_little = self.at_least is not None and not self.value >= self.at_least
        return "miss" if too_much or too_little else "pass"

    @property
    def threshold(self) -> str:
        """What is asked of it."""
        bounds = (("<=", self.at_most), (">=", self.at_least))
        return " ".join(f"{sign} {bound:g}" for sign, bound in bounds if bound is not None)

    def line(self) -> str:
        """For the terminal."""
        shown = self.value if isinstance(self.value, str) else f"{self.value:.4g} {self.unit}".rstrip()
        asked = f" ({self.threshold}: {self.outcome})" if self.outcome else ""
        return f"{self.name}: {shown}{asked}"


class Results:
    """What one part has found, as JSON: written anew with each figure, so that what is cut short is not lost."""

    def __init__(self, path: Path, device: str) -> None:
        self.path = path
        self._found: dict[str, Any] = {"device": device, "whole": False, "seconds": 0.0, "figures": []}

    def add(self, figure: Figure) -> None:
        self._found["figures"].append({**asdict(figure), "outcome": figure.outcome})
        self._write()

    def end(self, seconds: float) -> None:
        """All of the part was measured."""
        self._found |= {"whole": True, "seconds": round(seconds, 1)}
        self._write()

    def _write(self) -> None:
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self.path.write_text(json.dumps(self._found, indent=1) + "\n")


def read(path: Path, device: str) -> tuple[bool, list[Figure]]:
    """Whether a part was measured to its end on ``device``, and its figures; nothing, where it never was."""
    try:
        found = json.loads(path.read_text())
    except FileNotFoundError:
        return False, []
    if found["device"] != device:
        return False, []
    return found["whole"], list(_figures(found["figures"]))


def _figures(found: list[dict[str, Any]]) -> Iterator[Figure]:
    for each in found:
        yield Figure(**{name: value for name, value in each.items() if name != "outcome"})
