"""Run the tests in a child process, and collect the outcome of each."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from file_systems.kinds import Mounted

CHECKOUT = Path(__file__).parents[2]
TESTS = [
    *("tests/storage/test_local.py", "tests/storage/test_doubts.py", "tests/storage/test_resolve.py"),
    *("tests/storage/test_strangers.py", "tests/test_checkpointer.py"),
    "scripts/file_systems/test_two_hosts.py",
]


@dataclass
class Outcome:
    """The outcome of the tests on one file system."""

    name: str
    passed: int = 0
    skipped: int = 0
    refused: dict[str, str] = field(default_factory=dict)
    """Tests that ended with an error of asyncckpt that calls no checkpoint lost or damaged, with the error."""
    failed: dict[str, str] = field(default_factory=dict)
    """Tests that failed in another way, with the error."""
    note: str = ""
    """The reason if no tests ran, or not all of them."""


def run_tests(name: str, place: Mounted, tests: list[str], limit_s: float, report: Path) -> Outcome:
    """Run the tests with their temporary folders on the mounted file system."""
    # The runtime folder is on a disk of the host, as in a training. Some tests give other users access to the parent
    # folders of temporary files.
    hosts = report.with_name("hosts")
    hosts.mkdir()
    variables = {"FILE_SYSTEMS_REPORT": str(report), "TMPDIR": str(report.parent), "RUNTIME_FOLDERS": str(hosts)}
    environment = {**os.environ, **place.environment, **variables}
    folders = map(str, (CHECKOUT, CHECKOUT / "scripts", CHECKOUT / "tests"))
    environment["PYTHONPATH"] = os.pathsep.join([*folders, environment.get("PYTHONPATH", "")])
    command = [sys.executable, "-m", "pytest", "-q", "-n", "0", "-p", "no:cacheprovider", "-p", "file_systems.recorder"]
    with report.with_suffix(".log").open("wb") as log:
        process = subprocess.Popen(
            [*command, f"--basetemp={place.path / 't'}", *tests],
            cwd=CHECKOUT,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            start_new_session=True,
        )
        try:
            status: int | None = process.wait(limit_s)
        except subprocess.TimeoutExpired:
            status = None
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
    outcome = _outcome(name, report)
    if status is None:
        outcome.note = f"stopped after {limit_s:g} s"
    elif status not in (0, 1):
        outcome.note = f"pytest ended with {status}: " + _last_line(report.with_suffix(".log"))
    return outcome


def _outcome(name: str, report: Path) -> Outcome:
    outcome = Outcome(name)
    with contextlib.suppress(FileNotFoundError), report.open() as file:
        for line in file:
            said: dict[str, Any] = json.loads(line)
            if said["outcome"] == "passed":
                outcome.passed += 1
            elif said["outcome"] == "skipped":
                outcome.skipped += 1
            else:
                errors = outcome.refused if said["is_ours"] else outcome.failed
                errors[said["test"]] = f"{said['error']} ({said['where']})"
    for test in outcome.refused.keys() & outcome.failed.keys():
        del outcome.refused[test]
    ended_badly = {
        test.removesuffix(" (end)") for test in [*outcome.refused, *outcome.failed] if test.endswith(" (end)")
    }
    outcome.passed -= len(ended_badly - outcome.refused.keys() - outcome.failed.keys())
    return outcome


def _last_line(log: Path) -> str:
    return (log.read_text(errors="replace").strip().splitlines() or [""])[-1]
