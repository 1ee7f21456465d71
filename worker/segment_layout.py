"""What stands where in a segment: the trainer lays it out, the worker is told, and so are those who read."""

from __future__ import annotations

from dataclasses import dataclass

from asyncckpt.worker.manifest import data_name


@dataclass(frozen=True)
class Region:
    """Bytes of a segment: ``nbytes`` from ``offset``."""

    offset: int
    nbytes: int


@dataclass(frozen=True)
class DataFile:
    """A data file in an image: ``nbytes`` from ``begin``, both whole pages. Its name has its ``number`` among those of
    a rank, and a ``prefix``.

    ``index_head`` is its index up to the checksums. ``spans`` holds unsigned 64-bit numbers: the boundaries, in the
    file, of what has one checksum.
    """

    number: int
    prefix: str
    begin: int
    nbytes: int
    index_head: Region
    spans: Region

    def name(self, rank: int) -> str:
        """What it is called where ``rank`` has saved it."""
        return data_name(rank, self.number, self.prefix)

    @property
    def checksums(self) -> int:
        """How many it has."""
        return self.spans.nbytes // 8 - 1


@dataclass(frozen=True)
class CheckpointLayout:
    """Where in a segment the files of a checkpoint stand.

    ``data_files`` are those that differ from save to save, one after the other: an image of them, of ``data_bytes`` (a
    multiple of the page), is at each of ``slots`` (offsets in bytes). ``metadata`` is DCP's ``.metadata``.
    """

    data_files: tuple[DataFile, ...]
    data_bytes: int
    slots: tuple[int, ...]
    metadata: Region

    def constants(self) -> tuple[Region, ...]:
        """Of what is the same in every save."""
        return self.metadata, *(region for file in self.data_files for region in (file.index_head, file.spans))

    def data(self, slot: int, file: DataFile) -> Region:
        """Where ``file`` is in the image of ``slot``."""
        return Region(self.slots[slot] + file.begin, file.nbytes)


@dataclass(frozen=True)
class TorchFileLayout:
    """Where in a segment a single file stands, an archive (see ``archive.py``); ``data_bytes``, ``slots`` as above.

    ``sizes`` holds unsigned 64-bit numbers: the alignment of its records, the space for the pickle, and the size of
    each storage, in bytes.
    """

    data_bytes: int
    slots: tuple[int, ...]
    sizes: Region

    def constants(self) -> tuple[Region, ...]:
        """Of what is the same in every save."""
        return (self.sizes,)


@dataclass(frozen=True)
class WeightsLayout:
    """Of a segment that has only a header page: its slots are other segments, of these numbers, each a file of tensors
    with its own index (see ``asyncckpt/weights/layout.py``).
    """

    slots: tuple[int, ...]

    def constants(self) -> tuple[Region, ...]:
        """None."""
        return ()


SegmentLayout = CheckpointLayout | TorchFileLayout | WeightsLayout
