"""What stands where in a segment: the trainer lays it out, the worker is told, and so are those who read."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Region:
    """Bytes of a segment: ``nbytes`` from ``offset``."""

    offset: int
    nbytes: int


@dataclass(frozen=True)
class CheckpointLayout:
    """Where in a segment the files of a checkpoint stand.

    ``data_name`` is the one file that differs from save to save: ``data_bytes`` (a multiple of the page) at each of
    ``slots`` (offsets in bytes). ``metadata`` is DCP's ``.metadata``, ``index_head`` the index of the data file up to
    its checksums. ``spans`` holds unsigned 64-bit numbers: the boundaries, in the file, of what has one checksum.
    """

    data_name: str
    data_bytes: int
    slots: tuple[int, ...]
    metadata: Region
    index_head: Region
    spans: Region

    def constants(self) -> tuple[Region, ...]:
        """Of what is the same in every save."""
        return self.metadata, self.index_head, self.spans


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
