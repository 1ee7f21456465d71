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

    def constants(self) -> tuple[Region, ...]:
        """Return the regions that are the same in every save."""
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

    def constants(self) -> tuple[Region, ...]:
        return self.index_head, self.spans


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

    def constants(self) -> tuple[Region, ...]:
        return self.index_head, self.sizes


@dataclass(frozen=True)
class ImageLayout:
    """The places of the large files of a save in a segment.

    Attributes:
        files: The files, one after the other. The files that contain only bytes from the trainer come first. A file
            that is saved alone has the name "".
        data_bytes: The size of an image of these files, a multiple of the page.
        slots: The begin of each slot in the segment, in bytes. A slot holds an image.
        metadata: Each folder of DCP ("" is the top), and the region of its ``.metadata``.
        is_held: Whether the worker holds the images for a load, also after the trainer's death.
    """

    files: tuple[LargeFile, ...]
    data_bytes: int
    slots: tuple[int, ...]
    metadata: tuple[tuple[str, Region], ...]
    is_held: bool

    @property
    def is_single_file(self) -> bool:
        """Whether a file is saved alone, without a manifest."""
        return [file.path for file in self.files if isinstance(file, ArchiveData)] == [""]

    @property
    def has_state(self) -> bool:
        """Whether there is a folder of DCP at the top, which a load can read from an image alone."""
        return any(not folder for folder, _ in self.metadata)

    def constants(self) -> tuple[Region, ...]:
        """Return the regions that are the same in every save."""
        regions = (region for file in self.files for region in file.constants())
        return *(region for _, region in self.metadata), *regions

    def spanned_files(self) -> list[SpannedFile]:
        """Return the files with constant offsets. The checksums of an image are those of their spans, in this order."""
        return [file for file in self.files if isinstance(file, SpannedFile)]

    def data_files(self, folder: str = "") -> list[DataFile]:
        """Return the data files of a folder of DCP, in the order of their numbers."""
        return [file for file in self.files if isinstance(file, DataFile) and file.folder == folder]

    def data(self, slot: int, file: LargeFile) -> Region:
        """Return the region of ``file`` in the image of ``slot``."""
        return Region(self.slots[slot] + file.begin, file.nbytes)


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


SegmentLayout = ImageLayout | WeightsLayout
