"""The operating system's errors, turned into ours at the edge."""

from __future__ import annotations

import contextlib
import errno
from collections.abc import Iterator

from asyncckpt.errors import StorageError

_ADVICE = {
    errno.ENOSPC: "free space there, or choose another place",
    errno.EDQUOT: "the quota is used up: free space there, or choose another place",
    errno.EACCES: "check the permissions",
    errno.EPERM: "check the permissions",
    errno.EROFS: "the file system is mounted read-only",
    errno.ENOTDIR: "part of the path is a file: choose another place",
    errno.EFBIG: "the file may not grow that far (see ulimit -f): raise the limit, or choose another place",
}


@contextlib.contextmanager
def translated(doing: str, path: str) -> Iterator[None]:
    """Turn an ``OSError`` inside into a ``StorageError`` that says what was being done, and to what."""
    try:
        yield
    except OSError as error:
        advice = _ADVICE.get(error.errno or 0, "look at the storage there")
        raise StorageError(f"{doing} failed: {error.strerror or error}; {advice}", path=path) from error
