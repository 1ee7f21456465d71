"""The vocabulary of the trainer and its worker. Without logic: read it and you know the protocol.

One socket pair joins them; every message is one of these. In the order of a life:

    worker   Ready                        it is up
    trainer  Allocate                     make a segment
    worker   Allocated + descriptor       here it is, touched      (or Refused)
    trainer  Describe                     what its bytes are (after writing all that is constant into it)
    trainer  Begin                        a save is about to be staged: what, where to
    trainer  Staged                       it is (the slot's state says so too, for when the trainer dies here)
             or Cancel                    it is not, or is no longer wanted
    worker   Cancelled                    whether that was in time
    worker   Written                      the slot is free again
    worker   Committed or Failed          the end of that save
    trainer  Release                      forget a segment (none of its saves is under way)
    trainer  Close                        finish what is staged and leave; end of file means the same
"""

from __future__ import annotations

from dataclasses import dataclass, field

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


@dataclass(frozen=True)
class Order:
    """What to make of one staged slot: the checkpoint at ``path`` (absolute)."""

    save_id: int
    segment: int
    slot: int
    path: str
    attempt: str
    step: int | None
    rank: int
    overwrite: bool
    keep_last: int | None


# From the trainer.


@dataclass(frozen=True)
class Allocate:
    nbytes: int


@dataclass(frozen=True)
class Describe:
    segment: int
    layout: Layout


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
class Allocated:
    """Followed on the same socket by the segment's descriptor."""

    segment: int


@dataclass(frozen=True)
class Refused:
    error: CheckpointError


@dataclass(frozen=True)
class Cancelled:
    save_id: int
    in_time: bool


@dataclass(frozen=True)
class Written:
    save_id: int


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


FromTrainer = Allocate | Describe | Begin | Staged | Cancel | Release | Close
FromWorker = Ready | Allocated | Refused | Cancelled | Written | Committed | Failed
