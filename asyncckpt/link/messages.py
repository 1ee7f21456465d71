"""The messages between a trainer and its worker. Data only, no logic.

One socket pair joins trainer and worker. A message with a * travels as a ``Question``, and the next message as the
``Answer`` of the same number. The messages in the order of a worker's life:

    worker   Ready                        the worker runs; its endpoint is open, or why not  (or Refused: it must end)
    trainer  Claim * -> Claimed, Refused  first rank: lock the root, unless another worker has the lock
    trainer  Host *                       many ranks: the first rank's worker hosts the store that joins them
    worker   Hosting                      the port of the store    (or Refused)
    trainer  Join                         many ranks: the address of the store, and the rank
    trainer  Allocate *                   make a segment
    worker   Allocated + descriptor       the touched segment      (or Refused)
    trainer  Adopt + descriptor *         take over a segment of weights of a dead worker
    worker   Adopted                      the segment's number
    trainer  Describe *                   the layout of a segment, after its constant parts are written
    worker   Described                    the worker tells the layout to other processes from now on
    trainer  Serve *                      serve images to other hosts
    worker   Served                       the port, or why not
    trainer  Follow *                     publish the weights of another host here
    worker   Followed                     done, or why not
    trainer  KeepCopies *                 keep copies of the images of ranks on other hosts
    worker   CopiesKept                   the memory is taken      (or Refused)
    trainer  Begin                        a save is being staged: its request, slot and path
    trainer  Staged                       the state is in the slot (the header page has this too, if the trainer dies)
             or Cancel                    staging failed, or the save is no longer needed
    worker   Cancelled                    whether the save was cancelled in time
    worker   Written                      the slot is free again
    worker   Replicated                   other hosts have copies of the images of all ranks, or why not
    worker   Committed or Failed          the end of the save, the same on all ranks
    trainer  AskUploads *                 first rank: ask for the checkpoints that are not yet uploaded
    worker   UploadsUnderWay              the targets of those uploads, and an error of one of them
    worker   Uploaded                     an attempt to upload a checkpoint has ended, at any time
    worker   Logged                       a line for the trainer's log, at any time
    trainer  Release                      forget a segment (none of its saves is under way)
    trainer  Close                        finish the staged saves and leave; at an end of file without it, linger for
                                          the next trainer, which attaches at the endpoint

The messages of other processes at the endpoint are in ``endpoint_messages.py``.
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
    """Take the lock of a root.

    Args:
        root: The folder to lock.
        job_id: The job that the folder has to belong to; None: any job.
        local: The folder to save to, if it differs from the root. The worker uploads from there to the root.
    """

    root: str
    job_id: str | None
    local: str | None = None


@dataclass(frozen=True)
class RootHolder:
    """The worker that has the lock of a root.

    Args:
        host: The name of its host.
        scope: The scope in which the process ids are valid, see ``root_lock.py``; "": unknown.
        worker: The process id of the worker.
        trainer: The process id of its trainer; 0: the trainer is in another container.
        job_id: The job that the folder belongs to; None: unknown.
        leaving: Whether the trainer is gone, and the worker only finishes the staged saves.
    """

    host: str
    scope: str
    worker: int
    trainer: int
    job_id: str | None
    leaving: bool


@dataclass(frozen=True)
class Claimed:
    """Answer a claim.

    Args:
        holder: The other worker that has the lock; None: no other worker has it.
        trouble: The reason why a lock is not possible; None: it is possible.
    """

    holder: RootHolder | None = None
    trouble: str | None = None


if TYPE_CHECKING:
    from multiprocessing.connection import Connection


@dataclass(frozen=True)
class Rendezvous:
    """The store of a job, for the agreement among its ranks.

    Args:
        address: The address of the store.
        port: The port of the store.
        token: The prefix of all keys.
        secret: The secret of the ranks, which seals all values.
        rank: The rank in the group that saves together.
        world_size: The size of that group.
    """

    address: str
    port: int
    token: str
    secret: bytes
    rank: int
    world_size: int


@dataclass(frozen=True)
class Host:
    """Host the store.

    Args:
        port: The port to listen at; 0: any free port.
        address: The only numeric address to listen at; "": all addresses of the host.
        secret: The secret of the ranks.
    """

    port: int
    address: str
    secret: bytes


@dataclass(frozen=True)
class Join:
    """Join the other ranks. ``timeout``: timeout in seconds for each call to the store."""

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
    """Keep copies of the images of ``ranks``.

    Args:
        plan: The number of the plan of these images.
        ranks: The ranks, with the sizes of their segments.
        plans: The numbers of the plans to keep. Copies of other plans are released.
        transport: See ``Config``.
        rate: See ``Config``.
    """

    plan: int
    ranks: tuple[CopiedRank, ...]
    plans: tuple[int, ...]
    transport: str
    rate: float | None


class CopiesKept:
    """There is memory for the copies."""


@dataclass(frozen=True)
class Replicated:
    """A save is replicated. ``failure``: the reason why it never will be; None: it is replicated."""

    save_id: int
    failure: CheckpointError | None


@dataclass(frozen=True)
class Begin:
    request: WriteRequest


@dataclass(frozen=True)
class Staged:
    """The image of a save is staged.

    Args:
        save_id: The number of the save.
        timings: The timings of the trainer, see ``manifest.py``.
        replicas: The digests of values that should be equal on all ranks, see ``replica_check.py``.
    """

    save_id: int
    timings: dict[str, float] = field(default_factory=dict)
    replicas: dict[str, int] = field(default_factory=dict)


@dataclass(frozen=True)
class Cancel:
    save_id: int
    reason: CheckpointError


@dataclass(frozen=True)
class Take:
    """Take more memory of a segment in the background, from byte ``begin`` up to ``end``. ``Taken`` is the answer."""

    segment: int
    begin: int
    end: int


@dataclass(frozen=True)
class GiveBack:
    """Give back the memory of a segment from byte ``begin`` on. No save uses the ``slots`` in that memory."""

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
    """Ask the worker. The ``number`` is unique."""

    number: int
    question: Claim | Host | Allocate | Adopt | Describe | AskUploads | Serve | Follow | KeepCopies


@dataclass(frozen=True)
class Ready:
    """The worker is up. ``trouble``: the reason why others cannot find it; None: they can, if it has an endpoint."""

    pid: int
    trouble: str | None = None


@dataclass(frozen=True)
class Hosting:
    """The store listens. ``address``: the only address that it listens at; "": all addresses of the host."""

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
    """Answer ``Cancel``.

    Args:
        save_id: The number of the save.
        in_time: Whether the save was cancelled in time.
        slot_free: Whether the slot is free already. Otherwise ``Written`` follows.
    """

    save_id: int
    in_time: bool
    slot_free: bool


@dataclass(frozen=True)
class Taken:
    """The end of ``Take``. ``error``: the reason why the memory is not taken; None: it is taken."""

    segment: int
    error: CheckpointError | None


@dataclass(frozen=True)
class Written:
    """The slot of a save is free again.

    Args:
        save_id: The number of the save.
        inode: The inode of a single file, which identifies the file under its final name.
        timings: All timings so far.
    """

    save_id: int
    inode: int | None = None
    timings: dict[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class Committed:
    """The end of a save.

    Args:
        timings: See ``manifest.py``.
        nbytes: Size of the image.
        trouble: The reason why the pointer was not advanced to this save; None: it was advanced.
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
    """A line for the trainer's log. ``level``: a level of ``logging``."""

    level: int
    text: str


@dataclass(frozen=True)
class Answer:
    """Answer the question of that ``number``. The asker may have given up."""

    number: int
    answer: (
        Claimed | Hosting | Allocated | Adopted | Described | UploadsUnderWay | Served | Followed | CopiesKept | Refused
    )


FromTrainer = Question | Join | Begin | Staged | Cancel | Take | GiveBack | Release | Close
FromWorker = Ready | Answer | Taken | Written | Cancelled | Replicated | Committed | Failed | Uploaded | Logged


class OtherVersionError(EOFError):
    """The message is of another version of asyncckpt."""


def send(connection: Connection, message: object) -> None:
    """Send one message. Raises ``OSError`` when the other end is gone."""
    # Use the plain pickler. Connection.send makes a pickler for closures, which takes 0.3 ms a message.
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
