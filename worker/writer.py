"""From the image in a slot to a file: large aligned direct writes, and a checksum of every span on the way.

Nothing here knows tensors. The pieces of a file are written and checksummed by the same few threads, so that a disk
that takes 3 GB/s and a core that checksums 30 GB/s wait for each other as little as can be.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from concurrent.futures import FIRST_EXCEPTION, Future, ThreadPoolExecutor, wait
from typing import Any

import xxhash

from asyncckpt.worker.manifest import checksum
from asyncckpt.worker.storage import LocalStorage

# Measured: a direct write reaches the disk's speed at 4 MiB a piece, two at a time; 16 MiB leaves Python out of it.
PIECE_BYTES = 16 << 20


def write_image(
    storage: LocalStorage, pool: ThreadPoolExecutor, path: str, image: memoryview, bounds: Sequence[int]
) -> tuple[array[int], bool]:
    """Write ``image`` to the new file ``path`` and sync it.

    ``image`` must stay as it is until this returns; it begins on a page and is whole pages. Returns the checksums of the
    spans between ``bounds``, and whether the page cache was bypassed. Raises ``StorageError``.
    """
    checksums = array("Q", bytes(8 * (len(bounds) - 1)))
    file = storage.create(path, large=True)
    try:
        tasks: list[Future[None]] = []
        first = 0
        for begin in range(0, len(image), PIECE_BYTES):
            end = min(begin + PIECE_BYTES, len(image))
            tasks.append(pool.submit(file.write, image[begin:end], begin))
            # The spans that begin in this piece, which by then is warm in the cache.
            last = first
            while last < len(checksums) and bounds[last] < end:
                last += 1
            tasks.append(pool.submit(_checksum_spans, image, bounds, checksums, first, last))
            first = last
        _gather(tasks)
        file.sync()
    finally:
        file.close()
    return checksums, file.direct


def write_small(storage: LocalStorage, path: str, *parts: bytes | memoryview) -> dict[str, Any]:
    """Write ``parts``, one after the other, to the new file ``path`` and sync it. Returns its entry for the manifest."""
    digest = xxhash.xxh3_64()
    nbytes = 0
    file = storage.create(path, large=False)
    try:
        for part in parts:
            file.write(memoryview(part), nbytes)
            digest.update(part)
            nbytes += len(part)
        file.sync()
    finally:
        file.close()
    return {"bytes": nbytes, "xxh3": digest.hexdigest()}


def _checksum_spans(
    image: memoryview, bounds: Sequence[int], checksums: array[int], first: int, last: int
) -> None:
    for span in range(first, last):
        checksums[span] = checksum(image[bounds[span] : bounds[span + 1]])


def _gather(tasks: list[Future[None]]) -> None:
    """Wait for all ``tasks``, or until one fails; then no other is left running, and its error is raised."""
    done, pending = wait(tasks, return_when=FIRST_EXCEPTION)
    for task in pending:
        task.cancel()
    wait(pending)
    for task in done:
        task.result()
