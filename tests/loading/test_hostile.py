"""Hostile checkpoints, which would hang a reader or make it read other files, are refused at once."""

from __future__ import annotations

import json
import os
import pickle
import shutil
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import torch
from support.checkpoints import Manifest, checksum
from torch.distributed.checkpoint import state_dict_saver

from asyncckpt import Checkpointer, cli
from asyncckpt.errors import CheckpointError, DamagedCheckpointError
from asyncckpt.format.index import Index
from asyncckpt.loading import load as reader

DATA, INDEX, MANIFEST = "__0_0.distcp", "__0_0.index.json", "asyncckpt.json"


@pytest.fixture(autouse=True)
def limit() -> Iterator[None]:
    """Interrupt a test that hangs."""

    def wake(signum: int, frame: FrameType | None) -> None:
        raise TimeoutError("it hangs")

    before = signal.signal(signal.SIGALRM, wake)
    signal.alarm(20)
    yield
    signal.alarm(0)
    signal.signal(signal.SIGALRM, before)


@pytest.fixture(scope="module")
def good(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from asyncckpt.extension import Engine

    with Engine() as engine:
        engine.save(folder := tmp_path_factory.mktemp("good") / "it", {"w": torch.arange(5000.0)}, step=1).result(60)
    return folder


@pytest.fixture
def step(good: Path, root: Path) -> Path:
    """Return the only step of a new root."""
    shutil.copytree(good, step := root / "step-00000001")
    return step


def rewrite(step: Path, files: Callable[[dict[str, Any]], dict[str, Any]]) -> None:
    """Change the manifest's facts about files, and keep the manifest valid."""
    manifest = Manifest.parse((step / MANIFEST).read_bytes(), "")
    changed = vars(manifest) | {"files": files({name: dict(facts) for name, facts in manifest.files.items()})}
    (step / MANIFEST).write_bytes(Manifest(**changed).encode())


def replace(step: Path, name: str, text: bytes) -> None:
    (step / name).write_bytes(text)
    new = {"bytes": len(text), "xxh3": f"{checksum(text):016x}"}
    rewrite(step, lambda files: files | {name: new})


def check(step: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Check that every reader reports damage, and that no reader hangs or raises another error."""
    for command in ("verify", "inspect"):
        assert cli.main([command, str(step)]) == 1
    cli.main(["ls", str(step.parent)])
    assert "Traceback" not in (said := capsys.readouterr()).out + said.err
    with pytest.raises(DamagedCheckpointError):
        reader.load({"w": torch.zeros(5000)}, str(step))
    with Checkpointer(step.parent) as checkpointer, pytest.raises(CheckpointError):
        checkpointer.load({"w": torch.zeros(5000)})


@pytest.mark.parametrize("name", [MANIFEST, INDEX, DATA, ".metadata"])
@pytest.mark.parametrize("kind", ["fifo", "device", "folder"])
def test_what_is_no_file(step: Path, capsys: pytest.CaptureFixture[str], name: str, kind: str) -> None:
    size = (step / name).stat().st_size
    (step / name).unlink()
    if kind == "fifo":
        os.mkfifo(step / name)
    elif kind == "device":
        (step / name).symlink_to("/dev/zero")
    else:
        (step / name).mkdir()
    assert size
    # The manifest states the size of this file.
    if name != MANIFEST:
        rewrite(step, lambda files: files | {name: files[name] | {"bytes": (step / name).stat().st_size}})
    # Readers skip this file if our own indexes are complete.
    if name == ".metadata":
        assert cli.main(["verify", str(step)]) == 1
    else:
        check(step, capsys)


@pytest.mark.parametrize("nbytes", [1 << 56, 1 << 80, -1, 1.5e300, "many", None])
def test_an_index_of_any_size(step: Path, capsys: pytest.CaptureFixture[str], nbytes: Any) -> None:
    found = json.loads((step / INDEX).read_bytes())
    replace(step, INDEX, json.dumps(found | {"bytes": nbytes}).encode())
    check(step, capsys)


@pytest.mark.parametrize("at", [1 << 56, 1 << 80, -4096, 0.5])
def test_an_item_anywhere(step: Path, capsys: pytest.CaptureFixture[str], at: Any) -> None:
    found = json.loads((step / INDEX).read_bytes())
    place = found["fields"].index("at")
    found["items"][0][place] = at
    replace(step, INDEX, json.dumps(found).encode())
    check(step, capsys)


def test_an_index_of_another_file(step: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found = json.loads((step / INDEX).read_bytes())
    replace(step, INDEX, json.dumps(found | {"data": "__1_0.distcp"}).encode())
    check(step, capsys)


@pytest.mark.parametrize(
    "name",
    ["../../secret.distcp", "/etc/hostname.distcp", "..", ".", "", "a/../../b.distcp", "/a/b.distcp", "nul\0.distcp"],
)
def test_a_manifest_names_files_of_its_folder_alone(step: Path, capsys: pytest.CaptureFixture[str], name: str) -> None:
    for file in (DATA, INDEX):
        secret = step.parent.parent / file.replace("__0_0", "secret")
        secret.write_bytes((step / file).read_bytes().replace(b"__0_0.distcp", b"../../secret.distcp"))
    index = (step.parent.parent / "secret.index.json").read_bytes()
    assert Index.parse(index, "").data == "../../secret.distcp"
    facts = {"bytes": len(index), "xxh3": f"{checksum(index):016x}"}
    rewrite(step, lambda files: files | {name: files[DATA], name.replace(".distcp", ".index.json"): facts})
    check(step, capsys)


@pytest.mark.parametrize(
    "facts",
    [
        *(None, [], {}, {"bytes": 1}, {"bytes": 1, "xxh3": 7}, {"bytes": "1", "index": "__0_0.index.json"}),
        *(
            {"bytes": -1, "index": "__0_0.index.json"},
            {"bytes": 1, "index": 7},
            {"bytes": 1, "index": None, "xxh3": "0"},
            {"bytes": 1, "index": "../secret"},
        ),
    ],
)
def test_what_a_manifest_says_of_a_file(step: Path, capsys: pytest.CaptureFixture[str], facts: Any) -> None:
    rewrite(step, lambda files: files | {DATA: facts})
    check(step, capsys)


@pytest.mark.filterwarnings("ignore:torch.distributed is")
@pytest.mark.parametrize("to", ["../secret.distcp", "/dev/zero", "fifo"])
def test_dcps_metadata_names_files_of_its_folder_alone(tmp_path: Path, to: str) -> None:
    """A checkpoint of stock DCP."""
    state_dict_saver.save({"w": torch.arange(5000.0)}, checkpoint_id=tmp_path / "it")
    shutil.copy(tmp_path / "it" / DATA, tmp_path / "secret.distcp")
    os.mkfifo(tmp_path / "it" / "fifo")
    metadata = pickle.loads((tmp_path / "it" / ".metadata").read_bytes())
    for place in metadata.storage_data.values():
        place.relative_path = to
    (tmp_path / "it" / ".metadata").write_bytes(pickle.dumps(metadata))
    with pytest.raises(DamagedCheckpointError):
        reader.load({"w": torch.zeros(5000)}, str(tmp_path / "it"))


@pytest.mark.parametrize(
    "changes",
    [
        {"attempt": 7},
        *({"step": step} for step in ("1", 1.0, True)),
        *({"created": created} for created in ("now", None, True, 10**400)),
        *({"world_size": ranks} for ranks in (0, -1, "1", True, 10**9)),
        *({"keep": keep} for keep in (0, "no", None)),
        *({"nbytes": nbytes} for nbytes in (-1, 1.5, "1", None, 10**400)),
        *({"files": []}, {"files": None}, {"files": "files"}, {"timings": []}, {"timings": None}),
        *({"timings": {"write_s": each}} for each in (7, ["1"], [1e300])),
    ],
    ids=lambda changes: str(changes)[:30],
)
def test_what_a_manifest_says_of_itself(
    step: Path, capsys: pytest.CaptureFixture[str], changes: dict[str, Any]
) -> None:
    manifest = Manifest.parse((step / MANIFEST).read_bytes(), "")
    (step / MANIFEST).write_bytes(Manifest(**{**vars(manifest), "timings": {}, **changes}).encode())
    check(step, capsys)


@pytest.mark.parametrize("text", [b"[" * 100_000, b"{" * 9, b"[]", b"NaN", b"7", b'{"format": NaN}', b"\xff"])
@pytest.mark.parametrize("name", [MANIFEST, INDEX])
def test_what_is_no_manifest_and_no_index(
    step: Path, capsys: pytest.CaptureFixture[str], name: str, text: bytes
) -> None:
    if name == MANIFEST:
        (step / MANIFEST).write_bytes(text)
    else:
        replace(step, name, text)
    check(step, capsys)


def test_no_number_of_a_manifest_is_infinite(step: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rewrite(step, lambda files: files | {DATA: files[DATA] | {"more": float("nan")}})
    check(step, capsys)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        *(("name", 7), ("name", None), ("kind", 7), ("dtype", None), ("shape", 5000), ("shape", ["5000"])),
        *(("shape", [5000, 1]), ("offsets", [0.0]), ("offsets", [-1]), ("nbytes", "many"), ("nbytes", -1)),
        *(("at", None), ("at", 1 << 80), ("lead", None), ("lead", -1), ("lead", 1 << 80)),
        *(("payload_bytes", 1.5), ("payload_bytes", 1 << 80)),
        *(("form", -1), ("form", 99), ("form", "0"), ("form", None), ("form", True)),
    ],
)
def test_what_an_index_says_of_an_item(step: Path, capsys: pytest.CaptureFixture[str], field: str, value: Any) -> None:
    found = json.loads((step / INDEX).read_bytes())
    if field in found["form_fields"]:
        found["forms"][0][found["form_fields"].index(field)] = value
    else:
        found["items"][0][found["fields"].index(field)] = value
    replace(step, INDEX, json.dumps(found).encode())
    check(step, capsys)


@pytest.mark.filterwarnings("ignore:torch.distributed is")
@pytest.mark.parametrize(
    ("field", "value"),
    [
        *(("offset", "0"), ("offset", -1), ("offset", None), ("length", 1.5), ("length", 1 << 80)),
        *(("relative_path", 7), ("relative_path", None)),
    ],
)
def test_dcps_metadata_says_where_in_numbers(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], field: str, value: Any
) -> None:
    state_dict_saver.save({"w": torch.arange(5000.0)}, checkpoint_id=tmp_path / "it")
    metadata = pickle.loads((tmp_path / "it" / ".metadata").read_bytes())
    for place in metadata.storage_data.values():
        setattr(place, field, value)
    _refused(tmp_path / "it", metadata, capsys)


@pytest.mark.filterwarnings("ignore:torch.distributed is")
@pytest.mark.parametrize("odd", ["storage", "values", "chunks", "offsets", "size", "names"])
def test_dcps_metadata_is_made_of_its_classes(tmp_path: Path, capsys: pytest.CaptureFixture[str], odd: str) -> None:
    state_dict_saver.save({"w": torch.arange(5000.0)}, checkpoint_id=tmp_path / "it")
    metadata = pickle.loads((tmp_path / "it" / ".metadata").read_bytes())
    about = metadata.state_dict_metadata["w"]
    match odd:
        case "storage":
            metadata.storage_data = [7]
        case "values":
            metadata.state_dict_metadata = {"w": 7}
        case "chunks":
            about.chunks = 7
        case "offsets":
            about.chunks[0].offsets = torch.Size((0, 0))
        case "size":
            about.size = (5000.5,)
        case "names":
            metadata.state_dict_metadata[7] = about
    _refused(tmp_path / "it", metadata, capsys)


def _refused(folder: Path, metadata: Any, capsys: pytest.CaptureFixture[str]) -> None:
    """Check that every reader of stock DCP's checkpoints refuses."""
    (folder / ".metadata").write_bytes(pickle.dumps(metadata))
    for command in ("inspect", "verify"):
        assert cli.main([command, str(folder)]) == 1
    capsys.readouterr()
    with pytest.raises(DamagedCheckpointError):
        reader.load({"w": torch.zeros(5000)}, str(folder))
