"""The bench runs, tiny: so it cannot rot. What it measures is not looked at."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

BENCH = Path(__file__).parent.parent / "scripts" / "bench_load.py"


def test_every_contestant_takes_part(tmp_path: Path) -> None:
    out = tmp_path / "figures.json"
    options = "--gib 0.01 --tensors 10 --loads 2 --pause 0"  # and all peers
    done = subprocess.run(
        [sys.executable, "-W", "ignore", str(BENCH), *options.split(), "--folder", str(tmp_path), "--json", str(out)],
        capture_output=True,
        text=True,
        timeout=110,
    )
    assert done.returncode == 0, done.stderr
    found = json.loads(out.read_text())
    assert set(found["results"]) == {"asyncckpt, memory", "asyncckpt, storage", "dcp-load", "torch-load"}
    assert all(len(seconds) == 2 and min(seconds) > 0 for seconds in found["limits"].values())
    for result in found["results"].values():
        assert len(result["load_s"]) == 2 and min(*result["load_s"], result["first_load_s"]) > 0
    assert "times as fast as dcp-load" in done.stdout
    assert [path.name for path in tmp_path.iterdir()] == ["figures.json"]
