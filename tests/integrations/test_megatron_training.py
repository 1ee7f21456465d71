"""megatron-core trains with dropout, is killed, and resumes. Every loss equals that of an uninterrupted run."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest
from support import megatron_training
from support.megatron_training import Training
from support.peers import MEGATRON, peer
from support.ranks import Job, run, say

pytestmark = pytest.mark.usefixtures("forkserver")

_STEPS = 10


def _is_killed(package: str, folder: Path, parallel: int, distributed: bool) -> None:
    megatron_training.set_up(package, tensor_parallel=parallel)
    whole = Training(distributed_optimizer=distributed)
    say(dict(megatron_training.train(whole, folder, 1, _STEPS)))
    training = Training(distributed_optimizer=distributed)
    # At the kill, saves 2 and 4 are finalized, and save 6 is pending.
    losses = {}
    for number, loss in megatron_training.train(training, folder, 1, _STEPS, save_every=2):
        losses[number] = loss
        if number == 7:
            say(losses)
            os.kill(os.getpid(), signal.SIGKILL)


def _goes_on(package: str, folder: Path, parallel: int, distributed: bool) -> tuple[int, dict[int, float]]:
    megatron_training.set_up(package, tensor_parallel=parallel)
    training = Training(distributed_optimizer=distributed)
    latest = int((folder / "latest").read_text())
    assert training.load(folder / str(latest)) == latest
    return latest, dict(megatron_training.train(training, folder, latest + 1, _STEPS, save_every=3))


@pytest.mark.parametrize(
    ("parallel", "distributed"),
    [pytest.param(2, False, id="tensor parallel"), pytest.param(1, True, id="distributed optimizer")],
)
def test_losses_after_a_kill(tmp_path: Path, parallel: int, distributed: bool) -> None:
    arguments = (peer(MEGATRON), tmp_path / "saves", parallel, distributed)
    job = Job(2, _is_killed, *arguments, folder=tmp_path)
    expected = [job.hear(rank) for rank in range(2)]
    before = [job.hear(rank) for rank in range(2)]
    assert all(end.killed for end in job.wait())
    for rank, (latest, after) in enumerate(run(2, _goes_on, *arguments, folder=tmp_path)):
        assert latest == 4
        assert before[rank] == {number: expected[rank][number] for number in before[rank]}
        assert after == {number: expected[rank][number] for number in range(5, _STEPS)}
