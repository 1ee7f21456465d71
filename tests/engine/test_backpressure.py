"""Test saves that find no free slot, and copies that overlap with training."""

from __future__ import annotations

import threading
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from support.checkpoints import complete_steps
from support.states import small_state, zeros_like
from support.workers import Faulty

import asyncckpt
from asyncckpt import Checkpointer
from asyncckpt.config import Config
from asyncckpt.errors import (
    SaveDroppedError,
)
from asyncckpt.ranks.group import Group
from asyncckpt.staging.slot_copy import SlotStager


def _wait_for(path: Path) -> None:
    deadline = time.monotonic() + 60
    while not path.exists():
        assert time.monotonic() < deadline
        time.sleep(0.005)


def _running(checkpointer: Checkpointer, root: Path) -> None:
    """Wait until the worker has begun to write the first save."""
    deadline = time.monotonic() + 60
    while not list(root.glob(".*.partial")):
        assert time.monotonic() < deadline, "the worker does not begin"
        time.sleep(0.005)


def test_busy_wait(root: Path, gate: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Group, "check_first", lambda _: gate.touch())  # called while the save waits
    with Checkpointer(root, Config(slots=1)) as checkpointer:
        checkpointer.save(1, small_state())
        assert not gate.exists()
        save = checkpointer.save(2, small_state())
        assert gate.exists() and save.timings["slot_s"] > 0.01
        checkpointer.wait(60)
        assert checkpointer.steps() == [1, 2]


def test_a_slot_is_waited_for_as_long_as_a_save_may_take(
    root: Path, gate: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Storage is slow, but the previous save still ends in time."""
    timeout = 3.0
    begun = time.monotonic()

    def open_when_late(_: Group) -> None:
        if time.monotonic() - begun > timeout:
            gate.touch()

    monkeypatch.setattr(Group, "check_first", open_when_late)
    with Checkpointer(root, config := Config(slots=1, commit_timeout=60)) as checkpointer:
        checkpointer.save(1, small_state())
        checkpointer._engine._saves._config = replace(config, timeout=timeout)  # the worker keeps the longer timeout
        begun = time.monotonic()
        checkpointer.save(2, small_state())
        checkpointer.wait(60)
        assert checkpointer.steps() == [1, 2]


def test_busy_skip(root: Path, gate: Path) -> None:
    with Checkpointer(root, Config(slots=1, when_busy="skip")) as checkpointer:
        checkpointer.save(1, small_state())
        skipped = checkpointer.save(2, small_state())
        with pytest.raises(SaveDroppedError, match="skipped"):
            skipped.result(1)
        gate.touch()
        checkpointer.wait(60)
        assert checkpointer.steps() == [1]


def test_a_save_counts_until_it_has_ended(
    root: Path, tmp_path: Path, faulty_worker: Faulty, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A save with a written slot counts until its commit. Otherwise saves would pile up behind the commit."""
    gate = tmp_path / "gate"
    monkeypatch.setenv("ASYNCCKPT_TEST_GATE", str(gate))
    faulty_worker("finalize:hold")
    with Checkpointer(root, Config(slots=1, when_busy="skip")) as checkpointer:
        checkpointer.save(1, small_state())
        _wait_for(Path(f"{gate}.reached"))
        with pytest.raises(SaveDroppedError, match="skipped"):
            checkpointer.save(2, small_state()).result(1)
        gate.touch()
        checkpointer.wait(60)
        checkpointer.save(3, small_state()).result(60)
        assert checkpointer.steps() == [1, 3]


def test_a_slow_removal_holds_no_save_up(
    root: Path, tmp_path: Path, faulty_worker: Faulty, monkeypatch: pytest.MonkeyPatch
) -> None:
    gate = tmp_path / "gate"
    monkeypatch.setenv("ASYNCCKPT_TEST_GATE", str(gate))
    faulty_worker("prune:hold")
    steps = list(range(1, 9))
    with Checkpointer(root, Config(keep_last=2)) as checkpointer:
        for step in steps:
            checkpointer.save(step, small_state()).result(60)
        assert checkpointer.steps() == steps
        gate.touch()
    assert complete_steps(str(root)) == steps[-2:]


def test_busy_latest(root: Path, gate: Path) -> None:
    with Checkpointer(root, Config(slots=2, when_busy="latest")) as checkpointer:
        state = small_state()
        saves = [checkpointer.save(1, state)]
        _running(checkpointer, root)
        for step in (2, 3, 4):
            state["step"] = step
            saves.append(checkpointer.save(step, state))
        gate.touch()
        checkpointer.wait(60)
        assert checkpointer.steps() == [1, 4]
        for save in saves[1:3]:
            with pytest.raises(SaveDroppedError, match="newer save"):
                save.result(1)
        checkpointer.load(into := zeros_like(state))
        assert into["step"] == 4


# Copies that overlap with training.


def test_overlap_waits_before_the_optimizer_steps(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    may_copy = threading.Event()
    copy = SlotStager.copy

    def slow(self: Any, *args: Any, **options: Any) -> None:
        assert may_copy.wait(30)
        copy(self, *args, **options)

    parameter = torch.nn.Parameter(torch.full((1000,), 1.0))
    optimizer = torch.optim.SGD([parameter], lr=1.0)
    with Checkpointer(root, Config(overlap=True)) as checkpointer:
        checkpointer.prepare({"p": parameter})
        checkpointer.guard(optimizer)
        monkeypatch.setattr(SlotStager, "copy", slow)
        save = checkpointer.save(1, {"p": parameter})
        assert not save.staged()
        parameter.grad = torch.ones_like(parameter)
        timer = threading.Timer(0.1, may_copy.set)
        timer.start()
        optimizer.step()
        assert save.staged()
        timer.join()
        save.result(60)
        checkpointer.load(into := {"p": torch.zeros(1000)})
        assert (into["p"] == 1).all() and (parameter == 0).all()


def test_a_failed_overlapped_copy_is_told(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with Checkpointer(root, Config(overlap=True)) as checkpointer:
        checkpointer.prepare(state := small_state())

        def broken(*_: Any, **__: Any) -> None:
            raise RuntimeError("the device is lost")

        with monkeypatch.context() as patch:
            patch.setattr(SlotStager, "copy", broken)
            save = checkpointer.save(1, state)
            save.wait_staged(60)
            with pytest.raises(asyncckpt.CheckpointError, match="the device is lost"):
                save.result(60)
        checkpointer.save(2, state).result(60)
        assert checkpointer.steps() == [2]


def test_a_failed_copy_loses_no_slot(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with Checkpointer(root, Config(slots=1)) as checkpointer:
        checkpointer.prepare(state := small_state())

        def broken(*_: Any, **__: Any) -> None:
            raise RuntimeError("the device is lost")

        for step in range(3):
            with monkeypatch.context() as patch:
                patch.setattr(SlotStager, "copy", broken)
                with pytest.raises(asyncckpt.CheckpointError, match="the device is lost"):
                    checkpointer.save(step, state)
        checkpointer.save(9, state).result(60)
        assert checkpointer.steps() == [9]
