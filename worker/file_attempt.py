"""A single file, whole or not at all: from a staged slot to a file that has its name.

It is written beside its final place under a hidden name, synced, then renamed, and the folder synced: so whatever has
the final name is whole and durable, and what had it before is there until then.
"""

from __future__ import annotations

import time
from array import array
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

from asyncckpt.shm.segment import Segment
from asyncckpt.worker import archive
from asyncckpt.worker.arrival import Arrival
from asyncckpt.worker.commit import ORPHAN_S
from asyncckpt.worker.messages import FileLayout
from asyncckpt.worker.storage import LocalStorage
from asyncckpt.worker.writer import ImageFile


@dataclass
class FileAttempt:
    """One order for a file being carried out, step by step as an ``Attempt`` at a checkpoint is."""

    storage: LocalStorage
    arrival: Arrival
    layout: FileLayout
    segment: Segment

    def __post_init__(self) -> None:
        self.order = self.arrival.order
        self.direct = False
        self.timings: dict[str, float] = {}
        self._path = ""
        self.written_at = 0.0

    def write(self, pool: ThreadPoolExecutor) -> array[int]:
        """Complete the archive in the slot and write it, durably; then the slot may be used again.

        Returns no checksums: nobody loads it from memory. Raises ``StorageError``.
        """
        begun = time.perf_counter()
        layout, order = self.layout, self.order
        image = self.segment.view[(start := layout.slots[order.slot]) : start + layout.data_bytes]
        constants = self.segment.view[layout.sizes.offset : layout.sizes.offset + layout.sizes.nbytes]
        alignment, room, *sizes = constants.cast("Q")
        path = self.storage.begin_file(order.path, order.attempt, layout.data_bytes, ORPHAN_S)
        with ImageFile(self.storage, pool, path, image) as file:
            self._path = path
            self.arrival.inode = self.storage.hold(path)
            end = archive.complete(image, alignment, room, sizes, order.pickle_bytes, file.advance)
            self.direct = file.finish(end)
        self.timings["write_s"] = time.perf_counter() - begun
        return array("Q")

    def seal(self) -> bytes:
        """The file says all there is to say of it: there is nothing to report."""
        self.written_at = time.perf_counter()
        return b"{}"

    def commit(self, reports: Sequence[dict[str, Any]]) -> None:
        """Give the file its name. Raises ``StorageError``."""
        self.storage.publish_file(self._path, self.order.path)

    def release(self) -> None:
        """It is published: let go of it."""
        self.storage.release(self._path)

    def discard(self) -> None:
        """Remove what the attempt has written."""
        if self._path:
            self.storage.discard_file(self._path)
