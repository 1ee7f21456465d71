"""The parts: what measures each, and the seconds that it may take."""

from __future__ import annotations

import importlib
import time
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from gpu_check.budget import Budget
from gpu_check.figures import Figure, Results


@dataclass(frozen=True)
class Part:
    """A function of a module of this folder, imported in the process of the part alone."""

    module: str
    function: str
    seconds: float

    def load(self) -> Callable[..., Iterator[Figure]]:
        """Import the function, which takes a ``Task``."""
        found: Callable[..., Iterator[Figure]] = getattr(
            importlib.import_module(f"gpu_check.{self.module}"), self.function
        )
        return found


PEERS = {
    "nvrx": Part("saves", "measure_peer", 45),
    "nvrx-ipc": Part("saves", "measure_peer", 35),
    "dcp-process": Part("saves", "measure_peer", 40),
    "torch-checkpointing": Part("saves", "measure_peer", 25),
    "torch-save": Part("saves", "measure_peer", 25),
}
"""Contestants of the bench that save what ``saves`` does. One that hangs costs no time but its own."""
PARTS = {
    "env": Part("environment", "measure", 18),
    "tests": Part("device_tests", "measure", 71),
    "link": Part("link", "measure", 28),
    "saves": Part("saves", "measure", 40),
    **PEERS,
    "many": Part("saves", "measure_many", 40),
    "train": Part("training", "measure", 60),
    "crash": Part("crash", "measure", 30),
    "load": Part("loads", "measure", 23),
}
START = "start of the device"
SECONDS = sum(part.seconds for part in PARTS.values())


def measure(
    name: str,
    function: Callable[..., Iterator[Figure]],
    device_name: str,
    scale: float,
    seconds: float,
    results: Results,
) -> bool:
    """Measure one part in this process, and note its figures. Returns False if it failed, and notes why."""
    from gpu_check.device import Device  # imports torch, which the command itself does without
    from gpu_check.task import Task

    def note(figure: Figure) -> None:
        print(f"{name}: {figure.line()}", flush=True)
        results.add(name, figure)

    budget, begun = Budget(seconds), time.monotonic()
    try:
        device = Device(device_name)
        device.synchronize()
        note(Figure(START, time.monotonic() - begun, "s"))
        for figure in function(Task(name, device, scale, budget, results)):
            note(figure)
    except Exception as error:
        traceback.print_exc()
        note(Figure("failed", f"{type(error).__name__}: {error}"))
        return False
    return True
