"""``examples/fsdp2.py`` as its text says to run it."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from ranks import fsdp2_on_cpu

EXAMPLE = Path(__file__).parent.parent / "examples/fsdp2.py"


def _run(ranks: int, root: Path, *options: str) -> str:
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", str(ranks), "--rdzv-backend", "c10d"]
    return subprocess.run(
        [*command, "--rdzv-endpoint", "127.0.0.1:0", str(EXAMPLE), str(root), *options],
        env=os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(EXAMPLE.parent.parent)},
        stdout=subprocess.PIPE,
        check=True,
        text=True,
        timeout=100,
    ).stdout


@fsdp2_on_cpu
def test_it_trains_and_goes_on_with_other_ranks(tmp_path: Path) -> None:
    root = tmp_path / "checkpoints"
    assert "steps 0 to 10 with 2 ranks" in _run(2, root, "--steps", "10", "--ckpt-assume-constant-structure")
    assert "steps 10 to 15 with 1 ranks" in _run(1, root, "--steps", "15", "--ckpt-keep-last", "1")
    assert [path.name for path in root.iterdir()] == ["step-00000015"]
