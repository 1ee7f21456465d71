"""What a worker is to write of a save."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from asyncckpt.format.manifest import Upload

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
