"""The bench runs, tiny: so it cannot rot. What it measures is not looked at."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

from peers import FOLDER

BENCH = Path(__file__).parent.parent / "scripts" / "bench_save.py"


def test_every_contestant_takes_part(tmp_path: Path) -> None:
    out = tmp_path / "figures.json"
    options = "--gib 0.01 --tensors 10 --objects 5 --changing 2 --saves 2 --pause 0"  # and all peers
    done = subprocess.run(
        [sys.executable, "-W", "ignore", str(BENCH), *options.split(), "--folder", str(tmp_path), "--json", str(out)],
        capture_output=True,
        text=True,
        timeout=110,
    )
    assert done.returncode == 0, done.stderr
    found = json.loads(out.read_text())
    contestants = {"asyncckpt", "dcp-thread", "dcp-process", "dcp-save", "torch-save", "nvrx", "asyncckpt-nvrx"}
    if not (FOLDER / "nvrx-0.7.0").is_dir():
        contestants.remove("nvrx")
    assert found["left_out"].keys() == {"nvrx"} - contestants and set(found["results"]) == contestants
    assert all(len(seconds) == 2 and min(seconds) > 0 for seconds in found["limits"].values())
    for result in found["results"].values():
        assert len(result["stall_s"]) == len(result["durable_s"]) == 2
        assert 0 < result["first_stall_s"] <= result["first_durable_s"]
        assert all(stall <= durable for stall, durable in zip(result["stall_s"], result["durable_s"], strict=True))
    assert "times sooner than the best asynchronous peer" in done.stdout
    assert [path.name for path in tmp_path.iterdir()] == ["figures.json"]
