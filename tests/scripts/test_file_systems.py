"""Test a short run of ``scripts/file_systems``."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

SCRIPT = Path(__file__).parents[2] / "scripts" / "file_systems"
_OF_LOCAL = "tests/storage/test_local.py::TestLocalStorage::"


@pytest.mark.skipif(os.getuid() != 0, reason="takes root to mount")
def test_some_tests_run_on_a_file_system(tmp_path: Path) -> None:
    (tmp_path / "test_failing.py").write_text(
        "from asyncckpt.errors import StorageError\n\n\n"
        "def test_refused(tmp_path):\n    raise StorageError('as wanted', path=str(tmp_path))\n\n\n"
        "def test_failed(tmp_path):\n    assert 'mount' not in tmp_path.parts\n"
    )
    (outcome,) = _try(tmp_path, "tmpfs", f"{_OF_LOCAL}test_a_pointer_advances", str(tmp_path / "test_failing.py"))
    if not outcome["note"]:  # mounting may be forbidden even for root
        assert (outcome["passed"], outcome["skipped"]) == (1, 0)
        assert ["as wanted" in error for error in outcome["refused"].values()] == [True]
        assert len(outcome["failed"]) == 1
    else:
        assert outcome["note"].startswith("not mounted: ")


def _try(tmp_path: Path, kind: str, *tests: str) -> list[dict[str, Any]]:
    report = tmp_path / "report.json"
    command = [sys.executable, str(SCRIPT), kind, f"--json={report}", "--limit-s=60", "--tests", *tests]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as trial:
        said = trial.communicate(timeout=100)[0]
    assert report.exists(), said
    outcomes: list[dict[str, Any]] = json.loads(report.read_text())
    assert trial.returncode == int(any(outcome["failed"] for outcome in outcomes)), said
    assert not list(Path("/dev/shm").glob(f"asyncckpt-file-systems-{trial.pid}*"))
    return outcomes
