"""Limits that a training and its worker have from the first save on: all works, or each error names the limit."""

from __future__ import annotations

import resource
from pathlib import Path

from support.surroundings import Trainings, nameless, trained, was_refused

_TOO_LOW = [
    ("NOFILE", "+1", "Too many open files"),  # for the start of the worker
    ("NOFILE", "+7", "Too many open files"),  # for the work of the worker
    ("AS", "+0", "ulimit -v"),  # for a thread
    ("AS", f"+{12 << 20}", "ulimit -v"),  # for the memory of the worker
    ("FSIZE", "1000000", "ulimit -f"),  # less than one image
]
_TOO_FEW_PROCESSES = [(2, "no thread can be started"), (4, "did not start"), (6, "while it started")]


def test_too_low(root: Path) -> None:
    trials = [
        {"name": f"{name} {most}", "limits": {name: most}, "mib": 16 if name == "AS" else 1, "single": most != "+7"}
        for name, most, _ in _TOO_LOW
    ]
    trainings = Trainings.start(root, trials=trials)
    for plan, report, (_, _, text) in zip(trainings.plans, trainings.end(), _TOO_LOW, strict=True):
        was_refused(plan, report, text)


def test_too_few_processes(root: Path) -> None:
    """The user has two processes: the training, and the one that it is a fork of."""
    trials = [{"name": str(most), "limits": {"NPROC": str(most)}} for most, _ in _TOO_FEW_PROCESSES]
    trainings = Trainings.start(root, *nameless(root), trials=trials)
    for plan, report, (_, text) in zip(trainings.plans, trainings.end(), _TOO_FEW_PROCESSES, strict=True):
        was_refused(plan, report, "ulimit -u")
        assert text in report.errors[0]


def test_just_enough(root: Path) -> None:
    """Without core dumps and locked memory, and with a small stack, too."""

    def limit() -> None:
        for kind, most in ((resource.RLIMIT_CORE, 0), (resource.RLIMIT_MEMLOCK, 0), (resource.RLIMIT_STACK, 256 << 10)):
            resource.setrlimit(kind, (most, most))

    limits = {"NOFILE": "+16", "AS": f"+{1 << 30}", "FSIZE": str(16 << 20), "NPROC": "24"}
    trained(root, *nameless(root), limits=limits, in_child=limit)
