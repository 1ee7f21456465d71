"""Requests to a worker to write a save, and descriptions of the images that workers hold."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import xxhash

from asyncckpt.format.manifest import Upload
from asyncckpt.format.segment_layout import ImageLayout

Existing = Literal["refuse", "replace", "join", "set aside"]
"""The rule for a save if its path exists.

- "refuse": the save fails.
- "replace": the save replaces an existing checkpoint as a whole, in one step. It follows a link.
- "join": the save puts its files beside the existing files, and DCP's ``.metadata`` last. It follows a link.
- "set aside": the save renames the existing folder or file. It removes an existing link.
"""


ANY_PLAN = -1
"""The plan number of a rank without anything to stage. It fits every plan of the other ranks."""


@dataclass(frozen=True)
class Pointer:
    """A small text file that names the newest checkpoint, such as DeepSpeed's ``latest``.

    Args:
        path: The text file.
        text: The text that names the checkpoint.
        needs: Other paths that the checkpoint needs. The pointer advances only when all of them exist.
        at: Time of the save, in nanoseconds since the epoch. A pointer with a later time is left alone.
    """

    path: str
    text: str
    needs: tuple[str, ...] = ()
    at: int = 0


@dataclass(frozen=True)
class Rotation:
    """Older checkpoints to remove when a newer one is durable.

    Args:
        paths: Folders or files of older checkpoints, the oldest first.
        spares: Number of existing paths that stay, counted from the newest.
    """

    paths: tuple[str, ...]
    spares: int = 0


FIRST_PARTY = 10_000_000
"""The member number of the first party. No job has as many ranks."""


@dataclass(frozen=True)
class Joint:
    """The parties of a checkpoint: processes that are no ranks, and add their parts to it.

    Args:
        parties: The names of the parties, sorted, without the ranks.
        party: The party of this part; "": this is the part of a rank.
        token: The token of the trainer. The trainer writes it to the root (``storage/parties.py``), where the parties
            read it. It has a part that differs for each trainer, and a number that grows when a step is tried again.
        cut: A text that all parts must share, such as a global step with a sequence number; None: no text.
    """

    parties: tuple[str, ...]
    party: str = ""
    token: str = ""
    cut: str | None = None

    def member(self, rank: int) -> int:
        """Return the number of this part in the commit: the ``rank``, or a number above all ranks for a party."""
        return FIRST_PARTY + self.parties.index(self.party) if self.party else rank

    def attempt(self, step: int | None) -> str:
        """Return the name of the attempt at ``step``. It is the same for all ranks and parties."""
        return f"{xxhash.xxh3_64_hexdigest(f'{self.token} {step}'.encode())[:12]}-{step}"


@dataclass(frozen=True)
class WriteRequest:
    """The order to write one slot: this rank's part of a checkpoint, or a single file.

    All times are in seconds since the epoch.

    Attributes:
        save_id, attempt: Identify the save and its attempt. They are the same on all ranks.
        path: Absolute path of the checkpoint or file.
        existing: The rule if ``path`` exists.
        timeout: Seconds until the save has to be committed.
        pickle_bytes: Size of the pickle of each archive, in bytes.
        small_files: Names and contents of the files that are not staged.
        umask: The trainer's umask.
        since: This save is newer than every checkpoint created up to this time.
        began: Start of the training, for the manifest.
        plan: Number of the image's plan. Parts of different plans do not belong together, except ``ANY_PLAN``.
        upload, pointer, rotation: Tasks of the first rank's worker after the commit. ``storage/follow_up.py`` carries
            out the last two.
        called_at: Time of the call of ``save``.
        is_copied: Whether other hosts keep copies of the image.
        most_links: Maximum number of consecutive saves that link to an unchanged file of the save before.
        refuses_differing: Fail the save if ranks have different values under one name.
        version: Version of this package, for the manifest. The trainer sends it, because the worker imports nothing
            more by then.
        member: The number of this part in the commit (``Joint.member``).
        joint: The parties of the checkpoint; None: only ranks save it.
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
    pointer: Pointer | None = None
    rotation: Rotation | None = None
    called_at: float = 0.0
    is_copied: bool = False
    most_links: int = 0
    refuses_differing: bool = False
    version: str = ""
    member: int = 0
    joint: Joint | None = None

    @property
    def party(self) -> str:
        """The party of this part; "": a rank."""
        return "" if self.joint is None else self.joint.party

    @property
    def parties(self) -> tuple[str, ...]:
        """The parties that the first rank waits for."""
        return () if self.joint is None or self.joint.party else self.joint.parties


@dataclass(frozen=True)
class HeldImage:
    """A complete image in the memory of a worker, staged for ``request`` in a segment with that ``layout``.

    Attributes:
        constants: Checksums of the layout's constant regions.
        checksums: Checksums of the image's spans, as unsigned 64-bit numbers.
        committed: Whether the save was committed; None: the save has not ended yet.
        staged_at: Time when the image was complete, by ``time.monotonic``.
        is_copy: Whether this is a copy of the image of a rank on another host.
    """

    request: WriteRequest
    layout: ImageLayout
    constants: tuple[int, ...]
    checksums: bytes
    committed: bool | None
    staged_at: float
    is_copy: bool = False


COPY_SLOTS = 2
"""Number of images to keep of each copied rank: the image of the last replicated save, and the newest image."""


@dataclass(frozen=True)
class CopiedRank:
    """A rank on another host. This host keeps copies of its images, in a segment of ``nbytes`` for each plan."""

    rank: int
    nbytes: int


@dataclass(frozen=True)
class ImageKey:
    """The key of an image: the attempt of the save, and the rank. Copies of an image have the same key."""

    attempt: str
    rank: int


@dataclass(frozen=True)
class ImageSummary:
    """A short description of an image: its request without small files, and ``committed`` as in ``HeldImage``."""

    request: WriteRequest
    committed: bool | None

    @property
    def key(self) -> ImageKey:
        """The key of the image."""
        return ImageKey(self.request.attempt, self.request.rank)
