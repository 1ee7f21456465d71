"""Test exports of checkpoints on S3, served by moto."""

from __future__ import annotations

import pickle
from pathlib import Path

import pytest
import torch
from support.object_stores import keys_below, s3_root, s3_server
from support.shards import kinds_of_values, save_shards
from support.states import same

from asyncckpt import Checkpointer, export
from asyncckpt.errors import CheckpointNotFoundError, StorageError
from asyncckpt.storage.objects import objects_at, split_address

__all__ = ["s3_root", "s3_server"]


def test_of_an_object_store(s3_root: str, tmp_path: Path) -> None:
    """Export a checkpoint by asyncckpt, one by stock DCP, and one by torch_checkpointing."""
    state = kinds_of_values()
    with Checkpointer(f"{s3_root}/run") as checkpointer:
        checkpointer.save(4, state)
    export(f"{s3_root}/run", tmp_path / "ours.pt", to="torch")
    assert same(torch.load(tmp_path / "ours.pt"), state)
    save_shards(state, tmp_path / "stock", {"model.weight": ((), (9,))})
    for file in (tmp_path / "stock").iterdir():
        address = f"{s3_root}/{file.parent.name}/{file.name}"
        objects_at(address).put(split_address(address)[1], file.read_bytes())
    export(f"{s3_root}/stock", tmp_path / "stock.pt", to="torch")
    assert same(torch.load(tmp_path / "stock.pt"), state)
    (tmp_path / "ranks").mkdir()
    torch.save(state, tmp_path / "ranks/item_0.pt")
    metadata = {"version": "2.0", "metadata": {}, "world_size": 1}  # of torch_checkpointing
    (tmp_path / "ranks/metadata.pkl").write_bytes(pickle.dumps(metadata))
    for file in (tmp_path / "ranks").iterdir():
        address = f"{s3_root}/ranks/{file.name}"
        objects_at(address).put(split_address(address)[1], file.read_bytes())
    export(f"{s3_root}/ranks", tmp_path / "ranks.pt", to="torch")
    assert same(torch.load(tmp_path / "ranks.pt"), {"item": state})
    with pytest.raises(CheckpointNotFoundError):
        export(f"{s3_root}/none", tmp_path / "other")


def test_not_to_an_object_store(s3_root: str, tmp_path: Path) -> None:
    save_shards({"w": torch.ones(3)}, tmp_path / "stock", {})
    with pytest.raises(StorageError, match="goes to a file system"):
        export(tmp_path / "stock", f"{s3_root}/out")
    assert not keys_below(s3_root)
