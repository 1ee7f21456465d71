"""Writing an image to a file: direct I/O where possible, pieces, and failing writes."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
from array import array
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from support.checkpoints import PAGE, checksum
from support.states import small_state

from asyncckpt import Checkpointer
from asyncckpt.config import Config
from asyncckpt.errors import StorageError
from asyncckpt.format.index import spans
from asyncckpt.shm.segment import Segment
from asyncckpt.storage.file_system import translated
from asyncckpt.storage.local_file import LocalFile
from asyncckpt.worker import staged_image
from asyncckpt.worker.staged_image import BUFFER_BYTES, ImageFile

PIECE_BYTES = 2 * BUFFER_BYTES


@pytest.fixture(autouse=True)
def small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(LocalFile, "piece_bytes", PIECE_BYTES)


def _write(
    file: LocalFile, pool: ThreadPoolExecutor, image: memoryview, bounds: Sequence[int], wait_beyond: Any
) -> Any:
    """Write an image. Return the checksums, and whether the page cache was bypassed."""
    with ImageFile(file, pool, image, is_huge=False) as output:
        output.follow(wait_beyond)
        output.finish(bounds[-1])
        output.sync()
        return array("Q", (checksum(image[begin:end]) for begin, end in pairwise(bounds))), file.direct


def _whole(nbytes: int, whole: int) -> int:
    """Report that the whole image has arrived."""
    return whole


@pytest.mark.parametrize("refused", ["never", "at open", "at write"])
def test_where_direct_io_is_refused_it_writes_through_the_cache(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, refused: str
) -> None:
    real_open, real_pwrite = os.open, os.pwrite
    written: set[int] = set()

    def open_(path: str, flags: int, *args: Any, **options: Any) -> int:
        if refused == "at open" and flags & os.O_DIRECT:
            # Some file systems create the file before they refuse.
            os.close(real_open(path, flags & ~os.O_DIRECT, *args, **options))
            raise OSError(errno.EINVAL, "no direct I/O here")
        return real_open(path, flags, *args, **options)

    def pwrite(fd: int, data: memoryview, offset: int) -> int:
        direct = fcntl.fcntl(fd, fcntl.F_GETFL) & os.O_DIRECT
        if refused == "at write" and direct:
            raise OSError(errno.EINVAL, "no direct I/O here")
        written.add(direct)
        return real_pwrite(fd, data[: 3 * PAGE], offset)  # never the whole data at once

    monkeypatch.setattr(os, "open", open_)
    monkeypatch.setattr(os, "pwrite", pwrite)
    data = bytes(os.urandom(PIECE_BYTES + 5 * PAGE))
    with Segment.create("test", len(data)) as segment, ThreadPoolExecutor(2) as pool:
        segment.view[:] = data
        bounds = spans([0, 77, 5000], len(data))
        checksums, direct = _write(LocalFile(str(tmp_path / "file"), True), pool, segment.view, bounds, _whole)
    assert (tmp_path / "file").read_bytes() == data
    assert list(checksums) == [checksum(data[a:b]) for a, b in zip(bounds[:-1], bounds[1:], strict=True)]
    if refused != "never":
        assert not direct and written == {0}


@pytest.mark.parametrize("instant", ["before one is refused", "before the file is switched"])
def test_several_threads_may_be_refused_direct_io(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, instant: str
) -> None:
    """A second write begins and ends during the first."""
    real_pwrite, real_fcntl = os.pwrite, fcntl.fcntl
    file = LocalFile(str(tmp_path / "file"), True)
    first = iter([True])

    def write_the_second(at: str) -> None:
        if at == instant and next(first, False):
            file.write(memoryview(b"2" * PAGE), PAGE)

    def pwrite(fd: int, data: memoryview, offset: int) -> int:
        if real_fcntl(fd, fcntl.F_GETFL) & os.O_DIRECT:
            write_the_second("before one is refused")
            raise OSError(errno.EINVAL, "no direct I/O here")
        return real_pwrite(fd, data, offset)

    def fcntl_(fd: int, command: int, *args: int) -> int:
        if command == fcntl.F_SETFL:
            write_the_second("before the file is switched")
        return real_fcntl(fd, command, *args)

    monkeypatch.setattr(os, "pwrite", pwrite)
    monkeypatch.setattr(fcntl, "fcntl", fcntl_)
    was_direct = file.direct
    with contextlib.closing(file):
        if not was_direct:
            pytest.skip("this file system knows no direct I/O")
        file.write(memoryview(b"1" * PAGE), 0)
    assert not file.direct and not next(first, False)
    assert (tmp_path / "file").read_bytes() == b"1" * PAGE + b"2" * PAGE


@pytest.mark.parametrize("bounces", [False, True])
def test_through_buffers_or_not_it_is_the_same_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, bounces: bool
) -> None:
    """Whether the writes use buffers depends on the host's huge pages."""
    written: list[int] = []
    real_write = LocalFile.write

    def write(self: LocalFile, data: memoryview, offset: int) -> None:
        written.append(len(data))
        real_write(self, data, offset)

    monkeypatch.setattr(LocalFile, "write", write)
    monkeypatch.setattr(staged_image, "only_private", lambda: bounces)
    data = os.urandom(2 * PIECE_BYTES + 5 * PAGE)
    with Segment.create("test", len(data)) as segment, ThreadPoolExecutor(2) as pool:
        segment.view[:] = data
        _, direct = _write(LocalFile(str(tmp_path / "file"), True), pool, segment.view, [0, len(data)], _whole)
    assert (tmp_path / "file").read_bytes() == data
    assert max(written) == (BUFFER_BYTES if bounces and direct else PIECE_BYTES)


def test_a_failed_piece_fails_the_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = LocalFile.write

    def write(self: LocalFile, data: memoryview, offset: int) -> None:
        if offset:
            with translated("writing", self.path):
                raise OSError(errno.EIO, "Input/output error")
        real(self, data, offset)

    monkeypatch.setattr(LocalFile, "write", write)
    with Segment.create("test", 3 * PIECE_BYTES) as segment, ThreadPoolExecutor(2) as pool:
        bounds = spans([], segment.nbytes)
        with pytest.raises(StorageError):
            _write(LocalFile(str(tmp_path / "file"), True), pool, segment.view, bounds, _whole)


@pytest.mark.parametrize("direct", [True, False])
def test_a_save_leaves_no_page_cache(root: Path, direct: bool) -> None:
    import mmap

    with Checkpointer(root, Config(direct_io=direct)) as checkpointer:
        path = Path(checkpointer.save(1, {**small_state(), "large": torch.ones(4 << 20)}).result(60), "__0_0.distcp")
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ) as mapped:
        import ctypes

        pages = -(-len(mapped) // PAGE)
        residency = (ctypes.c_ubyte * pages)()
        libc = ctypes.CDLL(None, use_errno=True)
        address = libc.mmap
        address.restype = ctypes.c_void_p
        where = address(None, ctypes.c_size_t(len(mapped)), mmap.PROT_READ, mmap.MAP_SHARED, file.fileno(), 0)
        assert libc.mincore(ctypes.c_void_p(where), ctypes.c_size_t(len(mapped)), residency) == 0
        libc.munmap(ctypes.c_void_p(where), ctypes.c_size_t(len(mapped)))
    assert sum(value & 1 for value in residency) < pages / 10
