"""All or nothing: from a staged slot to a published checkpoint.

In this order, each step durable before the next: the data file, its index, DCP's ``.metadata``, the manifest, the
folder they stand in, the rename to the final name, the folder above. So whatever has its final name is complete.
"""

from __future__ import annotations

import os
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from asyncckpt.shm.segment import Segment
from asyncckpt.worker.manifest import MANIFEST_NAME, METADATA_NAME, Index, Manifest, index_name
from asyncckpt.worker.messages import Layout, Order, Region
from asyncckpt.worker.storage import LocalStorage
from asyncckpt.worker.writer import write_image, write_small


@dataclass
class Attempt:
    """One order being carried out: first ``write``, after which the slot may be used again, then ``commit``."""

    storage: LocalStorage
    order: Order
    layout: Layout
    segment: Segment
    trainer_timings: dict[str, float]

    def __post_init__(self) -> None:
        self.direct = False
        self.timings: dict[str, float] = {}
        self._folder = ""

    def write(self, pool: ThreadPoolExecutor) -> None:
        """Write the slot's image to the attempt's folder, durably. Raises ``StorageError``."""
        begun = time.perf_counter()
        layout = self.layout
        image = self.segment.view[(start := layout.slots[self.order.slot]) : start + layout.data_bytes]
        bounds = self._region(layout.spans).cast("Q")
        total = layout.data_bytes + layout.metadata.nbytes + layout.index_head.nbytes + layout.spans.nbytes
        self._folder = self.storage.begin(self.order.path, self.order.attempt, total)
        checksums, self.direct = write_image(self.storage, pool, self._path(layout.data_name), image, bounds)
        self._index_tail = Index.tail(checksums)
        self.timings["write_s"] = time.perf_counter() - begun

    def commit(self) -> None:
        """Write what says what was written, and publish. Raises ``StorageError`` or ``CheckpointExistsError``."""
        begun = time.perf_counter()
        layout, order = self.layout, self.order
        index = index_name(layout.data_name)
        head = self._region(layout.index_head)
        files = {
            layout.data_name: {"bytes": layout.data_bytes, "xxh3": None},
            index: write_small(self.storage, self._path(index), head, self._index_tail),
            METADATA_NAME: write_small(self.storage, self._path(METADATA_NAME), self._region(layout.metadata)),
        }
        manifest = Manifest(
            attempt=order.attempt,
            step=order.step,
            created=time.time(),
            nbytes=sum(facts["bytes"] for facts in files.values()),
            files=files,
            timings={name: round(value, 6) for name, value in {**self.trainer_timings, **self.timings}.items()},
        )
        write_small(self.storage, self._path(MANIFEST_NAME), manifest.encode())
        self.storage.publish(self._folder, order.path, overwrite=order.overwrite)
        self.timings["commit_s"] = time.perf_counter() - begun

    def discard(self) -> None:
        """Remove what the attempt has written."""
        if self._folder:
            self.storage.discard(self._folder)

    def _path(self, name: str) -> str:
        return os.path.join(self._folder, name)

    def _region(self, region: Region) -> memoryview:
        return self.segment.view[region.offset : region.offset + region.nbytes]
