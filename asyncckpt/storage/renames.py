"""Renames: of what may be done although it was answered with an error, and what the kernel does in one step.

All raise ``OSError``: whoever calls says what was being done.
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
    """``os.rename``. One that was done and answered with an error, as of a call that a network file system had to
    repeat, is done.
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
    """Give what is at ``path`` another name beside its own, which says why, durably. Returns that."""
    aside = next(name for number in itertools.count(1) if not os.path.lexists(name := f"{path}.{why}-{number}"))
    rename(path, aside)
    try:
        sync_folder(os.path.dirname(path))
    except OSError:
        rename(aside, path)
        raise
    return aside


def exchange(one: str, other: str) -> bool:
    """Swap two names in one step; False where the file system or the kernel cannot."""
    return _renameat2(one, other, _RENAME_EXCHANGE)


def rename_new(one: str, other: str) -> None:
    """As ``rename``, of a file, but a ``FileExistsError`` where something has the other name. That is found out in the
    same step, but on a file system that knows neither ``RENAME_NOREPLACE`` nor hard links.
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
    with contextlib.suppress(OSError):  # where it was a link; what stays is a leftover like others
        os.unlink(one)


def _link(one: str, other: str) -> None:
    """Give a file another name, too; or, where there are no hard links, instead."""
    try:
        os.link(one, other)
    except FileExistsError:
        raise
    except OSError:
        if os.path.lexists(other):
            raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), other) from None
        rename(one, other)


def _renameat2(one: str, other: str, flags: int) -> bool:
    """False where the file system or the kernel cannot."""
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
