"""Test when a new job reuses the plan of the checkpoint that it has loaded."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from support.checkpoints import verify
from support.plans import counting_plans
from support.states import same, small_state, stock_load, zeros_like

from asyncckpt import Checkpointer
from asyncckpt.errors import CheckpointError
from asyncckpt.extension import Engine, StorageSource, load
from asyncckpt.loading.load import read_plan


@pytest.fixture
def planned() -> Iterator[mock.MagicMock]:
    with counting_plans() as counting:
        yield counting


def _saved(root: Path, planned: mock.MagicMock) -> dict[str, Any]:
    """Save step 1 as the previous job, and return its state."""
    state = small_state()
    with Checkpointer(root) as checkpointer:
        checkpointer.save(1, state).result(60)
    planned.reset_mock()
    return state


def _go_on(root: Path, state: dict[str, Any], into: dict[str, Any], **config: Any) -> None:
    """Load step 1 into ``into`` as a new job, and save ``state`` as step 2."""
    with Checkpointer(root, **config) as checkpointer:
        checkpointer.load(into, 1)
        checkpointer.save(2, state).result(60)
        found = zeros_like(state)
        checkpointer.load(found, 2)
        assert same(found, state)
    assert verify(str(root / "step-00000002")).damages == []
    stock = zeros_like(state)
    stock_load(stock, root / "step-00000002")
    assert same(stock, state)


def _shared(state: dict[str, Any]) -> dict[str, Any]:
    return {**state, "model": {**state["model"], "head": state["model"]["weight"]}}


@pytest.mark.parametrize(
    ("change", "anew"),
    [
        ({}, False),
        ({"step": 8}, False),
        ({"step": "a text that needs more bytes than are reserved for a number, and then some" * 9}, True),
        ({"step": torch.zeros(())}, True),
        ({"more": 1}, True),
        ({"model": {"weight": torch.randn(64, 32), "bias": torch.zeros(32)}}, True),
        ({"model": {"weight": torch.randn(64, 32), "bias": torch.zeros(32, dtype=torch.bfloat16)}}, False),
        ({"model": {"bias": torch.zeros(32, dtype=torch.bfloat16), "weight": torch.randn(64, 32)}}, True),
        ({"model": {"weight": torch.randn(32, 64), "bias": torch.zeros(32, dtype=torch.bfloat16)}}, True),
    ],
    ids=["same", "value", "longer", "tensor", "more", "dtype", "values", "order", "shape"],
)
def test_when_the_next_job_plans_anew(root: Path, planned: mock.MagicMock, change: dict[str, Any], anew: bool) -> None:
    before = _saved(root, planned)
    _go_on(root, {**small_state(), **change}, zeros_like(before))
    assert planned.called == anew


def test_tensors_that_are_one_now(root: Path, planned: mock.MagicMock) -> None:
    """DCP's plan is the same for tied tensors. We store them once, so the layout differs."""
    before = _shared(small_state())
    before["model"]["head"] = before["model"]["head"].clone()
    with Checkpointer(root) as checkpointer:
        checkpointer.save(1, before).result(60)
    for state in (_shared(small_state()), before):
        planned.reset_mock()
        _go_on(root, state, zeros_like(before))
        assert planned.called == (state is not before)
        (root / "step-00000002" / "asyncckpt.json").unlink()


def test_it_stays_until_it_is_taken(root: Path, planned: mock.MagicMock) -> None:
    state = _saved(root, planned)
    with Checkpointer(root) as checkpointer:
        checkpointer.load(zeros_like(state))
        for number, other in enumerate(({"other": torch.zeros(3)}, {"model": state["model"]}), 1):
            checkpointer.prepare(other)
            assert planned.call_count == number
        checkpointer.save(2, state).result(60)
        assert planned.call_count == 2 and checkpointer._engine._plans.stored is None
        checkpointer.load(zeros_like(state))
        assert checkpointer._engine._plans.stored is None  # the checkpointer has a plan


def test_several_data_files_and_what_is_no_plain_tensor(tmp_path: Path, planned: mock.MagicMock) -> None:
    state = {**small_state(), "sparse": torch.eye(5).to_sparse()}
    with Engine() as engine:
        engine.save(tmp_path / "one", state, separate="optimizer").result(60)
    planned.reset_mock()
    with Engine() as engine:
        engine.plan_as(read_plan(StorageSource(str(tmp_path / "one")), 0))
        engine.save(tmp_path / "two", state, separate="optimizer").result(60)
        assert planned.call_count == 0
        engine.plan_as(read_plan(StorageSource(str(tmp_path / "one")), 0))
        engine.save(tmp_path / "three", state).result(60)
        assert planned.call_count == 1
    files = [sorted(each.name for each in (tmp_path / name).iterdir()) for name in ("one", "two", "three")]
    assert files[0] == files[1] != files[2]
    for name in ("one", "two", "three"):
        assert verify(str(tmp_path / name)).damages == []
        found = zeros_like(state)
        load(found, str(tmp_path / name))
        assert same(found, state)


def test_a_load_that_fails_leaves_no_plan(root: Path, planned: mock.MagicMock) -> None:
    state = _saved(root, planned)
    with Checkpointer(root) as checkpointer:
        checkpointer.load(zeros_like(state))
        with pytest.raises(CheckpointError):
            checkpointer.load(zeros_like(state), 5)
        checkpointer.save(2, state).result(60)
    assert planned.called
