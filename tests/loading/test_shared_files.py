"""Damage in a data file that checkpoints share is reported for each of them, and later saves stop sharing the file."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from support.checkpoints import verify
from support.file_sets import make
from support.shared_files import flip, share
from support.states import zeros_like

from asyncckpt import Checkpointer, cli
from asyncckpt.errors import DamagedCheckpointError
from asyncckpt.extension import Engine, StorageSource
from asyncckpt.format.index import Item
from asyncckpt.loading import load as reader
from asyncckpt.loading.data_file import CheckedFiles, ChecksummedFile, StoredFile, sharing
from asyncckpt.storage.local import LocalStorage

DATA = "__0_0.distcp"
ALL = [f"step-0000000{step}" for step in (1, 2, 3)]


def _state() -> dict[str, Any]:
    generator = torch.Generator().manual_seed(0)
    return {"w": torch.randn(1000, 100, generator=generator), "b": torch.zeros(10), "names": ["a", "b"]}


@pytest.fixture
def shared(root: Path) -> Path:
    """Save three steps that share a data file, and a fourth with its own copy of the same bytes."""
    with Checkpointer(root) as checkpointer:
        for step in (1, 2, 3, 4):
            checkpointer.save(step, _state()).result(60)
    share(root / ALL[1], root / ALL[0])
    share(root / ALL[2], root / ALL[0])
    for name in ALL:
        os.utime(root / name / DATA, (1e9, 1e9))
    return root


def _item(folder: Path, name: str) -> Item:
    index = StorageSource(str(folder)).index(DATA)
    return next(item for item in index.items if item.name == name)


def test_who_shares_a_file(shared: Path) -> None:
    assert sharing(str(shared / ALL[1]), DATA) == [ALL[0], ALL[2]]
    assert sharing(str(shared / "step-00000004"), DATA) == []
    assert sharing(str(shared / ALL[1]), "__0_0.index.json") == sharing(str(shared / ALL[1]), "none") == []
    (shared / ALL[2]).rename(shared / f".{ALL[2]}.0.trash")  # a removal in progress
    (shared / ALL[0]).rename(shared / f"{ALL[0]}.damaged-1")
    assert sharing(str(shared / ALL[1]), DATA) == [f"{ALL[0]}.damaged-1"]


def test_a_shared_file_is_read_once(shared: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    read: list[str] = []
    once = ChecksummedFile.read

    def noted(self: ChecksummedFile, *args: Any, **kwargs: Any) -> Any:
        read.append(self.path)
        return once(self, *args, **kwargs)

    monkeypatch.setattr(ChecksummedFile, "read", noted)
    done: list[int] = []
    checked: CheckedFiles = {}
    reports = [verify(str(path), done.append, checked) for path in sorted(shared.glob("step-*"))]
    assert read == [str(shared / name / DATA) for name in (ALL[0], "step-00000004")]
    nbytes = (shared / ALL[0] / DATA).stat().st_size
    assert [report.shared for report in reports] == [0, nbytes, nbytes, 0]
    assert sum(done) == sum(report.nbytes for report in reports) and not any(report.damages for report in reports)


def test_what_another_index_says_of_a_shared_file_is_checked(shared: Path) -> None:
    """Two checkpoints may expect different bytes in one file. The file is damaged for only one of them."""
    with Checkpointer(shared) as checkpointer:
        checkpointer.save(5, {**_state(), "b": torch.ones(10)}).result(60)
    other = shared / "step-00000005" / DATA
    assert other.stat().st_size == (shared / ALL[0] / DATA).stat().st_size
    other.unlink()
    os.link(shared / ALL[0] / DATA, other)
    checked: CheckedFiles = {}
    assert not verify(str(shared / ALL[0]), checked=checked).damages
    (damage,) = verify(str(other.parent), checked=checked).damages
    assert "'b'; this file is shared with step-00000001, step-00000002, step-00000003: they are" in damage.message


def test_verify_names_all_that_have_a_damaged_file(shared: Path, capsys: pytest.CaptureFixture[str]) -> None:
    damaged = _item(shared / ALL[0], "w")
    flip(shared / ALL[0] / DATA, damaged.payload_at + 50)
    assert cli.main(["verify", str(shared)]) == 1
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 4 and lines[3].endswith("KiB") and "step-00000004: good" in lines[3]
    for name, line in zip(ALL, lines, strict=False):
        others = ", ".join(each for each in ALL if each != name)
        assert line.startswith(f"{shared / name / DATA}: the bytes {damaged.at} to")
        assert line.endswith(f"'w'; this file is shared with {others}: they are damaged, too; save again")
    # First one checkpoint alone, then several in the given order.
    assert cli.main(["verify", str(shared / ALL[1]), str(shared / ALL[0])]) == 1
    assert capsys.readouterr().out.count(f"is shared with {ALL[0]}, {ALL[2]}: they are damaged") == 1
    shutil.rmtree(shared / ALL[2])
    assert cli.main(["verify", str(shared / ALL[1])]) == 1
    assert f"is shared with {ALL[0]}: that is damaged, too; save again" in capsys.readouterr().out


def test_verify_says_what_was_read_before(shared: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["verify", str(shared / ALL[0]), str(shared / ALL[1])]) == 0
    first, second = capsys.readouterr().out.splitlines()
    assert "shared" not in first and "are shared and were read before" in second


@pytest.mark.parametrize("way", ["direct", "dcp", "shorter"])
def test_a_load_names_all_that_have_a_damaged_file(shared: Path, monkeypatch: pytest.MonkeyPatch, way: str) -> None:
    file = shared / ALL[1] / DATA
    if way == "shorter":
        os.truncate(file, file.stat().st_size - 1)
    else:
        flip(file, _item(shared / ALL[1], "w").payload_at + 50)
    if way == "dcp":
        monkeypatch.setattr(reader, "draft", lambda *_: None)
    with pytest.raises(DamagedCheckpointError) as caught:
        reader.load(zeros_like(_state()), str(shared / ALL[1]))
    assert caught.value.path == str(file)
    assert caught.value.message.endswith(
        f"; this file is shared with {ALL[0]}, {ALL[2]}: they are damaged, too; save again"
    )
    assert caught.value.message.count("shared") == 1


@pytest.mark.parametrize("command", ["verify", "load", "export"])
def test_a_damaged_file_is_not_taken_over_by_later_saves(shared: Path, tmp_path: Path, command: str) -> None:
    """Damage sets the file's modification time, and the next save compares that time."""
    file = shared / ALL[1] / DATA
    flip(file, _item(shared / ALL[1], "w").payload_at + 50)
    os.utime(file, (1e9, 1e9))
    if command == "verify":
        assert verify(str(shared / ALL[0])).damages
    elif command == "load":
        with pytest.raises(DamagedCheckpointError):
            reader.load(zeros_like(_state()), str(shared / ALL[0]))
    else:
        assert cli.main(["export", str(shared / ALL[0]), str(tmp_path / "out")]) == 1
    assert file.stat().st_mtime > 1e9 and file.stat().st_ino == (shared / ALL[2] / DATA).stat().st_ino


def test_a_good_file_keeps_its_time(shared: Path) -> None:
    verify(str(shared / ALL[0]))
    reader.load(zeros_like(_state()), str(shared / ALL[0]))
    assert (shared / ALL[0] / DATA).stat().st_mtime == 1e9


def test_who_may_not_change_a_file_says_what_is_damaged(shared: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any, **__: Any) -> None:
        raise PermissionError

    flip(shared / ALL[0] / DATA, _item(shared / ALL[0], "w").payload_at + 50)
    with monkeypatch.context() as patched:
        patched.setattr(os, "utime", refuse)
        (damage,) = verify(str(shared / ALL[0])).damages
    assert "step-00000003: they are damaged" in damage.message


def test_storage_that_is_not_readable_beside_it(shared: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The damage is reported even if the other checkpoints cannot be read."""
    flip(shared / ALL[0] / DATA, _item(shared / ALL[0], "w").payload_at + 50)
    (shared / "step-00000004" / DATA).unlink()
    (shared / "step-00000004" / DATA).symlink_to(DATA)  # a loop
    assert sharing(str(shared / ALL[0]), DATA) == ALL[1:]


def test_files_of_sets_in_folders_of_their_own(tmp_path: Path) -> None:
    with Engine() as engine:
        for name in ("first", "second"):
            engine.save(tmp_path / name, make(3)).result(60)
    for name in ("model.safetensors", "dcp/model_0/__0_0.distcp", "optimizer.pt"):
        share(tmp_path / "second", tmp_path / "first", name)
        flip(tmp_path / "first" / name, (tmp_path / "first" / name).stat().st_size // 2)
    checked: CheckedFiles = {}
    for name, other in (("first", "second"), ("second", "first")):
        report = verify(str(tmp_path / name), checked=checked)
        assert len(report.damages) == 3
        assert all(f"shared with {other}: that is damaged" in damage.message for damage in report.damages)


def test_what_is_damaged_in_memory_says_nothing_of_storage(shared: Path) -> None:
    """Only an error in a file of storage names the checkpoints that share the file."""
    error = DamagedCheckpointError("damaged", path=str(shared / ALL[0] / DATA))
    assert ChecksummedFile.explained(None, error) is error  # type: ignore[arg-type]
    assert StoredFile.explained is not ChecksummedFile.explained


def test_identity(tmp_path: Path) -> None:
    storage = LocalStorage()
    (tmp_path / "a").write_bytes(bytes(10_000))
    os.link(tmp_path / "a", tmp_path / "b")
    (tmp_path / "c").write_bytes(bytes(10_000))
    a, b, c = (storage.identity(str(tmp_path / name)) for name in "abc")
    assert a == b and a is not None and c is not None
    assert (a.links, c.links) == (2, 1) and a.inode != c.inode and a.allocated >= 10_000
    assert storage.identity(str(tmp_path / "d")) is None
    storage.distrust(str(tmp_path / "d"))  # raises nothing
