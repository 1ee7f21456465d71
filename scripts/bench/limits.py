"""What nothing can beat: copying the bytes once, and moving them past the page cache, as fast as this machine can."""

from __future__ import annotations

import ctypes
import mmap
import os
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from types import TracebackType

import torch

from asyncckpt.shm.segment import PAGE, Segment
from asyncckpt.spans import READ_THREADS, RUN_BYTES
from asyncckpt.worker.storage import OutputFile

WRITE_THREADS = 2
WRITE_BYTES = 16 << 20


class WriteLimit:
    """A direct write of so many bytes into a new file, until they are on storage."""

    def __init__(self, nbytes: int, folder: str) -> None:
        """The bytes are in shared memory, touched."""
        self._path = f"{folder}/limit"
        self.segment = Segment.create("asyncckpt-bench", nbytes)
        self.segment.touch()
        self.segment.view[:PAGE] = os.urandom(PAGE)
        self._nbytes = max(PAGE, nbytes // PAGE * PAGE)

    def direct_write(self) -> float:
        """In large pieces, by a few threads."""
        with self.segment.view[: self._nbytes] as view:
            begun = time.perf_counter()
            file = OutputFile(self._path, direct=True)

            def write(offset: int) -> None:
                with view[offset : offset + WRITE_BYTES] as piece:
                    file.write(piece, offset)

            with ThreadPoolExecutor(WRITE_THREADS) as pool:
                list(pool.map(write, range(0, self._nbytes, WRITE_BYTES)))
            file.sync()
            file.close()
            elapsed = time.perf_counter() - begun
        os.unlink(self._path)
        return elapsed

    def close(self) -> None:
        self.segment.close()


class Limits:
    """With memory of its own, all of it touched; the methods return seconds."""

    def __init__(self, nbytes: int, folder: str, device: str = "cpu") -> None:
        self._nbytes = nbytes
        self._source = torch.ones(nbytes, dtype=torch.uint8)
        self._written = WriteLimit(nbytes, folder)
        self._target = torch.frombuffer(self._written.segment.view, dtype=torch.uint8, count=nbytes)
        self._on_device: tuple[torch.Tensor, torch.Tensor] | None = None
        if device.startswith("cuda"):
            pinned = torch.empty(nbytes, dtype=torch.uint8, pin_memory=True)
            self._on_device = self._source.to(device), pinned

    def of_copies(self) -> dict[str, Callable[[], float]]:
        """Of copying the bytes once, by name."""
        found = {"memcpy": self.memcpy, "memcpy, all cores": self.memcpy_all_cores}
        return found | ({"pinned copy": self.pinned_copy} if self._on_device else {})

    def of_saves(self) -> dict[str, Callable[[], float]]:
        """Of these and a write."""
        return self.of_copies() | {"direct write": self._written.direct_write}

    def memcpy(self) -> float:
        """By one thread, into shared memory that is in use."""
        begun = time.perf_counter()
        ctypes.memmove(self._target.data_ptr(), self._source.data_ptr(), self._nbytes)
        return time.perf_counter() - begun

    def memcpy_all_cores(self) -> float:
        """By torch, with a thread for each core."""
        threads = torch.get_num_threads()
        torch.set_num_threads(len(os.sched_getaffinity(0)))
        begun = time.perf_counter()
        self._target.copy_(self._source)
        elapsed = time.perf_counter() - begun
        torch.set_num_threads(threads)
        return elapsed

    def pinned_copy(self) -> float:
        """From the device into pinned memory."""
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
        self._written.close()

    def __enter__(self) -> Limits:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


class ReadLimit:
    """A direct read of a file, into buffers that are used again."""

    def __init__(self, path: str) -> None:
        self._path = path
        self._buffers = [mmap.mmap(-1, RUN_BYTES) for _ in range(READ_THREADS)]

    def direct_read(self) -> float:
        begun = time.perf_counter()
        fd = os.open(self._path, os.O_RDONLY | os.O_DIRECT)
        offsets = range(0, os.fstat(fd).st_size, RUN_BYTES)

        def read(number: int) -> None:
            for offset in offsets[number::READ_THREADS]:
                os.preadv(fd, [self._buffers[number]], offset)

        with ThreadPoolExecutor(READ_THREADS) as pool:
            list(pool.map(read, range(READ_THREADS)))
        os.close(fd)
        return time.perf_counter() - begun

    def close(self) -> None:
        for buffer in self._buffers:
            buffer.close()
