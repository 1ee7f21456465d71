"""A checkpoint at a wrong place is never loaded as another checkpoint, and is never skipped silently."""

from __future__ import annotations

import errno
import itertools
import json
import os
import shutil
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from support.checkpoints import Manifest, verify
from torch.distributed.checkpoint import state_dict_saver
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.filesystem import FileSystemReader

import asyncckpt
from asyncckpt import Checkpointer, cli
from asyncckpt.errors import CheckpointNotFoundError, DamagedCheckpointError, StorageError
from asyncckpt.extension import MANIFEST_NAME, METADATA_NAME, StorageSource, storage_for
from asyncckpt.format.index import Index
from asyncckpt.format.manifest import data_name, index_name
from asyncckpt.format.write_request import WriteRequest
from asyncckpt.loading import source
from asyncckpt.loading.memory_source import FoundImages, HeldAttempt, MemorySource
from asyncckpt.ranks.ranks import OneRank
from asyncckpt.storage.local import LocalStorage


def _folder(root: Path, step: int) -> Path:
    return root / f"step-{step:08d}"


def _state(value: float = 0.0) -> dict[str, Any]:
    return {"model": {"w": torch.full((100,), value)}, "step": value}


@pytest.fixture
def saved(root: Path) -> Path:
    """Save steps 1, 2 and 3, and close the worker."""
    with Checkpointer(root) as checkpointer:
        for step in (1, 2, 3):
            checkpointer.save(step, _state(step)).result(60)
    return root


def _exchange(root: Path) -> None:
    _folder(root, 2).rename(root / "aside")
    _folder(root, 3).rename(_folder(root, 2))
    (root / "aside").rename(_folder(root, 3))


def _overwrite(root: Path) -> None:
    shutil.rmtree(_folder(root, 3))
    shutil.copytree(_folder(root, 2), _folder(root, 3))


@pytest.mark.parametrize("happened", [_exchange, _overwrite])
def test_a_checkpoint_under_the_name_of_another_step_is_refused(
    saved: Path, happened: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    happened(saved)
    into = _state()
    with Checkpointer(saved) as checkpointer:
        for step in (None, 3):
            with pytest.raises(DamagedCheckpointError, match="step 2.*name of step 3") as raised:
                checkpointer.load(into, step=step)
            assert raised.value.path == str(_folder(saved, 3))
        assert into["step"] == 0.0
        assert checkpointer.load(into, fallback=True) == (1 if happened is _exchange else 2)
    assert cli.main(["verify", str(_folder(saved, 1))]) == 0


@pytest.mark.parametrize("happened", [_exchange, _overwrite])
def test_tools_see_it(saved: Path, happened: Any, capsys: pytest.CaptureFixture[str]) -> None:
    happened(saved)
    assert verify(str(_folder(saved, 3))).damages
    assert cli.main(["verify", str(_folder(saved, 3))]) == 1
    capsys.readouterr()
    assert cli.main(["ls", str(saved)]) == 1
    printed = capsys.readouterr()
    assert "name of step 3" in printed.out + printed.err


@pytest.mark.parametrize("harm", ["removed", "emptied"])
def test_a_newest_checkpoint_without_a_manifest_is_not_passed_over(saved: Path, harm: str) -> None:
    manifest = _folder(saved, 3) / "asyncckpt.json"
    manifest.unlink() if harm == "removed" else manifest.write_bytes(b"")
    with Checkpointer(saved) as checkpointer:
        with pytest.raises(DamagedCheckpointError) as raised:
            checkpointer.load(_state())
        assert str(_folder(saved, 3)) in str(raised.value.path)
        assert checkpointer.load(into := _state(), fallback=True) == 2
        assert into["step"] == 2


def test_a_folder_that_is_empty_is_no_checkpoint(saved: Path) -> None:
    _folder(saved, 4).mkdir()
    with Checkpointer(saved) as checkpointer:
        assert checkpointer.load(_state()) == checkpointer.latest() == 3


@pytest.mark.parametrize("code", [errno.EACCES, errno.EIO, errno.ESTALE])
def test_what_may_not_be_looked_at_is_not_taken_for_absent(
    saved: Path, monkeypatch: pytest.MonkeyPatch, code: int
) -> None:
    real = {name: getattr(os, name) for name in ("stat", "lstat", "open", "listdir", "scandir")}

    def failing(name: str) -> Any:
        def call(path: Any, *args: Any, **kwargs: Any) -> Any:
            if isinstance(path, (str, Path)) and "/step-" in str(path):
                raise OSError(code, os.strerror(code), str(path))
            return real[name](path, *args, **kwargs)

        return call

    with Checkpointer(saved) as checkpointer:
        with monkeypatch.context() as patched:
            for name in real:
                patched.setattr(os, name, failing(name))
            for ask in (checkpointer.steps, checkpointer.latest, lambda: checkpointer.load(_state())):
                with pytest.raises(StorageError, match=os.strerror(code)):
                    ask()
        assert checkpointer.latest() == 3


def test_a_trainer_that_is_always_saving_keeps_no_reader_waiting(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Readers wait for the attempt of a killed trainer, because its worker may still write."""
    numbers = itertools.count()
    storage = storage_for(str(root))
    monkeypatch.setattr(type(storage), "attempts_under_way", lambda *_: [f".step-{next(numbers)}.partial"])
    source.wait_for_attempts(str(root), 10)
    assert 4 <= next(numbers) < 40
    monkeypatch.setattr(type(storage), "attempts_under_way", lambda *_: [".step-1.partial"])
    with pytest.raises(StorageError, match="still writing"):
        source.wait_for_attempts(str(root), 0.05)


def test_a_data_file_of_another_structure_is_refused(root: Path) -> None:
    """The data file has the same shapes and correct checksums, as after mixing up ranks."""
    for number, name in enumerate(["one", "other"]):
        with Checkpointer(root / str(number)) as checkpointer:
            checkpointer.save(1, {name: torch.ones(100)}).result(60)
    ours, theirs = (_folder(root / str(number), 1) for number in (0, 1))
    manifest = Manifest.parse((ours / MANIFEST_NAME).read_bytes(), str(ours))
    files = dict(manifest.files)
    for name in (data_name(0), index_name(0)):
        shutil.copy(theirs / name, ours / name)
        files[name] = json.loads((theirs / MANIFEST_NAME).read_bytes())["files"][name]
    (ours / MANIFEST_NAME).write_bytes(replace(manifest, files=files).encode())
    into = {"one": torch.zeros(100)}
    with Checkpointer(root / "0") as checkpointer, pytest.raises(DamagedCheckpointError, match="'other'"):
        checkpointer.load(into, memory=False)
    assert not into["one"].any()


@pytest.mark.parametrize("name", ["it", "step-00000001"])
def test_one_that_has_lost_its_manifest_is_not_taken_for_stock_dcps(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    asyncckpt.save({"w": torch.ones(5000)}, checkpoint_id=(folder := tmp_path / name))
    data = bytearray((folder / data_name(0)).read_bytes())
    data[len(data) // 2] ^= 1
    (folder / data_name(0)).write_bytes(data)
    (folder / MANIFEST_NAME).unlink()
    for planner in (None, DefaultLoadPlanner()):
        with pytest.raises(DamagedCheckpointError, match="manifest is missing"):
            asyncckpt.load({"w": torch.zeros(5000)}, checkpoint_id=folder, planner=planner)
    with pytest.raises(DamagedCheckpointError, match="manifest is missing"):
        asyncckpt.export(folder, tmp_path / "out")
    for command, status in (("verify", 1), ("inspect", 1), ("ls", 1)):
        assert cli.main([command, str(folder)]) == status
        answer = capsys.readouterr()
        assert "manifest is missing" in answer.out + answer.err
    assert cli.main(["diff", str(folder), str(folder)]) == 2


def _begin_to_join(folder: Path, other: Path) -> None:
    """Simulate the begin of our save into an existing checkpoint's folder."""
    (folder / METADATA_NAME).unlink()
    (other / data_name(0)).rename(folder / data_name(0))


def _write_half(folder: Path, other: Path) -> None:
    """Simulate DCP, which overwrites existing files."""
    data = (other / data_name(0)).read_bytes()
    with open(folder / data_name(0), "r+b") as file:
        file.write(data[: len(data) // 2])


@pytest.mark.filterwarnings("ignore:torch.distributed is:UserWarning")
@pytest.mark.parametrize("replaced", [_begin_to_join, _write_half])
def test_stock_dcps_that_is_replaced_while_it_is_read_is_refused(
    replaced: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The new bytes stand at the offsets of the old bytes, so that no other check would notice."""
    folder, other = tmp_path / "it", tmp_path / "other"
    for place, value in ((folder, 1.0), (other, 2.0)):
        state_dict_saver.save({name: torch.full((1000,), value) for name in "ab"}, checkpoint_id=place)
    read = FileSystemReader.read_data

    def interrupted(*args: Any) -> Any:
        replaced(folder, other)
        return read(*args)

    monkeypatch.setattr(FileSystemReader, "read_data", interrupted)
    with pytest.raises(StorageError, match="replaced while it was read"):
        asyncckpt.load({name: torch.zeros(1000) for name in "ab"}, checkpoint_id=folder)


def test_what_replaces_a_checkpoint_is_no_part_of_what_is_held_of_it(
    saved: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One rank's image is in memory. The other rank's files are in storage, where a new save replaces the step."""
    path = str(_folder(saved, 3))
    with Checkpointer(again := tmp_path / "again") as checkpointer:
        checkpointer.save(3, _state(30)).result(60)
    attempt = source.read_manifest(path).attempt
    request = WriteRequest(1, 0, 0, path, attempt, 3, 0, 2, "set aside", None, False, 20.0)
    held = HeldAttempt(request, True, {})
    images = FoundImages(None, "here", b"", ())
    with closing(MemorySource(images, held, lambda found: None, "sockets", OneRank())) as memory:
        memory.open(data_name(0)).close()
        is_finalized = LocalStorage.is_finalized

        def then_replaced(storage: LocalStorage, final: str, *args: Any) -> bool:
            found = is_finalized(storage, final, *args)
            Path(final).rename(f"{final}.abandoned-1")
            _folder(again, 3).rename(final)
            return found

        monkeypatch.setattr(LocalStorage, "is_finalized", then_replaced)
        with pytest.raises(CheckpointNotFoundError, match="in no reachable memory, and not yet in storage"):
            memory.open(data_name(0))


@pytest.mark.parametrize("fallback", [False, True])
def test_a_step_that_is_saved_again_while_it_is_loaded_is_not_damaged(
    fallback: bool, saved: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The training goes back and replaces the step while another process loads it. The new step is good, and stays."""
    with Checkpointer(again := tmp_path / "again") as checkpointer:
        checkpointer.save(3, _state(30.0)).result(60)
    open_file = StorageSource.open

    def first(*args: Any) -> Any:
        monkeypatch.setattr(StorageSource, "open", open_file)
        _folder(saved, 3).rename(f"{_folder(saved, 3)}.abandoned-1")
        _folder(again, 3).rename(_folder(saved, 3))
        return open_file(*args)

    monkeypatch.setattr(StorageSource, "open", first)
    with Checkpointer(saved) as checkpointer:
        assert checkpointer.load(into := _state(), memory=False, fallback=fallback) == 3
    assert into["step"] == 30 and torch.equal(into["model"]["w"], _state(30.0)["model"]["w"])
    assert not list(saved.glob("*damaged*"))


def test_one_that_is_replaced_while_it_is_checked_is_not_damaged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, parse = str(tmp_path / "it"), Index.parse
    asyncckpt.save({"w": torch.ones(5000)}, checkpoint_id=path)

    def first(*args: Any) -> Any:
        monkeypatch.setattr(Index, "parse", parse)
        asyncckpt.save({"w": torch.zeros(5000)}, checkpoint_id=path)
        return parse(*args)

    monkeypatch.setattr(Index, "parse", first)
    report = verify(path)
    assert report.nbytes > 20000 and not report.damages


@pytest.mark.parametrize("fallback", [False, True])
def test_the_newest_is_removed_while_it_is_loaded(fallback: bool, saved: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The training removes the step during the load. No lock prevents this, as on an object store."""
    _folder(saved, 3).rename(newer := saved / "newer")
    open_file = StorageSource.open

    def first(*args: Any) -> Any:
        monkeypatch.setattr(StorageSource, "open", open_file)
        newer.rename(_folder(saved, 3))
        shutil.rmtree(_folder(saved, 2))
        return open_file(*args)

    monkeypatch.setattr(StorageSource, "open", first)
    with Checkpointer(saved) as checkpointer:
        assert checkpointer.load(into := _state(), memory=False, fallback=fallback) == 3
    assert into["step"] == 3 and torch.equal(into["model"]["w"], _state(3.0)["model"]["w"])
