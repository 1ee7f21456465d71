"""The part ``tests``: the tests of the mark "device" that take seconds, some at a time."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

from gpu_check.budget import Budget
from gpu_check.figures import Figure
from gpu_check.task import Task

_ROOT = Path(__file__).parents[2]
_MARK = "mark.device"
_AT_ONCE = min(8, max(4, (os.cpu_count() or 1) // 2))
_ONE_TEST_S = 60
_SPARE_S = 4.0
_LEAST_PASSED = 90


def measure(task: Task) -> Iterator[Figure]:
    """Run all test files that name the mark."""
    with_mark = [path for path in sorted(_ROOT.glob("tests/**/test_*.py")) if _MARK in path.read_text()]
    # This command has a test of its own.
    yield from run(
        [path for path in with_mark if "gpu_check" not in path.name], task.device.type, task.budget, _LEAST_PASSED
    )


def run(paths: Sequence[Path], device_type: str, budget: Budget, least_passed: int) -> Iterator[Figure]:
    """Run the marked tests of these files. Each outcome is written immediately, so that a cut loses no finished test.

    Plugins of the machine are left out, and its torch may warn of things that the tests do not know: neither is looked
    for here.
    """
    with tempfile.TemporaryDirectory(prefix="asyncckpt-gpu-check-") as folder:
        outcomes = Path(folder, "outcomes")
        outcomes.touch()
        command = [sys.executable, "-m", "pytest", "-q", "-rs", "-m", "device and not slow", "-n", str(_AT_ONCE)]
        command += ["-p", "xdist", "-p", "pytest_timeout", "-p", "gpu_check.outcomes", "-p", "no:cacheprovider"]
        command += [
            "-o",
            "filterwarnings=default",
            f"--timeout={_ONE_TEST_S}",
            "--tb=short",
            "-rs",
            f"--rootdir={_ROOT}",
        ]
        # These tests may run within a test.
        environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")} | {
            "ASYNCCKPT_TEST_DEVICE": device_type,
            "ASYNCCKPT_TEST_OUTCOMES": str(outcomes),
            "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1",
            "PYTHONPATH": os.pathsep.join([str(_ROOT / "scripts"), os.environ.get("PYTHONPATH", "")]),
        }
        tests = subprocess.Popen([*command, *map(str, paths)], cwd=_ROOT, env=environment)
        try:
            tests.wait(max(1.0, budget.left - _SPARE_S))
            ended = f"pytest ended with {tests.returncode}"
        except subprocess.TimeoutExpired:
            tests.send_signal(signal.SIGINT)
            ended = "cut short, as the budget was used up"
        rows = [json.loads(line) for line in outcomes.read_text().splitlines()]
        tests.kill()
        tests.wait()
    by_outcome: dict[str, list[str]] = {"passed": [], "skipped": [], "failed": []}
    for row in rows:
        by_outcome[row["outcome"]].append(row["test"])
    failed = sorted(set(by_outcome["failed"]))
    yield Figure("tests that passed", len(set(by_outcome["passed"]) - set(failed)), at_least=least_passed)
    yield Figure("tests that were skipped", len(by_outcome["skipped"]))
    yield Figure("tests that failed", len(failed), at_most=0)
    for name in failed:
        yield Figure("failed", name)
    yield Figure("end", ended)
