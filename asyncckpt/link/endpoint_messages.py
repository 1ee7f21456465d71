"""The messages between a worker and processes that did not start it. Data only, no logic.

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

    client   Follow                       have here what is published on another host
    worker   Followed                     (not where it has a trainer, which publishes here)

One that loads, and looks what there is in memory:

    client   AskImages                    which images do you hold?
    worker   Images
    client   AskImage                     what exactly is this one?
    worker   FoundImage                   (then OpenSegment, and a lease)
    client   Serve
    worker   Served

One that lists workers, which keeps none of them from leaving:

    client   AskStatus
    worker   WorkerStatus                 this is what I do, and wait for
"""

from __future__ import annotations

from dataclasses import dataclass

from asyncckpt.format.segment_layout import CheckpointLayout, FileSetLayout, WeightsLayout
from asyncckpt.format.write_request import HeldImage, ImageKey, ImageSummary


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
    ``follows``: it has them from another host, for whoever reads here.
    """

    worker: int
    leaving: bool
    segments: tuple[int, ...]
    images: tuple[HeldImage, ...]
    published: tuple[PublishedSegment, ...]
    saves: tuple[str, ...] = ()
    follows: bool = False


class TakeSegments:
    """Answered by the descriptors of the ``segments`` of ``Inventory``, in that order."""


class Retire:
    """Leave, once all that is staged is written."""


class ListPublished:
    """Tell where something is published."""


@dataclass(frozen=True)
class PublishedSegments:
    """``trouble``: why nothing newer comes from another host; "": no reason is known."""

    published: tuple[PublishedSegment, ...]
    trouble: str = ""


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


@dataclass(frozen=True)
class Follow:
    """``locator``: where it is published, see ``transfer/requests.py``."""

    locator: str


@dataclass(frozen=True)
class Followed:
    """``trouble``: why not; None: it is."""

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
