"""Test how exports nest values: lists, dicts and renamed values."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from support.states import same

from asyncckpt import Checkpointer, export
from asyncckpt.errors import UnsavableStateError


def exported(state: Any, folder: Path, **options: Any) -> Any:
    """Save ``state``, export the checkpoint to a torch file, and load the file."""
    with Checkpointer(folder / "run") as checkpointer:
        checkpointer.save(1, state).result(60)
    export(folder / "run", folder / "out.pt", to="torch", **options)
    return torch.load(folder / "out.pt")


def test_a_list_of_a_number_and_a_dict(tmp_path: Path) -> None:
    state = {"a": [1, {"x": torch.ones(2)}]}
    assert same(exported(state, tmp_path), state)


def test_a_part_of_a_list(tmp_path: Path) -> None:
    state = {"layers": [torch.ones(1), torch.zeros(2)]}
    assert same(exported(state, tmp_path, only="layers"), {"0": torch.ones(1), "1": torch.zeros(2)})


def test_a_name_before_all_names(tmp_path: Path) -> None:
    state = {"groups": [{"lr": torch.ones(1)}], "w": torch.zeros(2), "n": {"q": torch.ones(3)}}
    assert same(exported(state, tmp_path, rename="^=model."), {"model": state})


def test_what_cannot_be_nested_is_refused(tmp_path: Path) -> None:
    state = {"layers": [torch.ones(1), torch.zeros(2)], "m": {"w": torch.ones(1), "y": torch.zeros(2)}}
    with pytest.raises(UnsavableStateError, match="in a list and in a dict"):
        exported(state, tmp_path, rename=r"layers\.1=layers.b")
    names = {"m.w": "x", "m.y": "x.y"}
    with pytest.raises(UnsavableStateError, match="would be a value"):
        export(tmp_path / "run", tmp_path / "out.pt", to="torch", rename=names)
    assert export(tmp_path / "run", tmp_path / "out", rename=names).tensors == 4  # safetensors has no nesting
    with pytest.raises(ValueError, match="no text"):
        export(tmp_path / "run", tmp_path / "out.pt", to="torch", rename=lambda name: None)  # type: ignore[arg-type]
