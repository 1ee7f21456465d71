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
from array import array
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

import xxhash

from asyncckpt.config import TRAINER
from asyncckpt.errors import CheckpointError, CutError, StorageError, StructureChangedError
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
    DataFile,
    ImageLayout,
    LargeFile,
    SpannedFile,
)
from asyncckpt.format.storage_meta import storage_meta
from asyncckpt.format.write_request import ANY_PLAN, Joint
from asyncckpt.ranks.rounds import Call, check_same_call
from asyncckpt.storage import parties
from asyncckpt.storage.history import time_of_creation
from asyncckpt.storage.storage import OpenAttempt, OutputFile, Storage, exists_error
from asyncckpt.worker.durable_files import DurableFile, DurableFiles
from asyncckpt.worker.staged_image import ImageFile, StagedImage, UnwrittenFile, span_digests


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
class Attempt:
    """The execution of one write request: an attempt at one rank's part of a folder with a manifest, or at a file.

    All ranks call ``write`` and ``seal``. After that the first rank calls ``commit``. In the end all ranks call
    ``release`` or ``discard``.

    ``opened``: the attempt on storage. ``durable``: files that may be linked. ``timings``: the timings of the image.
    ``written_at``: the time when the image was durable, by ``time.perf_counter``.
    """

    opened: OpenAttempt
    staged_image: StagedImage
    layout: ImageLayout
    durable: DurableFiles

    def __post_init__(self) -> None:
        self.request = self.staged_image.request
        self.region = self.staged_image.hosted.region
        self.timings = self.staged_image.timings
        self.written_at = 0.0
        self.begun: float | None = None  # stays None if there is nothing to write
        self._large_names = [file.name(self.request.rank) for file in self.layout.files]
        self._is_file = self.layout.is_single_file
        self._most_links = 0 if self._is_file else self.request.most_links
        self._first_index: OutputFile | None = None
        self._pickle_bytes = iter(self.request.pickle_bytes)
        self._files: dict[str, dict[str, Any]] = {}  # the written files, for the manifest
        self._tails: list[bytes] = []  # the tails of the indexes of large files
        self._linkable: dict[str, DurableFile] = {}

    def write(self, pool: ThreadPoolExecutor) -> array[int]:
        """Write the image while it arrives, durably, on the threads of ``pool``. Then the slot may be used again.

        First try to link the files that have probably not changed.

        Returns:
            The checksums of the spans of the image; none for a single file, which no process loads from memory.

        Raises:
            StorageError: Storage refuses.
            CheckpointError: The image will not arrive.
        """
        checksums = array("Q")
        if not self.layout.data_bytes:
            self.staged_image.wait_beyond(-1, 0)  # wait until the image is staged
        is_state = all(isinstance(file, DataFile) and not file.folder for file in self.layout.files)
        if self.layout.files and not (self._is_file or (is_state and not self.request.small_files)):
            # The index marks the folder as ours: files of other formats look like those of another program.
            self._first_index = self.opened.create(self._index_name(0), large=False)
        with contextlib.ExitStack() as opened:
            written: list[tuple[_LargeFile, ImageFile | None]] = []
            for name, each in zip(self._large_names, self.layout.files, strict=True):
                its = _LargeFile(each, name, self._image(each))
                output = None
                if not self._link(its, pool):
                    file = self.opened.create(name, large=True)
                    output = ImageFile(file, pool, its.image, self.staged_image.hosted.is_huge)
                    opened.enter_context(output)
                    self.staged_image.inode = self.opened.inode
                    its.bounds = its.bounds or self._follow(each, output)
                    output.write_rest(its.bounds[-1])
                written.append((its, output))
            if not self._is_file:
                # Compute checksums only after the trainer has copied, because copying needs the memory bandwidth and
                # the cores. The disk is ten times slower anyway.
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
        for name, linkable in self._linkable.items():
            self._linkable[name] = replace(linkable, source=self.opened.link_source(name))
        return checksums

    def seal(self) -> bytes:
        """Write the small files. Return this rank's report, for ``commit``. Raises ``StorageError``."""
        for name, data in self.request.small_files:
            self._write_small(name, data)
        joint, call = self.request.joint, Call.of_save(self.request.step, self.request.path)
        timings = {CALLED_AT: self.request.called_at, **self.timings}
        report = {"files": self._files, "timings": timings, "plan": self.request.plan, "call": call}
        report["replicas"] = self.staged_image.replicas
        if joint is not None:
            report["cut"] = joint.cut
        return json.dumps(report).encode() if joint is None or not joint.party else parties.encoded(report)

    def commit(self, reports: Sequence[dict[str, Any]]) -> None:
        """First rank: finalize the checkpoint. ``reports``: the reports of all ranks, then of all parties, in order.

        Raises ``StorageError`` or ``CheckpointExistsError``.
        """
        if not self._is_file:
            self._write_manifest(reports)
            self._check_complete(reports)
        self.opened.finalize(self.request.existing)

    def release(self) -> None:
        """Stop holding the attempt, after the save is committed."""
        if self._linkable:
            large = zip(self._large_names, self.layout.files, strict=True)
            frozen = {name for name, file in large if isinstance(file, DataFile) and file.is_frozen}
            self.durable.note(self.request.segment, self._linkable, frozen)
        self.opened.release()

    def discard(self) -> None:
        """Remove the whole attempt on the first rank, and this rank's files on the others. Stop holding the attempt.

        The first rank cannot remove finalized files, because it is the only rank that finalizes. Another rank removes
        its files under the path of the attempt, and that path does not exist after the attempt is finalized.
        """
        if self._first_index is not None:
            with contextlib.suppress(StorageError):
                self._first_index.close()
        self.opened.discard(None if self.request.member == 0 else self._names())

    def _link(self, file: _LargeFile, pool: ThreadPoolExecutor) -> bool:
        """Link a file from the last durable save, if it has not changed since. Return whether it is linked."""
        request = self.request
        known = self.durable.expected(request.segment, file.name, self._most_links)
        if known is None or known.source is None:
            return False
        file.bounds = self._follow(file.large, UnwrittenFile(file.image))
        file.digests = span_digests(file.image, file.bounds, pool)
        if file.digests == known.digests and self.opened.link(file.name, known.source):
            file.links = known.links + 1
        return file.links > 0

    def _note(self, file: _LargeFile) -> array[int]:
        """Note a complete file for the manifest and the index. Return its checksums, if its offsets are constant."""
        bounds, image = file.bounds, file.image
        if self._most_links and not file.digests:
            file.digests = b"".join(digest_of(image[begin:end]) for begin, end in pairwise(bounds))
        if file.digests:
            checksums = checksums_in(file.digests, pairwise(bounds), image)
        else:
            checksums = array("Q", (checksum(image[begin:end]) for begin, end in pairwise(bounds)))
        self._files[file.name] = {"bytes": bounds[-1], "index": self._index_name(len(self._tails))}
        self._tails.append(Index.tail(bounds[-1], checksums))
        return checksums if isinstance(file.large, SpannedFile) else array("Q")

    def _note_linkable(self, files: Sequence[_LargeFile]) -> None:
        """Note the files that the next save may link, once this save is committed."""
        for each in files if self._most_links else ():
            self._linkable[each.name] = DurableFile(array("Q", each.bounds), each.digests, None, each.links)

    def _follow(self, file: LargeFile, output: ImageFile | UnwrittenFile) -> Sequence[int]:
        """Write a whole file while it arrives. Return the boundaries of its spans. The last boundary is its size."""
        match file:
            case SpannedFile():
                output.follow(lambda nbytes, whole: min(self._wait_beyond(file.begin + nbytes) - file.begin, whole))
                return self.region(file.spans).cast("Q")
            case ArchiveData():
                return self._complete_archive(file, output)
            case _:
                raise NotImplementedError(type(file))

    def _index_name(self, number: int) -> str:
        return index_name(self.request.member, number)

    def _write_beside(self) -> None:
        """Write the small files in parallel with the large files, because they may have a twentieth of all bytes."""
        for number, (each, tail) in enumerate(zip(self.layout.files, self._tails, strict=True)):
            self._write_small(self._index_name(number), self.region(each.index_head), tail)
        for folder, region in self.layout.metadata if self.request.rank == 0 else ():
            tail = storage_meta(os.path.join(self.request.path, folder).rstrip("/"), self.request.attempt)
            self._write_small(os.path.join(folder, METADATA_NAME), self.region(region)[:-1], tail)

    def _write_manifest(self, reports: Sequence[dict[str, Any]]) -> None:
        request = self.request
        ranks, others = reports[: request.world_size], reports[request.world_size :]
        # With constant structure, the trainers have not compared their calls.
        check_same_call([Call(*report["call"]) for report in ranks])
        self._check_plans(ranks)
        files = merged(report["files"] for report in reports)
        if request.joint is not None:
            files |= parties.marks(request.joint.parties) | self._join(request.joint, ranks, others)
        path = os.path.dirname(request.path)
        manifest = Manifest(
            attempt=request.attempt,
            step=request.step,
            created=time.time() if request.step is None else time_of_creation(path, request.since),
            world_size=len(ranks),
            keep=request.keep,
            nbytes=sum(facts["bytes"] for facts in files.values()),
            files=files,
            timings=of_all_ranks([report["timings"] for report in ranks]),
            began=request.began,
            version=request.version,
            upload=request.upload,
        )
        self._write_small(MANIFEST_NAME, manifest.encode())

    def _join(
        self, joint: Joint, ranks: Sequence[dict[str, Any]], others: Sequence[dict[str, Any]]
    ) -> dict[str, dict[str, Any]]:
        """Check that the parts of ranks and parties belong together. Return the files that tell their names and cut."""
        for rank, report in enumerate(ranks):
            if report["cut"] != joint.cut:
                raise CutError(f"rank {rank} has the cut {report['cut']!r}, and rank 0 has {joint.cut!r}", rank=rank)
        name, data = parties.summary(joint.parties, joint.cut)
        self._write_small(name, data)
        files = {name: self._files[name]}
        for party, report in zip(joint.parties, others, strict=True):
            if report["call"][1] != ranks[0]["call"][1]:
                raise CutError(f"the party {party!r} {report['call'][0]}, and the trainer {ranks[0]['call'][0]}")
            if report["cut"] != joint.cut:
                raise CutError(f"the party {party!r} has the cut {report['cut']!r}, and the trainer has {joint.cut!r}")
            data = parties.encoded(report)
            files[parties.name_of(party)] = {"bytes": len(data), "xxh3": f"{checksum(data):016x}"}
        return files

    def _names(self) -> list[str]:
        """Return the names of the files that this rank may have created."""
        large = self._large_names
        party = self.request.party
        reports = [parties.name_of(party), parties.name_of(party, "begun")] if party else []
        return [*large, *map(self._index_name, range(len(large))), *dict(self.request.small_files), *reports]

    def _create(self, name: str) -> OutputFile:
        if self._first_index is None or name != self._index_name(0):
            return self.opened.create(name, large=False)
        first = self._first_index
        self._first_index = None
        return first

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
                    f"rank {rank} has saved a state of another structure (such as other names) than rank 0, and"
                    " assume_constant_structure was promised; save the same on all ranks, or do not promise that",
                    rank=rank,
                )

    def _check_complete(self, reports: Sequence[dict[str, Any]]) -> None:
        """Check that all ranks have written into the same folder, on a file system that all hosts share."""
        missing_names = self.opened.missing({name for report in reports for name in report["files"]})
        for rank, report in enumerate(reports):
            missing = report["files"].keys() & missing_names
            if missing:
                party = rank - self.request.world_size
                who = f"rank {rank}" if party < 0 else f"the party {self.request.parties[party]!r}"
                raise StorageError(
                    f"{who} has written {sorted(missing)[0]}, and rank 0 does not see it here: all ranks must"
                    " save to the same path, on a file system that all nodes share",
                    path=self.opened.path,
                    rank=rank if party < 0 else None,
                )

    def _image(self, file: LargeFile) -> memoryview:
        return self.region(self.layout.data(self.request.slot, file))

    def _wait_beyond(self, nbytes: int) -> int:
        """Wait as ``StagedImage.wait_beyond`` does. Writing begins when the first bytes have arrived."""
        arrived = self.staged_image.wait_beyond(nbytes, self.layout.data_bytes)
        self.begun = self.begun or time.perf_counter()
        return arrived

    def _complete_archive(self, file: ArchiveData, output: ImageFile | UnwrittenFile) -> Sequence[int]:
        """Complete an archive in the slot while its bytes arrive, and write it. Return the same as ``_follow``."""
        arrived = 0

        def wait_for(end: int) -> None:
            nonlocal arrived
            while arrived < file.begin + end:
                arrived = self._wait_beyond(arrived)

        alignment, room, *sizes = self.region(file.sizes).cast("Q")
        pickle_bytes = next(self._pickle_bytes)
        end = archive.complete(self._image(file), alignment, room, sizes, pickle_bytes, wait_for, output.advance)
        return spans((record.at for record in archive.lay_out(alignment, room, *sizes)), end)


# Minimum age of an unlocked attempt before its removal. A younger attempt may not be locked yet.
_ORPHAN_S = 60.0


def begin_attempt(storage: Storage, staged_image: StagedImage, durable: DurableFiles) -> Attempt:
    """Create the file or folder of a write request on ``storage``. The image need not be complete.

    ``durable``: the files that may be linked. Raises ``StorageError`` if storage refuses, ``CheckpointError`` if the
    segment has no layout of a checkpoint or file.
    """
    request, layout = staged_image.request, staged_image.hosted.layout
    if not isinstance(layout, ImageLayout):
        raise CheckpointError("the trainer never described this segment as a checkpoint's")
    if layout.is_single_file:
        file = storage.begin_file(request.path, request.attempt, layout.data_bytes, _ORPHAN_S)
        return Attempt(file, staged_image, layout, durable)
    beside = sum(region.nbytes for region in layout.constants())
    beside += sum(len(data) for _, data in request.small_files)
    # The locks of other hosts may be invisible here. But no attempt outlives its timeout.
    sees_all = request.world_size == 1 and storage.has_locks and request.joint is None
    orphan_s = None if request.member > 0 else _ORPHAN_S if sees_all else request.timeout
    if not storage.has_locks and orphan_s is not None and not storage.may_put(request.path, request.existing):
        raise exists_error(request.path, request.existing, request.step)  # the trainer has not checked
    if request.joint is not None and request.joint.party:
        joined = parties.join(storage, request, layout.data_bytes + beside, staged_image.can_succeed)
        return Attempt(joined, staged_image, layout, durable)
    nbytes, linked = layout.data_bytes + beside, durable.expected_bytes(request.segment, request.most_links)
    folder = storage.begin_checkpoint(request.path, request.attempt, nbytes, orphan_s, linked_bytes=linked)
    if request.joint is not None and request.rank == 0:
        folder.claim(parties.name_of(TRAINER, "begun"))  # now the parties may join
    return Attempt(folder, staged_image, layout, durable)
