"""Files of checkpoints: where they are, syncing them, what of them is in the page cache; where workers are found."""

from __future__ import annotations

import ctypes
import mmap
import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from asyncckpt.link.endpoint import FOLDER_VARIABLE


@contextmanager
def working_folder(inside: str | None) -> Iterator[str]:
    """A folder in ``inside`` (None: the system's for temporary files), removed in the end."""
    if inside is not None:
        os.makedirs(inside, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=inside, prefix="bench-", ignore_cleanup_errors=True) as folder:
        yield os.path.realpath(folder)


@contextmanager
def runtime_folder(folder: str) -> Iterator[None]:
    """Workers are found in ``folder`` meanwhile, by no one else."""
    before = os.environ.get(FOLDER_VARIABLE)
    os.environ[FOLDER_VARIABLE] = folder
    try:
        yield
    finally:
        os.environ.pop(FOLDER_VARIABLE)
        if before is not None:
            os.environ[FOLDER_VARIABLE] = before


def files_in(folder: str) -> list[str]:
    """All of them, also in folders within."""
    return [str(path) for path in Path(folder).rglob("*") if path.is_file()]


def sync(folder: str) -> None:
    """Until all in ``folder`` is on storage: files, and the folders that name them."""
    inside = [str(path) for path in Path(folder).rglob("*") if path.is_file() or path.is_dir()]
    for path in [*inside, folder, os.path.dirname(folder)]:
        fd = os.open(path, os.O_RDONLY)
        try:
            os.fsync(fd)
        finally:
            os.close(fd)


def forget(folder: str) -> None:
    """Out of the page cache with them. What is not yet on storage stays."""
    for path in files_in(folder):
        fd = os.open(path, os.O_RDONLY)
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(fd)


def cached_bytes(folder: str) -> int:
    """How much of the files is in the page cache."""
    return sum(map(_cached_bytes, files_in(folder)))


_mincore = ctypes.CDLL(None, use_errno=True).mincore
_mincore.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_char_p]


def _cached_bytes(path: str) -> int:
    size = os.stat(path).st_size
    if not size:
        return 0
    # Private and writable, as ctypes wants it to tell the address; nothing is written.
    with open(path, "rb") as file, mmap.mmap(file.fileno(), size, access=mmap.ACCESS_COPY) as mapped:
        start = ctypes.c_char.from_buffer(mapped)
        pages = ctypes.create_string_buffer(-(-size // mmap.PAGESIZE))
        failed = _mincore(ctypes.addressof(start), size, pages)
        del start
    if failed:
        raise OSError(ctypes.get_errno(), "mincore failed", path)
    return sum(byte & 1 for byte in pages.raw[: -(-size // mmap.PAGESIZE)]) * mmap.PAGESIZE
