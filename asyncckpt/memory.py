"""Checkpoints in memory: what workers whose trainers died still hold, as a place to load from."""

from __future__ import annotations

import os
from array import array
from collections.abc import Mapping, Sequence, Set

from asyncckpt.catalog import latest, read_manifest
from asyncckpt.errors import CheckpointError, CheckpointNotFoundError, DamagedCheckpointError
from asyncckpt.shm.segment import Segment
from asyncckpt.source import FolderSource
from asyncckpt.spans import MemoryFile, SpanFile
from asyncckpt.worker.commit import published
from asyncckpt.worker.door import door_name
from asyncckpt.worker.manifest import Index, checksum, data_name
from asyncckpt.worker.messages import Held, Order, Region
from asyncckpt.worker.steps import step_folder
from asyncckpt.worker.visit import Visit

# How long the worker of another rank on this host may take to answer.
_VISIT_S = 10.0


class Memory:
    """What one rank's worker holds: the ``images``, in ``segments`` that are mapped here (and are not closed here)."""

    def __init__(self, job: str, segments: Mapping[int, Segment], images: Sequence[Held]) -> None:
        self.job = job
        self._segments = segments
        self.images = list(images)

    def is_closed(self) -> bool:
        """Whether some of it was given back meanwhile."""
        return any(segment.closed for segment in self._segments.values())

    def metadata(self, held: Held) -> bytes:
        """DCP's ``.metadata`` of the checkpoint that ``held`` is a part of; only the first rank's image has it.

        Raises ``DamagedCheckpointError``.
        """
        self._check(held)
        return bytes(self._region(held, held.layout.metadata))

    def file(self, held: Held) -> SpanFile:
        """The data file that an image is. Raises ``DamagedCheckpointError``."""
        self._check(held)
        layout = held.layout
        path = os.path.join(held.order.path, layout.data_name)
        text = bytes(self._region(held, layout.index_head)) + Index.tail(array("Q", held.checksums))
        data = self._region(held, Region(layout.slots[held.order.slot], layout.data_bytes))
        return MemoryFile(path, Index.parse(text, path), data, self._region(held, layout.spans).cast("Q"))

    def _check(self, held: Held) -> None:
        """The trainer could write there until it died, and may have died of writing where it should not."""
        found = tuple(checksum(self._region(held, region)) for region in held.layout.constants())
        if found != held.constants:
            raise DamagedCheckpointError("its image in memory is damaged", path=held.order.path, step=held.order.step)

    def _region(self, held: Held, region: Region) -> memoryview:
        return self._segments[held.order.segment].view[region.offset : region.offset + region.nbytes]


def choose_in_memory(root: str, step: int | None, offers: Sequence[Sequence[Order]], committed: Set[str]) -> str | None:
    """Which checkpoint to load from memory, as its attempt: that of ``step``, or the newest; None: none.

    ``offers``: what each rank has, in their order; ``committed``: attempts of which it is known. It must be whole, and
    no older than what is in storage: there it may have been replaced, or removed by somebody who did not want it.
    """
    whole = [
        order
        for order in offers[0]
        if order.step is not None
        and order.path == step_folder(root, order.step)
        and order.world_size == len(offers)
        and all(any(other.attempt == order.attempt for other in offer) for offer in offers)
    ]
    stored = latest(root)
    for order in sorted(whole, key=lambda order: order.step or 0, reverse=True):
        if step is not None and order.step != step:
            continue
        if published(order.path, order.attempt):
            return order.attempt if step is not None or order.step == stored else None
        if order.attempt in committed or os.path.lexists(order.path):
            continue
        return order.attempt if step is not None or stored is None or stored < (order.step or 0) else None
    return None


class MemorySource:
    """One checkpoint, of which each rank's worker holds its part: this rank's in ``memory``.

    Parts of other ranks on this host are read from the memory of their workers; those on other hosts from the
    checkpoint in storage, if it was published.
    """

    def __init__(self, memory: Memory, held: Held, metadata: bytes) -> None:
        self._memory, self._held = memory, held
        self._metadata = metadata
        self._visits: dict[int, Visit] = {}

    def metadata(self) -> bytes:
        """DCP's ``.metadata``."""
        return self._metadata

    def data_files(self) -> list[str]:
        """One a rank."""
        return [data_name(rank) for rank in range(self._held.order.world_size)]

    def open(self, name: str) -> SpanFile:
        """The data file ``name``, to be closed. Raises ``CheckpointNotFoundError`` where it is out of reach."""
        order = self._held.order
        if name == self._held.layout.data_name:
            return self._memory.file(self._held)
        for rank in range(order.world_size):
            if name == data_name(rank) and (file := self._of_other(rank)) is not None:
                return file
        if published(order.path, order.attempt):
            return FolderSource(order.path, read_manifest(order.path)).open(name)
        raise CheckpointNotFoundError(
            f"{name} is in the memory of another host, and not yet in storage", path=order.path, step=order.step
        )

    def close(self) -> None:
        """End the visits to other ranks' workers."""
        for visit in self._visits.values():
            visit.close()
        self._visits.clear()

    def _of_other(self, rank: int) -> SpanFile | None:
        visit = self._visits.get(rank)
        if visit is None:
            try:
                visit = Visit.pay(door_name(self._memory.job, rank), _VISIT_S)
            except CheckpointError:  # it has a trainer, or is stopped
                return None
            if visit is None:
                return None
            self._visits[rank] = visit
        for held in visit.images:
            if held.order.attempt == self._held.order.attempt:
                return Memory(self._memory.job, visit.segments, visit.images).file(held)
        return None
