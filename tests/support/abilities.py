"""Abilities of the file system of a folder, and of this machine. A test that needs a missing ability is skipped."""

from __future__ import annotations

import fcntl
import os
import subprocess
from pathlib import Path

import pytest

from asyncckpt.storage.file_system import opened
from asyncckpt.storage.partial import exchange


def can_link(folder: Path) -> bool:
    """Return whether a file can have two names there."""
    (one := folder / "one").touch()
    try:
        os.link(one, folder / "other")
    except OSError:
        return False
    finally:
        one.unlink()
    (folder / "other").unlink()
    return True


def can_exchange(folder: Path) -> bool:
    """Return whether two names can be exchanged there."""
    (one := folder / "one").touch()
    (other := folder / "other").touch()
    try:
        return exchange(str(one), str(other))
    finally:
        one.unlink()
        other.unlink()


def need_space_told(folder: Path) -> None:
    if not os.statvfs(folder).f_blocks:
        pytest.skip("this file system does not say how much space it has")


def need_links(folder: Path) -> None:
    if not can_link(folder):
        pytest.skip("this file system has no hard links")


def need_permissions(folder: Path) -> None:
    try:
        folder.chmod(0o755)
        os.chown(folder, os.getuid(), os.getgid())
    except OSError:
        pytest.skip("this file system has no permissions")


def need_locks(folder: Path) -> None:
    with opened(str(folder)) as fd:
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            pytest.skip("this file system has no locks")


def need_lasting_inodes(folder: Path) -> None:
    if folder.stat().st_ino != folder.stat().st_ino:
        pytest.skip("this file system shows another inode number at each look")


def keeps_inodes(folder: Path) -> bool:
    """Return whether a file has the same inode number after a rename."""
    (one := folder / "one").touch()
    before = one.stat().st_ino
    other = one.rename(folder / "other")
    after = other.stat().st_ino
    other.unlink()
    return before == after


def need_inodes(folder: Path) -> None:
    if not keeps_inodes(folder):
        pytest.skip("this file system gives another inode number at a rename")


def need_command(*command: str) -> None:
    """Skip the test unless this command succeeds, such as one of ``unshare`` in a container."""
    try:
        found = subprocess.run(command, capture_output=True, text=True, timeout=20, check=False)
    except FileNotFoundError:
        pytest.skip(f"{command[0]} is not installed")
    if found.returncode != 0:
        pytest.skip(found.stderr.strip() or f"{command[0]} fails")
