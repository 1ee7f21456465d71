"""What was measured, as JSON: one file a measurement, in the folder of the report."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from bench.machine import describe

Result = dict[str, Any]
"""``kind`` (which measurement), ``label`` (which of its kind), ``machine``, ``settings``, and what it found."""


def result(kind: str, label: str, folder: str, settings: dict[str, Any], found: dict[str, Any]) -> Result:
    """``folder`` is where was written."""
    about = {"kind": kind, "label": label, "machine": describe(folder), "settings": settings}
    return {**about, **rounded(found)}


def write(found: Result, out: Path) -> Path:
    """Into the folder ``out``; one of the same kind and label is replaced."""
    out.mkdir(parents=True, exist_ok=True)
    path = out / f"{found['kind']}-{found['label']}.json"
    path.write_text(json.dumps(found, indent=1) + "\n")
    return path


def read(out: Path) -> list[Result]:
    """All there are, in the order of their names."""
    return [json.loads(path.read_text()) for path in sorted(out.glob("*.json"), key=_order)]


def _order(path: Path) -> tuple[int, int, str]:
    """By kind, and numbers by what they are."""
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
    "vllm",
)


def rounded(values: Any) -> Any:
    """Seconds to the microsecond, in any nest: more digits only make the files longer."""
    if isinstance(values, float):
        return round(values, 6)
    if isinstance(values, dict):
        return {name: rounded(each) for name, each in values.items()}
    if isinstance(values, (list, tuple)):
        return [rounded(each) for each in values]
    return values
