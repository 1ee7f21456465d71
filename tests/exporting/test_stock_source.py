"""Test exports of stock DCP's checkpoints: from several ranks, in unusual forms, and with harmful pickles."""

from __future__ import annotations

import io
import os
import pickle
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file
from support import ranks
from support.images import DTYPES, any_bits
from support.shards import save_shards
from support.states import same
from torch.distributed.checkpoint import state_dict_saver
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

from asyncckpt import Checkpointer, FileSet, export
from asyncckpt.errors import DamagedCheckpointError, MismatchError, UnsavableStateError
from asyncckpt.extension import METADATA_NAME
from asyncckpt.planning.layout import tensor_header


def _whole() -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return {name: torch.randn(7, 6, 2, generator=generator) for name in ("rows", "columns", "both", "copies", "plain")}


def _save_on_ranks(folder: str) -> None:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    square = init_device_mesh("cpu", (1, dist.get_world_size()))
    whole = _whole()
    model: dict[str, Any] = {
        "rows": distribute_tensor(whole["rows"], mesh, [Shard(0)]),
        "columns": distribute_tensor(whole["columns"], mesh, [Shard(1)]),
        "both": distribute_tensor(whole["both"], square, [Shard(0), Shard(2)]),
        "copies": distribute_tensor(whole["copies"], mesh, [Replicate()]),
        "plain": whole["plain"],
    }
    state_dict_saver.save({"model": model}, checkpoint_id=f"{folder}/stock")
    with Checkpointer(f"{folder}/ours") as checkpointer:
        checkpointer.save(1, {"model": model})


@pytest.mark.usefixtures("forkserver")
def test_of_several_ranks(tmp_path: Path) -> None:
    ranks.run(2, _save_on_ranks, str(tmp_path), folder=tmp_path)
    for name in ("stock", "ours"):
        export(tmp_path / name, tmp_path / "hf", only="model")
        found = load_file(tmp_path / "hf/model.safetensors")
        assert same({key: found[key] for key in _whole()}, _whole())
        (tmp_path / "hf/model.safetensors").unlink()


def test_extensions_are_refused(tmp_path: Path) -> None:
    save_shards({"w": torch.ones(3)}, tmp_path / "stock", {})
    metadata = FileSystemReader(tmp_path / "stock").read_metadata()
    for info in metadata.storage_data.values():
        info.transform_descriptors = ("stream.zstd",)
    (tmp_path / "stock/.metadata").write_bytes(pickle.dumps(metadata))
    with pytest.raises(UnsavableStateError, match=r"'w' is stored by way of the extensions \['stream.zstd'\]"):
        export(tmp_path / "stock", tmp_path / "out")


def _put(path: Path, value: Any, *, zipped: bool = True) -> None:
    """Store ``value`` in the place of the only tensor of a checkpoint."""
    metadata = FileSystemReader(path).read_metadata()
    (info,) = metadata.storage_data.values()
    if not isinstance(value, bytes):
        torch.save(value, buffer := io.BytesIO(), _use_new_zipfile_serialization=zipped)
        value = buffer.getvalue()
    (path / info.relative_path).write_bytes(value)
    info.offset, info.length = 0, len(value)
    (path / ".metadata").write_bytes(pickle.dumps(metadata))


class Harmful:
    def __reduce__(self) -> Any:
        return os.mkdir, ("harm",)


@pytest.mark.parametrize("zipped", [True, False])
def test_no_code_of_an_archive_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, zipped: bool) -> None:
    monkeypatch.chdir(tmp_path)
    save_shards({"w": torch.ones(3)}, tmp_path / "stock", {})
    _put(tmp_path / "stock", Harmful(), zipped=zipped)
    with pytest.raises(UnsavableStateError, match=r"posix\.mkdir"):
        export(tmp_path / "stock", tmp_path / "out")
    assert not (tmp_path / "harm").exists()


@pytest.mark.parametrize("zipped", [True, False])
@pytest.mark.parametrize(
    "value, error",
    [
        (torch.ones(4), DamagedCheckpointError),  # another shape
        (torch.ones(3).to_sparse(), UnsavableStateError),
        ([torch.ones(3)], UnsavableStateError),
        (b"no archive", DamagedCheckpointError),
        (b"PK\3\4" * 30, DamagedCheckpointError),
        (tensor_header(torch.float32, (3,)), DamagedCheckpointError),  # no bytes after the header
        (pickle.dumps(1) * 5, DamagedCheckpointError),
        ({"a": torch.ones(3), "b": torch.ones(3)}, UnsavableStateError),
    ],
)
def test_what_is_no_plain_tensor_is_refused(tmp_path: Path, value: Any, error: type[Exception], zipped: bool) -> None:
    save_shards({"w": torch.ones(3)}, tmp_path / "stock", {})
    _put(tmp_path / "stock", value, zipped=zipped)
    with pytest.raises(error, match="w"):
        export(tmp_path / "stock", tmp_path / "out")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("alignment", [64, 4096])
def test_other_forms_of_archives(tmp_path: Path, alignment: int) -> None:
    """Export parameters, and archives that are aligned to pages."""
    config = pytest.importorskip("torch.utils.serialization.config")
    if not hasattr(config.save, "storage_alignment"):
        pytest.skip("this torch aligns to 64 bytes")
    save_shards({"w": torch.ones(3)}, tmp_path / "stock", {})
    with config.patch("save.storage_alignment", alignment):
        _put(tmp_path / "stock", torch.nn.Parameter(torch.arange(3.0)))
    assert ((tmp_path / "stock/__0_0.distcp").stat().st_size > 5 * 4096) is (alignment == 4096)
    export(tmp_path / "stock", tmp_path / "out")
    assert same(load_file(tmp_path / "out/model.safetensors"), {"w": torch.arange(3.0)})


def test_the_older_form(tmp_path: Path) -> None:
    """The tensor is a part of a larger storage, with its elements in another order."""
    save_shards({"w": torch.ones(3, 2)}, tmp_path / "stock", {})
    value = torch.nn.Parameter(torch.arange(12.0).view(3, 4).t()[1:3].t())
    _put(tmp_path / "stock", value, zipped=False)
    export(tmp_path / "stock", tmp_path / "out")
    assert same(load_file(tmp_path / "out/model.safetensors"), {"w": value.detach()})


def test_ours_without_what_is_not_dcps(root: Path, tmp_path: Path) -> None:
    """A copy has only the files that DCP names. Values of each dtype, without elements or dimensions, are exported."""
    state = {str(dtype): any_bits(dtype, (3, 5)) for dtype in DTYPES}
    state |= {"none": torch.empty(3, 0, 2), "one": torch.tensor(1.5), "large": torch.randn(1 << 19)}
    with Checkpointer(root) as checkpointer:
        checkpointer.save(1, {"model": state, "step": 1})
    for name in (METADATA_NAME, "__0_0.distcp"):
        (tmp_path / "copy").mkdir(exist_ok=True)
        shutil.copy(root / "step-00000001" / name, tmp_path / "copy")
    export(tmp_path / "copy", tmp_path / "out.pt", to="torch", only="model")
    assert same(torch.load(tmp_path / "out.pt"), state)


def test_a_set_of_files_is_none_of_a_state_dict(root: Path, tmp_path: Path) -> None:
    files = FileSet()
    files.add_safetensors("model.safetensors", {"w": torch.ones(3)})
    with Checkpointer(root) as checkpointer:
        checkpointer.save(1, files)
    with pytest.raises(MismatchError, match="a set of files"):
        export(root, tmp_path / "out")
