"""All or nothing: from a slot, as it fills, to a committed checkpoint or a single file.

A checkpoint in this order, each step durable before the next: on every rank its data files and their indexes, and on
the first DCP's ``.metadata``; then there the manifest, and the final name. A single file: its bytes, then the name. So
whatever has its final name is complete. ``committer.py`` decides when that name is given, storage how.
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from array import array
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

from asyncckpt.format import archive
from asyncckpt.format.segment_layout import (
    CheckpointLayout,
    FileSetLayout,
    Region,
    TorchFileLayout,
)
from asyncckpt.format.timings import note
from asyncckpt.storage.storage import OpenAttempt
from asyncckpt.worker.staged_image import ImageFile, StagedImage, UnwrittenFile


@dataclass
class Attempt(ABC):
    """One write request being carried out: ``write``, ``seal``, then, when all ranks have, ``commit`` on the first;
    at the end ``release`` or ``discard`` on all.

    ``opened`` is the attempt on storage. ``direct``: whether the page cache was bypassed; ``timings``: the image's;
    ``written_at``: when it was durable, as ``time.perf_counter`` says.
    """

    opened: OpenAttempt
    staged_image: StagedImage
    layout: CheckpointLayout | FileSetLayout | TorchFileLayout

    def __post_init__(self) -> None:
        self.request = self.staged_image.request
        self.region = self.staged_image.hosted.region
        self.direct = False
        self.timings = self.staged_image.timings
        self.written_at = 0.0
        self.begun: float | None = None  # where there is nothing to write, never

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

    def image(self, begin: int, nbytes: int) -> memoryview:
        """Some of what stands in the slot."""
        return self.region(Region(self.layout.slots[self.request.slot] + begin, nbytes))

    def wait_beyond(self, nbytes: int) -> int:
        """As ``StagedImage.wait_beyond``; when something has arrived, writing begins."""
        arrived = self.staged_image.wait_beyond(nbytes, self.layout.data_bytes)
        self.begun = self.begun or time.perf_counter()
        return arrived

    def complete_archive(
        self, image: memoryview, begin: int, sizes: Region, pickle_bytes: int, file: ImageFile | UnwrittenFile
    ) -> tuple[int, list[int]]:
        """Complete an archive in the slot as it arrives, and write it as far as it goes.

        Args:
            image: Where it stands.
            begin: Where that is in the slot, in bytes.
            sizes: As of ``ArchiveData``.
            pickle_bytes: How long its pickle is.
            file: What it goes to.

        Returns:
            Its length, and where its records begin, in bytes.
        """
        arrived = 0

        def wait_for(end: int) -> None:
            nonlocal arrived
            while arrived < begin + end:
                arrived = self.wait_beyond(arrived)

        alignment, room, *each = self.region(sizes).cast("Q")
        end = archive.complete(image, alignment, room, each, pickle_bytes, wait_for, file.advance)
        return end, [record.at for record in archive.lay_out(alignment, room, *each)]


@dataclass
class FileAttempt(Attempt):
    """An attempt at a single file, an archive that ``torch.load`` reads."""

    layout: TorchFileLayout

    def write(self, pool: ThreadPoolExecutor) -> array[int]:
        """The archive is completed in the slot. Returns no checksums: nobody loads it from memory."""
        image = self.image(0, self.layout.data_bytes)
        is_huge = self.staged_image.hosted.is_huge
        with ImageFile(self.opened.create("", large=True), pool, image, is_huge) as file:
            self.staged_image.inode = self.opened.inode
            end, _ = self.complete_archive(image, 0, self.layout.sizes, self.request.pickle_bytes[0], file)
            file.finish(end)
            begun = time.perf_counter()
            self.direct = file.sync()
            note(self.timings, "sync", begun, self.request.called_at)
        note(self.timings, "write", self.begun or time.perf_counter(), self.request.called_at)
        return array("Q")

    def seal(self) -> bytes:
        """The file says all there is to say of it: there is nothing to report."""
        return b"{}"

    def commit(self, reports: Sequence[dict[str, Any]]) -> None:
        self.opened.finalize(self.request.existing)
