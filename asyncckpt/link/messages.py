"""The messages between a trainer and its worker. Data only, no logic.

One socket pair joins trainer and worker. A message with a * travels as a ``Question``, and the next one as the
``Answer`` of the same number. The messages in the order of a worker's life:

    worker   Ready                        it runs, and others can find it; or why not    (or Refused: it has to end)
    trainer  Claim * -> Claimed, Refused  first rank: lock the folder that is saved to; or somebody has it
    trainer  Host *                       many ranks: the first rank's worker hosts the store that joins them
    worker   Hosting                      at this port             (or Refused)
    trainer  Join                         many ranks: where the store is, and which rank this is
    trainer  Allocate *                   make a segment
    worker   Allocated + descriptor       here it is, touched      (or Refused)
    trainer  Adopt + descriptor *         take over a segment of weights whose worker is gone
    worker   Adopted                      under this number
    trainer  Describe *                   the layout of a segment, after its constant parts are written
    worker   Described                    other processes are told so from now on
    trainer  Serve *                      let other hosts read your images
    worker   Served                       at this port, or why not
    trainer  Follow *                     publish the weights of another host here
    worker   Followed                     or why not
    trainer  KeepCopies *                 keep copies of what ranks of other hosts stage
    worker   CopiesKept                   there is memory for it   (or Refused)
    trainer  Begin                        a save is being staged: what, in which slot, to which path
    trainer  Staged                       the state is in the slot (the slot says so too, if the trainer dies here)
             or Cancel                    it is not, or is no longer needed
    worker   Cancelled                    whether that was in time
    worker   Written                      the slot is free again
    worker   Replicated                   copies are on other hosts, of all ranks; or why not
    worker   Committed or Failed          the end of that save, the same on all ranks
    trainer  AskUploads *                 first rank: which checkpoints are yet to be copied to another root?
    worker   UploadsUnderWay              this, and why it is not there yet
    worker   Uploaded                     an attempt to copy one has ended, at any time
    worker   Logged                       what it has to say, for the trainer's log, at any time
    trainer  Release                      forget a segment (none of its saves is under way)
    trainer  Close                        finish the staged saves and leave; at an end of file without it, linger for
                                          the next trainer, which attaches at the endpoint

What others say at its endpoint stands in ``endpoint_messages.py``.
"""

from __future__ import annotations

import pickle
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from asyncckpt.errors import CheckpointError
from asyncckpt.format.segment_layout import SegmentLayout
from asyncckpt.format.write_request import CopiedRank, WriteRequest
from asyncckpt.link.endpoint_messages import Follow, Followed, Serve, Served
from asyncckpt.storage.uploads import AskUploads, Uploaded, UploadsUnderWay


@dataclass(frozen=True)
class Claim:
    """The lock of the folder ``root``, which is to be of the job ``job_id``; None: of any.

    ``local``: the folder that is saved to, if it is another one, and from which that worker uploads to the root.
    """

    root: str
    job_id: str | None
    local: str | None = None


@dataclass(frozen=True)
class RootHolder:
    """The worker that has the lock. ``scope``: where its process ids are valid. ``leaving``: its trainer has gone, and
    the worker finishes the staged saves.
    """

    host: str
    scope: str
    worker: int
    trainer: int
    job_id: str | None
    leaving: bool


@dataclass(frozen=True)
class Claimed:
    """``holder``: who has the lock; None: this worker, or nobody. ``trouble``: why there is no lock; None: there is."""

    holder: RootHolder | None = None
    trouble: str | None = None


if TYPE_CHECKING:
    from multiprocessing.connection import Connection


@dataclass(frozen=True)
class Rendezvous:
    """How the ranks of a job find each other: by a store at ``address``, ``port``, its keys prefixed by ``token``, its
    values sealed with the ``secret`` of the ranks. ``rank`` and ``world_size``: in the group that saves together.
    """

    address: str
    port: int
    token: str
    secret: bytes
    rank: int
    world_size: int


@dataclass(frozen=True)
class Host:
    """``port``: 0 for any. ``address``: a numeric one to be reached at alone; "": at all. ``secret``: of the ranks."""

    port: int
    address: str
    secret: bytes


@dataclass(frozen=True)
class Join:
    """``timeout``: seconds that anything asked of the store may take."""

    rendezvous: Rendezvous
    timeout: float


@dataclass(frozen=True)
class Allocate:
    """Make a segment of ``nbytes``, and take its memory up to byte ``end``."""

    nbytes: int
    end: int


class Adopt:
    """Take over a segment. Its descriptor follows on the same socket."""


@dataclass(frozen=True)
class Describe:
    segment: int
    layout: SegmentLayout


@dataclass(frozen=True)
class KeepCopies:
    """``plan``: the number of the plan; ``plans``: all numbers. ``transport``, ``rate``: see ``Config``."""

    plan: int
    ranks: tuple[CopiedRank, ...]
    plans: tuple[int, ...]
    transport: str
    rate: float | None


class CopiesKept:
    """There is memory for the copies."""


@dataclass(frozen=True)
class Replicated:
    """``failure``: why it is not, and will not be; None: it is."""

    save_id: int
    failure: CheckpointError | None


@dataclass(frozen=True)
class Begin:
    request: WriteRequest


@dataclass(frozen=True)
class Staged:
    """``timings``: the trainer's, see ``manifest.py``. ``replicas``: digests of values, see ``replica_check.py``."""

    save_id: int
    timings: dict[str, float] = field(default_factory=dict)
    replicas: dict[str, int] = field(default_factory=dict)


@dataclass(frozen=True)
class Cancel:
    save_id: int
    reason: CheckpointError


@dataclass(frozen=True)
class Take:
    """Take the memory of a segment from byte ``begin`` up to ``end`` too, beside all else. ``Taken`` says when."""

    segment: int
    begin: int
    end: int


@dataclass(frozen=True)
class GiveBack:
    """Give the memory of a segment from byte ``begin`` on back: that of ``slots``, in which nothing is under way."""

    segment: int
    begin: int
    slots: tuple[int, ...]


@dataclass(frozen=True)
class Release:
    segment: int


class Close:
    """Finish the staged saves, and leave."""


@dataclass(frozen=True)
class Question:
    """No other has its ``number``."""

    number: int
    question: Claim | Host | Allocate | Adopt | Describe | AskUploads | Serve | Follow | KeepCopies


@dataclass(frozen=True)
class Ready:
    """``trouble``: the reason why others cannot find the worker; None: they can, if it has an endpoint."""

    pid: int
    trouble: str | None = None


@dataclass(frozen=True)
class Hosting:
    """``address``: where alone it can be reached; "": at any address of the host."""

    port: int
    address: str


@dataclass(frozen=True)
class Allocated:
    segment: int


@dataclass(frozen=True)
class Adopted:
    segment: int


class Described:
    """The layout of the segment is known."""


@dataclass(frozen=True)
class Refused:
    error: CheckpointError


@dataclass(frozen=True)
class Cancelled:
    """``slot_free``: whether the slot is free already; else ``Written`` will say when."""

    save_id: int
    in_time: bool
    slot_free: bool


@dataclass(frozen=True)
class Taken:
    """The memory of a segment is taken; with ``error``, it is not."""

    segment: int
    error: CheckpointError | None


@dataclass(frozen=True)
class Written:
    """``inode``: the inode of a single file, which identifies it at its final name. ``timings``: all so far."""

    save_id: int
    inode: int | None = None
    timings: dict[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class Committed:
    """The end of a save.

    Args:
        timings: See ``manifest.py``.
        nbytes: Size of the image.
        trouble: Why the pointer of the save was not advanced.
    """

    save_id: int
    timings: dict[str, float]
    nbytes: int
    trouble: CheckpointError | None = None


@dataclass(frozen=True)
class Failed:
    save_id: int
    error: CheckpointError


@dataclass(frozen=True)
class Logged:
    """``level``: of ``logging``."""

    level: int
    text: str


@dataclass(frozen=True)
class Answer:
    """To the question of that ``number``, for which nobody may be waiting any more."""

    number: int
    answer: (
        Claimed | Hosting | Allocated | Adopted | Described | UploadsUnderWay | Served | Followed | CopiesKept | Refused
    )


FromTrainer = Question | Join | Begin | Staged | Cancel | Take | GiveBack | Release | Close
FromWorker = Ready | Answer | Taken | Written | Cancelled | Replicated | Committed | Failed | Uploaded | Logged


class OtherVersionError(EOFError):
    """The message is of another version of asyncckpt."""


def send(connection: Connection, message: object) -> None:
    """Send one message. Raises ``OSError`` when nobody is at the other end."""
    # By the plain pickler: Connection.send makes one that knows closures, at 0.3 ms a message.
    connection.send_bytes(pickle.dumps(message))


def receive(connection: Connection) -> Any:
    """Wait for the next message.

    Raises ``OtherVersionError``; ``EOFError`` or ``OSError`` when the other end is gone.
    """
    received = connection.recv_bytes()
    try:
        return pickle.loads(received)
    except (AttributeError, ImportError, TypeError, pickle.UnpicklingError) as error:
        raise OtherVersionError("a message of another version") from error
