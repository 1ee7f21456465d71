"""Loading from memory: the images that the workers of dead trainers still hold, as the source of a checkpoint."""

from __future__ import annotations

import contextlib
import logging
import os
from array import array
from collections.abc import Callable, Mapping, Sequence, Set
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

from asyncckpt.errors import CheckpointError, CheckpointNotFoundError, DamagedCheckpointError, StorageError
from asyncckpt.loading.data_file import ChecksummedFile, MemoryFile
from asyncckpt.loading.source import StorageSource
from asyncckpt.ranks.collectives import from_first, gather
from asyncckpt.shm.segment import Segment
from asyncckpt.worker.endpoint import endpoint_name
from asyncckpt.worker.held_image import HeldImage
from asyncckpt.worker.manifest import Index, checksum
from asyncckpt.worker.segment_layout import Region
from asyncckpt.worker.storage import step_folder, storage_for
from asyncckpt.worker.storage.history import StoredStep, history
from asyncckpt.worker.takeover import Takeover
from asyncckpt.worker.write_request import WriteRequest

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

logger = logging.getLogger(__name__)

# How often to look again at what is in storage, which changes with each commit of a worker that finishes.
_MOST_LOOKS = 100
# How long the worker of another rank on this host may take to answer.
_ANSWER_S = 10.0


@dataclass(frozen=True)
class HeldImages:
    """The ``images`` that one rank's worker holds, in ``segments`` that are mapped here (and are not closed here)."""

    job: str
    segments: Mapping[int, Segment]
    images: Sequence[HeldImage]

    def is_closed(self) -> bool:
        """Whether some of it was given back meanwhile."""
        return any(segment.closed for segment in self.segments.values())

    def metadata(self, held: HeldImage) -> bytes:
        """DCP's ``.metadata`` of the checkpoint that ``held`` is a part of; only the first rank's image has it.

        Raises ``DamagedCheckpointError``.
        """
        self._check(held)
        return bytes(self._region(held, held.layout.metadata))

    def file(self, held: HeldImage, number: int) -> ChecksummedFile:
        """The data file ``number`` of an image. Raises ``DamagedCheckpointError``."""
        self._check(held)
        before, each = held.layout.data_files[:number], held.layout.data_files[number]
        path = os.path.join(held.request.path, each.name(held.request.rank))
        first = sum(file.checksums for file in before)
        checksums = array("Q", held.checksums)[first : first + each.checksums]
        text = bytes(self._region(held, each.index_head)) + Index.tail(each.length, checksums)
        data = self._region(held, held.layout.data(held.request.slot, each))
        return MemoryFile(path, Index.parse(text, path), data)

    def _check(self, held: HeldImage) -> None:
        """The trainer could write there until it died, and may have died of writing where it should not."""
        found = tuple(checksum(self._region(held, region)) for region in held.layout.constants())
        if found != held.constants:
            raise DamagedCheckpointError(
                "its image in memory is damaged", path=held.request.path, step=held.request.step
            )

    def _region(self, held: HeldImage, region: Region) -> memoryview:
        return self.segments[held.request.segment].view[region.offset : region.offset + region.nbytes]


def agreed_image(
    memory: HeldImages | None,
    choose: Callable[[Sequence[Sequence[WriteRequest]], Set[str]], str | None],
    ranks: ProcessGroup | None = None,
) -> tuple[HeldImages, HeldImage] | None:
    """This rank's part of the checkpoint to load from memory, the same one on all ranks; None: none.

    Args:
        memory: What is held for this rank; None: nothing.
        choose: First rank: the attempt to take, of what each rank offers, the oldest first, and of those the attempts
            that are known to be committed.
        ranks: That load together; None: the whole job.
    """
    staged = [] if memory is None else sorted(memory.images, key=lambda each: each.staged_at)
    images = {each.request.attempt: each for each in staged}
    offers = gather([each.request for each in images.values()], ranks)
    committed = {each.request.attempt for each in images.values() if each.committed}
    attempt = from_first(lambda: choose(offers, committed), ranks)
    return None if attempt is None or memory is None else (memory, images[attempt])


def load_image(
    fill: Callable[..., None], memory: HeldImages, held: HeldImage, ranks: ProcessGroup | None = None
) -> bool:
    """Load the checkpoint that ``held`` is this rank's part of. Returns whether that was possible, on all ranks alike.

    Args:
        fill: Loads the checkpoint at a path, given its ``source``.
        memory: What is held for this rank.
        held: As ``agreed_image`` says.
        ranks: That load together; None: the whole job.
    """
    source = None
    try:
        source = MemorySource(memory, held, from_first(lambda: memory.metadata(held), ranks))
        fill(held.request.path, source=source)
    except (CheckpointNotFoundError, DamagedCheckpointError, StorageError) as error:
        logger.warning("not loaded from memory: %s", str(error))  # not itself: it holds on to the memory it saw
        return False
    finally:
        if source is not None:
            source.close()
    return True


def choose_in_memory(
    roots: Sequence[str], step: int | None, offers: Sequence[Sequence[WriteRequest]], committed: Set[str]
) -> str | None:
    """Choose which checkpoint to load from memory: a whole one, and no older than what is in storage.

    There it may have been replaced, or removed by somebody who did not want it.

    Args:
        roots: The folders of the run's checkpoints, that which is saved to first.
        step: The step to load; None: the newest.
        offers: The images that each rank has, by rank, as they were staged, the newest last.
        committed: Attempts that are known to be committed.

    Returns:
        The attempt; None: there is none to load from memory.
    """
    if not offers[0]:
        return None
    found = history(*roots) if step is None else []
    for _ in range(_MOST_LOOKS):
        attempt = _choose(roots[0], step, offers, committed, found[-1] if found else None)
        # A dead trainer's worker may be writing: what it commits between two looks would be taken for another's.
        before, found = found, history(*roots) if step is None else []
        if [each[:2] for each in found] == [each[:2] for each in before]:  # step, and time of creation
            return attempt
    return None  # somebody copies checkpoints here, say


def _choose(
    root: str,
    step: int | None,
    offers: Sequence[Sequence[WriteRequest]],
    committed: Set[str],
    newest: StoredStep | None,
) -> str | None:
    storage = storage_for(root)
    for request in reversed(offers[0]):
        is_wanted = request.step is not None and step in (None, request.step)
        is_here = is_wanted and request.path == step_folder(root, request.step or 0)
        is_whole = request.world_size == len(offers) and all(
            any((other.attempt, other.plan) == (request.attempt, request.plan) for other in offer) for offer in offers
        )
        if not (is_here and is_whole):
            continue
        # In this order: what is committed in between is this one.
        is_taken = request.existing != "set aside" and storage.exists(request.path)
        is_finalized = False
        with contextlib.suppress(DamagedCheckpointError):  # of whatever it is, something is there
            is_finalized = storage.is_finalized(request.path, request.attempt)
        if is_finalized:
            is_newest = newest is not None and newest.step == request.step and root in newest.roots
            return request.attempt if step is not None or is_newest else None
        if request.attempt in committed or is_taken:
            continue
        return request.attempt if step is not None or _is_newer(request, newest) else None
    return None


def _is_newer(request: WriteRequest, newest: StoredStep | None) -> bool:
    """Whether what was staged, and is not committed yet, is newer than the newest in storage."""
    if newest is None or newest.step < (request.step or 0):
        return True
    return newest.created is not None and newest.created <= request.since  # the training went back behind it


class MemorySource:
    """One checkpoint, of which each rank's worker holds its part.

    Parts of other ranks on this host are read from the memory of their workers; those on other hosts from the
    checkpoint in storage, if it is committed.
    """

    def __init__(self, images: HeldImages, held: HeldImage, metadata: bytes) -> None:
        """Read nothing yet.

        Args:
            images: What this rank's worker holds.
            held: The one of them that is this rank's part of the checkpoint.
            metadata: DCP's ``.metadata``, checked.
        """
        self._images, self._held, self._metadata = images, held, metadata
        self._takeovers: dict[int, Takeover] = {}

    def metadata(self) -> bytes:
        return self._metadata

    def data_files(self) -> list[str]:
        return list(self._places)

    def open(self, name: str) -> ChecksummedFile:
        """As ``Source.open``. Raises ``CheckpointNotFoundError`` where the file is out of reach."""
        request = self._held.request
        rank, number = self._places.get(name, (None, 0))
        if rank == request.rank:
            return self._images.file(self._held, number)
        if rank is not None and (file := self._of_other(rank, number)) is not None:
            return file
        if storage_for(request.path).is_finalized(request.path, request.attempt):
            return StorageSource(request.path).open(name)
        raise CheckpointNotFoundError(
            f"{name} is in the memory of another host, and not yet in storage", path=request.path, step=request.step
        )

    def close(self) -> None:
        """Let go of the workers of other ranks."""
        for takeover in self._takeovers.values():
            takeover.close()
        self._takeovers.clear()

    @cached_property
    def _places(self) -> dict[str, tuple[int, int]]:
        """The rank and the number of each data file. All ranks have as many."""
        ranks, files = range(self._held.request.world_size), self._held.layout.data_files
        return {each.name(rank): (rank, each.number) for rank in ranks for each in files}

    def _of_other(self, rank: int, number: int) -> ChecksummedFile | None:
        takeover = self._takeovers.get(rank)
        if takeover is None:
            try:
                takeover = Takeover.find(endpoint_name(self._images.job, rank), _ANSWER_S)
            except CheckpointError:  # it has a trainer, or is stopped
                return None
            if takeover is None:
                return None
            self._takeovers[rank] = takeover
        for held in takeover.images:
            if held.request.attempt == self._held.request.attempt:
                return HeldImages(self._images.job, takeover.segments, takeover.images).file(held, number)
        return None
