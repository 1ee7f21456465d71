"""A lock file: one holder at a time, and facts about it."""

from __future__ import annotations

import os
from contextlib import closing
from pathlib import Path

import pytest
from support.abilities import need_locks

from asyncckpt.storage.file_system import LockFile, lock_alone


@pytest.fixture
def path(tmp_path: Path) -> str:
    need_locks(tmp_path)
    return str(tmp_path / "lock")


def test_one_holder_at_a_time(path: str) -> None:
    with closing(LockFile(path)) as first:
        first.write({"worker": 7, "note": "x" * 100})
        first.write({"worker": 8})  # shorter than before
        with closing(LockFile(path)) as second:
            assert first.is_held and not second.is_held
            assert second.read() == {"worker": 8}
    with closing(LockFile(path)) as third:
        assert third.is_held and third.read() == {"worker": 8}


def test_a_file_that_its_holder_removes_meanwhile_is_not_locked(path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A process may open the file just before its holder removes it and releases the lock."""
    first = LockFile(path)

    def release_first(fd: int) -> bool | None:
        monkeypatch.undo()
        first.remove()
        first.close()
        return lock_alone(fd)

    monkeypatch.setattr("asyncckpt.storage.file_system.lock_alone", release_first)
    with closing(LockFile(path)) as second:
        assert second.is_held and os.path.exists(path)
        with closing(LockFile(path)) as third:
            assert not third.is_held


@pytest.mark.parametrize("text", [b"", b'{"wor', b"[1]"])
def test_incomplete_facts_are_none(path: str, text: bytes) -> None:
    Path(path).write_bytes(text)
    with closing(LockFile(path)) as lock:
        assert lock.read() == {}


def test_a_file_system_without_locks(path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("asyncckpt.storage.file_system.lock_alone", lambda _: None)
    with closing(LockFile(path)) as lock:
        assert lock.is_held is None
