"""Folders of safetensors of which a file is missing."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file
from support import ranks
from support.states import same
from torch.distributed.checkpoint import state_dict_saver
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

from asyncckpt.errors import DamagedCheckpointError
from asyncckpt.exporting.export import export

hf_storage = pytest.importorskip("torch.distributed.checkpoint.hf_storage")  # not in torch 2.6


def _whole() -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return {name: torch.randn(8, 6, generator=generator) for name in ("a", "b", "c")}


@pytest.mark.parametrize("number", [1, 2, 3])
@pytest.mark.parametrize("stem", ["model", "model.fp16", "shard-00003-model"])
def test_a_missing_number_is_found(tmp_path: Path, number: int, stem: str) -> None:
    for at, (name, tensor) in enumerate(_whole().items(), 1):
        if at != number:
            save_file({name: tensor}, tmp_path / f"{stem}-{at:05d}-of-00003.safetensors")
    missing = f"{stem.replace('00003', '*')}-{number:05d}-of-00003.safetensors"
    with pytest.raises(DamagedCheckpointError, match="is missing, as the names of the others say") as raised:
        export(tmp_path, tmp_path / "out")
    assert raised.value.path == str(tmp_path / missing)
    names = {name: f"{stem}-{at:05d}-of-00003.safetensors" for at, name in enumerate(_whole(), 1) if at != number}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": names}))
    assert export(tmp_path, tmp_path / "out").tensors == 2  # the index is the truth


def test_files_without_numbers_are_all_there_are(tmp_path: Path) -> None:
    for name, tensor in _whole().items():
        save_file({name: tensor}, tmp_path / f"{name}.safetensors")
    assert export(tmp_path, tmp_path / "out").tensors == 3


@pytest.mark.parametrize("weight_map", [{"a": "x.safetensors", "d": "x.safetensors"}, {"b": "x.safetensors"}])
def test_what_the_index_names_is_there(tmp_path: Path, weight_map: dict[str, str]) -> None:
    whole = _whole()
    save_file({"a": whole["a"]}, tmp_path / "x.safetensors")
    save_file({"b": whole["b"]}, tmp_path / "y.safetensors")
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    with pytest.raises(DamagedCheckpointError, match=f"the index says that '{max(weight_map)}' is in x.safetensors"):
        export(tmp_path, tmp_path / "out")


def _save_on_ranks(folder: str) -> None:
    """A mesh of shards, each on two ranks: DCP has one of the two write it, and the other has nothing to write."""
    mesh = init_device_mesh("cpu", (2, dist.get_world_size() // 2))
    state = {name: distribute_tensor(tensor, mesh, [Shard(0), Replicate()]) for name, tensor in _whole().items()}
    writer: Any = hf_storage.HuggingFaceStorageWriter
    planner = DefaultSavePlanner(dedup_save_to_lowest_rank=True)
    for name, mapping in (("one", None), ("two", {"a": 1, "b": 2, "c": 2})):
        storage = writer(f"{folder}/{name}", save_distributed=True, fqn_to_index_mapping=mapping)
        state_dict_saver.save(state, storage_writer=storage, planner=planner)


@pytest.mark.usefixtures("forkserver")
def test_a_rank_that_had_nothing_to_write(tmp_path: Path) -> None:
    """As DCP's own writer leaves it."""
    ranks.run(4, _save_on_ranks, str(tmp_path), folder=tmp_path)
    files = sorted(each.name for each in (tmp_path / "two").iterdir())
    assert files == [f"shard-0000{rank}-model-0000{n}-of-00002.safetensors" for rank in (1, 3) for n in (1, 2)]
    for name in ("one", "two"):
        export(tmp_path / name, tmp_path / f"{name}-whole")
        assert same(load_file(tmp_path / f"{name}-whole/model.safetensors"), _whole())
    (tmp_path / "two" / files[0]).unlink()  # the rows before those that are there
    with pytest.raises(DamagedCheckpointError, match="a part is missing"):
        export(tmp_path / "two", tmp_path / "out")
    (tmp_path / "two" / files[2]).unlink()
    with pytest.raises(DamagedCheckpointError, match="model-00001-of-00002.safetensors' is missing"):
        export(tmp_path / "two", tmp_path / "out")
