"""The limits that contestants are compared to: one copy of the bytes, and direct I/O as fast as this machine can.

The copies use the common ways, ``memcpy`` and torch. A loop of streaming stores would be faster.
"""

from __future__ import annotations

import ctypes
import os
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from types import TracebackType

import torch
import xxhash

from asyncckpt.shm.huge import huge_buffer
from asyncckpt.shm.segment import PAGE, Segment
from asyncckpt.storage.local_file import LocalFile

WRITE_THREADS = 2
# Larger sizes make no disk faster if the buffers are on huge pages.
WRITE_BYTES = 4 << 20
READ_THREADS = 4
READ_BYTES = 2 << 20
DIGEST_BYTES = 8 << 20


class WriteLimit:
    """A direct write of a number of bytes into a new file, until they are on storage."""

    def __init__(self, nbytes: int, folder: str) -> None:
        """Fill the buffers, which are on huge pages. Each write repeats their bytes."""
        self._path = f"{folder}/limit"
        self._buffers = [huge_buffer(WRITE_BYTES) for _ in range(WRITE_THREADS)]
        for buffer in self._buffers:
            buffer[:] = os.urandom(len(buffer))
        self._nbytes = max(PAGE, nbytes // PAGE * PAGE)

    def direct_write(self) -> float:
        """Write in large pieces by a few threads, sync, and return the seconds."""
        begun = time.perf_counter()
        file = LocalFile(self._path, direct=True)

        def write(number: int) -> None:
            for offset in range(number * WRITE_BYTES, self._nbytes, WRITE_THREADS * WRITE_BYTES):
                file.write(self._buffers[number][: self._nbytes - offset], offset)

        with ThreadPoolExecutor(WRITE_THREADS) as pool:
            list(pool.map(write, range(WRITE_THREADS)))
        file.sync()
        file.close()
        elapsed = time.perf_counter() - begun
        os.unlink(self._path)
        return elapsed


class Limits:
    """The limits for a number of bytes, in preallocated and touched memory. The methods return seconds."""

    def __init__(self, nbytes: int, folder: str, device: str = "cpu") -> None:
        self._nbytes = nbytes
        self._source = torch.ones(nbytes, dtype=torch.uint8)
        self._written = WriteLimit(nbytes, folder)
        self._shared = Segment.create("asyncckpt-bench", nbytes)
        self._shared.touch()
        self._target = torch.frombuffer(self._shared.view, dtype=torch.uint8, count=nbytes)
        self._on_device: tuple[torch.Tensor, torch.Tensor] | None = None
        if device.startswith("cuda"):
            pinned = torch.empty(nbytes, dtype=torch.uint8, pin_memory=True)
            self._on_device = self._source.to(device), pinned

    def of_copies(self) -> dict[str, Callable[[], float]]:
        """Return the measurements of one copy of the bytes, by name."""
        found = {"memcpy": self.memcpy, "memcpy, all cores": self.memcpy_all_cores}
        return found | ({"pinned copy": self.pinned_copy} if self._on_device else {})

    def of_saves(self) -> dict[str, Callable[[], float]]:
        """Return the measurements of one copy and of a direct write, by name."""
        return self.of_copies() | {"direct write": self.direct_write}

    def memcpy(self) -> float:
        """Copy by one thread into shared memory that is in use."""
        begun = time.perf_counter()
        ctypes.memmove(self._target.data_ptr(), self._source.data_ptr(), self._nbytes)
        return time.perf_counter() - begun

    def memcpy_all_cores(self) -> float:
        """Copy by torch, with a thread for each core."""
        threads = torch.get_num_threads()
        torch.set_num_threads(len(os.sched_getaffinity(0)))
        begun = time.perf_counter()
        self._target.copy_(self._source)
        elapsed = time.perf_counter() - begun
        torch.set_num_threads(threads)
        return elapsed

    def direct_write(self) -> float:
        """Write past the page cache, until the bytes are on storage."""
        return self._written.direct_write()

    def digests_all_cores(self) -> float:
        """Read the bytes once, and compute a 128-bit XXH3 of each piece, with a thread for each core."""
        view = self._source.numpy().data
        begun = time.perf_counter()
        with ThreadPoolExecutor(len(os.sched_getaffinity(0))) as pool:
            pieces = [view[at : at + DIGEST_BYTES] for at in range(0, self._nbytes, DIGEST_BYTES)]
            list(pool.map(xxhash.xxh3_128_digest, pieces))
        return time.perf_counter() - begun

    def pinned_copy(self) -> float:
        """Copy from the device into pinned memory."""
        if self._on_device is None:
            raise RuntimeError("there is no device")
        source, target = self._on_device
        torch.cuda.synchronize(source.device)
        begun = time.perf_counter()
        target.copy_(source, non_blocking=True)
        torch.cuda.synchronize(source.device)
        return time.perf_counter() - begun

    def close(self) -> None:
        del self._target
        self._shared.close()

    def __enter__(self) -> Limits:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


class ReadLimit:
    """A direct read of a file into reused buffers on huge pages."""

    def __init__(self, path: str) -> None:
        self._path = path
        self._buffers = [huge_buffer(READ_BYTES) for _ in range(READ_THREADS)]

    def direct_read(self) -> float:
        begun = time.perf_counter()
        fd = os.open(self._path, os.O_RDONLY | os.O_DIRECT)
        offsets = range(0, os.fstat(fd).st_size, READ_BYTES)

        def read(number: int) -> None:
            for offset in offsets[number::READ_THREADS]:
                os.preadv(fd, [self._buffers[number]], offset)

        with ThreadPoolExecutor(READ_THREADS) as pool:
            list(pool.map(read, range(READ_THREADS)))
        os.close(fd)
        return time.perf_counter() - begun
