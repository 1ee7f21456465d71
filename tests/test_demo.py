"""The demo, small: a run is killed, resumed, and goes on exactly as one that was not killed."""

from __future__ import annotations

import json
import subprocess
import sys


def test_the_killed_run_goes_on_exactly() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "asyncckpt", "demo", "--size", "small", "--steps", "14", "--every", "4", "--json"],
        capture_output=True,
        text=True,
        timeout=110,
    )
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["ok"] and found["losses_equal"] and found["resumed_from"] > 0 and found["steps_compared"] > 0
    assert [row["run"] for row in found["table"]] == [
        "no checkpoints",
        "asyncckpt",
        "torch.distributed.checkpoint.save",
    ]
