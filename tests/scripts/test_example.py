"""Test the example of rollouts with the commands in its text."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from support.checkpoints import complete_steps

EXAMPLE = Path(__file__).parents[2] / "examples/rl_sync.py"
ENVIRONMENT = {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(EXAMPLE.parent.parent)}


@pytest.mark.parametrize("saves", [False, True], ids=["published", "saved and published"])
def test_rollouts_write_with_the_newest_weights(tmp_path: Path, saves: bool) -> None:
    options = ["--steps=12", *(["--checkpoints", str(tmp_path / "checkpoints")] if saves else [])]
    said = subprocess.run(
        [sys.executable, str(EXAMPLE), *options],
        env=os.environ | ENVIRONMENT,
        stdout=subprocess.PIPE,
        check=True,
        text=True,
        timeout=200,
    ).stdout
    versions = [int(version) for version in re.findall(r"version +(\d+) wrote", said)]
    # The two processes differ in speed. A save may find no free slot for its publication while the reader is busy.
    assert len(versions) == 13 and (saves or max(versions) > 0)
    assert "published 13 versions" in said
    if saves:
        assert complete_steps(str(tmp_path / "checkpoints")) == list(range(13))
