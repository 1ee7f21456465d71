"""The layout of a segment. The trainer makes the layout, and sends it to the worker and to readers."""

from __future__ import annotations

import os
from dataclasses import dataclass

from asyncckpt.format.manifest import data_name


@dataclass(frozen=True)
class Region:
    """A range of bytes in a segment: ``nbytes`` from ``offset`` on."""

    offset: int
    nbytes: int


@dataclass(frozen=True)
class LargeFile:
    """A large file in an image. The file takes ``nbytes`` from ``begin`` on, both multiples of the page size.

    ``index_head`` is the constant part of the file's index.
    """

    begin: int
    nbytes: int
    index_head: Region

    def name(self, rank: int) -> str:
        """Return the file's name in a checkpoint that ``rank`` has saved."""
        raise NotImplementedError


@dataclass(frozen=True)
class SpannedFile(LargeFile):
    """A large file with constant offsets, of ``length`` bytes.

    ``spans`` holds the span boundaries in the file, as unsigned 64-bit numbers. Each span has one checksum.
    """

    length: int
    spans: Region

    @property
    def checksums(self) -> int:
        """The number of checksums."""
        return self.spans.nbytes // 8 - 1


@dataclass(frozen=True)
class DataFile(SpannedFile):
    """A data file of DCP, in ``folder`` of the checkpoint ("" is the top).

    The file's name has a ``prefix``, and the file's ``number`` among the rank's files in that folder. ``is_frozen``:
    the file holds tensors that probably never change.
    """

    number: int
    prefix: str
    folder: str = ""
    is_frozen: bool = False

    def name(self, rank: int) -> str:
        return os.path.join(self.folder, data_name(rank, self.number, self.prefix))


@dataclass(frozen=True)
class SafetensorsData(SpannedFile):
    """A file in the format of safetensors."""

    path: str

    def name(self, rank: int) -> str:
        return self.path


@dataclass(frozen=True)
class ArchiveData(LargeFile):
    """A file in the format of ``torch.save``: an archive (see ``archive.py``) that the worker completes.

    ``sizes`` holds unsigned 64-bit numbers, in bytes: the alignment of the records, the space for the pickle, and the
    size of each storage.
    """

    path: str
    sizes: Region

    def name(self, rank: int) -> str:
        return self.path


@dataclass(frozen=True)
class CheckpointLayout:
    """The places of a checkpoint's files in a segment.

    ``data_files`` are the files that differ from save to save, one after the other. Each of ``slots`` (offsets in
    bytes) holds an image of them, of ``data_bytes`` (a multiple of the page). ``metadata`` is DCP's ``.metadata``.
    """

    data_files: tuple[DataFile, ...]
    data_bytes: int
    slots: tuple[int, ...]
    metadata: Region

    def constants(self) -> tuple[Region, ...]:
        """Return the regions that are the same in every save."""
        return self.metadata, *(region for file in self.data_files for region in (file.index_head, file.spans))

    def published_files(self, number: int) -> tuple[DataFile, ...]:
        """Return all data files, because readers of a published image see all of them. ``number`` is 0."""
        return self.data_files

    def data(self, slot: int, file: DataFile) -> Region:
        """Return the region of ``file`` in the image of ``slot``."""
        return Region(self.slots[slot] + file.begin, file.nbytes)


@dataclass(frozen=True)
class FileSetLayout:
    """The places of the large files of a set in a segment. ``data_bytes`` and ``slots`` are as in ``CheckpointLayout``.

    ``files`` begins with the files that contain only bytes from the trainer. ``metadata`` has each folder of DCP, and
    the region of its ``.metadata``. Each of these folders can be published, by its number in ``metadata``.
    """

    files: tuple[LargeFile, ...]
    data_bytes: int
    slots: tuple[int, ...]
    metadata: tuple[tuple[str, Region], ...]

    def constants(self) -> tuple[Region, ...]:
        """Return no regions, because workers hold no images of a set."""
        return ()

    def published_files(self, number: int) -> tuple[DataFile, ...]:
        """Return the files that readers of a published image see: the data files of folder ``number``."""
        folder, _ = self.metadata[number]
        return tuple(file for file in self.files if isinstance(file, DataFile) and file.folder == folder)


@dataclass(frozen=True)
class TorchFileLayout:
    """The place of a single file, an archive, in a segment.

    ``data_bytes`` and ``slots`` are as in ``CheckpointLayout``, ``sizes`` as in ``ArchiveData``.
    """

    data_bytes: int
    slots: tuple[int, ...]
    sizes: Region

    def constants(self) -> tuple[Region, ...]:
        """Return the regions that are the same in every save."""
        return (self.sizes,)


@dataclass(frozen=True)
class WeightsLayout:
    """The layout of a segment that has only a header page. ``slots`` has the numbers of other segments.

    Each slot is a file of tensors with its own index (see ``asyncckpt/weights/layout.py``). If several ranks have
    published the version, a slot has several files, and ``files`` has their places (see ``transfer/mirror.py``).
    Otherwise ``files`` is empty.
    """

    slots: tuple[int, ...]
    files: tuple[Region, ...] = ()

    def constants(self) -> tuple[Region, ...]:
        """Return no regions."""
        return ()


SegmentLayout = CheckpointLayout | FileSetLayout | TorchFileLayout | WeightsLayout
