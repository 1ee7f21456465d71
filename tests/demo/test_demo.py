"""The demo, tiny: a trainer is really killed, and the one that resumes goes on exactly."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

STEPS, EVERY = 8, 2
TIMEOUT_S = 500

pytestmark = pytest.mark.timeout(TIMEOUT_S + 100)


def demo(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "asyncckpt.demo.run", *arguments], capture_output=True, text=True, timeout=TIMEOUT_S
    )


def test_a_killed_run_goes_on_exactly(tmp_path: Path) -> None:
    done = demo("--size", "small", "--steps", str(STEPS), "--every", str(EVERY), "--folder", str(tmp_path), "--json")
    assert done.returncode == 0, done.stderr
    summary: dict[str, Any] = json.loads(done.stdout)
    assert summary["ok"]
    assert summary["losses_equal"]
    assert summary["different"] == {}
    # What was staged when the trainer was killed is written all the same.
    assert summary["resumed_from"] == summary["killed_at"] > 0
    assert summary["steps_compared"] == STEPS - summary["resumed_from"]
    assert len(summary["losses"]) == STEPS
    assert summary["losses"][-1] < summary["losses"][0]
    rows = {row["run"]: row for row in summary["table"]}
    assert list(rows) == ["no checkpoints", "asyncckpt", "torch.distributed.checkpoint.save"]
    assert all(row["train_s"] > 0 for row in rows.values())
    assert rows["no checkpoints"]["saves"] == 0
    assert rows["asyncckpt"]["saves"] == rows["torch.distributed.checkpoint.save"]["saves"] > 0
    assert "killed the trainer" in done.stderr
    assert sorted(path.name for path in (tmp_path / "killed").glob("step-*")) == [
        f"step-{step:08d}" for step in range(STEPS - 2 * EVERY, STEPS + 1, EVERY)
    ]


def test_a_folder_in_use_is_refused(tmp_path: Path) -> None:
    (tmp_path / "mine").touch()
    done = demo("--size", "small", "--folder", str(tmp_path))
    assert done.returncode == 1
    assert "not empty" in done.stderr
    assert [path.name for path in tmp_path.iterdir()] == ["mine"]
