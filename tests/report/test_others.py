"""``ls``, ``inspect`` and ``verify`` of what others have stored, and of sets of files."""

from __future__ import annotations

import json
import pickle
import zipfile
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
from asyncckpt.engine.engine import Engine
from asyncckpt.loading import dcp_reader
from asyncckpt.loading.contents import contents
from asyncckpt.report.others import verify_others

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")

KINDS = ("dcp", "torch.save", "safetensors", "file set")
VALUE = 7.0  # a byte of it is found in the files


@pytest.fixture
def stored(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    """Some values of the kind that the test asks for."""
    state = {"w": torch.full((1000, 3), VALUE), "n": torch.arange(5)}
    match request.param:
        case "dcp":
            dcp_save({**state, "lr": 0.5}, checkpoint_id=str(tmp_path / "dcp"))
            return tmp_path / "dcp"
        case "torch.save":
            torch.save({**state, "lr": 0.5}, tmp_path / "state.pt")
            return tmp_path / "state.pt"
        case "safetensors":
            save_file(state, tmp_path / "model.safetensors")
            return tmp_path / "model.safetensors"
    with Engine(alone=True) as engine:
        engine.save(tmp_path / "set", make(VALUE)).result(60)
    return tmp_path / "set"


def _facts(capsys: pytest.CaptureFixture[str], *argv: Any) -> tuple[int, dict[str, Any]]:
    status = cli.main([*map(str, argv), "--json"])
    (facts,) = json.loads(capsys.readouterr().out)
    return status, facts


def _flip(file: Path, what: bytes) -> None:
    data = bytearray(file.read_bytes())
    data[data.index(what)] ^= 1
    file.write_bytes(data)


BYTES = torch.full((100,), VALUE).numpy().tobytes()


@pytest.mark.parametrize("stored", KINDS, indirect=True)
def test_good_ones(stored: Path, request: pytest.FixtureRequest, capsys: pytest.CaptureFixture[str]) -> None:
    kind = request.node.callspec.params["stored"]
    for command in ("ls", "inspect", "verify"):
        assert cli.main([command, str(stored)]) == 0
        assert str(stored) in capsys.readouterr().out
        status, facts = _facts(capsys, command, stored)
        assert status == 0 and (facts["path"], facts["kind"]) == (str(stored), kind)
    assert (
        facts["ok"] and facts["checked"] and not facts["damages"] and bool(facts["unchecked"]) == (kind in KINDS[1:3])
    )
    _, facts = _facts(capsys, "ls", stored)
    assert facts["bytes"] > 12_000 and facts["created"] > 1e9
    assert (facts["stall_s"] is None) == (kind != "file set") == (facts["bytes_per_s"] is None)
    _, facts = _facts(capsys, "inspect", stored)
    if kind != "file set":
        values = {value["name"]: (value["dtype"], value["shape"], value["bytes"]) for value in facts["values"]}
        assert values["w"] == ("float32", [1000, 3], 12_000) and values["n"] == ("int64", [5], 40)
        assert ("lr" in values) == (kind != "safetensors")


@pytest.mark.parametrize("stored", KINDS, indirect=True)
def test_damaged_ones(stored: Path, request: pytest.FixtureRequest, capsys: pytest.CaptureFixture[str]) -> None:
    kind = request.node.callspec.params["stored"]
    if kind == "safetensors":  # whose bytes nobody can check
        _flip(stored, BYTES)
        status, facts = _facts(capsys, "verify", stored)
        assert status == 0 and any("no checksums" in each for each in facts["unchecked"])
        _flip(stored, b'"shape"')
    else:
        _flip(
            stored / "__0_0.distcp" if kind == "dcp" else stored / "optimizer.pt" if kind == "file set" else stored,
            BYTES,
        )
    status, facts = _facts(capsys, "verify", stored)
    assert status == 1 and not facts["ok"] and facts["damages"][0]["file"].startswith(str(stored))
    assert cli.main(["verify", str(stored)]) == 1
    assert "good" not in capsys.readouterr().out


@pytest.mark.parametrize("stored", KINDS[:3], indirect=True)
def test_ones_that_are_cut_off(stored: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = stored / "__0_0.distcp" if stored.is_dir() else stored
    whole = file.read_bytes()
    file.write_bytes(whole[:-40])
    status, facts = _facts(capsys, "verify", stored)
    assert status == 1 and facts["damages"]
    file.write_bytes(whole + b"more")
    assert cli.main(["verify", str(stored)]) == (1 if stored.suffix == ".safetensors" else 0)


@pytest.mark.parametrize("stored", ["dcp"], indirect=True)
def test_a_checkpoint_of_dcp(stored: Path, capsys: pytest.CaptureFixture[str]) -> None:
    data, metadata = stored / "__0_0.distcp", stored / ".metadata"
    _flip(data, b"PK\3\4")  # the first archive begins so
    status, facts = _facts(capsys, "verify", stored)
    assert status == 1 and len(facts["damages"]) == 1
    _flip(data, b"QK\3\4")
    assert _facts(capsys, "verify", stored)[0] == 0
    whole = metadata.read_bytes()
    metadata.write_bytes(whole[: len(whole) // 2])
    assert _facts(capsys, "verify", stored)[0] == 1
    found = pickle.loads(whole)
    removed = next(index for index in found.storage_data if index.fqn == "w")
    del found.storage_data[removed]
    metadata.write_bytes(pickle.dumps(found))
    status, facts = _facts(capsys, "verify", stored)
    assert status == 1 and facts["damages"] == [{"file": str(metadata), "what": "it does not say where 'w' is stored"}]
    metadata.write_bytes(whole)
    data.write_bytes((bytes_of := data.read_bytes())[:100])
    status, facts = _facts(capsys, "verify", stored)
    assert status == 1 and {damage["what"].split(" and ")[1] for damage in facts["damages"]} == {
        "the file has 100 bytes"
    }
    data.write_bytes(bytes_of)
    assert _facts(capsys, "verify", stored)[0] == 0
    data.unlink()
    status, facts = _facts(capsys, "verify", stored)
    assert status == 1 and facts["damages"] == [{"file": str(data), "what": "a file of this checkpoint is missing"}]


def test_those_of_dcp_in_a_root(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for step in (1, 2):
        dcp_save({"w": torch.full((100,), VALUE)}, checkpoint_id=tmp_path / f"step-{step:08d}", no_dist=True)
    for command in ("ls", "verify"):
        assert cli.main([command, str(tmp_path), "--json"]) == 0
        assert [facts["kind"] for facts in json.loads(capsys.readouterr().out)] == ["dcp", "dcp"]


def test_ours_without_a_manifest_is_none_of_dcps(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with asyncckpt.Checkpointer(root) as checkpointer:
        checkpointer.save(1, {"w": torch.ones(3)})
    (root / "step-00000001/asyncckpt.json").unlink()
    status, facts = _facts(capsys, "verify", root / "step-00000001")
    assert status == 1 and "manifest is missing" in facts["damages"][0]["what"]


def test_our_own_files_of_torch(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    asyncckpt.torch_save({"w": torch.full((300_000,), VALUE)}, tmp_path / "w.pt").result(60)
    assert _facts(capsys, "verify", tmp_path / "w.pt")[0] == 0
    _flip(tmp_path / "w.pt", BYTES)
    assert _facts(capsys, "verify", tmp_path / "w.pt")[0] == 1


def test_a_file_without_crcs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before = torch.serialization.get_crc32_options()
    torch.serialization.set_crc32_options(False)
    try:
        torch.save({"w": torch.ones(3)}, tmp_path / "w.pt")
    finally:
        torch.serialization.set_crc32_options(before)
    if any(info.CRC for info in zipfile.ZipFile(tmp_path / "w.pt").infolist() if info.filename.endswith("/data/0")):
        pytest.skip("this torch has CRCs in any case")
    status, facts = _facts(capsys, "verify", tmp_path / "w.pt")
    assert status == 0 and any("no CRC-32" in each for each in facts["unchecked"])


def test_a_file_of_before_torch_1_6(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    torch.save({"w": torch.ones(3)}, tmp_path / "old.pt", _use_new_zipfile_serialization=False)
    assert cli.main(["ls", str(tmp_path / "old.pt")]) == 0 and "torch.save" in capsys.readouterr().out
    for command in ("verify", "inspect"):
        assert cli.main([command, str(tmp_path / "old.pt")]) == 2
        assert "before torch 1.6" in capsys.readouterr().err


class _Odd:
    pass


def test_a_pickle_that_could_run_code_is_not_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    torch.save({"w": torch.ones(3), "odd": _Odd()}, tmp_path / "odd.pt")
    status, facts = _facts(capsys, "inspect", tmp_path / "odd.pt")
    assert status == 0 and "run code" in facts["unchecked"][0]
    assert any(record["name"].endswith("data/0") and record["bytes"] == 12 for record in facts["records"])
    assert cli.main(["inspect", str(tmp_path / "odd.pt")]) == 0 and "data/0" in capsys.readouterr().out
    assert _facts(capsys, "verify", tmp_path / "odd.pt")[0] == 0


@pytest.mark.parametrize("data", [b"", b"text", bytes(5000)])
def test_a_file_of_nothing_known(tmp_path: Path, capsys: pytest.CaptureFixture[str], data: bytes) -> None:
    (tmp_path / "file").write_bytes(data)
    for command in ("ls", "inspect", "verify"):
        assert cli.main([command, str(tmp_path / "file")]) == 2
    assert "no checkpoint here" in capsys.readouterr().err


def _entries(folder: Path) -> list[tuple[int, int]]:
    found = pickle.loads((folder / ".metadata").read_bytes())
    return sorted((place.offset, place.length) for place in found.storage_data.values())


@pytest.mark.parametrize("stored", ["dcp"], indirect=True)
@pytest.mark.parametrize("byte", [0, 1])
def test_an_entry_of_dcp_that_is_no_archive(stored: Path, capsys: pytest.CaptureFixture[str], byte: int) -> None:
    data, entries = stored / "__0_0.distcp", _entries(stored)
    found = bytearray(data.read_bytes())
    begin, nbytes = entries[1]
    found[begin : begin + nbytes] = bytes([byte]) * nbytes
    data.write_bytes(found)
    status, facts = _facts(capsys, "verify", stored)
    assert status == 1 and len(facts["damages"]) == 1
    assert ("zeros" if byte == 0 else "no archive") in facts["damages"][0]["what"]
    for begin, nbytes in entries:  # all of them: a planner may write in another form, but not zeros
        found[begin : begin + nbytes] = bytes([byte]) * nbytes
    data.write_bytes(found)
    status, facts = _facts(capsys, "verify", stored)
    assert (status, len(facts["damages"])) == ((1, 3) if byte == 0 else (0, 0))
    assert byte == 0 or any("3 values" in each for each in facts["unchecked"])


@pytest.mark.parametrize("stored", ["file set"], indirect=True)
@pytest.mark.parametrize("name", ["model.safetensors", "optimizer.pt", "dcp/model_0"])
def test_what_is_in_a_set_of_ours(stored: Path, capsys: pytest.CaptureFixture[str], name: str) -> None:
    """Its manifest has checksums also of what has none of its own."""
    status, facts = _facts(capsys, "verify", stored / name)
    assert status == 0 and str(stored) in facts["checked"][0] and not facts["unchecked"]
    assert 0 < facts["bytes"] < 4_000_000
    file = stored / name / "__0_0.distcp" if name.startswith("dcp") else stored / name
    for other in {"model.safetensors", "optimizer.pt"} - {name}:  # of which nothing is asked
        (stored / other).write_bytes(b"other")
    data = bytearray(file.read_bytes())
    data[-100] ^= 1
    file.write_bytes(data)
    status, facts = _facts(capsys, "verify", stored / name)
    assert status == 1 and [damage["file"] for damage in facts["damages"]] == [str(file)]


def _shard_of_dcp(path: Path, dtype: str = "F32", more: bytes = b"") -> None:
    """A part of a tensor, as DCP's writer for safetensors stores it."""
    its = {"saved_offsets": [4, 0]}
    about = {"format": "pt", "DCP_SHARDING_INFO": json.dumps({"w": its}), "DCP_VERSION": "1.0"}
    fields = {"__metadata__": about, "w": {"dtype": dtype, "shape": [4, 3], "data_offsets": [0, 48]}}
    header = json.dumps(fields).encode()
    path.write_bytes(len(header).to_bytes(8, "little") + header + bytes(48) + more)


def test_a_part_of_a_tensor_in_safetensors(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "shard-00001-model-00001-of-00001.safetensors"
    for dtype, shown in (("F32", "float32"), ("F3_NEW", "F3_NEW")):
        _shard_of_dcp(file, dtype)
        assert _facts(capsys, "verify", file)[0] == 0
        status, facts = _facts(capsys, "inspect", file)
        (value,) = facts["values"]
        assert status == 0 and (value["dtype"], value["bytes"]) == (shown, 48)
        assert (value["shards"][0]["offsets"], value["shards"][0]["shape"]) == ([4, 0], [4, 3])
    for dtype, more in (("F64", b""), ("F32", b"more")):
        _shard_of_dcp(file, dtype, more)
        assert _facts(capsys, "verify", file)[0] == 1
    file.write_bytes(b"\xff" * 8 + b"{" * 5000)
    assert _facts(capsys, "verify", file)[0] == 1


@pytest.mark.parametrize("name", ["it.whl", "it.npz", "it.docx"])
def test_an_archive_of_something_else(tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str) -> None:
    with zipfile.ZipFile(tmp_path / name, "w") as archive:
        archive.writestr("package/data.py", "nothing of torch")
    for command in ("ls", "inspect", "verify"):
        assert cli.main([command, str(tmp_path / name)]) == 2
    assert "no checkpoint here" in capsys.readouterr().err
    (tmp_path / name).write_bytes((tmp_path / name).read_bytes()[:-30])
    assert cli.main(["verify", str(tmp_path / name)]) == 2


@pytest.mark.parametrize("ours", [False, True])
def test_a_file_of_torch_without_its_end(tmp_path: Path, capsys: pytest.CaptureFixture[str], ours: bool) -> None:
    """It is known by what it begins with."""
    state, file = {"w": torch.full((300_000,), VALUE)}, tmp_path / "w.pt"
    if ours:
        asyncckpt.torch_save(state, file).result(60)
    else:
        torch.save(state, file)
    file.write_bytes(file.read_bytes()[:-5000])
    status, facts = _facts(capsys, "verify", file)
    assert status == 1 and facts["kind"] == "torch.save"


def test_what_is_compressed_is_not_read(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    torch.save({"w": torch.zeros(300_000)}, tmp_path / "w.pt")
    with zipfile.ZipFile(tmp_path / "w.pt") as archive, zipfile.ZipFile(tmp_path / "packed.pt", "w") as packed:
        for info in archive.infolist():
            form = zipfile.ZIP_DEFLATED if info.filename.endswith("data/0") else zipfile.ZIP_STORED
            packed.writestr(info.filename, archive.read(info), form)
    read: list[int] = []
    found = verify_others(str(tmp_path / "packed.pt"), "torch.save", read.append)
    assert not found.damages and sum(read) < 10_000
    assert any("1 record that" in each and "compressed" in each for each in found.unchecked)
    assert _facts(capsys, "inspect", tmp_path / "packed.pt")[0] == 0


@pytest.mark.parametrize("kind", ["sparse", "meta", "plain"])
def test_a_file_of_torch_of_which_only_records_are_shown(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], kind: str
) -> None:
    odd = torch.eye(3).to_sparse() if kind == "sparse" else torch.ones(3, device="meta")
    torch.save(torch.ones(3) if kind == "plain" else {"w": torch.ones(3), "odd": odd}, tmp_path / "odd.pt")
    status, facts = _facts(capsys, "inspect", tmp_path / "odd.pt")
    assert status == 0 and any(each["name"].endswith("data/0") for each in facts["records"])
    assert ("no state dict" if kind == "plain" else "'odd' is a tensor") in facts["unchecked"][0]
    assert "export" not in facts["unchecked"][0]


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
