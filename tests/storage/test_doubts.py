"""A storage error is not an answer, and a call that takes effect before it fails counts as done."""

from __future__ import annotations

import contextlib
import errno
import json
import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from support.abilities import need_inodes, need_lasting_inodes
from support.attempts import checkpoint_attempt
from support.checkpoints import PAGE
from support.link_contract import put, put_checkpoint

from asyncckpt.errors import DamagedCheckpointError, SaveTimeoutError, StorageError
from asyncckpt.shm.segment import Segment
from asyncckpt.storage import file_system, partial, resolve
from asyncckpt.storage.local import LocalStorage

CODES = [errno.EIO, errno.EACCES, errno.ESTALE]


def fail(monkeypatch: pytest.MonkeyPatch, name: str, code: int, where: str) -> None:
    real = getattr(os, name)

    def call(path: Any, *args: Any, **kwargs: Any) -> Any:
        if isinstance(path, str) and path.endswith(where):
            raise OSError(code, os.strerror(code))
        return real(path, *args, **kwargs)

    monkeypatch.setattr(os, name, call)


@pytest.mark.parametrize("code", CODES)
def test_a_manifest_that_cannot_be_read_is_not_of_another(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: int
) -> None:
    """A process that has not heard of the commit reads the manifest."""
    with Segment.create("test", 4 * PAGE) as segment, ThreadPoolExecutor(2) as pool:
        attempt = checkpoint_attempt(tmp_path, segment)
        attempt.write(pool)
        attempt.commit([json.loads(attempt.seal())])
        attempt.release()
        request, storage = attempt.request, LocalStorage()
        with monkeypatch.context() as patched:
            fail(patched, "open", code, "asyncckpt.json")
            with pytest.raises(StorageError, match=os.strerror(code)):
                storage.is_finalized(request.path, request.attempt)
            with pytest.raises(SaveTimeoutError, match="outcome of the save is not known"):
                resolve(request, 30.0)
        assert resolve(request, 30.0)
        Path(request.path, "asyncckpt.json").write_bytes(b"{}")
        with pytest.raises(DamagedCheckpointError):
            storage.is_finalized(request.path, request.attempt)
        with pytest.raises(SaveTimeoutError, match="outcome of the save is not known"):
            resolve(request, 30.0)


def test_over_one_that_is_damaged_an_attempt_that_is_revoked_has_failed(tmp_path: Path) -> None:
    (final := tmp_path / "final").mkdir()
    (final / "asyncckpt.json").write_bytes(b"{}")
    for is_sealed in (True, False):
        opened = LocalStorage().begin_checkpoint(str(final), "0123456789ab-1", 0)
        if is_sealed:
            put_checkpoint(opened, "0123456789ab-1")
        found = LocalStorage().resolve(str(final), "0123456789ab-1", "replace")
        assert not found.is_finalized and found.leftover is not None
        LocalStorage().remove(found.leftover)
        opened.release()


@pytest.mark.parametrize("code", CODES)
def test_an_attempt_that_may_not_be_looked_at_may_be_under_way(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: int
) -> None:
    opened = LocalStorage().begin_checkpoint(str(tmp_path / "final"), "0123456789ab-1", 0)
    with monkeypatch.context() as patched:
        fail(patched, "open", code, ".partial")
        with pytest.raises(StorageError, match=os.strerror(code)):
            LocalStorage().attempts_under_way(str(tmp_path))
    opened.release()


@pytest.mark.parametrize("code", CODES)
def test_what_stands_in_a_folder_that_cannot_be_read_may_be_of_somebody(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: int
) -> None:
    """The unreadable folder is inside a checkpoint that is to be replaced."""
    storage, final = LocalStorage(), str(tmp_path / "final")
    for attempt in ("0123456789ab-1", "0123456789ab-2"):
        opened = storage.begin_checkpoint(final, attempt, 0)
        put_checkpoint(opened, attempt)
        if attempt.endswith("1"):
            opened.finalize("refuse")
            opened.release()
    (mine := tmp_path / "final" / "notes" / "mine.txt").parent.mkdir()
    mine.write_text("mine")
    with monkeypatch.context() as patched:
        fail(patched, "open", code, "notes")
        with pytest.raises(StorageError, match=os.strerror(code)):
            opened.finalize("replace")
    opened.discard()
    assert mine.read_text() == "mine" and storage.is_finalized(final, "0123456789ab-1")
    assert os.listdir(tmp_path) == ["final"]


def test_a_file_system_on_which_nothing_keeps_its_inode_number_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os.path, "samestat", lambda *_: False)
    storage = LocalStorage()
    with pytest.raises(StorageError, match="this file system gives an open file a new inode number"):
        storage.begin_checkpoint(str(tmp_path / "final"), "0123456789ab-1", 0)
    opened = storage.begin_file(str(tmp_path / "file"), "0123456789ab-1", 0, 60.0)
    with pytest.raises(StorageError, match="this file system gives an open file a new inode number"):
        opened.create("", large=False)
    opened.discard()
    assert not (tmp_path / "final").exists() and not (tmp_path / "file").exists()


def test_a_folder_that_lists_the_names_of_its_opening_is_listed_anew(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """btrfs does so since Linux 6.6."""
    at_opening: dict[int, set[str]] = {}
    real_open, real_scandir = os.open, os.scandir

    def open_(path: str, flags: int, mode: int = 0o777, *, dir_fd: int | None = None) -> int:
        fd = real_open(path, flags, mode, dir_fd=dir_fd)
        if flags & os.O_DIRECTORY:
            at_opening[fd] = set(os.listdir(fd))
        return fd

    @contextlib.contextmanager
    def scandir(folder: int) -> Iterator[list[os.DirEntry[str]]]:
        with real_scandir(folder) as entries:
            yield [entry for entry in entries if entry.name in at_opening[folder]]

    monkeypatch.setattr(os, "open", open_)
    monkeypatch.setattr(os, "scandir", scandir)
    opened = LocalStorage().begin_checkpoint(str(tmp_path / "final"), "0123456789ab-1", 0)
    put(opened, "below/one", b"1")
    put(opened, "other", b"2")
    assert opened.names() == {"below/one", "other"}
    opened.release()


def test_a_folder_is_removed_at_once_though_its_listing_is_old(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A name that is listed but gone causes no new listing. Listings may stay stale for half a minute."""
    need_lasting_inodes(tmp_path)
    (folder := tmp_path / "folder").mkdir()
    (folder / "deep").mkdir()
    listed = {folder.stat().st_ino: [("gone", False), ("deep", True)], (folder / "deep").stat().st_ino: [("in", True)]}
    monkeypatch.setattr(file_system, "_entries", lambda fd: listed[os.fstat(fd).st_ino])
    file_system.remove_folder(str(folder))
    assert not folder.exists()


@pytest.mark.parametrize("code", [errno.EIO, errno.ENOENT])
def test_renames_that_are_done_and_answered_with_an_error_are_done(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: int
) -> None:
    """This holds for replacing without an exchange of names, revoking, removing and setting aside."""
    need_inodes(tmp_path)
    real = os.rename

    def rename(one: str, other: str) -> None:
        real(one, other)
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(partial, "exchange", lambda *_: False)
    monkeypatch.setattr(os, "rename", rename)
    storage, final = LocalStorage(), str(tmp_path / "final")
    for number in (1, 2):
        opened = storage.begin_checkpoint(final, f"0123456789ab-{number}", 0)
        put_checkpoint(opened, f"0123456789ab-{number}")
        opened.finalize("replace")
        opened.release()
        assert storage.is_finalized(final, f"0123456789ab-{number}") and os.listdir(tmp_path) == ["final"]
    storage.begin_checkpoint(final, "0123456789ab-3", 0).release()
    leftover = storage.revoke(final, "0123456789ab-3")
    assert leftover is not None and os.path.exists(leftover)
    storage.remove(leftover)
    storage.set_aside(final, "damaged")
    assert storage.remove_checkpoint(f"{final}.damaged-1") and not os.listdir(tmp_path)


def test_a_manifest_that_is_removed_as_it_is_read_is_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Retention removes the checkpoint between two accesses to its manifest."""
    storage, final = LocalStorage(), str(tmp_path / "root" / "final")
    opened = storage.begin_checkpoint(final, "a-1", 100)
    put_checkpoint(opened, "a-1")
    opened.finalize("refuse")
    opened.release()
    real = LocalStorage.read

    def read(self: LocalStorage, path: str) -> bytes:
        assert storage.remove_checkpoint(final)
        return real(self, path)

    monkeypatch.setattr(LocalStorage, "read", read)
    assert not storage.is_finalized(final, "a-1")


@pytest.mark.parametrize("when", ["rename", "set_aside"])
def test_what_is_removed_before_it_is_set_aside_is_not_in_the_way(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, when: str
) -> None:
    """Retention removes the old checkpoint after it was found in the way, before it is examined or renamed."""
    storage, root = LocalStorage(), tmp_path / "root"
    final = str(root / "final")
    for attempt in ("a-1", "a-2"):
        opened = storage.begin_checkpoint(final, attempt, 100)
        put_checkpoint(opened, attempt)
        if attempt == "a-1":
            opened.finalize("refuse")
            opened.release()
    real = getattr(partial, when)

    def remove(*args: str) -> Any:
        monkeypatch.setattr(partial, when, real)
        try:
            if when == "rename":
                real(*args)
        finally:
            assert storage.remove_checkpoint(final)
        return real(*args)

    monkeypatch.setattr(partial, when, remove)
    opened.finalize("set aside")
    opened.release()
    assert storage.is_finalized(final, "a-2") and os.listdir(root) == ["final"]
