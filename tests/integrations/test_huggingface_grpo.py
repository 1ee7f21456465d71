"""Test that TRL's GRPO goes on in the middle of a generated block, after kills of one rank and of two ranks."""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from support.ranks import Job, run

pytest.importorskip("trl")

from support import grpo_training
from support.grpo_training import BATCHES, COMPLETIONS, SLICES, USES

TESTS = Path(__file__).parent.parent
KILLS = 3


def start(folder: Path) -> subprocess.Popen[bytes]:
    folder.mkdir(exist_ok=True)
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(TESTS), str(TESTS.parent)])}
    return subprocess.Popen([sys.executable, "-m", "support.grpo_training", str(folder)], env=environment)


def history(folder: Path, rank: int = 0) -> list[list[Any]]:
    """Return the records of a rank, in the order of time. A line may be cut by a kill."""
    path = folder / f"history_{rank}"
    lines = path.read_text().split("\n")[:-1] if path.exists() else []
    return [json.loads(line) for line in lines]


@pytest.mark.slow
def test_no_prompt_is_lost_or_comes_twice(tmp_path: Path, runtime: Path) -> None:
    with start(tmp_path / "whole") as whole:
        assert whole.wait(200) == 0
    killed, chance = tmp_path / "killed", random.Random(5)
    for _ in range(KILLS):
        with start(killed) as process:
            had, more = len(history(killed)), chance.randint(3, 7)
            while process.poll() is None and len(history(killed)) < had + more:
                time.sleep(0.001)
            time.sleep(chance.random() * 0.02)
            process.kill()
    with start(killed) as last:
        assert last.wait(200) == 0
    check_same(tmp_path / "whole", killed, rank=0)


@pytest.mark.slow
@pytest.mark.usefixtures("forkserver")
def test_each_of_two_ranks_goes_on_in_its_own_block(tmp_path: Path) -> None:
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    whole.mkdir()
    run(2, grpo_training.rank, str(whole), folder=tmp_path)
    for step in (4, 6):  # in the second use of the first block, and in the first use of the second block
        kill_in(step, killed)
    run(2, grpo_training.rank, str(killed), folder=tmp_path)
    for rank in range(2):
        check_same(whole, killed, rank)
    used = Counter(each for rank in range(2) for prompts, *_ in survived(killed, rank).values() for each in prompts)
    assert set(used.values()) == {USES * COMPLETIONS}, "no prompt is lost or comes twice"


@pytest.mark.usefixtures("forkserver")
@pytest.mark.parametrize(("ranks", "warning"), [(1, "its options differ"), (2, "another rank loads none")])
def test_ranks_begin_with_a_new_block_together(tmp_path: Path, ranks: int, warning: str) -> None:
    kill_in(4, tmp_path / "killed")
    if ranks == 2:
        (tmp_path / "killed" / "run" / "checkpoint-3" / "generation_1.pt").unlink()
    before = len(history(tmp_path / "killed"))
    warnings = run(ranks, grpo_training.rank, str(tmp_path / "killed"), folder=tmp_path)
    assert [warning in each for each in warnings[0]] == [True]
    for rank in range(ranks):
        tokens = [tokens for _, _, tokens, _ in history(tmp_path / "killed", rank)[before:]]
        assert tokens[:SLICES] == tokens[SLICES : 2 * SLICES] != tokens[2 * SLICES : 3 * SLICES]


def kill_in(step: int, folder: Path) -> None:
    """Train on two ranks, and kill both after the first of the two batches of ``step``."""
    folder.mkdir(exist_ok=True)
    job = Job(2, grpo_training.rank, str(folder), step, folder=folder)
    assert [job.hear(rank) for rank in range(2)] == [2 * step - 1] * 2
    for process in job.processes:
        process.kill()
    assert all(ended.killed for ended in job.wait())


def survived(folder: Path, rank: int) -> dict[int, list[Any]]:
    """Return the last record of each batch. Each step begins after the step before it."""
    return {batch: rest for batch, *rest in history(folder, rank)}


def check_same(whole: Path, killed: Path, rank: int) -> None:
    """Check that a training with kills trained on the same batches, in the same order, and ended the same."""
    expected = history(whole, rank)
    assert [batch for batch, *_ in expected] == [*range(1, BATCHES + 1)]
    assert survived(killed, rank) == survived(whole, rank)
    ends = [torch.load(folder / f"end_{rank}.pt", weights_only=True) for folder in (whole, killed)]
    assert all(torch.equal(value, ends[1][name]) for name, value in ends[0].items())
