"""From the image in a slot to a file: large aligned direct writes, and a checksum of every span on the way.

Nothing here knows tensors. A few threads keep the disk busy while another checksums the same bytes.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_EXCEPTION, Future, ThreadPoolExecutor, wait
from typing import Any

import xxhash

from asyncckpt.shm.huge import only_private, own_buffer
from asyncckpt.shm.memcpy import address_of, memcpy
from asyncckpt.shm.segment import round_up
from asyncckpt.worker.manifest import checksum
from asyncckpt.worker.storage.storage import OutputFile

# Measured: a direct write reaches the disk's speed at 4 MiB a piece, two at a time; 16 MiB leaves Python out of it.
PIECE_BYTES = 16 << 20
BUFFER_BYTES = 4 << 20


class ImageFile:
    """A new file that an image is written to by the threads of a pool, as far as it is final.

    A context manager: when it is left no thread looks at the image any more, and the file is closed.
    """

    def __init__(self, file: OutputFile, pool: ThreadPoolExecutor, image: memoryview) -> None:
        """``image`` begins on a page and is whole pages; ``file`` is this object's from now on."""
        self._file, self._pool, self._image = file, pool, image
        self._pieces: list[Future[None]] = []
        self._begin = self._good = 0

    def advance(self, end: int) -> None:
        """The image is final up to ``end``, in bytes: write all whole pieces of that.

        Raises ``StorageError`` if an earlier piece could not be written.
        """
        while self._good < len(self._pieces) and self._pieces[self._good].done():
            self._pieces[self._good].result()
            self._good += 1
        while self._begin + PIECE_BYTES <= end:
            self._submit(self._begin + PIECE_BYTES)

    def finish(self, nbytes: int | None = None) -> bool:
        """Write what is left of the image, or of its first ``nbytes``, and sync it. Raises ``StorageError``.

        Returns whether the page cache was bypassed.
        """
        end = len(self._image) if nbytes is None else round_up(nbytes)
        self.advance(end)
        if self._begin < end:
            self._submit(end)
        done, _ = wait(self._pieces, return_when=FIRST_EXCEPTION)
        for piece in done:
            piece.result()
        if nbytes is not None:
            self._file.truncate(nbytes)
        self._file.sync()
        return self._file.direct

    def __enter__(self) -> ImageFile:
        return self

    def __exit__(self, *_: object) -> None:
        for piece in self._pieces:
            piece.cancel()
        wait(self._pieces)
        self._file.close()

    def _submit(self, end: int) -> None:
        self._pieces.append(self._pool.submit(self._write, self._begin, end))
        self._begin = end

    def _write(self, begin: int, end: int) -> None:
        if not (self._file.direct and only_private()):
            self._file.write(self._image[begin:end], begin)
            return
        # Through a buffer on huge pages: a copy costs less than direct writes from small pages do.
        buffer = own_buffer(BUFFER_BYTES)
        for at in range(begin, end, BUFFER_BYTES):
            nbytes = min(BUFFER_BYTES, end - at)
            memcpy(address_of(buffer), address_of(self._image[at:end]), nbytes)
            self._file.write(buffer[:nbytes], at)


def write_image(
    file: OutputFile,
    pool: ThreadPoolExecutor,
    image: memoryview,
    bounds: Sequence[int],
    wait_beyond: Callable[[int, int], int],
) -> tuple[array[int], bool]:
    """Write an image to a new file, sync and close it.

    Args:
        file: The file, created for large writes.
        pool: The threads that write.
        image: Begins on a page and is whole pages.
        bounds: The boundaries of its spans, from 0 to its length, in bytes.
        wait_beyond: ``wait_beyond(nbytes, whole)`` waits until more than ``nbytes`` of the ``whole`` are there, and
            returns how many. From then on those stay as they are until this function returns.

    Returns:
        The checksums of the spans, and whether the page cache was bypassed.

    Raises:
        StorageError: A write failed. What ``wait_beyond`` raises is raised too.
    """
    checksums = array("Q", bytes(8 * (len(bounds) - 1)))
    with ImageFile(file, pool, image) as output:
        there = 0
        while there < len(image):
            there = wait_beyond(there, len(image))
            output.advance(there)
        # Meanwhile, on this thread: checksums are ten times as fast as the disk. Not while the trainer copies: it needs
        # the memory and the cores for that.
        for span, (begin, end) in enumerate(zip(bounds[:-1], bounds[1:], strict=True)):
            checksums[span] = checksum(image[begin:end])
        direct = output.finish()
    return checksums, direct


def write_small(file: OutputFile, *parts: bytes | memoryview) -> dict[str, Any]:
    """Write ``parts`` one after the other to a new file, sync and close it. Returns its entry for the manifest."""
    digest = xxhash.xxh3_64()
    nbytes = 0
    try:
        for part in parts:
            file.write(memoryview(part), nbytes)
            digest.update(part)
            nbytes += len(part)
        file.sync()
    finally:
        file.close()
    return {"bytes": nbytes, "xxh3": digest.hexdigest()}
