"""Renames: plain renames that tolerate a lost answer, and atomic renames of the kernel.

All functions raise ``OSError``. Their callers know the operation and translate the error.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import itertools
import os

from asyncckpt.storage.file_system import sync_folder

# From linux/fcntl.h and linux/fs.h.
_AT_FDCWD = -100
_RENAME_NOREPLACE, _RENAME_EXCHANGE = 1, 2
_libc = ctypes.CDLL(None, use_errno=True)


def rename(one: str, other: str) -> None:
    """Rename as ``os.rename`` does. Ignore an error if the rename was done.

    A network file system may retry a call that was done, and then answer with an error.
    """
    before = os.lstat(one)
    try:
        os.rename(one, other)
    except OSError:
        with contextlib.suppress(OSError):
            if os.path.samestat(before, os.lstat(other)):
                return
        raise


def set_aside(path: str, why: str) -> str:
    """Give the file or folder at ``path`` another name, with ``why`` as a suffix, durably. Return the new path."""
    aside = next(name for number in itertools.count(1) if not os.path.lexists(name := f"{path}.{why}-{number}"))
    rename(path, aside)
    try:
        sync_folder(os.path.dirname(path))
    except OSError:
        rename(aside, path)
        raise
    return aside


def exchange(one: str, other: str) -> bool:
    """Exchange two names atomically. Return False if the file system or the kernel cannot."""
    return _renameat2(one, other, _RENAME_EXCHANGE)


def rename_new(one: str, other: str) -> None:
    """Rename a file as ``rename`` does, but raise ``FileExistsError`` if the new name exists.

    The check is atomic unless the file system has neither ``RENAME_NOREPLACE`` nor hard links.
    """
    before = os.lstat(one)
    try:
        if not _renameat2(one, other, _RENAME_NOREPLACE):
            _link(one, other)
    except OSError:
        try:
            is_done = os.path.samestat(before, os.lstat(other))
        except OSError:
            is_done = False
        if not is_done:
            raise
    with contextlib.suppress(OSError):  # after a hard link; if this fails, the leftover is an orphan like others
        os.unlink(one)


def _link(one: str, other: str) -> None:
    """Give a file a second name, or rename it on a file system without hard links."""
    try:
        os.link(one, other)
    except FileExistsError:
        raise
    except OSError:
        if os.path.lexists(other):
            raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), other) from None
        rename(one, other)


def _renameat2(one: str, other: str, flags: int) -> bool:
    """Call renameat2. Return False if the file system or the kernel cannot do it."""
    try:
        rename = _libc.renameat2
    except AttributeError:  # glibc before 2.28
        return False
    if rename(_AT_FDCWD, os.fsencode(one), _AT_FDCWD, os.fsencode(other), flags) == 0:
        return True
    code = ctypes.get_errno()
    if code in (errno.EINVAL, errno.ENOSYS, errno.ENOTSUP):
        return False
    raise OSError(code, os.strerror(code), other)
