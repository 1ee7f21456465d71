"""The demo, tiny: a trainer is really killed, and the one that resumes goes on exactly."""

from __future__ import annotations

import json
import subprocess
import sys
from importlib import util
from pathlib import Path
from typing import Any

import pytest

from asyncckpt.demo import run
from asyncckpt.demo.costs import CANNOT_TELL, DCP, OURS
from asyncckpt.demo.picture import draw
from asyncckpt.demo.text import show_costs, show_kill, show_next, show_resume

STEPS, EVERY = 8, 2
TIMEOUT_S = 500
PNG = b"\x89PNG\r\n"

pytestmark = pytest.mark.timeout(TIMEOUT_S + 100)


def demo(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "asyncckpt.demo.run", *arguments], capture_output=True, text=True, timeout=TIMEOUT_S
    )


def made_up(**changed: Any) -> dict[str, Any]:
    """A summary of a demo in which one cost could not be told."""
    figure = {"median": 0.01, "low": 0.009, "high": 0.02, "count": 14}
    few = {"median": 0.1, "low": None, "high": None, "count": 2}
    losses = {"killed": {1: 3.0, 2: 2.5}, "resumed": {3: 2.0}, "not killed": {1: 3.0, 2: 2.5, 3: 2.0}}
    costs = {
        OURS: {"saves": 14, "call_s": figure, "wall_s": None, "cpu_s": figure, "worker_cpu_s": figure},
        DCP: {"saves": 14, "call_s": few, "wall_s": figure, "cpu_s": None},
    }
    whole = {"ok": True, "parameters": 1000, "state_bytes": 12_000_000, "device": "cpu", "killed_at": 2, "pairs": 14}
    whole |= {"resumed_from": 2, "resumed_source": "memory", "resume_s": 0.1, "steps_compared": 1, "costs": costs}
    return whole | {"state_equal": True, "different": {}, "losses": losses} | changed


def test_a_killed_run_goes_on_exactly(tmp_path: Path) -> None:
    folder, picture = tmp_path / "run", tmp_path / "demo.png"
    options = ("--size", "small", "--steps", str(STEPS), "--every", str(EVERY), "--seconds", "300")
    done = demo(*options, "--pairs", "2", "--folder", str(folder), "--png", str(picture), "--json")
    assert done.returncode == 0, done.stderr
    summary: dict[str, Any] = json.loads(done.stdout)
    assert summary["ok"] and summary["losses_equal"] and summary["state_equal"]
    assert summary["different"] == {}
    # What was staged when the trainer was killed is written all the same, and resumed from where it is.
    assert summary["resumed_from"] == summary["killed_at"] == STEPS // 2
    assert summary["resumed_source"] == "memory"
    assert summary["steps_compared"] == STEPS // 2
    losses = summary["losses"]
    assert losses["killed"] | losses["resumed"] == losses["not killed"]
    assert list(losses["not killed"]) == [str(step) for step in range(1, STEPS + 1)]
    assert losses["not killed"][str(STEPS)] < losses["not killed"]["1"]
    assert sorted(summary["costs"]) == [OURS, DCP]
    for costs in summary["costs"].values():
        assert costs["saves"] == 2
        assert costs["call_s"]["median"] > 0
        assert costs["wall_s"] is None  # two pairs say nothing, whatever they are
    assert summary["costs"][OURS]["worker_cpu_s"]["median"] > 0
    assert "It was killed at step 4" in done.stderr and f"asyncckpt verify {folder}/killed" in done.stderr
    assert picture.read_bytes().startswith(PNG)
    kept = sorted(path.name for path in (folder / "killed").glob("step-*"))
    assert kept == [f"step-{step:08d}" for step in (4, 6, 8)]


def test_a_folder_in_use_is_refused(tmp_path: Path) -> None:
    (tmp_path / "mine").touch()
    with pytest.raises(SystemExit, match="not empty"):
        run.main(["--folder", str(tmp_path)])
    assert [path.name for path in tmp_path.iterdir()] == ["mine"]


def test_a_picture_without_matplotlib_is_refused_before_anything_is_done(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(util, "find_spec", lambda name: None)
    with pytest.raises(SystemExit) as raised:
        run.main(["--png", str(tmp_path / "demo.png"), "--folder", str(tmp_path / "run")])
    assert raised.value.code == 2
    assert "pip install matplotlib" in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("wrong", [("--every", "0"), ("--steps", "7"), ("--png", "no/such/folder/a.png")])
def test_wrong_options_are_refused(wrong: tuple[str, str]) -> None:
    with pytest.raises(SystemExit) as raised:
        run.main(wrong)
    assert raised.value.code == 2


def test_what_cannot_be_told_is_not_shown(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    show_costs(made_up())
    said = capsys.readouterr().out
    (lost,) = [line for line in said.splitlines() if line.startswith("the training lost")]
    assert CANNOT_TELL in lost and "10 (9.0 to 20)" in lost
    draw(made_up(), str(tmp_path / "demo.png"))
    assert (tmp_path / "demo.png").read_bytes().startswith(PNG)


def test_what_differs_is_said(capsys: pytest.CaptureFixture[str]) -> None:
    show_resume(made_up())
    assert "bit for bit" in capsys.readouterr().out
    show_resume(made_up(ok=False, different={"resumed": [3]}, state_equal=False))
    said = capsys.readouterr().out
    assert "THE LOSSES DIFFER: resumed, from step 3" in said and "THE PARAMETERS DIFFER" in said
    assert "bit for bit" not in said
    show_kill(2, 4, {"state_bytes": 1e6, "while_writing": False})
    said = capsys.readouterr().out
    assert "had just written" in said and "no time for 4 steps" in said


def test_the_commands_to_try_name_the_folder(capsys: pytest.CaptureFixture[str]) -> None:
    show_next("my runs")
    said = capsys.readouterr().out
    for command in ("ls", "inspect", "verify", "export"):
        assert f"asyncckpt {command} 'my runs/killed'" in said
    show_next(None)
    assert "demo --folder" in capsys.readouterr().out
