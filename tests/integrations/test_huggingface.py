"""Background saves by Hugging Face's Trainer: resume, removal of old checkpoints, callbacks, and waits."""

from __future__ import annotations

import os
import signal
import threading
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("transformers")

from support import hf_training
from support.hf_ranks import Died, dies_at
from support.hf_states import checkpoints, same_files
from support.ranks import alone
from support.workers import FAULTY, Faulty, stop, wait_for, wait_reached
from transformers import TrainerCallback
from transformers.trainer_utils import get_last_checkpoint

from asyncckpt.config import Config
from asyncckpt.engine import shared as engines
from asyncckpt.errors import StorageError
from asyncckpt.link import process as worker_process

# Warnings of transformers itself during training and resume.
pytestmark = [
    pytest.mark.usefixtures("one_thread"),
    pytest.mark.filterwarnings("default::UserWarning", "default::FutureWarning", "default::DeprecationWarning"),
]


def weights(trainer: Any) -> dict[str, torch.Tensor]:
    return {name: value.detach().clone() for name, value in trainer.model.state_dict().items()}


def assert_same(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> None:
    torch.testing.assert_close(one, other, rtol=0, atol=0)


def test_each_checkpoint_is_as_transformers_makes_it(tmp_path: Path) -> None:
    for name in ("ours", "stock"):
        hf_training.trainer(tmp_path / name, enable=name == "ours").train()
    assert checkpoints(tmp_path / "ours") == [2, 4, 6]
    for step in (2, 4, 6):
        same_files(tmp_path / f"ours/checkpoint-{step}", tmp_path / f"stock/checkpoint-{step}")
    assert sorted(each.name for each in (tmp_path / "ours").iterdir()) == [f"checkpoint-{step}" for step in (2, 4, 6)]


def test_stock_transformers_goes_on_where_it_was(tmp_path: Path) -> None:
    whole = hf_training.trainer(tmp_path / "whole", enable=False, save_strategy="no")
    whole.train()
    with pytest.raises(Died):
        hf_training.trainer(tmp_path / "run", at_step=dies_at(5)).train()
    wait_for(lambda: checkpoints(tmp_path / "run") == [2, 4])
    resumed = hf_training.trainer(tmp_path / "run", enable=False)
    resumed.train(resume_from_checkpoint=True)
    assert_same(weights(resumed), weights(whole))
    assert resumed.recorder.losses == {step: whole.recorder.losses[step] for step in (5, 6)}


def test_no_checkpoint_is_seen_before_it_is_durable(tmp_path: Path, gate: Path) -> None:
    run = tmp_path / "run"
    seen = []

    def at_step(step: int) -> None:
        seen.append((step, checkpoints(run)))
        if step == 5:
            gate.touch()

    trainer = hf_training.trainer(run, at_step=at_step)
    trainer.train()
    assert seen[:4] == [(step, []) for step in (1, 2, 3, 4)]
    assert get_last_checkpoint(run) == str(run / "checkpoint-6")
    assert checkpoints(run) == [2, 4, 6]
    assert trainer.recorder.saved == [(2, True), (4, True), (6, True)]


def test_older_ones_are_removed_when_the_newer_is_durable(tmp_path: Path, gate: Path) -> None:
    run = tmp_path / "run"
    hf_training.trainer(run, enable=False, max_steps=2).train()
    seen = []

    def at_step(step: int) -> None:
        seen.append(checkpoints(run))
        if step == 6:
            gate.touch()

    hf_training.trainer(run, at_step=at_step, save_total_limit=1).train(resume_from_checkpoint=True)
    assert seen == [[2]] * 4
    assert checkpoints(run) == [6]


def test_what_was_set_aside_goes_first(tmp_path: Path) -> None:
    for name in ("checkpoint-1", "checkpoint-3", "checkpoint-3.abandoned-1"):
        (tmp_path / name).mkdir()
    hf_training.trainer(tmp_path, save_total_limit=3, max_steps=2).train()
    left = ["checkpoint-1", "checkpoint-2", "checkpoint-3"]
    # The files of the removed checkpoint are deleted later.
    wait_for(lambda: sorted(each.name for each in tmp_path.iterdir()) == left)


def test_a_failed_save_removes_nothing(tmp_path: Path, faulty_worker: Faulty) -> None:
    run = tmp_path / "run"
    hf_training.trainer(run, enable=False, max_steps=2, save_steps=2).train()
    faulty_worker("write:enospc")

    def at_step(step: int) -> None:
        # Otherwise the next save begins before this failure is known, and succeeds.
        if step == 5:
            wait_for(lambda: engines.shared.get().failures == 1)

    trainer = hf_training.trainer(run, save_total_limit=1, at_step=at_step)
    with pytest.raises(StorageError):
        trainer.train(resume_from_checkpoint=True)
    assert trainer.state.global_step == 6
    assert checkpoints(run) == [2]
    assert trainer.recorder.saved == []


def test_a_failed_save_is_only_logged(tmp_path: Path, faulty_worker: Faulty, caplog: pytest.LogCaptureFixture) -> None:
    run = tmp_path / "run"
    faulty_worker("write:enospc:2")
    options: dict[str, Any] = {"eval_strategy": "steps", "eval_steps": 2, "load_best_model_at_end": True}
    trainer = hf_training.trainer(run, config=Config(failure="warn"), learning_rate=0.0, **options)
    trainer.train()
    assert caplog.text.count("saving failed") == 1 == caplog.text.count("No space left")
    assert trainer.recorder.saved == [(step, True) for step in checkpoints(run)]
    assert trainer.state.best_model_checkpoint in (None, *map(str, run.glob("checkpoint-*")))


def test_the_best_checkpoint_is_loaded_in_the_end(tmp_path: Path) -> None:
    found = []
    for name in ("ours", "stock"):
        options: dict[str, Any] = {
            "eval_strategy": "steps",
            "eval_steps": 2,
            "load_best_model_at_end": True,
            "save_total_limit": 1,
        }
        trainer = hf_training.trainer(tmp_path / name, enable=name == "ours", **options)
        trainer.train()
        assert trainer.state.best_model_checkpoint == str(
            tmp_path / name / f"checkpoint-{trainer.state.best_global_step}"
        )
        found.append((trainer.state.best_metric, weights(trainer)))
    assert checkpoints(tmp_path / "ours") == checkpoints(tmp_path / "stock")
    assert found[0][0] == found[1][0]
    assert_same(found[0][1], found[1][1])
    for step in checkpoints(tmp_path / "stock"):
        same_files(tmp_path / f"ours/checkpoint-{step}", tmp_path / f"stock/checkpoint-{step}")


@pytest.mark.parametrize(
    "options", [{"save_only_model": True}, {"save_strategy": "epoch", "num_train_epochs": 1, "max_steps": -1}]
)
def test_other_ways_to_save(tmp_path: Path, options: dict[str, Any]) -> None:
    for name in ("ours", "stock"):
        hf_training.trainer(tmp_path / name, enable=name == "ours", **options).train()
    assert checkpoints(tmp_path / "ours") == checkpoints(tmp_path / "stock")
    for step in checkpoints(tmp_path / "stock"):
        same_files(tmp_path / f"ours/checkpoint-{step}", tmp_path / f"stock/checkpoint-{step}")


def test_what_a_failed_best_checkpoint_leaves(tmp_path: Path, faulty_worker: Faulty) -> None:
    run = tmp_path / "run"
    faulty_worker("finalize:enospc:2")
    options: dict[str, Any] = {"eval_strategy": "steps", "eval_steps": 2, "load_best_model_at_end": True}
    trainer = hf_training.trainer(run, config=Config(failure="warn"), **options)
    trainer.evaluate = lambda **_: {"eval_loss": {2: 3.0, 4: 2.0}.get(trainer.state.global_step, 4.0)}
    trainer.train()
    assert trainer.state.best_global_step == 4
    assert checkpoints(run) == [2, 6]
    assert trainer.state.best_model_checkpoint == str(run / "checkpoint-2")


class History(TrainerCallback):  # type: ignore[misc]
    """Record the step and the newest logged step at each ``on_save``."""

    def __init__(self) -> None:
        self.seen: list[tuple[int, int]] = []

    def on_save(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self.seen.append((state.global_step, max(each["step"] for each in state.log_history)))


def test_the_state_that_is_told_is_that_of_the_step(tmp_path: Path, gate: Path) -> None:
    """``on_save`` gets the state of the saved step, even if the training has passed that step."""
    trainer = hf_training.trainer(tmp_path, at_step=lambda step: gate.touch() if step == 5 else None)
    trainer.add_callback(history := History())
    trainer.train()
    assert history.seen == [(2, 2), (4, 4), (6, 6)]


def test_the_next_training_of_the_process_waits_for_what_the_one_before_saves(tmp_path: Path, gate: Path) -> None:
    trainer = hf_training.trainer(tmp_path, at_step=dies_at(3))
    with pytest.raises(Died):
        trainer.train()
    trainer.recorder._at_step = lambda _: None
    trainer.recorder.losses.clear()
    timer = threading.Timer(0.3, gate.touch)
    timer.start()
    trainer.train(resume_from_checkpoint=True)
    timer.join()
    assert min(trainer.recorder.losses) == 3


def _train_until_killed(run: Path, pid: Path, limit: int | None = None) -> None:
    """Train until killed. The worker writes nothing until the gate opens."""
    command = [worker_process.command()[0], FAULTY, "write:hold"]
    setattr(worker_process, "command", lambda: command)  # noqa: B010

    def at_step(step: int) -> None:
        if step == 5:
            worker = engines.shared.get().worker
            assert worker is not None
            pid.write_text(str(worker.pid))
            os.kill(os.getpid(), signal.SIGKILL)

    hf_training.trainer(run, at_step=at_step, save_total_limit=limit).train()


@pytest.mark.usefixtures("forkserver")
@pytest.mark.parametrize("is_stopped", [False, True])
def test_a_training_resumes_from_what_a_killed_one_had_staged(
    tmp_path: Path, gate: Path, caplog: pytest.LogCaptureFixture, is_stopped: bool
) -> None:
    run, pid = tmp_path / "run", tmp_path / "pid"
    code, _ = alone(_train_until_killed, run, pid)
    assert code == -signal.SIGKILL and get_last_checkpoint(run) is None
    if is_stopped:
        stop(int(pid.read_text()))
        gate.touch()

    def go_on() -> None:
        gate.touch()
        os.kill(int(pid.read_text()), signal.SIGCONT)

    timer = threading.Timer(0.5, go_on)
    timer.start()
    trainer = hf_training.trainer(run)
    timer.join()
    assert get_last_checkpoint(run) == str(run / "checkpoint-4")
    assert f"the load waits until a worker has written the staged saves under {run}" in caplog.text
    trainer.train(resume_from_checkpoint=True)
    assert min(trainer.recorder.losses) == 5
    assert sorted(each.name for each in run.iterdir()) == [f"checkpoint-{step}" for step in (2, 4, 6)]


@pytest.mark.usefixtures("forkserver")
def test_the_worker_of_a_killed_training_removes_what_is_too_old(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The worker removes the old checkpoint only after the new one is durable."""
    monkeypatch.setenv("ASYNCCKPT_TEST_GATE", str(gate := tmp_path / "gate"))
    run, pid = tmp_path / "run", tmp_path / "pid"
    hf_training.trainer(run, enable=False, max_steps=1, save_steps=1).train()
    assert alone(_train_until_killed, run, pid, 1)[0] == -signal.SIGKILL
    wait_reached(gate)
    assert checkpoints(run) == [1]
    gate.touch()
    wait_for(lambda: checkpoints(run) == [4])


@pytest.mark.usefixtures("forkserver")
def test_a_training_does_not_wait_for_ever(tmp_path: Path, gate: Path, caplog: pytest.LogCaptureFixture) -> None:
    run, pid = tmp_path / "run", tmp_path / "pid"
    assert alone(_train_until_killed, run, pid)[0] == -signal.SIGKILL
    hf_training.trainer(run, config=Config(timeout=0.3))
    assert "training may resume from a checkpoint that is not the newest" in caplog.text
    gate.touch()
    wait_for(lambda: checkpoints(run) == [2, 4])
