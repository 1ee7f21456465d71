"""Test ``ls``, ``inspect`` and ``verify`` on stock DCP's checkpoints, and on sets of files and their contents."""

from __future__ import annotations

import json
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from support.file_sets import make
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.state_dict_saver import save as dcp_save

import asyncckpt
from asyncckpt import cli
from asyncckpt.extension import Engine
from asyncckpt.loading import dcp_reader
from asyncckpt.loading.contents import contents

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is (disabled|unavailable)")

VALUE = 7.0  # the tests find its bytes in the files
BYTES = torch.full((100,), VALUE).numpy().tobytes()


@pytest.fixture
def stock(tmp_path: Path) -> Path:
    state = {"w": torch.full((1000, 3), VALUE), "n": torch.arange(5), "lr": 0.5}
    dcp_save(state, checkpoint_id=str(tmp_path / "dcp"))
    return tmp_path / "dcp"


@pytest.fixture
def file_set(tmp_path: Path) -> Path:
    with Engine(alone=True) as engine:
        engine.save(tmp_path / "set", make(VALUE)).result(60)
    return tmp_path / "set"


def _facts(capsys: pytest.CaptureFixture[str], *argv: Any) -> tuple[int, dict[str, Any]]:
    status = cli.main([*map(str, argv), "--json"])
    (facts,) = json.loads(capsys.readouterr().out)
    return status, facts


@pytest.mark.parametrize("kind", ["dcp", "file set"])
def test_good_ones(stock: Path, file_set: Path, capsys: pytest.CaptureFixture[str], kind: str) -> None:
    stored = stock if kind == "dcp" else file_set
    for command in ("ls", "inspect", "verify"):
        assert cli.main([command, str(stored)]) == 0
        assert str(stored) in capsys.readouterr().out
        status, facts = _facts(capsys, command, stored)
        assert status == 0 and (facts["path"], facts["kind"]) == (str(stored), kind)
    assert facts["ok"] and facts["checked"] and not facts["damages"] and bool(facts["unchecked"]) == (kind == "dcp")
    _, facts = _facts(capsys, "ls", stored)
    assert facts["bytes"] > 12_000 and facts["created"] > 1e9
    assert (facts["stall_s"] is None) == (kind == "dcp") == (facts["bytes_per_s"] is None)
    if kind == "dcp":
        _, facts = _facts(capsys, "inspect", stored)
        values = {value["name"]: (value["dtype"], value["shape"], value["bytes"]) for value in facts["values"]}
        assert values["w"] == ("float32", [1000, 3], 12_000) and values["n"] == ("int64", [5], 40) and "lr" in values


def test_a_damaged_set(file_set: Path, capsys: pytest.CaptureFixture[str]) -> None:
    data = bytearray((file_set / "optimizer.pt").read_bytes())
    data[data.index(BYTES)] ^= 1
    (file_set / "optimizer.pt").write_bytes(data)
    status, facts = _facts(capsys, "verify", file_set)
    assert status == 1 and not facts["ok"] and facts["damages"][0]["file"] == str(file_set / "optimizer.pt")
    assert cli.main(["verify", str(file_set)]) == 1
    assert "good" not in capsys.readouterr().out


def test_a_damaged_checkpoint_of_dcp(stock: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Without checksums, ``verify`` finds truncated and missing files, and a damaged ``.metadata``."""
    data, metadata = stock / "__0_0.distcp", stock / ".metadata"
    whole, known = data.read_bytes(), metadata.read_bytes()
    data.write_bytes(whole + b"more")
    assert _facts(capsys, "verify", stock)[0] == 0
    data.write_bytes(whole[:100])
    status, facts = _facts(capsys, "verify", stock)
    assert status == 1 and "the file has 100 bytes" in facts["damages"][0]["what"]
    data.unlink()
    status, facts = _facts(capsys, "verify", stock)
    assert status == 1 and facts["damages"] == [{"file": str(data), "what": "a file of this checkpoint is missing"}]
    data.write_bytes(whole)
    metadata.write_bytes(known[: len(known) // 2])
    assert _facts(capsys, "verify", stock)[0] == 1
    for name in ("w", "lr"):
        found = pickle.loads(known)
        del found.storage_data[next(index for index in found.storage_data if index.fqn == name)]
        metadata.write_bytes(pickle.dumps(found))
        status, facts = _facts(capsys, "verify", stock)
        what = f"it does not say where {name!r} is stored"
        assert status == 1 and facts["damages"] == [{"file": str(metadata), "what": what}]


def test_those_of_dcp_in_a_root(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for step in (1, 2):
        dcp_save({"w": torch.full((100,), VALUE)}, checkpoint_id=tmp_path / f"step-{step:08d}")
    for command in ("ls", "verify"):
        assert cli.main([command, str(tmp_path), "--json"]) == 0
        assert [facts["kind"] for facts in json.loads(capsys.readouterr().out)] == ["dcp", "dcp"]


def test_ours_without_a_manifest_is_none_of_dcps(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with asyncckpt.Checkpointer(root) as checkpointer:
        checkpointer.save(1, {"w": torch.ones(3)})
    (root / "step-00000001/asyncckpt.json").unlink()
    status, facts = _facts(capsys, "verify", root / "step-00000001")
    assert status == 1 and "manifest is missing" in facts["damages"][0]["what"]


def test_what_has_no_manifest_is_no_checkpoint(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    asyncckpt.torch_save({"w": torch.ones(300_000)}, tmp_path / "w.pt").result(60)
    save_file({"w": torch.ones(3)}, tmp_path / "model.safetensors")
    (tmp_path / "empty").touch()
    for name in ("w.pt", "model.safetensors", "empty"):
        for command in ("ls", "inspect", "verify"):
            assert cli.main([command, str(tmp_path / name)]) == 2
            assert "no checkpoint here" in capsys.readouterr().err


@pytest.mark.parametrize("name", ["model.safetensors", "optimizer.pt", "trainer_state.json", "dcp/model_0"])
def test_what_is_in_a_set_of_ours(file_set: Path, capsys: pytest.CaptureFixture[str], name: str) -> None:
    """The manifest of the set has a checksum for each file."""
    status, facts = _facts(capsys, "verify", file_set / name)
    assert status == 0 and str(file_set) in facts["checked"][0] and not facts["unchecked"]
    assert 0 < facts["bytes"] < 4_000_000
    file = file_set / name / "__0_0.distcp" if name.startswith("dcp") else file_set / name
    for other in {"model.safetensors", "optimizer.pt"} - {name}:  # damage in other files does not matter
        (file_set / other).write_bytes(b"other")
    data = bytearray(file.read_bytes())
    data[-min(100, len(data))] ^= 1
    file.write_bytes(data)
    status, facts = _facts(capsys, "verify", file_set / name)
    assert status == 1 and [damage["file"] for damage in facts["damages"]] == [str(file)]


@pytest.mark.parametrize("what", [b"{}", b'{"attempt": 1}', b"[]", b"no JSON"])
def test_a_manifest_of_others_above_is_none_of_ours(
    stock: Path, capsys: pytest.CaptureFixture[str], what: bytes
) -> None:
    (stock.parent / "asyncckpt.json").write_bytes(what)
    status, facts = _facts(capsys, "verify", stock)
    assert status == 0 and facts["kind"] == "dcp"


def test_a_link_in_the_place_of_a_file_is_damage(
    file_set: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    save_file({"w": torch.ones(3)}, tmp_path / "other.safetensors")
    (file_set / "model.safetensors").unlink()
    (file_set / "model.safetensors").symlink_to(tmp_path / "other.safetensors")
    assert _facts(capsys, "verify", file_set / "model.safetensors")[0] == 1


def test_the_chunks_of_a_tensor_of_dcp_are_walked_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Chunks(list[Any]):
        walks = 0

        def __iter__(self) -> Any:
            self.walks += 1
            return super().__iter__()

    (tmp_path / ".metadata").touch()
    chunks = Chunks(ChunkStorageMetadata(torch.Size((2 * n,)), torch.Size((2,))) for n in range(50))
    about = TensorStorageMetadata(TensorProperties(), torch.Size((100,)), chunks)
    places = {MetadataIndex("w", each.offsets): _StorageInfo("__0_0.distcp", 0, 8) for each in [*chunks]}
    monkeypatch.setattr(dcp_reader, "read_stock_metadata", lambda *_, **__: Metadata({"w": about}, storage_data=places))
    chunks.walks = 0
    (value,) = contents(str(tmp_path))
    assert value.shape == (100,) and len(value.shards) == 50 and value.nbytes == 400
    assert chunks.walks == 1
