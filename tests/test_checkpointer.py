"""Saving and loading as a training loop does it."""

from __future__ import annotations

import logging
import os
import resource
import tempfile
import threading
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import Faulty, same, small_state, zeros_like

import asyncckpt
from asyncckpt import engines, plan
from asyncckpt.checkpointer import Checkpointer
from asyncckpt.config import Config
from asyncckpt.errors import (
    CheckpointExistsError,
    CheckpointNotFoundError,
    ClosedError,
    MismatchError,
    OutOfMemoryError,
    SaveDroppedError,
    StorageError,
    UnsavableStateError,
)
from asyncckpt.staging import SlotStager
from asyncckpt.worker.storage import reading


@pytest.fixture
def checkpointer(root: Path) -> Iterator[Checkpointer]:
    with Checkpointer(root) as checkpointer:
        yield checkpointer


def test_a_run(checkpointer: Checkpointer, root: Path) -> None:
    state = small_state()
    checkpointer.prepare(state)
    assert checkpointer.latest() is None and checkpointer.steps() == []
    for step in (5, 10):
        state["step"] = step
        state["model"]["weight"].fill_(step)
        save = checkpointer.save(step, state)
        assert save.staged() and save.step == step and save.path == root / f"step-{step:08d}"
        assert save.result(60) == save.path and save.done() and save.failure is None
        assert {"plan_s", "copy_s", "stall_s", "write_s", "commit_s", "durable_s"} <= set(save.timings)
    assert checkpointer.steps() == [5, 10] and checkpointer.latest() == 10
    into = zeros_like(state)
    assert checkpointer.load(into) == 10
    assert same(into, state)
    assert checkpointer.load(into, step=5) == 5
    assert into["step"] == 5 and into["model"]["weight"][0, 0] == 5


def test_the_values_are_those_of_one_moment(root: Path) -> None:
    """The caller changes everything right after save() returns, again and again."""
    small = {f"small {number}": torch.zeros(100) for number in range(300)}
    large = {"large": torch.zeros(5_000_000), "strided": torch.zeros(600, 500).t()}
    state: dict[str, Any] = {**small, **large, "step": 0}
    with Checkpointer(root) as checkpointer:
        for step in range(1, 13):
            for value in state.values():
                if isinstance(value, torch.Tensor):
                    value.fill_(step)
            state["step"] = step
            checkpointer.save(step, state)
            for value in state.values():
                if isinstance(value, torch.Tensor):
                    value.fill_(-1)
            state["step"] = -1
        checkpointer.wait(60)
        for step in checkpointer.steps():
            checkpointer.load(state, step)
            assert state["step"] == step
            assert all(
                torch.equal(value, torch.full_like(value, step)) for value in state.values() if value is not step
            )


def test_a_changed_structure_is_planned_anew(checkpointer: Checkpointer, monkeypatch: pytest.MonkeyPatch) -> None:
    planned = []

    def counting(*args: Any) -> plan.Plan:
        planned.append(1)
        return plan.make_plan(*args)

    monkeypatch.setattr("asyncckpt.engine.make_plan", counting)
    base: dict[str, Any] = {"a": torch.ones(4, 6), "b": {"c": torch.zeros(3), "n": 1}, "list": [1, 2]}
    changes: list[tuple[dict[str, Any], bool]] = [
        ({}, True),
        ({"a": torch.randn(4, 6)}, False),
        ({"list": [1, 3]}, False),
        ({"b": {"c": torch.ones(3), "n": "text"}}, False),
        ({"a": torch.ones(6, 4)}, True),
        ({"a": torch.ones(24)}, True),
        ({"a": torch.ones(4, 6, dtype=torch.float64)}, True),
        ({"a": torch.ones(4, 6).to_sparse()}, True),
        ({"a": 5}, True),
        ({"list": [1, torch.ones(2)]}, True),
        ({"list": "x" * 5000}, True),
        ({"b": {"c": torch.zeros(3), "n": 1, "more": 2}}, True),
        ({"extra": torch.zeros(0, 3)}, True),
        ({"extra": torch.zeros(0, 4)}, True),
    ]
    for step, (change, anew) in enumerate(changes):
        state = {**base, **change}
        planned.clear()
        checkpointer.save(step, state).result(60)
        assert bool(planned) == anew, change
        into = zeros_like(state)
        checkpointer.load(into, step)
        assert same(into, state), change


def test_structures_take_turns(checkpointer: Checkpointer, monkeypatch: pytest.MonkeyPatch) -> None:
    states = [{f"{name} weight": torch.randn(50)} for name in ("model", "average")]
    for step in range(2):
        checkpointer.save(step, states[step])
    monkeypatch.setattr("asyncckpt.engine.make_plan", None)  # from here on nothing may be planned
    for step in range(2, 8):
        states[step % 2][next(iter(states[step % 2]))].fill_(step)
        checkpointer.save(step, states[step % 2])
    checkpointer.wait(60)
    for step in range(2, 8):
        into = zeros_like(states[step % 2])
        checkpointer.load(into, step)
        assert next(iter(into.values()))[0] == step


class Counter:
    def __init__(self) -> None:
        self.count = 0

    def state_dict(self) -> dict[str, Any]:
        return {"count": self.count, "tensor": torch.full((3,), float(self.count))}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        assert state_dict["tensor"][0] == state_dict["count"]
        self.count = state_dict["count"]


def test_stateful_values(checkpointer: Checkpointer) -> None:
    counter, model = Counter(), torch.nn.Linear(3, 2)
    for step in (1, 2):
        counter.count = step * 10
        checkpointer.save(step, {"counter": counter, "model": model})
    checkpointer.wait(60)
    weight = model.weight.detach().clone()
    with torch.no_grad():
        model.weight.zero_()
    counter.count = 0
    checkpointer.load({"counter": counter, "model": model})
    assert counter.count == 20 and torch.equal(model.weight, weight)


def test_an_optimizer_without_a_state_to_load_into_is_warned_about(
    checkpointer: Checkpointer, caplog: pytest.LogCaptureFixture
) -> None:
    model = torch.nn.Linear(3, 2)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(1, 3)).sum().backward()
    optimizer.step()
    checkpointer.save(1, {"model": model, "optimizer": optimizer}).result(60)
    checkpointer.load({"model": model})  # which leaves the optimizer out on purpose
    assert "not asked for" not in caplog.text
    checkpointer.load({"model": model, "optimizer": torch.optim.AdamW(model.parameters())})
    assert "'optimizer.state.0.exp_avg'" in caplog.text and "were not asked for" in caplog.text


# When all slots are busy.


@pytest.fixture
def gate(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, faulty_worker: Faulty) -> Path:
    """The worker writes nothing before this file exists."""
    monkeypatch.setenv("ASYNCCKPT_TEST_GATE", str(tmp_path / "gate"))
    faulty_worker("write:hold")
    return tmp_path / "gate"


def _running(checkpointer: Checkpointer, root: Path) -> None:
    """Wait until the worker has begun to write the first save."""
    for _ in range(2000):
        if list(root.glob(".*.partial")):
            return
        threading.Event().wait(0.005)
    raise AssertionError("the worker does not begin")


def test_busy_wait(root: Path, gate: Path) -> None:
    with Checkpointer(root, Config(slots=1)) as checkpointer:
        checkpointer.save(1, small_state())
        timer = threading.Timer(0.2, gate.touch)
        timer.start()
        save = checkpointer.save(2, small_state())
        assert gate.exists() and save.timings["slot_s"] > 0.01
        checkpointer.wait(60)
        timer.join()
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
            save.wait_staged(10)
            with pytest.raises(asyncckpt.CheckpointError, match="the device is lost"):
                save.result(10)
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


# Trouble, each time one clear error, and the next save works.


def _next_save_works(checkpointer: Checkpointer) -> None:
    state = small_state()
    checkpointer.save(999, state).result(60)
    assert checkpointer.load(into := zeros_like(state)) == 999
    assert same(into, state)


def test_a_step_saved_twice(checkpointer: Checkpointer, gate: Path) -> None:
    checkpointer.save(1, small_state())
    with pytest.raises(CheckpointExistsError, match="being saved"):
        checkpointer.save(1, small_state())
    gate.touch()
    checkpointer.wait(60)
    with pytest.raises(CheckpointExistsError, match="step 1"):
        checkpointer.save(1, small_state())
    _next_save_works(checkpointer)


def test_a_root_that_is_a_file(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(StorageError, match="file"):
        Checkpointer(tmp_path / "file")
    with pytest.raises(StorageError, match="file"):
        Checkpointer(tmp_path / "file" / "below")


def test_a_root_that_becomes_a_file(checkpointer: Checkpointer, root: Path) -> None:
    root.rmdir()
    root.touch()
    with pytest.raises(StorageError) as caught:
        checkpointer.save(3, small_state()).result(60)
    assert caught.value.step == 3 and caught.value.rank == 0 and "it is a file" in str(caught.value)
    root.unlink()
    _next_save_works(checkpointer)


@pytest.mark.skipif(os.getuid() != 0, reason="takes root to become nobody")
def test_a_read_only_folder(root: Path, faulty_worker: Faulty) -> None:
    faulty_worker("start:nobody")
    with Checkpointer(root) as checkpointer:
        for folder in (root, *root.parents):
            if folder.is_relative_to(tempfile.gettempdir()) and str(folder) != tempfile.gettempdir():
                folder.chmod(0o755)
        with pytest.raises(StorageError, match="making a folder failed: Permission denied; check the permissions"):
            checkpointer.save(1, small_state()).result(60)
        root.chmod(0o777)
        checkpointer.save(2, small_state()).result(60)
        assert checkpointer.steps() == [2]


@pytest.mark.parametrize("point", ["begin", "create", "write", "sync"])
@pytest.mark.parametrize(("action", "text"), [("enospc", "No space left .* free space"), ("eio", "Input/output error")])
def test_a_bad_disk(root: Path, faulty_worker: Faulty, point: str, action: str, text: str) -> None:
    faulty_worker(f"{point}:{action}:2")
    with Checkpointer(root) as checkpointer:
        state = small_state()
        with pytest.raises(StorageError, match=text) as caught:
            for step in (1, 2):
                checkpointer.save(step, state).result(60)
        assert caught.value.rank == 0 and caught.value.step in (1, 2)
        assert not list(root.glob(".*"))  # nothing half-written stays
        steps = checkpointer.steps()
        assert caught.value.step not in steps
        _next_save_works(checkpointer)
        assert checkpointer.steps() == [*steps, 999]


def test_a_disk_that_fills_in_the_middle_of_a_write(root: Path) -> None:
    """The real thing: the kernel ends the write at a limit, here that of the worker for the size of a file."""
    large = {"large": torch.ones(12 << 20)}
    with Checkpointer(root) as checkpointer:
        checkpointer.prepare(large)
        checkpointer.save(1, small_state()).result(60)
        worker = checkpointer._engine._client
        assert worker is not None
        resource.prlimit(worker.pid, resource.RLIMIT_FSIZE, (24 << 20, resource.RLIM_INFINITY))
        with pytest.raises(StorageError, match="writing failed: File too large.*step 2"):
            checkpointer.save(2, large).result(60)
        assert not list(root.glob(".*"))
        checkpointer.save(3, small_state()).result(60)
        resource.prlimit(worker.pid, resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY,) * 2)
        checkpointer.save(4, large).result(60)
        assert checkpointer.steps() == [1, 3, 4]


def test_a_state_that_cannot_be_saved(checkpointer: Checkpointer) -> None:
    bad: list[tuple[dict[str, Any], str]] = [
        ({"a": torch.ones(2), "hook": lambda: None}, "'hook'.*cannot be pickled"),
        ({"lock": threading.Lock()}, "'lock'.*cannot be pickled"),
        ({"meta": torch.ones(2, device="meta")}, "'meta' is on the meta device"),
        ({"a": {"b": 1}, "a.b": 2}, "a.b"),
    ]
    for state, text in bad:
        with pytest.raises(UnsavableStateError, match=text):
            checkpointer.save(1, state)
    state = {"a": torch.ones(2), "value": 1}
    checkpointer.save(1, state).result(60)
    with pytest.raises(UnsavableStateError, match="'value'"):
        checkpointer.save(2, {**state, "value": threading.Lock()})
    _next_save_works(checkpointer)
    assert checkpointer.steps() == [1, 999]


def test_loading_what_is_not_there(checkpointer: Checkpointer, root: Path) -> None:
    state = small_state()
    with pytest.raises(CheckpointNotFoundError, match="no checkpoint here yet"):
        checkpointer.load(state)
    checkpointer.save(3, state).result(60)
    with pytest.raises(CheckpointNotFoundError, match="the newest are: 3"):
        checkpointer.load(state, 4)
    (root / "step-00000008").mkdir()  # without a manifest: no checkpoint
    assert checkpointer.latest() == 3
    with pytest.raises(MismatchError, match="has no 'model.more'"):
        checkpointer.load({"model": {"more": torch.ones(1)}})
    with pytest.raises(MismatchError, match=r"'model.bias' is \(33,\) and \(32,\) is stored"):
        checkpointer.load({"model": {"bias": torch.ones(33)}})
    assert checkpointer.load({"model": {"bias": torch.ones(32)}}) == 3  # part of it


def test_after_close(root: Path) -> None:
    checkpointer = Checkpointer(root)
    checkpointer.save(1, small_state())
    checkpointer.close()
    checkpointer.close()
    assert checkpointer.steps() == [1]
    for use in (checkpointer.save, lambda step, state: checkpointer.load(state, step)):
        with pytest.raises(ClosedError):
            use(1, small_state())


def test_a_failure_nobody_asked_about_is_raised_by_wait(
    root: Path, faulty_worker: Faulty, caplog: pytest.LogCaptureFixture
) -> None:
    faulty_worker("write:eio")
    with Checkpointer(root) as checkpointer:
        with caplog.at_level(logging.ERROR):
            checkpointer.save(1, small_state())
            with pytest.raises(StorageError, match="step 1"):
                checkpointer.wait(60)
        assert "saving failed" in caplog.text
        checkpointer.wait(60)  # once
        checkpointer.save(2, small_state())
        checkpointer.wait(60)


def test_too_little_memory(root: Path) -> None:
    state = {"huge": torch.ones(1).expand(1 << 41)}  # 8 TiB, of which none is there
    with Checkpointer(root) as checkpointer:
        with pytest.raises(OutOfMemoryError, match="fewer slots"):
            checkpointer.save(1, state)
        _next_save_works(checkpointer)


# Retention.


def test_keep_last(root: Path) -> None:
    with Checkpointer(root, Config(keep_last=2)) as checkpointer:
        for step in (10, 20, 30, 40):
            checkpointer.save(step, small_state())
        checkpointer.close()
        assert checkpointer.steps() == [30, 40]
        assert not list(root.glob(".*"))


def test_one_being_read_is_kept(root: Path) -> None:
    with Checkpointer(root, Config(keep_last=1)) as checkpointer:
        checkpointer.save(1, small_state()).result(60)
        with reading(str(root / "step-00000001")):
            checkpointer.save(2, small_state())
            checkpointer.close()
            assert checkpointer.steps() == [1, 2]
    with Checkpointer(root, Config(keep_last=1)) as checkpointer:
        checkpointer.save(3, small_state())
    assert checkpointer.steps() == [3]


def test_the_one_just_written_is_kept_even_if_older(root: Path) -> None:
    with Checkpointer(root, Config(keep_last=1)) as checkpointer:
        checkpointer.save(50, small_state()).result(60)
        checkpointer.save(7, small_state())
    assert checkpointer.steps() == [7, 50]


# DCP's own calls.


def test_the_calls_of_dcp(tmp_path: Path) -> None:
    state = small_state()
    path = tmp_path / "checkpoint"
    path.mkdir()  # as people do
    assert asyncckpt.async_save(state, checkpoint_id=path).result(60) == path
    for number in range(3):
        state["step"] = number
        metadata = asyncckpt.save(state, checkpoint_id=path)  # replaces
    assert "model.weight" in metadata.state_dict_metadata
    asyncckpt.load(into := zeros_like(state), checkpoint_id=path)
    assert same(into, state)
    (path / "notes.txt").touch()
    with pytest.raises(CheckpointExistsError, match="not only one"):
        asyncckpt.save(state, checkpoint_id=path)
    with pytest.raises(ValueError, match="checkpoint_id"):
        asyncckpt.save(state)
    assert not list(tmp_path.glob(".*"))


def test_it_loads_what_stock_dcp_wrote(tmp_path: Path) -> None:
    from torch.distributed.checkpoint.state_dict_saver import save

    state = small_state()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that there is one process
        save(state, checkpoint_id=tmp_path / "stock")
    asyncckpt.load(into := zeros_like(state), checkpoint_id=tmp_path / "stock")
    assert same(into, state)


def test_a_planner_of_the_users_own(tmp_path: Path) -> None:
    from torch.distributed.checkpoint.default_planner import DefaultSavePlanner

    class Halving(DefaultSavePlanner):
        def transform_object(self, write_item: Any, object: Any) -> Any:
            object = super().transform_object(write_item, object)
            return object.half() if isinstance(object, torch.Tensor) and object.dim() else object

    state = {"a": torch.full((5, 3), 1.5), "n": 1, "s": torch.tensor(2.0)}
    for number in range(3):
        state["n"] = number
        asyncckpt.save(state, checkpoint_id=tmp_path / str(number), planner=Halving())
        into: dict[str, Any] = {"a": torch.zeros(5, 3), "n": None, "s": torch.zeros(())}
        asyncckpt.load(into, checkpoint_id=tmp_path / str(number))
        assert same(into, state)
    assert [len(engine._homes.known) for engine in engines.shared._engines.values()] == [1]
