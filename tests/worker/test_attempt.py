"""All or nothing: the order in which an attempt becomes durable, and the moment when its slot is free."""

from __future__ import annotations

import errno
import json
import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from support.attempts import checkpoint_attempt
from support.checkpoints import PAGE

from asyncckpt import Checkpointer
from asyncckpt.errors import StorageError
from asyncckpt.format.write_request import Existing
from asyncckpt.shm.segment import Segment
from asyncckpt.storage import file_system, partial
from asyncckpt.storage.local import LocalStorage


class Recorder:
    """Records the fsync and rename calls of this process in order, with the size of each synced file."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.events: list[tuple[str, str, int]] = []
        real_fsync, real_rename = os.fsync, os.rename

        def fsync(fd: int) -> None:
            real_fsync(fd)
            self.events.append(("fsync", os.readlink(f"/proc/self/fd/{fd}"), os.fstat(fd).st_size))

        def rename(source: str, target: str) -> None:
            real_rename(source, target)
            self.events.append(("rename", target, 0))

        monkeypatch.setattr(os, "fsync", fsync)
        monkeypatch.setattr(os, "rename", rename)


def test_everything_is_durable_before_it_is_finalized(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    root = str(tmp_path / "root")
    with Segment.create("test", 4 * PAGE) as segment, ThreadPoolExecutor(2) as pool:
        recorder = Recorder(monkeypatch)
        attempt = checkpoint_attempt(tmp_path, segment)
        attempt.write(pool)
        attempt.commit([json.loads(attempt.seal())])
        attempt.release()
    hidden = f"{root}/.final.attempt.partial"
    kinds = [(kind, path) for kind, path, _ in recorder.events]
    assert kinds == [
        ("fsync", str(tmp_path.parent)),  # another process may have just made this folder
        ("fsync", str(tmp_path)),  # makes the root's own entry durable
        ("fsync", f"{hidden}/__0_0.index.json"),
        ("fsync", f"{hidden}/.metadata"),
        ("fsync", f"{hidden}/__0_0.distcp"),
        ("fsync", f"{hidden}/asyncckpt.json"),
        ("fsync", hidden),
        ("rename", f"{root}/final"),
        ("fsync", root),
    ]
    final = tmp_path / "root" / "final"
    for kind, path, size in recorder.events[2:6]:
        assert kind == "fsync" and size == (final / Path(path).name).stat().st_size > 0
    assert sorted(os.listdir(root)) == ["final"]


def test_the_mark_of_a_set_is_durable_before_its_other_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """After a power cut, nobody would remove files of other formats from an attempt without an index."""
    with Segment.create("test", 4 * PAGE) as segment, ThreadPoolExecutor(2) as pool:
        recorder = Recorder(monkeypatch)
        attempt = checkpoint_attempt(tmp_path, segment, small_files=(("config.json", b"{}"),))
        hidden = attempt.opened.path
        attempt.write(pool)
        attempt.seal()
        attempt.discard()
    its = [path for _, path, _ in recorder.events if path.startswith(hidden)]
    assert its[0] == hidden and its[-1] == f"{hidden}/config.json"


def test_the_entry_of_a_root_is_durable(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The creator of an existing root may have been killed before its fsync, so each process syncs the entry once."""
    recorder = Recorder(monkeypatch)
    with Checkpointer(tmp_path / "above" / "root"):
        assert [path for _, path, _ in recorder.events] == [str(tmp_path.parent), str(tmp_path), f"{tmp_path}/above"]
    (left := tmp_path / "left").mkdir()
    recorder.events.clear()
    for _ in range(2):
        LocalStorage().begin_checkpoint(f"{left}/final", "1-1", 0).discard()
    assert [path for _, path, _ in recorder.events] == [str(tmp_path)]


def test_an_existing_root_may_stand_in_a_folder_that_cannot_be_synced(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(path: str) -> None:
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), path)

    monkeypatch.setattr(file_system, "sync_folder", refuse)
    file_system.make_folder(str(tmp_path))
    with pytest.raises(PermissionError):
        file_system.make_folder(str(tmp_path / "new"))


def test_the_first_index_of_a_set_is_durable_before_its_other_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A save recognises an attempt by its index, and never removes a folder without an index."""
    attempt = LocalStorage().begin_checkpoint(str(tmp_path / "final"), "1-1", 0)
    recorder = Recorder(monkeypatch)
    attempt.create("__0_0.index.json", large=False).close()
    assert [path for _, path, _ in recorder.events] == [str(tmp_path / ".final.1-1.partial")]
    attempt.create("model.bin", large=False).close()
    attempt.discard()
    assert len(recorder.events) == 1


def test_the_slot_is_free_only_when_its_bytes_are_synced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with Segment.create("test", 4 * PAGE) as segment, ThreadPoolExecutor(2) as pool:
        attempt = checkpoint_attempt(tmp_path, segment)
        recorder = Recorder(monkeypatch)
        attempt.write(pool)
        assert any(path.endswith(".distcp") for _, path, _ in recorder.events)
        image = bytes(segment.view[2 * PAGE : 4 * PAGE])
        segment.view[2 * PAGE : 4 * PAGE] = bytes(2 * PAGE)  # the trainer stages the next save
        attempt.commit([json.loads(attempt.seal())])
        attempt.release()
    assert (tmp_path / "root/final/__0_0.distcp").read_bytes() == image


def _text(path: Path) -> str:
    return path.read_text() if path.exists() else ""


@pytest.mark.parametrize("exchanges", [True, False])
@pytest.mark.parametrize("existing", ["refuse", "replace"])
def test_what_is_not_durable_in_the_end_loses_its_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, existing: Existing, exchanges: bool
) -> None:
    if not exchanges:
        monkeypatch.setattr(partial, "exchange", lambda *_: False)
    final = tmp_path / "root" / "final"
    if existing == "replace":
        final.mkdir(parents=True)
        (final / "asyncckpt.json").write_text("old")
    real = file_system.sync_folder

    def sync_folder(path: str) -> None:
        if path == str(final.parent) and "attempt" in _text(final / "asyncckpt.json"):
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        real(path)

    monkeypatch.setattr(partial, "sync_folder", sync_folder)
    with Segment.create("test", 4 * PAGE) as segment, ThreadPoolExecutor(2) as pool:
        attempt = checkpoint_attempt(tmp_path, segment, existing)
        attempt.write(pool)
        with pytest.raises(StorageError, match="Input/output error"):
            attempt.commit([json.loads(attempt.seal())])
        attempt.discard()
    assert _text(final / "asyncckpt.json") == ("old" if existing == "replace" else "")
    assert os.listdir(final.parent) == (["final"] if existing == "replace" else [])
