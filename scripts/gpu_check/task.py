"""The task of one part."""

from __future__ import annotations

from dataclasses import dataclass

from gpu_check.budget import Budget
from gpu_check.device import Device
from gpu_check.figures import Results
from gpu_check.parts import PEERS


@dataclass(frozen=True)
class Task:
    """A part gets the ``device``, the ``scale`` of all sizes, its ``budget``, the figures that earlier parts have
    ``found``, and the ``peers`` that take part.
    """

    device: Device
    scale: float
    budget: Budget
    found: Results
    peers: tuple[str, ...] = PEERS
