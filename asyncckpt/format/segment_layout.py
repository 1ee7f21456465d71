"""What stands where in a segment: the trainer lays it out, the worker is told, and so are those who read."""

from __future__ import annotations

import os
from dataclasses import dataclass

from asyncckpt.format.manifest import data_name


@dataclass(frozen=True)
class Region:
    """Bytes of a segment: ``nbytes`` from ``offset``."""

    offset: int
    nbytes: int


@dataclass(frozen=True)
class LargeFile:
    """A large file in an image: ``nbytes`` from ``begin``, both whole pages.

    ``index_head`` is the constant part of its index.
    """

    begin: int
    nbytes: int
    index_head: Region

    def name(self, rank: int) -> str:
        """What it is called where ``rank`` has saved it."""
        raise NotImplementedError


@dataclass(frozen=True)
class SpannedFile(LargeFile):
    """One whose offsets are all constant: it ends at ``length``, in bytes.

    ``spans`` holds unsigned 64-bit numbers: the boundaries, in the file, of what has one checksum.
    """

    length: int
    spans: Region

    @property
    def checksums(self) -> int:
        """How many it has."""
        return self.spans.nbytes // 8 - 1


@dataclass(frozen=True)
class DataFile(SpannedFile):
    """A data file of DCP's, in ``folder`` of the checkpoint ("": at its top). Its name has its ``number`` among those
    that a rank has there, and a ``prefix``. ``is_frozen``: it holds tensors that are likely to stay the same.
    """

    number: int
    prefix: str
    folder: str = ""
    is_frozen: bool = False

    def name(self, rank: int) -> str:
        return os.path.join(self.folder, data_name(rank, self.number, self.prefix))


@dataclass(frozen=True)
class SafetensorsData(SpannedFile):
    """A file as safetensors writes it."""

    path: str

    def name(self, rank: int) -> str:
        return self.path


@dataclass(frozen=True)
class ArchiveData(LargeFile):
    """A file as ``torch.save`` writes it, an archive (see ``archive.py``), which the worker completes.

    ``sizes`` holds unsigned 64-bit numbers: the alignment of its records, the space for the pickle, and the size of
    each storage, in bytes.
    """

    path: str
    sizes: Region

    def name(self, rank: int) -> str:
        return self.path


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

    def published_files(self, number: int) -> tuple[DataFile, ...]:
        """Those that readers of a published image see: all. ``number``: 0."""
        return self.data_files

    def data(self, slot: int, file: DataFile) -> Region:
        """Where ``file`` is in the image of ``slot``."""
        return Region(self.slots[slot] + file.begin, file.nbytes)


@dataclass(frozen=True)
class FileSetLayout:
    """Where in a segment the large files of a set stand; ``data_bytes`` and ``slots`` as above.

    ``files``: those first whose bytes are all the trainer's. ``metadata`` has a ``.metadata`` for each folder of DCP's:
    those can be published, in that order.
    """

    files: tuple[LargeFile, ...]
    data_bytes: int
    slots: tuple[int, ...]
    metadata: tuple[tuple[str, Region], ...]

    def constants(self) -> tuple[Region, ...]:
        """Of what is the same in every save: nobody asks, as no image of a set is held."""
        return ()

    def published_files(self, number: int) -> tuple[DataFile, ...]:
        """Those that readers of a published image see: of the folder of that number."""
        folder, _ = self.metadata[number]
        return tuple(file for file in self.files if isinstance(file, DataFile) and file.folder == folder)


@dataclass(frozen=True)
class TorchFileLayout:
    """Where in a segment a single file stands, an archive; ``data_bytes``, ``slots`` as above, ``sizes`` as of
    ``ArchiveData``.
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

    ``files``: where in a slot several stand, of a version that several ranks have published (see
    ``transfer/mirror.py``); empty: a slot is one file.
    """

    slots: tuple[int, ...]
    files: tuple[Region, ...] = ()

    def constants(self) -> tuple[Region, ...]:
        """None."""
        return ()


SegmentLayout = CheckpointLayout | FileSetLayout | TorchFileLayout | WeightsLayout
