"""Test a tiny demo: kill a trainer, and resume exactly."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from asyncckpt import demo

pytestmark = pytest.mark.timeout(600)


def test_a_killed_run_goes_on_exactly(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    options = ("--size", "small", "--steps", "8", "--every", "2", "--saves", "2", "--folder", str(folder), "--json")
    command = [sys.executable, "-m", "asyncckpt", "demo", *options]
    done = subprocess.run(command, capture_output=True, text=True, timeout=500)
    assert done.returncode == 0, done.stderr
    summary = json.loads(done.stdout)
    assert summary["ok"] and summary["resumed"]["from"] == 4 and summary["resumed"]["source"] == "memory"
    assert list(summary["losses"]) == [str(step) for step in range(1, 9)]
    assert list(summary["resumed"]["losses"]) == ["5", "6", "7", "8"]
    assert summary["losses"]["8"] < summary["losses"]["1"]
    assert all(cost["call_s"] > 0 for cost in summary["costs"].values())
    assert "equal bit for bit: True" in done.stderr
    kept = sorted(path.name for path in (folder / "killed").glob("step-*"))
    assert kept == [f"step-{step:08d}" for step in (4, 6, 8)]


def test_a_folder_in_use_is_refused(tmp_path: Path) -> None:
    (tmp_path / "mine").touch()
    with pytest.raises(SystemExit, match="not empty"):
        demo.main(["--folder", str(tmp_path)])
    assert [path.name for path in tmp_path.iterdir()] == ["mine"]


@pytest.mark.parametrize("wrong", [("--every", "0"), ("--steps", "7"), ("--size", "huge")])
def test_wrong_options_are_refused(wrong: tuple[str, str]) -> None:
    with pytest.raises(SystemExit) as raised:
        demo.main(wrong)
    assert raised.value.code == 2
