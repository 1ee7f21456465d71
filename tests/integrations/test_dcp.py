"""The calls of torch.distributed.checkpoint, on our engine."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from support.states import same, small_state, zeros_like

import asyncckpt
from asyncckpt.engine import shared as engines
from asyncckpt.errors import (
    CheckpointExistsError,
)


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
    assert [len(engine._buffers.known) for engine in engines.shared._engines.values()] == [1]
