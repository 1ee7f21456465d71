"""Test the matrix of versions: its arguments, and its output for a missing Python."""

from __future__ import annotations

import subprocess
from pathlib import Path

MATRIX = Path(__file__).parents[2] / "scripts/matrix"
NOTES = MATRIX.parents[1] / "docs/compatibility.md"


def _run(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([MATRIX, *arguments], capture_output=True, text=True, timeout=60)


def test_a_python_that_is_not_here_is_said_not_to_be() -> None:
    before = NOTES.read_text()
    done = _run("--no-notes", "2.0:none", "2.1:2.6.0")
    assert done.returncode == 0, done.stderr
    first, second = done.stdout.splitlines()
    assert first.split() == ["2.0:none", "what", "needs", "no", "torch", "not", "run:", "no", "python2.0", "here"]
    assert second.split() == ["2.1:2.6.0", "all", "tests", "not", "run:", "no", "python2.1", "here"]
    assert NOTES.read_text() == before


def test_what_it_does_not_know_is_refused() -> None:
    assert _run("--fast").returncode == _run("3.12").returncode == 2
    assert "PYTHON:TORCH" in _run("--help").stdout


def test_there_are_notes_of_what_was_run() -> None:
    rows = [line for line in NOTES.read_text().splitlines() if line.startswith("| 3.")]
    assert {row.split("|")[1].strip() for row in rows} >= {"3.10", "3.12", "3.13"}
    assert all("failed" not in row and row.count("|") == 6 for row in rows)
