"""What the demo says: how the resumed training compares, what saves cost, and what to try next."""

from __future__ import annotations

import os
import shlex
import shutil
import sys
from collections.abc import Mapping
from typing import Any

from asyncckpt.demo.costs import CANNOT_TELL
from asyncckpt.report.answers import table

_MILLI = 1e3
_SOURCES = {"memory": "the memory of the worker that the killed trainer left behind", "storage": "storage"}
_LINES = {
    "call_s": "the call of save took, ms",
    "wall_s": "the training lost in all, ms",
    "cpu_s": "processor time in all, ms",
    "worker_cpu_s": "of it in the worker, ms",
}


def show_kill(step: int, planned: int, facts: Mapping[str, Any]) -> None:
    """Say when the training was killed: at ``step`` of those ``planned``, and what it reported just before."""
    writing = "was still writing" if facts["while_writing"] else "had just written"
    size = f"{facts['state_bytes'] / 1e6:.0f} MB"
    print(f"  It was killed at step {step}, when its worker {writing} the checkpoint of that step, {size}.")
    if step < planned:
        print(f"  There was no time for {planned} steps: this machine is slow or busy.")


def show_resume(summary: Mapping[str, Any]) -> None:
    """Say how the killed training went on."""
    source = _SOURCES.get(summary["resumed_source"], summary["resumed_source"])
    print(f"  The new trainer took step {summary['resumed_from']} from {source}, in {summary['resume_s']:.2f} s.")
    last = max(summary["losses"]["not killed"])
    if summary["ok"]:
        loss = summary["losses"]["not killed"][last]
        print(
            f"  The losses of the {summary['steps_compared']} steps after it are, bit for bit, those of the training"
            f" that was not killed\n  (the last: {loss!r}), and so are all {summary['parameters']:,} parameters and the"
            f" optimizer's state\n  at step {last}."
        )
    for name, steps in summary["different"].items():
        print(f"  THE LOSSES DIFFER: {name}, from step {steps[0]} on, {len(steps)} steps.")
    if not summary["state_equal"]:
        print(f"  THE PARAMETERS DIFFER at step {last}, or the optimizer's state does.")


def show_costs(summary: Mapping[str, Any]) -> None:
    """Show the table of what saves cost, and say how it was measured."""
    costs: Mapping[str, Any] = summary["costs"]
    saves = max(each["saves"] for each in costs.values())
    print(
        f"\nWhat one save costs: {summary['parameters'] / 1e6:.1f} million parameters,"
        f" {summary['state_bytes'] / 1e6:.0f} MB a checkpoint, one training thread on {summary['device']}"
    )
    rows = [
        [words, *(_cell(each[key]) if key in each else "-" for each in costs.values())] for key, words in _LINES.items()
    ]
    print(table(["", *costs], rows, [False] * (1 + len(costs))))
    print(
        f"Medians of {saves} pairs of neighbouring blocks of steps, with a save and without; in brackets where the\n"
        "median lies with 95 % confidence. Each block with a save lasts until that is durable."
    )
    if saves < summary["pairs"]:
        print(f"These are {saves} of {summary['pairs']} pairs, as the time was up: --seconds gives more.")
    if any(figure is None for each in costs.values() for figure in each.values()):
        print(
            f'"{CANNOT_TELL}": the blocks differ more among themselves than by a save, or are too few.\n'
            "Try again when less runs here, or with more --seconds."
        )


def _cell(figure: Mapping[str, Any] | None) -> str:
    if figure is None:
        return CANNOT_TELL
    middle = _digits(figure["median"])
    return middle if figure["low"] is None else f"{middle} ({_digits(figure['low'])} to {_digits(figure['high'])})"


def _digits(seconds: float) -> str:
    return f"{seconds * _MILLI:.{0 if seconds >= 0.01 else 1}f}"


def show_next(folder: str | None) -> None:
    """Show the commands to try next.

    Args:
        folder: Where the checkpoints are kept; None: they are not.
    """
    command = _command()
    print("\nTo try next:")
    if folder is None:
        folder = "demo-checkpoints"
        print(f"  {command} demo --folder {folder}   (keeps the checkpoints, for what follows)")
    killed = os.path.join(folder, "killed")
    given, safetensors = shlex.quote(killed), shlex.quote(os.path.join(folder, "exported"))
    for line in (
        f"ls {given}",
        f"inspect {given}",
        f"verify {given}",
        f"export {given} {safetensors} --only model",
    ):
        print(f"  {command} {line}")
    print("To read on: README.md, and docs/quickstart.md for your own training loop.")


def _command() -> str:
    """How this command is called here."""
    if shutil.which("asyncckpt"):
        return "asyncckpt"
    beside = os.path.join(os.path.dirname(sys.executable), "asyncckpt")
    if not (near := os.path.relpath(beside)).startswith(os.pardir):
        beside = near
    return shlex.quote(beside) if os.access(beside, os.X_OK) else f"{shlex.quote(sys.executable)} -m asyncckpt"
