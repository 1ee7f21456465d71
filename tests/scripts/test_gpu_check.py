"""The check for real devices runs, on the simulated one: so it cannot rot. Its figures are not looked at."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from gpu_check.cli import main
from gpu_check.figures import Figure, Results, read
from support import simulated_device

SCRIPT = Path(__file__).parents[2] / "scripts" / "gpu_check"


def test_what_a_figure_has_to_reach(tmp_path: Path) -> None:
    figures = [
        Figure("fast", 2.0, "GB/s", at_least=1.5),
        Figure("slow", 2.0, "ms", at_most=1.5),
        Figure("no number", float("nan"), at_most=1.5),
        Figure("to be read", "unlimited"),
    ]
    assert [each.outcome for each in figures] == ["pass", "miss", "miss", ""]
    assert figures[1].line() == "slow: 2 ms (<= 1.5: miss)"
    results = Results(tmp_path / "gpu-env.json", "cuda")
    for figure in figures[:2]:
        results.add(figure)
    assert read(results.path, "cuda") == (False, figures[:2])  # as if cut short
    results.end(3.0)
    assert read(results.path, "cuda") == (True, figures[:2])
    assert read(results.path, "xpu") == read(tmp_path / "none.json", "cuda") == (False, [])


@pytest.mark.device
@pytest.mark.skipif(simulated_device.why_not() is not None, reason="no g++")
def test_a_part_is_measured_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    command = [str(SCRIPT), "env", "--device", "simulated", "--scale", "0.01", "--out", str(tmp_path)]
    done = subprocess.run([sys.executable, *command], capture_output=True, text=True, timeout=200)
    assert "env: torch" in done.stdout and "copy into our memory" in done.stdout, done.stderr
    assert json.loads((tmp_path / "gpu-env.json").read_text())["whole"]
    monkeypatch.setattr(sys, "argv", command)
    main()
    said, _ = capfd.readouterr()
    assert "copy into our memory" in said and "env: torch" not in said  # it was there
