"""A root where other users can write: their files are never adopted, and saves never follow their links."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from support.abilities import need_permissions
from support.link_contract import DATA, put, put_checkpoint

from asyncckpt.config import Config
from asyncckpt.errors import StorageError
from asyncckpt.ranks.group import Group
from asyncckpt.storage import partial
from asyncckpt.storage.local import LocalStorage
from asyncckpt.storage.partial import attempt_path

STRANGER = 65534


@pytest.fixture
def final(tmp_path: Path) -> str:
    return str(tmp_path / "final")


def test_the_name_of_an_attempt_cannot_be_guessed_from_another() -> None:
    one, other = (Group(Config()) for _ in range(2))
    names = [group.attempt(number) for group in (one, other) for number in (1, 2, 1)]
    assert names[0] == names[2] and names[3] == names[5]
    assert len({name.partition("-")[0] for name in names}) == 4
    assert names[1].endswith("-2")


@pytest.mark.parametrize("what", ["a stranger's folder", "a link", "a file"])
def test_what_a_stranger_made_is_not_adopted(tmp_path: Path, final: str, what: str) -> None:
    there = Path(attempt_path(final, "0123456789ab-1"))
    (trap := tmp_path / "trap").mkdir()
    if what == "a link":
        there.symlink_to(trap)
    elif what == "a file":
        there.touch()
    else:
        need_permissions(tmp_path)
        if os.geteuid():
            pytest.skip("only root can make a folder of another user")
        there.mkdir()
        os.chown(there, STRANGER, STRANGER)
    with pytest.raises(StorageError, match="another program") as raised:
        LocalStorage().begin_checkpoint(final, "0123456789ab-1", 0)
    assert raised.value.path == str(there)
    assert there.exists() and not list(trap.iterdir()) and (what == "a file" or not list(there.iterdir()))


def test_where_a_server_gives_our_files_to_another_user_they_are_ours(
    final: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """NFS does so with the files of root."""
    monkeypatch.setattr(os, "geteuid", lambda: STRANGER - 1)
    opened = LocalStorage().begin_checkpoint(final, "0123456789ab-1", 0)
    put_checkpoint(opened, "0123456789ab-1")
    assert opened.names() == {DATA, ".metadata", "asyncckpt.json"}
    opened.finalize("refuse")
    opened.release()


@pytest.mark.parametrize("to", ["a link", "another folder"])
def test_a_folder_that_is_exchanged_gets_nothing(tmp_path: Path, final: str, to: str) -> None:
    opened = LocalStorage().begin_checkpoint(final, "0123456789ab-1", 0)
    put(opened, DATA, b"data")
    (trap := tmp_path / "trap").mkdir()
    (trap / DATA).write_bytes(b"theirs")
    os.rename(opened.path, tmp_path / "ours")
    if to == "a link":
        Path(opened.path).symlink_to(trap)
    else:
        os.rename(trap, trap := Path(opened.path))
    with pytest.raises(StorageError):
        put(opened, ".metadata", b"")
    with pytest.raises(StorageError):
        opened.finalize("refuse")
    opened.discard([DATA])
    opened.discard()
    assert (trap / DATA).read_bytes() == b"theirs" and os.listdir(trap) == [DATA] and not os.path.exists(final)


def test_a_link_in_the_place_of_a_file_is_not_followed(tmp_path: Path, final: str) -> None:
    opened = LocalStorage().begin_checkpoint(final, "0123456789ab-1", 0)
    (victim := tmp_path / "victim").write_bytes(b"theirs")
    Path(opened.path, DATA).symlink_to(victim)
    with pytest.raises(StorageError):
        put(opened, DATA, b"data")
    opened.discard()
    assert victim.read_bytes() == b"theirs"


def test_a_removal_has_a_name_that_nobody_has_taken(tmp_path: Path, final: str) -> None:
    opened = LocalStorage().begin_checkpoint(final, "0123456789ab-1", 0)
    put_checkpoint(opened, "0123456789ab-1")
    opened.finalize("refuse")
    opened.release()
    (trap := tmp_path / "trap").mkdir()
    (tmp_path / f".final{partial.TRASH_SUFFIX}").symlink_to(trap)
    assert LocalStorage().remove_checkpoint(final) and not os.path.exists(final)
