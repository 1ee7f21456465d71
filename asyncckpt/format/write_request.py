"""What a worker is to write of a save."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from asyncckpt.format.manifest import Upload
from asyncckpt.format.segment_layout import CheckpointLayout

Existing = Literal["refuse", "replace", "join", "set aside"]
"""What a save does where its path exists: it is refused; a checkpoint that is there is replaced, whole, in one step;
its files are put beside those of others, DCP's ``.metadata`` after all it names; or what is there gets another name,
but for a link, which goes. Whoever replaces, or joins, follows a link."""


ANY_PLAN = -1
"""The number of the plan of a rank that has nothing to stage."""


@dataclass(frozen=True)
class WriteRequest:
    """What the worker is to write from one slot: this rank's part of the checkpoint at ``path`` (absolute), or a file.

    ``save_id`` and ``attempt`` are the same on all ranks. So is ``plan``, the number of the image's plan, or the parts
    do not belong together. ``timeout``: seconds until it has to be committed. ``pickle_bytes``: of the pickle of each
    archive. ``small_files``: by their names, what is not staged. ``umask``: the trainer's. ``since``: it is newer than
    all created up to then. ``began``: when the training began, for the manifest. ``upload``, on the first rank: what
    follows when it is committed. ``called_at``: when ``save`` was called, in seconds since the epoch. ``is_copied``:
    other hosts are to have copies.
    ``most_links``: how many saves in a row may take a file that has not changed from the one before.
    ``refuses_differing``: it fails if ranks have different values
    under one name. ``version``: of this package, for the manifest. The worker imports nothing more by then.
    """

    save_id: int
    segment: int
    slot: int
    path: str
    attempt: str
    step: int | None
    rank: int
    world_size: int
    existing: Existing
    keep_last: int | None
    keep: bool
    timeout: float
    pickle_bytes: tuple[int, ...] = ()
    small_files: tuple[tuple[str, bytes], ...] = ()
    umask: int = 0o022
    since: float = 0.0
    began: float = 0.0
    plan: int = 0
    upload: Upload | None = None
    called_at: float = 0.0
    is_copied: bool = False
    most_links: int = 0
    refuses_differing: bool = False
    version: str = ""


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
