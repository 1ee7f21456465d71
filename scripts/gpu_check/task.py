"""The task of one part."""

from __future__ import annotations

from dataclasses import dataclass

from gpu_check.budget import Budget
from gpu_check.device import Device
from gpu_check.figures import Results


@dataclass(frozen=True)
class Task:
    """A part gets its ``name``, the ``device``, the ``scale`` of all sizes, its ``budget``, and what earlier parts have
    ``found``.
    """

    name: str
    device: Device
    scale: float
    budget: Budget
    found: Results
