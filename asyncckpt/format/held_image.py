"""Images that a worker holds: whole states in its memory, each this rank's part of what was saved."""

from __future__ import annotations

from dataclasses import dataclass

from asyncckpt.format.segment_layout import CheckpointLayout
from asyncckpt.format.write_request import WriteRequest


@dataclass(frozen=True)
class HeldImage:
    """A whole image in the memory of a worker: what was staged for ``request``, in a segment of that ``layout``.

    ``constants`` and ``checksums``: of the layout's constant regions, and of the image's spans (unsigned 64-bit
    numbers). ``committed``: whether that save was; None: it has not ended yet. ``staged_at``: when it was whole, by
    ``time.monotonic``. ``is_copy``: of a rank on another host.
    """

    request: WriteRequest
    layout: CheckpointLayout
    constants: tuple[int, ...]
    checksums: bytes
    committed: bool | None
    staged_at: float
    is_copy: bool = False


COPY_SLOTS = 2
"""Images of each rank that copies are kept of: the last one that all have, and the one that is coming."""


@dataclass(frozen=True)
class CopiedRank:
    """A rank on another host, of which copies are kept: in a segment of ``nbytes`` for each structure."""

    rank: int
    nbytes: int


@dataclass(frozen=True)
class ImageKey:
    """Which image: of an attempt to save, the part of one rank. No two images have the same, whoever holds them."""

    attempt: str
    rank: int


@dataclass(frozen=True)
class ImageSummary:
    """An image in a few bytes: the request it was staged for, without small files, and whether that is committed."""

    request: WriteRequest
    committed: bool | None

    @property
    def key(self) -> ImageKey:
        """Which one it is."""
        return ImageKey(self.request.attempt, self.request.rank)
