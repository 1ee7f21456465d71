"""All or nothing: from a slot, as it fills, to a committed checkpoint or a single file.

A checkpoint in this order, each step durable before the next: on every rank its data files and their indexes; then on
the first rank DCP's ``.metadata``, the manifest, and the final name. A single file: its bytes, then the name. So
whatever has its final name is complete. ``committer.py`` decides when that name is given, storage how.
"""

from __future__ import annotations

import contextlib
import json
import os
import time
from abc import ABC, abstractmethod
from array import array
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import xxhash

from asyncckpt.errors import CheckpointError, StorageError, StructureChangedError
from asyncckpt.worker import archive
from asyncckpt.worker.manifest import MANIFEST_NAME, METADATA_NAME, Index, Manifest, index_name, storage_meta
from asyncckpt.worker.rounds import Call, check_same_call
from asyncckpt.worker.segment_layout import CheckpointLayout, Region, TorchFileLayout
from asyncckpt.worker.staged_image import ImageFile, StagedImage, write_image
from asyncckpt.worker.storage.history import time_of_creation
from asyncckpt.worker.storage.storage import OpenAttempt, Storage

# How long an attempt that nobody holds is left alone: it may have been made just now, and not be locked yet.
_ORPHAN_S = 60.0


def begin_attempt(storage: Storage, staged_image: StagedImage) -> Attempt:
    """Open on ``storage`` what a write request asks for, whether all of the image is there or not.

    Raises ``StorageError`` when there is too little space, and ``CheckpointError`` when the segment is no checkpoint's
    and no file's.
    """
    request, layout = staged_image.request, staged_image.hosted.layout
    match layout:
        case TorchFileLayout():
            file = storage.begin_file(request.path, request.attempt, layout.data_bytes, _ORPHAN_S)
            return FileAttempt(file, staged_image, layout)
        case CheckpointLayout():
            total = layout.data_bytes + sum(region.nbytes for region in layout.constants())
            # Where there are other hosts, their locks may not be seen here; but no attempt outlives its timeout.
            orphan_s = None if request.rank > 0 else request.timeout if request.world_size > 1 else _ORPHAN_S
            folder = storage.begin_checkpoint(request.path, request.attempt, total, orphan_s)
            return CheckpointAttempt(folder, staged_image, layout)
        case _:
            raise CheckpointError("the trainer never described this segment as a checkpoint's")


@dataclass
class Attempt(ABC):
    """One write request being carried out: ``write``, ``seal``, then, when all ranks have, ``commit`` on the first;
    at the end ``release`` or ``discard`` on all.

    ``opened`` is the attempt on storage. ``direct``: whether the page cache was bypassed; ``timings`` in seconds;
    ``written_at``: when it was durable, as ``time.perf_counter`` says.
    """

    opened: OpenAttempt
    staged_image: StagedImage
    layout: CheckpointLayout | TorchFileLayout

    def __post_init__(self) -> None:
        self.request = self.staged_image.request
        self._region = self.staged_image.hosted.region
        self.direct = False
        self.timings: dict[str, float] = {}
        self.written_at = 0.0

    @abstractmethod
    def write(self, pool: ThreadPoolExecutor) -> array[int]:
        """Write the slot's image durably, on the threads of ``pool``; then the slot may be used again.

        Returns the checksums of its spans. Raises ``StorageError``, or why the image does not arrive.
        """

    @abstractmethod
    def seal(self) -> bytes:
        """Write what says what was written. Returns this rank's report, for ``commit``. Raises ``StorageError``."""

    @abstractmethod
    def commit(self, reports: Sequence[dict[str, Any]]) -> None:
        """First rank: finalize what all ranks have reported; ``reports`` are in their order.

        Raises ``StorageError`` or ``CheckpointExistsError``.
        """

    def release(self) -> None:
        """The save is committed: stop holding the attempt."""
        self.opened.release()

    def discard(self) -> None:
        """Remove what the attempt has written, and stop holding it."""
        self.opened.discard()

    def _image(self) -> memoryview:
        return self._region(Region(self.layout.slots[self.request.slot], self.layout.data_bytes))


@dataclass
class CheckpointAttempt(Attempt):
    """An attempt at one rank's part of a checkpoint."""

    layout: CheckpointLayout

    def write(self, pool: ThreadPoolExecutor) -> array[int]:
        """The image is written as it arrives."""
        begun: float | None = None  # where there is nothing to write, never
        begin = 0  # of the file that is being written

        def wait_beyond(nbytes: int, whole: int) -> int:
            nonlocal begun
            arrived = self.staged_image.wait_beyond(begin + nbytes, layout.data_bytes)
            begun = begun or time.perf_counter()
            return min(arrived - begin, whole)

        layout, checksums = self.layout, array("Q")
        self._index_tails: list[bytes] = []
        for each in layout.data_files:
            begin = each.begin
            image, bounds = self._region(layout.data(self.request.slot, each)), self._region(each.spans).cast("Q")
            file = self.opened.create(each.name(self.request.rank), large=True)
            its, is_direct = write_image(file, pool, image, bounds, wait_beyond)
            self.direct = is_direct and (self.direct or not begin)
            self._index_tails.append(Index.tail(its))
            checksums += its
        self.timings["write_s"] = 0.0 if begun is None else time.perf_counter() - begun
        return checksums

    def seal(self) -> bytes:
        layout = self.layout
        files: dict[str, Any] = {}
        for each, tail in zip(layout.data_files, self._index_tails, strict=True):
            data = each.name(self.request.rank)
            files[data] = {"bytes": each.nbytes, "xxh3": None}
            index = index_name(data)
            files[index] = self._write_small(index, self._region(each.index_head), tail)
        if self.request.rank == 0:
            tail = storage_meta(self.request.path, self.request.attempt)
            files[METADATA_NAME] = self._write_small(METADATA_NAME, self._region(layout.metadata)[:-1], tail)
        call = Call.of_save(self.request.step, self.request.path)
        report = {"files": files, "write_s": round(self.timings["write_s"], 6), "plan": self.request.plan, "call": call}
        return json.dumps(report).encode()

    def commit(self, reports: Sequence[dict[str, Any]]) -> None:
        request = self.request
        check_same_call([Call(*report["call"]) for report in reports])  # with constant structure nobody has asked
        self._check_plans(reports)
        files = {name: facts for report in reports for name, facts in report["files"].items()}
        slowest = {"slowest_write_s": max(each["write_s"] for each in reports)}
        timings = {**self.staged_image.timings, **self.timings, **slowest}
        manifest = Manifest(
            attempt=request.attempt,
            step=request.step,
            created=time.time() if request.step is None else time_of_creation(os.path.dirname(request.path)),
            world_size=len(reports),
            keep=request.keep,
            nbytes=sum(facts["bytes"] for facts in files.values()),
            files=files,
            timings={name: round(value, 6) for name, value in timings.items()},
        )
        self._write_small(MANIFEST_NAME, manifest.encode())
        self._check_complete(reports)
        self.opened.finalize(request.existing)

    def discard(self) -> None:
        """All of it on the first rank, else this rank's files.

        Only the first rank finalizes, so only it can be sure that what it removes has not been finalized meanwhile. The
        others' files are named by the path of the attempt, where nothing stands any more once it is finalized.
        """
        data = [each.name(self.request.rank) for each in self.layout.data_files]
        self.opened.discard(None if self.request.rank == 0 else [*data, *map(index_name, data)])

    def _write_small(self, name: str, *parts: bytes | memoryview) -> dict[str, Any]:
        """Write ``parts`` one after the other to a new file, durably. Returns its entry for the manifest."""
        digest = xxhash.xxh3_64()
        nbytes = 0
        with contextlib.closing(self.opened.create(name, large=False)) as file:
            for part in parts:
                file.write(memoryview(part), nbytes)
                digest.update(part)
                nbytes += len(part)
            file.sync()
        return {"bytes": nbytes, "xxh3": digest.hexdigest()}

    def _check_plans(self, reports: Sequence[dict[str, Any]]) -> None:
        """That the parts of all ranks are of one structure: with constant structure no rank has asked another."""
        for rank, report in enumerate(reports):
            if report["plan"] != self.request.plan:
                raise StructureChangedError(
                    f"rank {rank} has saved a state of another structure (other names, for one) than rank 0, and"
                    " assume_constant_structure was promised; save the same on all ranks, or do not promise that",
                    rank=rank,
                )

    def _check_complete(self, reports: Sequence[dict[str, Any]]) -> None:
        """That all ranks have written into the same folder is for the job to arrange: a shared file system."""
        present = self.opened.names()
        for rank, report in enumerate(reports):
            missing = report["files"].keys() - present
            if missing:
                raise StorageError(
                    f"rank {rank} has written {sorted(missing)[0]}, and rank 0 does not see it here: all ranks must"
                    " save to the same path, on a file system that all nodes share",
                    path=self.opened.path,
                    rank=rank,
                )


@dataclass
class FileAttempt(Attempt):
    """An attempt at a single file, an archive that ``torch.load`` reads."""

    layout: TorchFileLayout

    def write(self, pool: ThreadPoolExecutor) -> array[int]:
        """The archive is completed in the slot first. Returns no checksums: nobody loads it from memory."""
        begun = time.perf_counter()
        alignment, room, *sizes = self._region(self.layout.sizes).cast("Q")
        image = self._image()
        with ImageFile(self.opened.create("", large=True), pool, image) as file:
            self.staged_image.inode = self.opened.inode
            end = archive.complete(image, alignment, room, sizes, self.request.pickle_bytes, file.advance)
            self.direct = file.finish(end)
        self.timings["write_s"] = time.perf_counter() - begun
        return array("Q")

    def seal(self) -> bytes:
        """The file says all there is to say of it: there is nothing to report."""
        return b"{}"

    def commit(self, reports: Sequence[dict[str, Any]]) -> None:
        self.opened.finalize(self.request.existing)
