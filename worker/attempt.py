"""Attempts: write a slot, while it is being staged, to a committed checkpoint or a single file. All or nothing.

The parts of a checkpoint become durable in this order: the data files and their indexes on every rank, and DCP's
``.metadata`` on the first rank; then the manifest and the final name, on the first rank. A single file gets its bytes,
then its name. So everything with a final name is complete. ``asyncckpt/protocol/commit.py`` decides when to set the
final name, and the storage decides how.
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
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

import xxhash

from asyncckpt.errors import CheckpointError, StorageError, StructureChangedError
from asyncckpt.format import archive
from asyncckpt.format.index import Index, spans
from asyncckpt.format.manifest import (
    CALLED_AT,
    MANIFEST_NAME,
    METADATA_NAME,
    Manifest,
    checksum,
    checksums_in,
    digest_of,
    index_name,
    merged,
    note,
    of_all_ranks,
)
from asyncckpt.format.segment_layout import (
    ArchiveData,
    CheckpointLayout,
    DataFile,
    FileSetLayout,
    LargeFile,
    Region,
    SpannedFile,
    TorchFileLayout,
)
from asyncckpt.format.storage_meta import storage_meta
from asyncckpt.format.write_request import ANY_PLAN
from asyncckpt.ranks.rounds import Call, check_same_call
from asyncckpt.storage.history import time_of_creation
from asyncckpt.storage.storage import OpenAttempt, OutputFile, Storage, exists_error
from asyncckpt.worker.durable_files import DurableFile, DurableFiles
from asyncckpt.worker.staged_image import ImageFile, StagedImage, UnwrittenFile, span_digests


@dataclass
class Attempt(ABC):
    """The execution of one write request.

    All ranks call ``write`` and ``seal``. After that the first rank calls ``commit``. In the end all ranks call
    ``release`` or ``discard``.

    ``opened``: the attempt on storage. ``timings``: the timings of the image. ``written_at``: the time when the image
    was durable, by ``time.perf_counter``.
    """

    opened: OpenAttempt
    staged_image: StagedImage
    layout: CheckpointLayout | FileSetLayout | TorchFileLayout

    def __post_init__(self) -> None:
        self.request = self.staged_image.request
        self.region = self.staged_image.hosted.region
        self.timings = self.staged_image.timings
        self.written_at = 0.0
        self.begun: float | None = None  # stays None if there is nothing to write

    @abstractmethod
    def write(self, pool: ThreadPoolExecutor) -> array[int]:
        """Write the slot's image durably, on the threads of ``pool``. After that the slot may be used again.

        Returns the checksums of the image's spans. Raises ``StorageError``, or the reason why the image will not
        arrive.
        """

    @abstractmethod
    def seal(self) -> bytes:
        """Write the small files. Return this rank's report, for ``commit``. Raises ``StorageError``."""

    @abstractmethod
    def commit(self, reports: Sequence[dict[str, Any]]) -> None:
        """First rank: finalize the checkpoint. ``reports``: the reports of all ranks, in the order of the ranks.

        Raises ``StorageError`` or ``CheckpointExistsError``.
        """

    def release(self) -> None:
        """Stop holding the attempt, after the save is committed."""
        self.opened.release()

    def discard(self) -> None:
        """Remove the files of the attempt, and stop holding it."""
        self.opened.discard()

    def image(self, begin: int, nbytes: int) -> memoryview:
        """Return ``nbytes`` bytes of the slot, from ``begin`` on."""
        return self.region(Region(self.layout.slots[self.request.slot] + begin, nbytes))

    def wait_beyond(self, nbytes: int) -> int:
        """Wait as ``StagedImage.wait_beyond`` does. Writing begins when the first bytes have arrived."""
        arrived = self.staged_image.wait_beyond(nbytes, self.layout.data_bytes)
        self.begun = self.begun or time.perf_counter()
        return arrived

    def complete_archive(
        self, image: memoryview, begin: int, sizes: Region, pickle_bytes: int, file: ImageFile | UnwrittenFile
    ) -> tuple[int, list[int]]:
        """Complete an archive in the slot while its bytes arrive, and write the complete part.

        Args:
            image: The memory of the archive.
            begin: The start of the archive in the slot, in bytes.
            sizes: See ``ArchiveData``.
            pickle_bytes: Size of the archive's pickle, in bytes.
            file: The file to write.

        Returns:
            The size of the archive, and the starts of its records, in bytes.
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
    """An attempt at a single file, an archive for ``torch.load``."""

    layout: TorchFileLayout

    def write(self, pool: ThreadPoolExecutor) -> array[int]:
        """Complete the archive in the slot, and write it.

        Returns no checksums, because no process loads the archive from memory.
        """
        image = self.image(0, self.layout.data_bytes)
        is_huge = self.staged_image.hosted.is_huge
        with ImageFile(self.opened.create("", large=True), pool, image, is_huge) as file:
            self.staged_image.inode = self.opened.inode
            end, _ = self.complete_archive(image, 0, self.layout.sizes, self.request.pickle_bytes[0], file)
            file.finish(end)
            begun = time.perf_counter()
            file.sync()
            note(self.timings, "sync", begun, self.request.called_at)
        note(self.timings, "write", self.begun or time.perf_counter(), self.request.called_at)
        return array("Q")

    def seal(self) -> bytes:
        """Return an empty report, because the file is complete by itself."""
        return b"{}"

    def commit(self, reports: Sequence[dict[str, Any]]) -> None:
        self.opened.finalize(self.request.existing)


@dataclass
class _LargeFile:
    """A large file of an attempt.

    ``image``: its staged bytes. ``bounds``: the boundaries of its spans, after all bytes have arrived. ``digests``: the
    digests of the spans; empty if not computed. ``links``: number of saves in a row that have linked the file; 0: this
    save writes the file.
    """

    large: LargeFile
    name: str
    image: memoryview
    bounds: Sequence[int] = ()
    digests: bytes = b""
    links: int = 0


@dataclass
class FolderAttempt(Attempt):
    """An attempt at one rank's part of a folder of files with a manifest. ``durable``: files that may be linked."""

    layout: CheckpointLayout | FileSetLayout
    durable: DurableFiles

    def __post_init__(self) -> None:
        super().__post_init__()
        self._files: dict[str, dict[str, Any]] = {}  # the written files, for the manifest
        self._tails: list[bytes] = []  # the tails of the indexes of large files
        self._linkable: dict[str, DurableFile] = {}

    @property
    @abstractmethod
    def _large(self) -> Sequence[LargeFile]:
        """The staged files, in the order of the image."""

    @property
    @abstractmethod
    def _metadata(self) -> Sequence[tuple[str, Region]]:
        """First rank: DCP's ``.metadata`` for each folder."""

    def write(self, pool: ThreadPoolExecutor) -> array[int]:
        """Write the image while it arrives. First try to link the files that have probably not changed."""
        checksums = array("Q")
        if not self.layout.data_bytes:
            self.staged_image.wait_beyond(-1, 0)  # wait until the image is staged
        with contextlib.ExitStack() as opened:
            written: list[tuple[_LargeFile, ImageFile | None]] = []
            for each in self._large:
                its = _LargeFile(each, each.name(self.request.rank), self.image(each.begin, each.nbytes))
                output = None
                if not self._link(its, pool):
                    is_huge = self.staged_image.hosted.is_huge
                    output = opened.enter_context(ImageFile(self._open(each, its.name), pool, its.image, is_huge))
                    its.bounds = its.bounds or self._follow(each, output)
                    output.write_rest(its.bounds[-1])
                written.append((its, output))
            # Compute checksums only after the trainer has copied, because copying needs the memory bandwidth and the
            # cores. The disk is ten times slower anyway.
            begun = time.perf_counter()
            for its, _ in written:
                checksums += self._note(its)
            note(self.timings, "checksum", begun, self.request.called_at)
            self._write_beside()
            self._note_linkable([its for its, _ in written])
            for its, output in written:
                if output is not None:
                    output.finish(its.bounds[-1])
            begun = time.perf_counter()
            for _, output in written:
                if output is not None:
                    output.sync()
            note(self.timings, "sync", begun, self.request.called_at)
        note(self.timings, "write", self.begun or time.perf_counter(), self.request.called_at)
        for name, file in self._linkable.items():
            self._linkable[name] = replace(file, source=self.opened.link_source(name))
        return checksums

    def _link(self, file: _LargeFile, pool: ThreadPoolExecutor) -> bool:
        """Link a file from the last durable save, if it has not changed since. Return whether it is linked."""
        request = self.request
        known = self.durable.expected(request.segment, file.name, request.most_links)
        if known is None or known.source is None:
            return False
        file.bounds = self._follow(file.large, UnwrittenFile(file.image))
        file.digests = span_digests(file.image, file.bounds, pool)
        if file.digests == known.digests and self.opened.link(file.name, known.source):
            file.links = known.links + 1
        return file.links > 0

    def _note(self, file: _LargeFile) -> array[int]:
        """Note a complete file for the manifest and the index. Return its checksums."""
        bounds, image = file.bounds, file.image
        if self.request.most_links and not file.digests:
            file.digests = b"".join(digest_of(image[begin:end]) for begin, end in pairwise(bounds))
        if file.digests:
            checksums = checksums_in(file.digests, pairwise(bounds), image)
        else:
            checksums = array("Q", (checksum(image[begin:end]) for begin, end in pairwise(bounds)))
        self._files[file.name] = self._facts(file.large, bounds[-1], self._index_name(len(self._tails)))
        self._tails.append(Index.tail(bounds[-1], checksums))
        return checksums

    def _note_linkable(self, files: Sequence[_LargeFile]) -> None:
        """Note the files that the next save may link, once this save is committed."""
        for each in files if self.request.most_links else ():
            self._linkable[each.name] = DurableFile(array("Q", each.bounds), each.digests, None, each.links)

    def release(self) -> None:
        if self._linkable:
            data_files = [each for each in self._large if isinstance(each, DataFile)]
            frozen = {each.name(self.request.rank) for each in data_files if each.is_frozen}
            self.durable.note(self.request.segment, self._linkable, frozen)
        super().release()

    def _follow(self, file: LargeFile, output: ImageFile | UnwrittenFile) -> Sequence[int]:
        """Write a whole file while it arrives. Return the boundaries of its spans. The last boundary is its size."""
        if not isinstance(file, SpannedFile):
            raise NotImplementedError(type(file))
        output.follow(lambda nbytes, whole: min(self.wait_beyond(file.begin + nbytes) - file.begin, whole))
        return self.region(file.spans).cast("Q")

    def _open(self, file: LargeFile, name: str) -> OutputFile:
        return self.opened.create(name, large=True)

    def _facts(self, file: LargeFile, nbytes: int, index: str) -> dict[str, Any]:
        """Return the manifest's entry for a file."""
        return {"bytes": nbytes, "index": index}

    def _index_name(self, number: int) -> str:
        return index_name(self.request.rank, number)

    def _write_beside(self) -> None:
        """Write the small files in parallel with the large files, because they may have a twentieth of all bytes."""
        for number, (each, tail) in enumerate(zip(self._large, self._tails, strict=True)):
            self._write_small(self._index_name(number), self.region(each.index_head), tail)
        for folder, region in self._metadata if self.request.rank == 0 else ():
            tail = storage_meta(os.path.join(self.request.path, folder).rstrip("/"), self.request.attempt)
            self._write_small(os.path.join(folder, METADATA_NAME), self.region(region)[:-1], tail)

    def seal(self) -> bytes:
        call = Call.of_save(self.request.step, self.request.path)
        timings = {CALLED_AT: self.request.called_at, **self.timings}
        report = {"files": self._files, "timings": timings, "plan": self.request.plan, "call": call}
        report["replicas"] = self.staged_image.replicas
        return json.dumps(report).encode()

    def commit(self, reports: Sequence[dict[str, Any]]) -> None:
        request = self.request
        # With constant structure, the trainers have not compared their calls.
        check_same_call([Call(*report["call"]) for report in reports])
        self._check_plans(reports)
        files = merged(report["files"] for report in reports)
        path = os.path.dirname(request.path)
        manifest = Manifest(
            attempt=request.attempt,
            step=request.step,
            created=time.time() if request.step is None else time_of_creation(path, request.since),
            world_size=len(reports),
            keep=request.keep,
            nbytes=sum(facts["bytes"] for facts in files.values()),
            files=files,
            timings=of_all_ranks([report["timings"] for report in reports]),
            began=request.began,
            version=request.version,
            upload=request.upload,
        )
        self._write_small(MANIFEST_NAME, manifest.encode())
        self._check_complete(reports)
        self.opened.finalize(request.existing)

    def discard(self) -> None:
        """Remove the whole attempt on the first rank, and this rank's files on the others.

        The first rank cannot remove finalized files, because it is the only rank that finalizes. Another rank removes
        its files under the path of the attempt, and that path does not exist after the attempt is finalized.
        """
        self.opened.discard(None if self.request.rank == 0 else self._names())

    def _names(self) -> list[str]:
        """Return the names of the files that this rank may have created."""
        large = [each.name(self.request.rank) for each in self._large]
        return [*large, *map(self._index_name, range(len(large)))]

    def _create(self, name: str) -> OutputFile:
        return self.opened.create(name, large=False)

    def _write_small(self, name: str, *parts: bytes | memoryview) -> None:
        """Write ``parts`` one after the other to a new file, durably."""
        digest = xxhash.xxh3_64()
        nbytes = 0
        with contextlib.closing(self._create(name)) as file:
            for part in parts:
                file.write(memoryview(part), nbytes)
                digest.update(part)
                nbytes += len(part)
            file.sync()
        self._files[name] = {"bytes": nbytes, "xxh3": digest.hexdigest()}

    def _check_plans(self, reports: Sequence[dict[str, Any]]) -> None:
        """Check that all ranks have saved the same structure. With constant structure, the trainers do not check it."""
        plans = [report["plan"] for report in reports]
        known = next((plan for plan in plans if plan != ANY_PLAN), ANY_PLAN)
        for rank, plan in enumerate(plans):
            if plan not in (known, ANY_PLAN):
                raise StructureChangedError(
                    f"rank {rank} has saved a state of another structure (other names, for one) than rank 0, and"
                    " assume_constant_structure was promised; save the same on all ranks, or do not promise that",
                    rank=rank,
                )

    def _check_complete(self, reports: Sequence[dict[str, Any]]) -> None:
        """Check that all ranks have written into the same folder, on a file system that all hosts share."""
        missing_names = self.opened.missing({name for report in reports for name in report["files"]})
        for rank, report in enumerate(reports):
            missing = report["files"].keys() & missing_names
            if missing:
                raise StorageError(
                    f"rank {rank} has written {sorted(missing)[0]}, and rank 0 does not see it here: all ranks must"
                    " save to the same path, on a file system that all nodes share",
                    path=self.opened.path,
                    rank=rank,
                )


@dataclass
class CheckpointAttempt(FolderAttempt):
    """An attempt at one rank's part of a checkpoint."""

    layout: CheckpointLayout

    @property
    def _large(self) -> Sequence[LargeFile]:
        return self.layout.data_files

    @property
    def _metadata(self) -> Sequence[tuple[str, Region]]:
        return [("", self.layout.metadata)]


@dataclass
class FileSetAttempt(FolderAttempt):
    """An attempt at one rank's part of a set of files."""

    layout: FileSetLayout

    def __post_init__(self) -> None:
        super().__post_init__()
        self._first_index: OutputFile | None = None
        self._pickle_bytes = iter(self.request.pickle_bytes)

    @property
    def _large(self) -> Sequence[LargeFile]:
        return self.layout.files

    @property
    def _metadata(self) -> Sequence[tuple[str, Region]]:
        return self.layout.metadata

    def write(self, pool: ThreadPoolExecutor) -> array[int]:
        """Create the first index, then write the image. The index marks the folder as ours beside other files."""
        self._first_index = super()._create(self._index_name(0)) if self._large else None
        return super().write(pool)

    def _follow(self, file: LargeFile, output: ImageFile | UnwrittenFile) -> Sequence[int]:
        """Complete an archive in the slot, if the file is one, and write it."""
        if not isinstance(file, ArchiveData):
            return super()._follow(file, output)
        image = self.image(file.begin, file.nbytes)
        end, starts = self.complete_archive(image, file.begin, file.sizes, next(self._pickle_bytes), output)
        return spans(starts, end)

    def seal(self) -> bytes:
        for name, data in self.request.small_files:
            self._write_small(name, data)
        return super().seal()

    def discard(self) -> None:
        if self._first_index is not None:
            with contextlib.suppress(StorageError):
                self._first_index.close()
        super().discard()

    def _create(self, name: str) -> OutputFile:
        if self._first_index is None or name != self._index_name(0):
            return super()._create(name)
        first, self._first_index = self._first_index, None
        return first

    def _names(self) -> list[str]:
        return [*super()._names(), *dict(self.request.small_files)]


# Minimum age of an unlocked attempt before its removal. A younger attempt may not be locked yet.
_ORPHAN_S = 60.0


def begin_attempt(storage: Storage, staged_image: StagedImage, durable: DurableFiles) -> Attempt:
    """Create the file or folder of a write request on ``storage``. The image need not be complete.

    ``durable``: the files that may be linked. Raises ``StorageError`` if storage refuses, ``CheckpointError`` if the
    segment has no layout of a checkpoint or file.
    """
    request, layout = staged_image.request, staged_image.hosted.layout
    match layout:
        case TorchFileLayout():
            file = storage.begin_file(request.path, request.attempt, layout.data_bytes, _ORPHAN_S)
            return FileAttempt(file, staged_image, layout)
        case CheckpointLayout() | FileSetLayout():
            beside = sum(region.nbytes for region in layout.constants())
            beside += sum(len(data) for _, data in request.small_files)
            # The locks of other hosts may be invisible here. But no attempt outlives its timeout.
            sees_all = request.world_size == 1 and storage.has_locks
            orphan_s = None if request.rank > 0 else _ORPHAN_S if sees_all else request.timeout
            if not storage.has_locks and orphan_s is not None and not storage.may_put(request.path, request.existing):
                raise exists_error(request.path, request.existing, request.step)  # the trainer has not checked
            nbytes, linked = layout.data_bytes + beside, durable.expected_bytes(request.segment, request.most_links)
            folder = storage.begin_checkpoint(request.path, request.attempt, nbytes, orphan_s, linked_bytes=linked)
            if isinstance(layout, FileSetLayout):
                return FileSetAttempt(folder, staged_image, layout, durable)
            return CheckpointAttempt(folder, staged_image, layout, durable)
        case _:
            raise CheckpointError("the trainer never described this segment as a checkpoint's")
