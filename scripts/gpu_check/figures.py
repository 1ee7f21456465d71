"""Figures: a measured value, its unit, and the threshold that it must reach; and the JSON file that holds them all."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class Figure:
    """A measured value, or a text.

    ``at_most`` and ``at_least`` are its thresholds; a figure without thresholds is for reading. ``samples`` are the
    single measurements behind it, in the same unit.
    """

    name: str
    value: float | str
    unit: str = ""
    at_most: float | None = None
    at_least: float | None = None
    samples: tuple[float, ...] = ()

    @property
    def outcome(self) -> str:
        """Return "pass" or "miss", or "" if the figure has no threshold."""
        if isinstance(self.value, str) or (self.at_most is None and self.at_least is None):
            return ""
        too_much = self.at_most is not None and not self.value <= self.at_most
        too_little = self.at_least is not None and not self.value >= self.at_least
        return "miss" if too_much or too_little else "pass"

    @property
    def threshold(self) -> str:
        """Return the threshold as text."""
        bounds = (("<=", self.at_most), (">=", self.at_least))
        return " ".join(f"{sign} {bound:g}" for sign, bound in bounds if bound is not None)

    @property
    def shown(self) -> str:
        """Return the value as text, without its unit."""
        return self.value if isinstance(self.value, str) else f"{self.value:.4g}"

    def line(self) -> str:
        """Return one line for the terminal."""
        asked = f" ({self.threshold}: {self.outcome})" if self.outcome else ""
        return f"{self.name}: {f'{self.shown} {self.unit}'.rstrip()}{asked}"


class Results:
    """The JSON file of all parts. A part writes it anew with each figure, so that a part that is cut short is not lost.

    One process writes at a time: the command runs the parts one after the other.
    """

    def __init__(self, path: Path, device: str, scale: float) -> None:
        """Read ``path``, if it is of the same device and scale; figures of another one are not compared with these."""
        self.path = path
        self._found: dict[str, Any] = {"device": device, "scale": scale, "parts": {}}
        try:
            read = json.loads(path.read_text())
        except FileNotFoundError:
            return
        if (read["device"], read["scale"]) == (device, scale):
            self._found = read

    def begin(self, part: str) -> None:
        """Forget what an earlier run of ``part`` has found."""
        self._found["parts"][part] = {"whole": False, "seconds": 0.0, "figures": []}
        self._write()

    def add(self, part: str, figure: Figure) -> None:
        """Note a figure of ``part``."""
        self._found["parts"][part]["figures"].append(asdict(figure) | {"outcome": figure.outcome})
        self._write()

    def end(self, part: str, seconds: float, *, whole: bool) -> None:
        """Note that ``part`` has ended after so many seconds; not ``whole``: it was cut short or has failed."""
        self._found["parts"].setdefault(part, {"figures": []})
        self._found["parts"][part] |= {"whole": whole, "seconds": round(seconds, 1)}
        self._write()

    def is_whole(self, part: str) -> bool:
        """Return True if ``part`` was measured to its end."""
        return bool(self._found["parts"].get(part, {}).get("whole"))

    def seconds(self, part: str) -> float:
        """Return how long ``part`` took; 0 if it was not measured."""
        return float(self._found["parts"].get(part, {}).get("seconds", 0.0))

    def figures(self, part: str) -> list[Figure]:
        """Return the figures of ``part`` so far."""
        return list(_figures(self._found["parts"].get(part, {}).get("figures", [])))

    def value(self, part: str, name: str) -> float | None:
        """Return the number that ``part`` has found under ``name``; None if it has found none."""
        return next(
            (each.value for each in self.figures(part) if each.name == name and not isinstance(each.value, str)), None
        )

    def _write(self) -> None:
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self.path.write_text(json.dumps(self._found, indent=1) + "\n")


def _figures(found: list[dict[str, Any]]) -> Iterator[Figure]:
    for each in found:
        fields = {name: value for name, value in each.items() if name != "outcome"}
        yield Figure(**fields | {"samples": tuple(fields["samples"])})
