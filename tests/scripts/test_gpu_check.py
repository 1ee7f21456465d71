"""Run a tiny check for real devices on the simulated device, so that the check cannot rot."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
import zipfile
from pathlib import Path

import pytest
import torch
from gpu_check import device_tests
from gpu_check.budget import Budget
from gpu_check.figures import Figure, Results
from gpu_check.parts import PARTS, PEERS
from support import simulated_device

SCRIPT = Path(__file__).parents[2] / "scripts" / "gpu_check"


def test_outcomes_of_figures(tmp_path: Path) -> None:
    figures = [
        Figure("fast", 2.0, "GB/s", at_least=1.5, samples=(1.0, 2.0)),
        Figure("slow", 2.0, "ms", at_most=1.5),
        Figure("no number", float("nan"), at_most=1.5),
        Figure("to be read", "unlimited"),
    ]
    assert [each.outcome for each in figures] == ["pass", "miss", "miss", ""]
    assert figures[1].line() == "slow: 2 ms (<= 1.5: miss)"
    results = Results(tmp_path / "gpu.json", "cuda", 1.0)
    results.begin("env")
    for figure in figures[:2]:
        results.add("env", figure)
    cut = Results(results.path, "cuda", 1.0)
    assert cut.figures("env") == figures[:2] and not cut.is_whole("env")
    results.end("env", 3.0, whole=True)
    again = Results(results.path, "cuda", 1.0)
    assert again.is_whole("env") and again.value("env", "fast") == 2.0 and again.value("env", "none") is None
    assert not Results(results.path, "cuda", 0.5).is_whole("env")
    assert not Results(results.path, "xpu", 1.0).is_whole("env")


def test_a_budget_ends_a_wait() -> None:
    before = signal.getsignal(signal.SIGALRM)
    with pytest.raises(TimeoutError, match="used up"), Budget(0.05).limit():
        time.sleep(30)
    assert signal.getsignal(signal.SIGALRM) == before
    with Budget(60).share(0.5).limit():
        pass


@pytest.mark.slow
@pytest.mark.timeout(400)
@pytest.mark.device
@pytest.mark.skipif(simulated_device.why_not() is not None or torch.cuda.is_available(), reason="no simulated device")
def test_all_parts_and_a_second_run(tmp_path: Path) -> None:
    wheels = tmp_path / "wheels"
    wheels.mkdir()
    with zipfile.ZipFile(wheels / "of_a_test-1-py3-none-any.whl", "w") as wheel:
        wheel.writestr("of_a_test.py", "")
    # The suite runs the tests anyway, and the tests of the bench cover the other peers.
    parts = [name for name in PARTS if name != "tests" and name not in PEERS] + ["dcp-process"]
    command = [sys.executable, str(SCRIPT), *parts, "--device", "simulated", "--scale", "0.002", "--out", str(tmp_path)]
    first = subprocess.run([*command, "--wheels", str(wheels)], capture_output=True, text=True, timeout=300)
    results = Results(tmp_path / "gpu.json", "simulated", 0.002)
    assert [name for name in parts if not results.is_whole(name)] == [], first.stdout + first.stderr
    assert all(results.figures(name) for name in parts)
    assert results.value("saves", "2,000 tensors, asyncckpt: save holds the caller") is not None
    assert results.value("crash", "step that was loaded") == 4
    assert results.value("crash", "losses after it that differ from an uninterrupted training's") == 0
    assert (tmp_path / "gpu.png").stat().st_size > 1000
    second = subprocess.run(command, capture_output=True, text=True, timeout=100)
    assert "env: cores" in first.stdout and "env: cores" not in second.stdout  # the second run measured nothing again


@pytest.mark.device
@pytest.mark.skipif(simulated_device.why_not() is not None, reason="no g++")
def test_outcomes_of_tests(tmp_path: Path) -> None:
    # This file is outside of the suite: one test passes, one fails, one is skipped.
    path = tmp_path / "test_three.py"
    path.write_text(
        "import pytest\n"
        "pytestmark = pytest.mark.device\n"
        "def test_good(): pass\n"
        "def test_bad(): assert False\n"
        "def test_none(): pytest.skip('so')\n"
    )
    found = list(device_tests.run([path], simulated_device.TYPE, Budget(60), least_passed=1))
    values = {figure.name: figure.value for figure in found}
    assert values["tests that passed"] == values["tests that failed"] == values["tests that were skipped"] == 1
    assert "test_bad" in str(values["failed"])
