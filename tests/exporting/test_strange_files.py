"""Test stock checkpoints that are not what they seem, and exports with too little memory."""

from __future__ import annotations

import os
import shutil
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint import state_dict_saver

from asyncckpt import export
from asyncckpt.errors import OutOfMemoryError, StorageError, UnsavableStateError
from asyncckpt.exporting import copying, stock_source


def stock_save(state: dict[str, torch.Tensor], folder: Path) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        state_dict_saver.save(state, checkpoint_id=folder)


def test_lazy_tensors_of_stock_checkpoints(tmp_path: Path) -> None:
    value = torch.tensor([1 + 2j, 3 - 1j])
    stock_save({"c": value.conj()}, tmp_path / "stock")
    with pytest.raises(UnsavableStateError, match="conj"):
        export(tmp_path / "stock", tmp_path / "out")
    stock_save({"c": value.conj().imag}, tmp_path / "other")  # DCP has stored a plain tensor
    export(tmp_path / "other", tmp_path / "out.pt", to="torch")
    assert torch.load(tmp_path / "out.pt")["c"].tolist() == [-2.0, 1.0]


def test_another_byte_order_of_stock_checkpoints(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stock_save({"c": torch.ones(3)}, tmp_path / "stock")
    monkeypatch.setattr(stock_source, "_BYTE_ORDER", b"big")
    with pytest.raises(UnsavableStateError, match="another order"):
        export(tmp_path / "stock", tmp_path / "out")


def test_too_little_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(nbytes: int) -> memoryview:
        raise OSError(12, "Cannot allocate memory")

    stock_save({"w": torch.arange(1000.0)}, tmp_path / "stock")
    monkeypatch.setattr(copying, "own_buffer", refuse)
    with pytest.raises(OutOfMemoryError, match="'w'"):
        export(tmp_path / "stock", tmp_path / "out", to="torch")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("name", ["__0_0.distcp", ".metadata"])
@pytest.mark.parametrize("in_place", [True, False])
def test_a_file_that_changes_meanwhile(
    tmp_path: Path, name: str, in_place: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    stock_save({"w": torch.arange(1000.0)}, tmp_path / "stock")
    path, real = tmp_path / "stock" / name, copying.write

    def change(*args: Any) -> int:
        if in_place:
            with open(path, "r+b") as file:
                file.seek(-1, os.SEEK_END)
                file.write(b"\1")
        else:
            shutil.copy(path, tmp_path / "new")
            os.replace(tmp_path / "new", path)
        return real(*args)

    monkeypatch.setattr("asyncckpt.exporting.export.write", change)
    with pytest.raises(StorageError, match="changed or replaced"):
        export(tmp_path / "stock", tmp_path / "out")
    assert not (tmp_path / "out").exists()
