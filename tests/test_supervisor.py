"""Test how workers end when their process ends or drops them, and where their messages go."""

from __future__ import annotations

import gc
import logging
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from support.checkpoints import complete_steps
from support.ranks import Job, script
from support.workers import FAULTY, Faulty

from asyncckpt import Checkpointer, Config
from asyncckpt.errors import CheckpointError, ClosedError
from asyncckpt.weights import WeightPublisher

_SAVE = """
import sys, torch
from asyncckpt import Checkpointer
checkpointer = Checkpointer(sys.argv[1])
checkpointer.save(1, {"w": torch.full((3_000_000,), 1.0)})
print(checkpointer._engine.worker.pid)
"""


pytestmark = pytest.mark.usefixtures("forkserver")


def _state(value: float) -> dict[str, Any]:
    return {"w": torch.full((1000,), value)}


def _run(root: Path, code: str) -> tuple[subprocess.CompletedProcess[str], psutil.Process | None]:
    """Run the script to its end. Return the process, and its worker if it still runs."""
    ended = subprocess.run([sys.executable, "-c", code, str(root)], capture_output=True, text=True, timeout=120)
    try:
        return ended, psutil.Process(int(ended.stdout))
    except psutil.NoSuchProcess:
        return ended, None


def test_an_orderly_end_is_no_death(root: Path) -> None:
    """The process closes nothing. Its save is still written, and nothing is left behind."""
    ended, worker = _run(root, _SAVE)
    assert ended.returncode == 0 and not ended.stderr and worker is None
    assert complete_steps(str(root)) == [1]


def test_after_an_error_the_worker_lingers(root: Path) -> None:
    ended, worker = _run(root, _SAVE + "raise RuntimeError('as the test wants')")
    assert ended.returncode == 1 and "as the test wants" in ended.stderr and "Exception ignored" not in ended.stderr
    assert worker is not None
    with Checkpointer(root) as checkpointer:
        into = {"w": torch.zeros(3_000_000)}
        assert checkpointer.load(into) == 1 and into["w"].sum() == 3_000_000
        assert checkpointer.loaded is not None and checkpointer.loaded.source == "memory"


@pytest.mark.filterwarnings("ignore:unclosed file:ResourceWarning")  # from the unclosed checkpointers
def test_a_cell_that_is_run_again(root: Path) -> None:
    """A process makes another checkpointer while the previous one, or only its worker, still exists."""
    first = Checkpointer(root)
    first.save(1, _state(1)).result(60)
    second = Checkpointer(root)
    second.save(2, _state(2)).result(60)
    with pytest.raises(ClosedError):
        first.save(3, _state(3))
    with pytest.warns(ResourceWarning, match="not closed"):
        del second
        gc.collect()
    with Checkpointer(root) as third:
        third.save(3, _state(3)).result(60)
        assert third.steps() == [1, 2, 3]


def test_one_that_only_loads_takes_nothing_over(root: Path) -> None:
    with Checkpointer(root) as trains, Checkpointer(root) as evaluates:
        trains.save(1, _state(1)).result(60)
        assert evaluates.load(_state(0)) == 1
        trains.save(2, _state(2)).result(60)


def test_a_publisher_that_is_made_again() -> None:
    first = WeightPublisher("weights")
    first.publish(_state(1), 1)
    with WeightPublisher("weights") as second:
        second.publish(_state(2), 2)
        with pytest.raises(ClosedError):
            first.publish(_state(3), 3)


def _leave_by_an_error(root: str) -> float:
    begun = time.monotonic()
    if torch.distributed.get_rank() == 0:
        try:
            with Checkpointer(root, Config(commit_timeout=90, assume_constant_structure=True)) as checkpointer:
                checkpointer.prepare(_state(1))
                save = checkpointer.save(1, _state(1))
                begun = time.monotonic()
                raise RuntimeError("before the other rank has saved")
        except RuntimeError:
            assert isinstance(save.failure, CheckpointError)
        took = time.monotonic() - begun
        torch.distributed.barrier()
        return took
    with Checkpointer(root, Config(commit_timeout=90, assume_constant_structure=True)) as checkpointer:
        checkpointer.prepare(_state(1))
        torch.distributed.barrier()
    return 0


def test_an_error_does_not_wait_for_other_ranks(root: Path, tmp_path: Path) -> None:
    """Other ranks may never reach that save, and the launcher must see that this rank has failed."""
    ended = Job(2, _leave_by_an_error, str(root), folder=tmp_path).wait()
    assert not any(end.error for end in ended), ended
    assert ended[0].result < 40


def test_warnings_of_the_worker_are_logged(
    root: Path, faulty_worker: Faulty, caplog: pytest.LogCaptureFixture, runtime: Path
) -> None:
    faulty_worker("write:warn")
    with Checkpointer(root) as checkpointer:
        checkpointer.save(1, _state(1)).result(60)
        worker = checkpointer._engine.worker
        assert worker is not None
        checkpointer.close()
    assert f"the worker {worker.pid}: as the test wants" in caplog.messages
    assert not list(runtime.glob("*.log"))


def test_what_it_says_to_a_dead_trainer_is_kept(root: Path, caplog: pytest.LogCaptureFixture) -> None:
    code = (
        "from asyncckpt.link import process; real = process.command();"
        f"process.command = lambda: [real[0], {FAULTY!r}, 'write:orphan'];" + _SAVE + "import time; time.sleep(60)"
    )
    assert script(code, str(root)) < 0
    with caplog.at_level(logging.WARNING), Checkpointer(root) as checkpointer:
        checkpointer.load({"w": torch.zeros(3_000_000)})
        checkpointer.save(2, _state(2)).result(60)
    assert any(
        "the worker of the previous trainer logged" in text and "as the test wants" in text for text in caplog.messages
    ), caplog.messages


def test_what_the_environment_says(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ASYNC_CKPT_SLOTS", "1")
    monkeypatch.setenv("ASYNC_CKPT_JOB_ID", "a")
    with Checkpointer(root) as checkpointer:
        assert checkpointer.config == Config(slots=1, job_id="a")
    monkeypatch.setenv("ASYNC_CKPT_SLOTS", "none")
    with pytest.raises(ValueError, match="ASYNC_CKPT_SLOTS"):
        Checkpointer(root)


def test_another_default_device(root: Path) -> None:
    """asyncckpt makes its own tensors on the CPU, whatever the default device is."""
    state = _state(1) | {"none": torch.ones(0), "number": 3, "scalar": torch.tensor(2.0)}
    into = {**_state(0), "none": torch.ones(0), "number": 0, "scalar": torch.tensor(0.0)}
    torch.set_default_device("meta")
    try:
        with Checkpointer(root) as checkpointer:
            checkpointer.save(1, state).result(60)
            checkpointer.load(into)
    finally:
        torch.set_default_device(None)
    assert torch.equal(into["w"], state["w"]) and into["number"] == 3 and into["scalar"] == 2


def test_a_fork_closes_nothing(root: Path) -> None:
    with Checkpointer(root, Config(overlap=True)) as checkpointer:
        checkpointer.save(1, _state(1)).result(60)
        child = os.fork()
        if child == 0:
            checkpointer.close()
            os._exit(0)
        assert os.waitpid(child, 0)[1] == 0
        checkpointer.save(2, _state(2)).result(60)


def test_callbacks_are_called_at_the_end_of_the_process(root: Path, tmp_path: Path) -> None:
    called = tmp_path / "called"
    script = _SAVE + (
        f"checkpointer.save(2, {{'w': torch.ones(3)}}).future.add_done_callback(lambda _: open({str(called)!r}, 'w'))"
    )
    ended, worker = _run(root, script)
    assert ended.returncode == 0 and worker is None and called.exists()
