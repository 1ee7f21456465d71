"""Results of measurements as JSON, one file for each, in the folder of the report."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from bench.machine import describe

Result = dict[str, Any]
"""``kind`` (which measurement), ``label`` (which of its kind), ``machine``, ``settings``, and the figures."""


def result(kind: str, label: str, folder: str, settings: dict[str, Any], found: dict[str, Any]) -> Result:
    """Return a result. ``folder``: where the measurement wrote its files."""
    about = {"kind": kind, "label": label, "machine": describe(folder), "settings": settings}
    return {**about, **rounded(found)}


def write(found: Result, out: Path) -> Path:
    """Write a result into the folder ``out``, in place of one with the same kind and label."""
    out.mkdir(parents=True, exist_ok=True)
    path = out / f"{found['kind']}-{found['label']}.json"
    path.write_text(json.dumps(found, indent=1) + "\n")
    return path


def read(out: Path) -> list[Result]:
    """Return all results, ordered by kind and label."""
    return [json.loads(path.read_text()) for path in sorted(out.glob("*.json"), key=_order)]


def _order(path: Path) -> tuple[int, int, str]:
    """Return a sort key: the kind, then the number that the label begins with."""
    kind, _, label = path.stem.partition("-")
    digits = "".join(each for each in label.split("x")[0].split("-")[0] if each.isdigit())
    return KINDS.index(kind) if kind in KINDS else len(KINDS), int(digits) if label[:1].isdigit() else 10**9, label


KINDS = (
    "save",
    "unchanged",
    "loop",
    "load",
    "store",
    "export",
    "telemetry",
    "frameworks",
    "scale",
    "cost",
    "memory",
    "ranks",
    "simulation",
    "publish",
    "hosts",
    "sparse",
    "vllm",
)


def rounded(values: Any) -> Any:
    """Round all floats in a nested value to microseconds, because more digits only make files longer."""
    if isinstance(values, float):
        return round(values, 6)
    if isinstance(values, dict):
        return {name: rounded(each) for name, each in values.items()}
    if isinstance(values, (list, tuple)):
        return [rounded(each) for each in values]
    return values
