"""A taste of ``scripts/torture.py``."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

SCRIPT = Path(__file__).parent.parent / "scripts/torture.py"


def test_nothing_is_lost(tmp_path: Path) -> None:
    report = tmp_path / "report.json"
    options = ["--kills=6", "--damages=30", "--full=6", "--restart-mib=16", "--seed=3", f"--json={report}"]
    trial = subprocess.run([sys.executable, str(SCRIPT), *options], capture_output=True, text=True, timeout=300)
    assert trial.returncode == 0, trial.stdout + trial.stderr
    facts = json.loads(report.read_text())
    assert facts["trainers killed"] >= 6 and facts["workers killed"] == 6
    assert facts["damages found by verify"] == 30 and facts["recovered from memory"] >= 1
    assert facts["losses"] == []
