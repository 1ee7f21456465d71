"""The vocabulary of the trainer and its worker. Without logic: read it and you know the protocol.

One socket pair joins them; every message is one of these. In the order of a life:

    worker   Ready                        it is up
    trainer  Open                         take your door: whoever had it has left
    worker   Opened                                                (or Refused)
    trainer  Host                         many ranks: the first rank's worker hosts the store that joins them
    worker   Hosting                      at this port             (or Refused)
    trainer  Join                         many ranks: where the store is, and who you are
    trainer  Allocate                     make a segment
    worker   Allocated + descriptor       here it is, touched      (or Refused)
    trainer  Adopt + descriptor           take over one whose worker is gone
    worker   Adopted                      it is yours to use
    trainer  Describe                     what its bytes are (after writing all that is constant into it)
    worker   Described                    from now on others are told so
    trainer  Begin                        a save is about to be staged: what, where to
    trainer  Staged                       it is (the slot's state says so too, for when the trainer dies here)
             or Cancel                    it is not, or is no longer wanted
    worker   Cancelled                    whether that was in time
    worker   Written                      the slot is free again
    worker   Committed or Failed          the end of that save, the same on all ranks
    trainer  Release                      forget a segment (none of its saves is under way)
    trainer  Close                        finish what is staged and leave; at an end of file without it, linger first

And at the door (see ``door.py``), with a process that did not start the worker:

    visitor  Look                         what do you hold?
    worker   Holding                      these images, in these segments    (or Busy: I have a trainer)
    visitor  Take
    worker   descriptors                  of these segments
    visitor  Retire                       I have it; finish what is staged and leave

    reader   Browse                       what is published?
    worker   Shelves                      in these segments, see there
    reader   Read
    worker   a descriptor                 of one segment, for reading alone
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from asyncckpt.errors import CheckpointError


@dataclass(frozen=True)
class Region:
    """Bytes of a segment: ``nbytes`` from ``offset``."""

    offset: int
    nbytes: int


@dataclass(frozen=True)
class Layout:
    """Where in a segment the files of a checkpoint stand.

    ``data_name`` is the one file that differs from save to save: ``data_bytes`` (a multiple of the page) at each of
    ``slots`` (offsets in bytes). ``metadata`` is DCP's ``.metadata`` and ``index_head`` the index of the data file up
    to its checksums; both are constant. ``spans`` holds unsigned 64-bit numbers: the boundaries, in the data file, of
    what is checksummed together.
    """

    data_name: str
    data_bytes: int
    slots: tuple[int, ...]
    metadata: Region
    index_head: Region
    spans: Region

    def constants(self) -> tuple[Region, ...]:
        """What stays the same from save to save."""
        return self.metadata, self.index_head, self.spans


@dataclass(frozen=True)
class FileLayout:
    """Where in a segment a single file stands, an archive (see ``archive.py``): in ``data_bytes`` (a multiple of the
    page) at each of ``slots`` (offsets in bytes).

    ``sizes`` holds unsigned 64-bit numbers: the alignment of its records, the room of the pickle, and the size of each
    storage, in bytes.
    """

    data_bytes: int
    slots: tuple[int, ...]
    sizes: Region

    def constants(self) -> tuple[Region, ...]:
        """What stays the same from save to save."""
        return (self.sizes,)


@dataclass(frozen=True)
class WeightLayout:
    """Of a segment that has but a header page: its slots are other segments, of these numbers, each a file of tensors
    that says itself what is in it (see ``asyncckpt/weights/image.py``).
    """

    slots: tuple[int, ...]

    def constants(self) -> tuple[Region, ...]:
        """There are none."""
        return ()


@dataclass(frozen=True)
class Meeting:
    """Where the ranks of a job meet: a store at ``address``, ``port``, its keys prefixed by ``token``.

    ``secret``: what only they know, and seal all they say there with. ``rank`` and ``world_size`` are those of the
    group that saves together.
    """

    address: str
    port: int
    token: str
    secret: bytes
    rank: int
    world_size: int


Existing = Literal["refuse", "replace", "join"]
"""What becomes of what stands at the place of a save: it is refused; a checkpoint that is there is replaced, whole, in
one step; or the save's files are put beside those of others in that folder, DCP's ``.metadata`` after all it names."""


@dataclass(frozen=True)
class Order:
    """What to make of one staged slot: its part of the checkpoint at ``path`` (absolute), or the file there.

    ``save_id`` and ``attempt`` are the same on all ranks. ``timeout``: seconds until it has to be committed.
    ``pickle_bytes``: of a file, how long its pickle is this time. ``umask``: the trainer's, for what is made.
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
    pickle_bytes: int = 0
    umask: int = 0o022


@dataclass(frozen=True)
class Held:
    """A whole image that a worker has in memory: what was staged for ``order``, in a segment of that ``layout``.

    ``constants`` and ``checksums``: checksums of the layout's constant regions, and of the image's spans (unsigned
    64-bit numbers). ``committed``: how that save ended; None: it has not yet.
    """

    order: Order
    layout: Layout
    constants: tuple[int, ...]
    checksums: bytes
    committed: bool | None


# From the trainer.


@dataclass(frozen=True)
class Open:
    pass


@dataclass(frozen=True)
class Host:
    """``port``: 0 for any."""

    port: int


@dataclass(frozen=True)
class Join:
    """``timeout``: seconds that talking to the store may take."""

    meeting: Meeting
    timeout: float


@dataclass(frozen=True)
class Allocate:
    nbytes: int


@dataclass(frozen=True)
class Adopt:
    """Followed on the same socket by the segment's descriptor. ``held``: the images in it, to be kept for now."""

    held: tuple[Held, ...]


@dataclass(frozen=True)
class Describe:
    segment: int
    layout: Layout | FileLayout | WeightLayout


@dataclass(frozen=True)
class Begin:
    order: Order


@dataclass(frozen=True)
class Staged:
    """``timings``: seconds the trainer spent, by phase; they go into the manifest."""

    save_id: int
    timings: dict[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class Cancel:
    save_id: int
    reason: CheckpointError


@dataclass(frozen=True)
class Release:
    segment: int


@dataclass(frozen=True)
class Close:
    pass


# From the worker.


@dataclass(frozen=True)
class Ready:
    pid: int


@dataclass(frozen=True)
class Opened:
    """``trouble``: why it has no door all the same."""

    trouble: str | None


@dataclass(frozen=True)
class Hosting:
    port: int


@dataclass(frozen=True)
class Allocated:
    """Followed on the same socket by the segment's descriptor."""

    segment: int


@dataclass(frozen=True)
class Adopted:
    segment: int


@dataclass(frozen=True)
class Described:
    pass


@dataclass(frozen=True)
class Refused:
    error: CheckpointError


@dataclass(frozen=True)
class Cancelled:
    """``slot_free``: whether the slot is the trainer's again; else ``Written`` will say so."""

    save_id: int
    in_time: bool
    slot_free: bool


@dataclass(frozen=True)
class Written:
    """``inode``: that of a single file, by which it is known when it has its name."""

    save_id: int
    inode: int | None = None


@dataclass(frozen=True)
class Committed:
    """``timings``: seconds of the worker by phase. ``direct``: whether the data bypassed the page cache."""

    save_id: int
    path: str
    timings: dict[str, float]
    direct: bool


@dataclass(frozen=True)
class Failed:
    save_id: int
    error: CheckpointError


# At the door.


@dataclass(frozen=True)
class Look:
    pass


@dataclass(frozen=True)
class Busy:
    """The worker, and its ``trainer``, are these processes."""

    worker: int
    trainer: int


@dataclass(frozen=True)
class Shelf:
    """A segment in which something is published: which slots and what, its header page says."""

    segment: int
    layout: Layout | WeightLayout


@dataclass(frozen=True)
class Holding:
    """``leaving``: somebody has had the worker retire, and it is only finishing its work. ``shelves``: those of weights
    that are no part of a checkpoint.
    """

    worker: int
    leaving: bool
    segments: tuple[int, ...]
    images: tuple[Held, ...]
    shelves: tuple[Shelf, ...]


@dataclass(frozen=True)
class Take:
    """Answered by the descriptors of the ``segments`` of ``Holding``, in that order."""


@dataclass(frozen=True)
class Retire:
    pass


@dataclass(frozen=True)
class Browse:
    pass


@dataclass(frozen=True)
class Shelves:
    shelves: tuple[Shelf, ...]


@dataclass(frozen=True)
class Read:
    """Answered by a descriptor of that ``segment``, or by the end of the visit where it is gone."""

    segment: int


FromTrainer = Open | Host | Join | Allocate | Adopt | Describe | Begin | Staged | Cancel | Release | Close
FromWorker = (
    Ready | Opened | Hosting | Allocated | Adopted | Described | Refused | Cancelled | Written | Committed | Failed
)
