"""Test short runs of ``scripts/torture`` and of the other scripts that kill processes."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

SCRIPTS = Path(__file__).parents[2] / "scripts"


@pytest.mark.slow
@pytest.mark.timeout(310)  # the script may take this long
def test_nothing_is_lost(tmp_path: Path) -> None:
    report = tmp_path / "report.json"
    counts = [
        "--kills=6",
        "--interruptions=20",
        "--calls=15",
        "--forks=10",
        "--damages=20",
        "--exchanges=8",
        "--full=6",
    ]
    facts = _try("torture", [*counts, "--restart-mib=16", "--seed=3", f"--json={report}"], report)
    assert facts["trainers killed"] >= 6 and facts["workers killed"] == 6
    assert facts["damages found by verify"] == 20 and facts["recovered from memory"] >= 1
    assert facts["forks"] == 10 and facts["checkpoints exchanged"] == 8
    assert sum(count for name, count in facts.items() if "failed, the save" in name or "no compiler" in name) > 0
    assert facts["losses"] == []


@pytest.mark.slow
@pytest.mark.timeout(310)
def test_nothing_is_lost_on_an_object_store(tmp_path: Path) -> None:
    pytest.importorskip("obstore")
    report = tmp_path / "report.json"
    facts = _try("torture", ["--store=1", "--seed=3", f"--json={report}"], report)
    assert facts["trainers killed"] >= 6 and facts["workers killed"] == 8 and facts["steps uploaded, at the end"] > 0
    assert facts["steps saved while requests were spoiled"] > 0
    assert facts["losses"] == []


@pytest.mark.slow
@pytest.mark.timeout(310)
@pytest.mark.parametrize(("framework", "kills"), [("huggingface", 2), ("verl-replay", 1), ("deepspeed", 1)])
def test_a_training_that_is_killed_goes_on(framework: str, kills: int, tmp_path: Path) -> None:
    report = tmp_path / "report.json"
    chosen = [f"--framework-kills={kills}", "--frameworks", framework, "--seed=3", f"--json={report}"]
    facts = _try("torture", chosen, report)
    if f"{framework}: not installed, no kills" in facts:
        pytest.skip(f"{framework} is not installed")
    assert sum(count for name, count in facts.items() if name.startswith(f"{framework}: kills of ")) == kills
    assert facts[f"{framework}: losses compared"] >= 12
    assert facts["losses"] == []


@pytest.mark.slow
def test_nothing_is_lost_with_a_host(tmp_path: Path) -> None:
    report = tmp_path / "report.json"
    chosen = ["--host-kills=3", "--host-flips=1", "--host-restart-mib=8", "--seed=3", f"--json={report}"]
    facts = _try("torture", chosen, report)
    ends = "hosts lost", "hosts lost, all at once", "jobs killed, their hosts left"
    assert sum(facts.get(end, 0) for end in ends) == 4
    assert facts["hosts: copies with flipped bytes"] >= 1
    # A kill leaves the newest step in memory, in storage, or in both. The timed restart always reads memory.
    assert sum(count for name, count in facts.items() if name.startswith("hosts: recovered from ")) >= 1
    assert facts["hosts_load_s"] > 0
    assert facts["losses"] == []


@pytest.mark.slow
@pytest.mark.timeout(310)
def test_nothing_is_lost_by_a_power_cut(tmp_path: Path) -> None:
    report = tmp_path / "report.json"
    chosen = ["--power-cuts=8", "--cache-cuts=6", "--file-systems", "ext4", "--seed=3", f"--json={report}"]
    facts = _try("torture", chosen, report)
    if any("no power cut" in name for name in facts):
        pytest.skip("no disk can be mounted here")
    assert sum(count for name, count in facts.items() if ": power cuts " in name) == 14
    assert facts["ext4: losses seen of a writer without fsync, of 4"] > 0
    assert facts["losses"] == []


@pytest.mark.slow
@pytest.mark.timeout(310)
def test_nothing_is_lost_by_a_call_that_fails(tmp_path: Path) -> None:
    report = tmp_path / "report.json"
    chosen = ["--each-call=1", "--each-call-share=0.04", "--scenarios", "files", "--seed=3", f"--json={report}"]
    facts = _try("torture", [*chosen, "--hours=0.001"], report)
    if "no compiler: no call failed" in facts:
        pytest.skip("there is no compiler")
    assert facts["repeated kinds"] == 1 and facts["each call: places"] >= 15
    for side in ("trainer", "worker"):
        assert any(name.startswith(f"each call: save of the {side} raised ") for name in facts)
    assert any(name.endswith(" succeeded") for name in facts)
    assert facts["losses"] == []


@pytest.mark.slow
@pytest.mark.timeout(310)
def test_a_disk_that_is_never_flushed_loses_steps_and_the_fault_can_be_replayed(tmp_path: Path) -> None:
    report = tmp_path / "report.json"
    chosen = ["--cache-cuts=4", "--file-systems", "ext4", "--mount-options=barrier=0", f"--json={report}"]
    facts = _try("torture", [*chosen, "--hours=0.1", f"--folder={tmp_path}"], report, loses=True)
    if any("no power cut" in name for name in facts):
        pytest.skip("no disk can be mounted here")
    *_, kept, replay = facts["losses"]
    assert "--cache-cuts 4 --seed" in replay and "--mount-options barrier=0" in replay
    assert Path(kept.rpartition(" ")[2]).is_dir()


@pytest.mark.slow
def test_no_read_is_torn(tmp_path: Path) -> None:
    report = tmp_path / "report.json"
    counts = ["--publications=600", "--kills=8", "--ends=4", "--rank-rounds=60"]
    facts = _try("torture_weights.py", [*counts, "--seed=5", f"--json={report}"], report)
    assert facts["reads"] > 0 and facts["readers killed"] >= 8 and facts["ended by error"] == 1
    assert (facts["torn"], facts["slots lost"], facts["growth"]) == (0, 0, [])
    assert facts["images at rest"] == [2] * 6  # one trainer, the last of several trainers, four ranks


@pytest.mark.slow
def test_no_read_is_torn_on_other_hosts(tmp_path: Path) -> None:
    report = tmp_path / "report.json"
    facts = _try("torture_mirrors.py", ["--hosts=2", "--kills=12", "--seed=3", f"--json={report}"], report)
    assert facts["trainers killed"] and facts["workers killed"] and facts["readers killed"]
    assert facts["reads"] > 0 and (facts["wrong"], facts["stuck"], facts["failed"]) == (0, 0, 0)


@pytest.mark.slow
def test_no_prompt_is_lost(tmp_path: Path) -> None:
    report = tmp_path / "report.json"
    facts = _try("torture_parties.py", ["--kills=5", "--seed=3", f"--json={report}"], report)
    assert facts["complete steps"] and facts["committed"]
    assert (facts["lost or twice"], facts["mixed"], facts["late"]) == (0, 0, 0)


def _try(script: str, options: list[str], report: Path, *, loses: bool = False) -> dict[str, Any]:
    trial = subprocess.run(
        [sys.executable, str(SCRIPTS / script), *options], capture_output=True, text=True, timeout=300
    )
    assert trial.returncode == 0 or loses, trial.stdout + trial.stderr
    facts: dict[str, Any] = json.loads(report.read_text())
    return facts
