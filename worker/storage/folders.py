"""What the operating system can do with folders and Python's ``os`` cannot say: durable entries, exchanged names."""

from __future__ import annotations

import contextlib
import ctypes
import errno
import os

from asyncckpt.worker.manifest import is_checkpoint_file
from asyncckpt.worker.storage.locks import opened

_AT_FDCWD = -100
_RENAME_EXCHANGE = 2
_libc = ctypes.CDLL(None, use_errno=True)


def sync_folder(path: str) -> None:
    """Make the entries of a folder durable. Raises ``OSError``."""
    with opened(path) as fd:
        try:
            os.fsync(fd)
        except OSError as error:
            if error.errno != errno.EINVAL:  # some network file systems have nothing to sync for a folder
                raise


def make_folder(path: str) -> None:
    """Make ``path`` and what is missing above it, each entry durable. Raises ``OSError``."""
    if os.path.isdir(path):
        return
    parent = os.path.dirname(path)
    if parent != path:
        make_folder(parent)
    with contextlib.suppress(FileExistsError):
        os.mkdir(path, 0o755)
    if not os.path.isdir(path):
        raise NotADirectoryError(errno.ENOTDIR, "it is a file", path)
    sync_folder(parent)


def holds_only_a_checkpoint(path: str) -> bool:
    """Whether ``path`` is free, or a folder of a checkpoint's files and no others, so that nobody's files are lost
    with it. Raises ``OSError``.
    """
    try:
        with os.scandir(path) as entries:
            return all(is_checkpoint_file(entry.name) and not entry.is_dir() for entry in entries)
    except FileNotFoundError:
        return True
    except NotADirectoryError:
        return False


def exchange(one: str, other: str) -> bool:
    """Swap two names in one step; False where the file system or the kernel cannot. Raises ``OSError``."""
    try:
        rename = _libc.renameat2
    except AttributeError:  # glibc before 2.28
        return False
    if rename(_AT_FDCWD, os.fsencode(one), _AT_FDCWD, os.fsencode(other), _RENAME_EXCHANGE) == 0:
        return True
    code = ctypes.get_errno()
    if code in (errno.EINVAL, errno.ENOSYS, errno.ENOTSUP):
        return False
    raise OSError(code, os.strerror(code), other)
