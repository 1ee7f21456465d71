"""Files of checkpoints: list, sync, and drop them from the page cache. Folders for work and for workers."""

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
    """Create a folder in ``inside`` (None: the system's temporary folder), and remove it at the end."""
    if inside is not None:
        os.makedirs(inside, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=inside, prefix="bench-", ignore_cleanup_errors=True) as folder:
        yield os.path.realpath(folder)


@contextmanager
def runtime_folder(folder: str) -> Iterator[None]:
    """Set ``folder`` as the runtime folder, so that only this process and its children find the workers."""
    before = os.environ.get(FOLDER_VARIABLE)
    os.environ[FOLDER_VARIABLE] = folder
    try:
        yield
    finally:
        os.environ.pop(FOLDER_VARIABLE)
        if before is not None:
            os.environ[FOLDER_VARIABLE] = before


def files_in(folder: str) -> list[str]:
    """Return all files in ``folder`` and its subfolders."""
    return [str(path) for path in Path(folder).rglob("*") if path.is_file()]


def sync(folder: str) -> None:
    """Sync all files in ``folder``, and the folders that name them."""
    inside = [str(path) for path in Path(folder).rglob("*") if path.is_file() or path.is_dir()]
    for path in [*inside, folder, os.path.dirname(folder)]:
        fd = os.open(path, os.O_RDONLY)
        try:
            os.fsync(fd)
        finally:
            os.close(fd)


def forget(folder: str) -> None:
    """Drop the files in ``folder`` from the page cache. Pages that are not yet on storage stay."""
    for path in files_in(folder):
        fd = os.open(path, os.O_RDONLY)
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(fd)


def storage_bytes() -> int:
    """Return the bytes that this process has read from devices so far; 0 if the kernel does not count them."""
    with open("/proc/self/io") as counts:
        return next((int(line.split()[1]) for line in counts if line.startswith("read_bytes")), 0)


def cached_bytes(folder: str) -> int:
    """Return the bytes of the files in the page cache."""
    return sum(map(_cached_bytes, files_in(folder)))


_mincore = ctypes.CDLL(None, use_errno=True).mincore
_mincore.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_char_p]


def _cached_bytes(path: str) -> int:
    size = os.stat(path).st_size
    if not size:
        return 0
    # ctypes gives the address only of a writable mapping, so this one is private and writable. Nothing is written.
    with open(path, "rb") as file, mmap.mmap(file.fileno(), size, access=mmap.ACCESS_COPY) as mapped:
        start = ctypes.c_char.from_buffer(mapped)
        pages = ctypes.create_string_buffer(-(-size // mmap.PAGESIZE))
        failed = _mincore(ctypes.addressof(start), size, pages)
        del start
    if failed:
        raise OSError(ctypes.get_errno(), "mincore failed", path)
    return sum(byte & 1 for byte in pages.raw[: -(-size // mmap.PAGESIZE)]) * mmap.PAGESIZE
