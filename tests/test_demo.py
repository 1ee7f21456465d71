"""Test a tiny demo: kill a trainer, resume exactly, and print what saves cost."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from asyncckpt import demo

pytestmark = pytest.mark.timeout(600)


def test_a_killed_run_goes_on_exactly(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    options = ("--size", "small", "--steps", "16", "--saves", "2", "--folder", str(folder), "--json")
    command = [sys.executable, "-m", "asyncckpt", "demo", *options]
    done = subprocess.run(command, capture_output=True, text=True, timeout=500)
    assert done.returncode == 0, done.stderr
    summary = json.loads(done.stdout)
    assert summary["ok"] and summary["resumed"]["from"] == 8 and summary["resumed"]["source"] == "memory"
    assert list(summary["losses"]) == [str(step) for step in range(1, 17)]
    assert list(summary["resumed"]["losses"]) == [str(step) for step in range(9, 17)]
    assert summary["losses"]["16"] < summary["losses"]["1"]
    assert re.search(
        r"SIGKILL ended process \d+ after its save of step 8, which its worker (was still|had just)", done.stderr
    )
    assert re.search(r"Process \d+ resumes: it loaded step 8 from memory", done.stderr)
    assert "equal bit for bit: True" in done.stderr
    for name in (demo.OURS, demo.SAVE, demo.ASYNC_SAVE):
        cells = re.search(rf"^   {re.escape(name)} +([\d.]+) +([\d.]+) +([\d.]+)$", done.stderr, re.MULTILINE)
        assert cells is not None, done.stderr
        assert all(float(cell) >= 0.1 for cell in cells.groups())
        call_s, durable_s, cpu_s = summary["costs"][name].values()
        assert 0 < call_s <= durable_s and cpu_s > 0
    assert re.search(r"held the training for \S+ ms; DCP's save for \S+ ms, DCP's async_save for \S+ ms", done.stderr)
    kept = sorted(path.name for path in (folder / "killed").glob("step-*"))
    assert kept == [f"step-{step:08d}" for step in (8, 12, 16)]


def test_a_folder_in_use_is_refused(tmp_path: Path) -> None:
    (tmp_path / "mine").touch()
    with pytest.raises(SystemExit, match="not empty"):
        demo.main(["--folder", str(tmp_path)])
    assert [path.name for path in tmp_path.iterdir()] == ["mine"]


@pytest.mark.parametrize("wrong", [("--saves", "0"), ("--steps", "12"), ("--size", "huge")])
def test_wrong_options_are_refused(wrong: tuple[str, str]) -> None:
    with pytest.raises(SystemExit) as raised:
        demo.main(wrong)
    assert raised.value.code == 2
