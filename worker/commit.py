"""All or nothing: from a slot, as it fills, to a published checkpoint.

In this order, each step durable before the next: on every rank the data file and its index; then on the first DCP's
``.metadata``, the manifest, the folder they stand in, the rename to the final name, the folder above. So whatever has
its final name is complete.

That rename decides. Who has to know how a save ends, and is not told in time, does not guess but ``settle``s it: by
another rename, which takes the attempt away. One of the two comes first, and that is how it ends for all.
"""

from __future__ import annotations

import contextlib
import json
import os
import threading
import time
from array import array
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from concurrent.futures import TimeoutError as FutureTimeoutError
from dataclasses import dataclass
from typing import Any

from asyncckpt.errors import CheckpointError, SaveTimeoutError, StorageError
from asyncckpt.shm.segment import Segment
from asyncckpt.worker.arrival import Arrival
from asyncckpt.worker.manifest import MANIFEST_NAME, METADATA_NAME, Index, Manifest, index_name
from asyncckpt.worker.messages import Layout, Order, Region
from asyncckpt.worker.storage import LocalStorage, disjoin, remove, sync_folder, translated, withdraw
from asyncckpt.worker.writer import write_image, write_small

# How long an attempt that nobody holds is left alone: it may have been made just now, and not be locked yet.
ORPHAN_S = 60.0


@dataclass
class Attempt:
    """One order being carried out: ``write``, ``seal``, then, when all ranks have, ``commit`` on the first."""

    storage: LocalStorage
    arrival: Arrival
    layout: Layout
    segment: Segment

    def __post_init__(self) -> None:
        self.order = self.arrival.order
        self.direct = False
        self.timings: dict[str, float] = {}
        self._folder = ""
        self.written_at = 0.0

    def write(self, pool: ThreadPoolExecutor) -> array[int]:
        """Write the slot's image, as it arrives, to the attempt's folder, durably; then the slot may be used again.

        Returns the checksums of its spans. Raises ``StorageError``, or why the image does not arrive.
        """
        layout, order = self.layout, self.order
        image = self.segment.view[(start := layout.slots[order.slot]) : start + layout.data_bytes]
        bounds = self._region(layout.spans).cast("Q")
        total = layout.data_bytes + layout.metadata.nbytes + layout.index_head.nbytes + layout.spans.nbytes
        # Where there are other hosts, their locks may not be seen here; but no attempt outlives its timeout.
        orphan_s = None if order.rank > 0 else order.timeout if order.world_size > 1 else ORPHAN_S
        self._folder = self.storage.begin(order.path, order.attempt, total, orphan_s)
        path = self._path(layout.data_name)
        begun = 0.0

        def wait_beyond(nbytes: int, whole: int) -> int:
            nonlocal begun
            arrived = self.arrival.wait_beyond(nbytes, whole)
            begun = begun or time.perf_counter()  # when there is something to write
            return arrived

        checksums, self.direct = write_image(self.storage, pool, path, image, bounds, wait_beyond)
        self._index_tail = Index.tail(checksums)
        self.timings["write_s"] = time.perf_counter() - begun
        return checksums

    def seal(self) -> bytes:
        """Write what says what was written. Returns this rank's report, for ``commit``. Raises ``StorageError``."""
        layout = self.layout
        index = index_name(layout.data_name)
        files: dict[str, Any] = {
            layout.data_name: {"bytes": layout.data_bytes, "xxh3": None},
            index: write_small(self.storage, self._path(index), self._region(layout.index_head), self._index_tail),
        }
        if self.order.rank == 0:
            metadata = self._region(layout.metadata)
            files[METADATA_NAME] = write_small(self.storage, self._path(METADATA_NAME), metadata)
        self.written_at = time.perf_counter()
        return json.dumps({"files": files, "write_s": round(self.timings["write_s"], 6)}).encode()

    def commit(self, reports: Sequence[dict[str, Any]]) -> None:
        """First rank: publish what all ranks have reported, in their order.

        Raises ``StorageError`` or ``CheckpointExistsError``.
        """
        order = self.order
        files = {name: facts for report in reports for name, facts in report["files"].items()}
        timings = {**self.arrival.timings, **self.timings, "slowest_write_s": max(each["write_s"] for each in reports)}
        manifest = Manifest(
            attempt=order.attempt,
            step=order.step,
            created=time.time(),
            world_size=len(reports),
            keep=order.keep,
            nbytes=sum(facts["bytes"] for facts in files.values()),
            files=files,
            timings={name: round(value, 6) for name, value in timings.items()},
        )
        write_small(self.storage, self._path(MANIFEST_NAME), manifest.encode())
        self._check_complete(reports)
        self.storage.publish(self._folder, order.path, existing=order.existing)

    def release(self) -> None:
        """It is published: let go of it."""
        self.storage.release(self._folder)

    def discard(self) -> None:
        """Remove what the attempt has written: all of it on the first rank, else what is this rank's.

        Only the first rank publishes, so only it can be sure that what it removes has not been published meanwhile.
        The others name their files by the path of the attempt, where nothing stands any more once it is published.
        """
        if self._folder:
            data = self.layout.data_name
            self.storage.discard(self._folder, None if self.order.rank == 0 else [data, index_name(data)])

    def _check_complete(self, reports: Sequence[dict[str, Any]]) -> None:
        """That all ranks have written into the same folder is for the job to arrange: a shared file system."""
        with translated("listing", self._folder):
            present = set(os.listdir(self._folder))
        for rank, report in enumerate(reports):
            missing = report["files"].keys() - present
            if missing:
                raise StorageError(
                    f"rank {rank} has written {sorted(missing)[0]}, and rank 0 does not see it here: all ranks must"
                    " save to the same path, on a file system that all nodes share",
                    path=self._folder,
                    rank=rank,
                )

    def _path(self, name: str) -> str:
        return os.path.join(self._folder, name)

    def _region(self, region: Region) -> memoryview:
        return self.segment.view[region.offset : region.offset + region.nbytes]


def published(path: str, attempt: str, inode: int | None = None) -> bool:
    """Whether what is at ``path`` is of that ``attempt``; a single file is known by the ``inode`` it was written to."""
    name = os.path.join(path, MANIFEST_NAME)
    try:
        if inode is not None:
            return os.stat(path).st_ino == inode
        with open(name, "rb") as file:
            return Manifest.parse(file.read(), name).attempt == attempt
    except (OSError, CheckpointError):
        return False


def settle(order: Order, timeout: float, inode: int | None = None) -> bool:
    """Whether a save is published; if it is not, it never will be.

    For a rank that has written its part and cannot learn the outcome, or whose part nobody is writing any more, because
    its worker is dead. Raises ``SaveTimeoutError`` where storage does not answer within ``timeout`` seconds: then, and
    only then, nobody can say.
    """
    outcome: Future[bool] = Future()

    def decide() -> None:
        try:
            trash = withdraw(order.path, order.attempt)
        except OSError as error:
            outcome.set_exception(error)
            return
        # In this order: what was being replaced by it, or joined, may be what has just been taken away.
        is_published = published(order.path, order.attempt, inode)
        if is_published:
            with contextlib.suppress(OSError):
                sync_folder(os.path.dirname(order.path))  # whoever published it may have died before
        elif trash is not None and order.existing == "join":
            with contextlib.suppress(OSError):
                disjoin(trash, order.path)
        outcome.set_result(is_published)
        if trash is not None:
            remove(trash)

    begun = time.monotonic()
    thread = threading.Thread(target=decide, name="asyncckpt-settle", daemon=True)
    thread.start()
    try:
        is_published = outcome.result(timeout)
    except (FutureTimeoutError, OSError) as error:
        why = f"has not answered for {timeout:g} s" if isinstance(error, FutureTimeoutError) else f"fails ({error})"
        raise SaveTimeoutError(
            f"storage {why}, and nobody can say whether this was saved",
            path=order.path,
            rank=order.rank,
            step=order.step,
        ) from error
    thread.join(max(0.0, begun + timeout - time.monotonic()))  # so that what was taken away takes no more space
    return is_published
