"""The messages between a trainer and its worker, and between a worker and other processes. Data only, no logic.

One socket pair joins trainer and worker. What is marked with a * travels as a ``Question``, and what follows it as the
``Answer`` of the same number. In the order of a worker's life:

    worker   Ready                        it runs
    trainer  Listen *                     take your endpoint: the worker before you has left
    worker   Listening                                             (or Refused)
    trainer  Claim * -> Claimed, Refused  first rank: lock the folder that is saved to; or somebody has it
    trainer  Host *                       many ranks: the first rank's worker hosts the store that joins them
    worker   Hosting                      at this port             (or Refused)
    trainer  Join                         many ranks: where the store is, and which rank this is
    trainer  Allocate *                   make a segment
    worker   Allocated + descriptor       here it is, touched      (or Refused)
    trainer  Adopt + descriptor *         take over a segment whose worker is gone
    worker   Adopted                      under this number
    trainer  Describe *                   the layout of a segment, after all that is constant was written into it
    worker   Described                    other processes are told so from now on
    trainer  Begin                        a save is being staged: what, in which slot, to which path
    trainer  Staged                       all of it is in the slot (its state says so too, if the trainer dies here)
             or Cancel *                  it is not, or is no longer needed
    worker   Cancelled                    whether that was in time
    worker   Written                      the slot is free again
    worker   Committed or Failed          the end of that save, the same on all ranks
    trainer  AskUploads *                 first rank: what of all that is yet to be copied to another root?
    worker   UploadsUnderWay              this, and why it is not there yet
    worker   Uploaded                     an attempt to copy one has ended, at any time
    worker   Logged                       what it has to say, for the trainer's log, at any time
    trainer  Release                      forget a segment (none of its saves is under way)
    trainer  Close                        finish what is staged and leave; at an end of file without it, linger first

At the endpoint (see ``endpoint.py``) other processes connect. One that takes over from a dead trainer:

    client   Inspect                      what do you hold?
    worker   Inventory                    these images, in these segments    (or TrainerAlive: my trainer lives)
    client   TakeSegments
    worker   descriptors                  of these segments
    client   Retire                       I have them; finish what is staged and leave

One that reads published weights:

    client   ListPublished
    worker   PublishedSegments            something is published in these segments; their header pages say what
    client   OpenSegment
    worker   descriptor                   of one segment, for reading alone

One that loads, and looks what there is in memory:

    client   AskImages                    which images do you hold?
    worker   Images
    client   AskImage                     what exactly is this one?
    worker   FoundImage                   (then OpenSegment, and a lease)
    client   Serve                        let other hosts read your images
    worker   Served                       at this port, or why not

One that lists workers, which keeps none of them from leaving:

    client   AskStatus
    worker   WorkerStatus                 this is what I do, and wait for
"""

from __future__ import annotations

import pickle
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from asyncckpt.errors import CheckpointError
from asyncckpt.worker.held_image import HeldImage, ImageKey, ImageSummary
from asyncckpt.worker.root_claim import Claim, Claimed
from asyncckpt.worker.segment_layout import CheckpointLayout, FileSetLayout, SegmentLayout, WeightsLayout
from asyncckpt.worker.uploads import AskUploads, Uploaded, UploadsUnderWay
from asyncckpt.worker.write_request import WriteRequest

if TYPE_CHECKING:
    from multiprocess.connection import Connection


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


class Listen:
    """Take the endpoint."""


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
    nbytes: int


@dataclass(frozen=True)
class Adopt:
    """The segment's descriptor follows on the same socket. ``held``: the images in it, which are kept for now."""

    held: tuple[HeldImage, ...]


@dataclass(frozen=True)
class Describe:
    segment: int
    layout: SegmentLayout


@dataclass(frozen=True)
class Begin:
    request: WriteRequest


@dataclass(frozen=True)
class Staged:
    """``timings``: the trainer's, see ``timings.py``."""

    save_id: int
    timings: dict[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class Cancel:
    save_id: int
    reason: CheckpointError


@dataclass(frozen=True)
class Release:
    segment: int


class Close:
    """Finish what is staged, and leave."""


@dataclass(frozen=True)
class Question:
    """No other has its ``number``."""

    number: int
    question: Listen | Claim | Host | Allocate | Adopt | Describe | Cancel | AskUploads


@dataclass(frozen=True)
class Ready:
    pid: int


@dataclass(frozen=True)
class Listening:
    """``trouble``: why there is no endpoint all the same; None: there is."""

    trouble: str | None


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
class Written:
    """``inode``: that of a single file, by which it is recognised at its final name. ``timings``: all so far."""

    save_id: int
    inode: int | None = None
    timings: dict[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class Committed:
    """``timings``: see ``timings.py``. ``direct``: whether the page cache was bypassed. ``nbytes``: of the image."""

    save_id: int
    path: str
    timings: dict[str, float]
    direct: bool
    nbytes: int


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
    answer: Listening | Claimed | Hosting | Allocated | Adopted | Described | Cancelled | UploadsUnderWay | Refused


# At the endpoint.


class Inspect:
    """Tell what is held."""


@dataclass(frozen=True)
class TrainerAlive:
    """The process ids of the worker and of its trainer."""

    worker: int
    trainer: int


@dataclass(frozen=True)
class PublishedSegment:
    """A segment in which something is published; its header page says what, and in which slots."""

    segment: int
    layout: CheckpointLayout | FileSetLayout | WeightsLayout


@dataclass(frozen=True)
class Inventory:
    """``leaving``: it was told to retire, and is finishing. ``published``: segments of weights and of sets of files,
    which have no images here. ``saves``: the paths of those that no other rank takes part in, and have not ended.
    """

    worker: int
    leaving: bool
    segments: tuple[int, ...]
    images: tuple[HeldImage, ...]
    published: tuple[PublishedSegment, ...]
    saves: tuple[str, ...] = ()


class TakeSegments:
    """Answered by the descriptors of the ``segments`` of ``Inventory``, in that order."""


class Retire:
    """Leave, once all that is staged is written."""


class ListPublished:
    """Tell where something is published."""


@dataclass(frozen=True)
class PublishedSegments:
    published: tuple[PublishedSegment, ...]


@dataclass(frozen=True)
class OpenSegment:
    """Answered by a descriptor of that ``segment``, or by an end of file where it was released."""

    segment: int


class AskImages:
    """Tell which images are held."""


@dataclass(frozen=True)
class Images:
    """Those that are whole, the oldest first. ``trainer``: the process id of the worker's trainer, whose own images are
    not among them; None: it is gone.
    """

    images: tuple[ImageSummary, ...]
    trainer: int | None


@dataclass(frozen=True)
class AskImage:
    key: ImageKey


@dataclass(frozen=True)
class FoundImage:
    """``held``: None where it is not held any more."""

    held: HeldImage | None


@dataclass(frozen=True)
class Serve:
    """Serve images to those who know ``key``. ``address``: a numeric one, to be reached there alone; "": at all."""

    key: bytes
    address: str


@dataclass(frozen=True)
class Served:
    """``trouble``: why not; None: at that ``port``."""

    port: int
    trouble: str | None = None


class AskStatus:
    """Tell what you do."""


@dataclass(frozen=True)
class WorkerStatus:
    """What a worker does, and waits for.

    ``has_trainer``: its trainer lives, as far as it knows, and may ask for more. ``saving``: where the saves go that
    have not ended. ``lingers``: for how many seconds more it waits for somebody to take over what it holds; None: it
    does not, yet or any more. ``leaving``: it was told to retire.
    """

    worker: int
    has_trainer: bool
    saving: tuple[str, ...]
    lingers: float | None
    leaving: bool


FromTrainer = Question | Join | Begin | Staged | Release | Close
FromWorker = Ready | Answer | Written | Committed | Failed | Uploaded | Logged


def send(connection: Connection, message: object) -> None:
    """Send one message. Raises ``OSError`` when nobody is at the other end."""
    # By the plain pickler: Connection.send makes one that knows closures, at 0.3 ms a message.
    connection.send_bytes(pickle.dumps(message))


def receive(connection: Connection) -> Any:
    """Wait for the next message. Raises ``EOFError`` or ``OSError`` when the other end is gone."""
    return pickle.loads(connection.recv_bytes())
