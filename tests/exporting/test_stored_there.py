"""Exports of checkpoints on an object store: S3 as moto serves it."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from support.object_stores import keys_below, s3_root, s3_server
from support.shards import kinds_of_values, save_shards
from support.states import same

from asyncckpt.checkpointer import Checkpointer
from asyncckpt.errors import CheckpointNotFoundError, StorageError
from asyncckpt.exporting.export import export
from asyncckpt.worker.storage.objects import objects_at, split_address

__all__ = ["s3_root", "s3_server"]


def test_of_an_object_store(s3_root: str, tmp_path: Path) -> None:
    """Ours, stock DCP's, and safetensors."""
    state = kinds_of_values()
    with Checkpointer(f"{s3_root}/run") as checkpointer:
        checkpointer.save(4, state)
    export(f"{s3_root}/run", tmp_path / "ours.pt", to="torch")
    assert same(torch.load(tmp_path / "ours.pt"), state)
    save_shards(state, tmp_path / "stock", {"model.weight": ((), (9,))})
    export(tmp_path / "ours.pt", tmp_path / "hf", only="model")
    for file in [*(tmp_path / "stock").iterdir(), *(tmp_path / "hf").iterdir()]:
        address = f"{s3_root}/{file.parent.name}/{file.name}"
        objects_at(address).put(split_address(address)[1], file.read_bytes())
    export(f"{s3_root}/stock", tmp_path / "stock.pt", to="torch")
    assert same(torch.load(tmp_path / "stock.pt"), state)
    export(f"{s3_root}/hf", tmp_path / "again")
    assert same(load_file(tmp_path / "again/model.safetensors"), load_file(tmp_path / "hf/model.safetensors"))


def test_single_files_of_an_object_store(s3_root: str, tmp_path: Path) -> None:
    state = {"w": torch.arange(5.0)}
    save_file(state, tmp_path / "model.safetensors")
    torch.save(state, tmp_path / "state.pt")
    for name in ("model.safetensors", "state.pt"):
        address = f"{s3_root}/{name}"
        objects_at(address).put(split_address(address)[1], (tmp_path / name).read_bytes())
    export(f"{s3_root}/model.safetensors", tmp_path / "out")
    assert same(load_file(tmp_path / "out/model.safetensors"), state)
    with pytest.raises(StorageError, match="copy it there first") as raised:
        export(f"{s3_root}/state.pt", tmp_path / "other")
    assert raised.value.path == f"{s3_root}/state.pt"
    with pytest.raises(CheckpointNotFoundError):
        export(f"{s3_root}/none.pt", tmp_path / "other")


def test_not_to_an_object_store(s3_root: str, tmp_path: Path) -> None:
    torch.save({"w": torch.ones(3)}, tmp_path / "state.pt")
    with pytest.raises(StorageError, match="goes to a file system"):
        export(tmp_path / "state.pt", f"{s3_root}/out")
    assert not keys_below(s3_root)
