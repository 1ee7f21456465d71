"""The messages at the endpoint of a worker. Data only, no logic.

Processes other than the worker's trainer connect there, see ``endpoint.py``. A restarted trainer:

    client   Inspect                      ask for the worker's memory
    worker   Inventory                    the images, and their segments     (or TrainerAlive: the trainer lives)
    client   TakeSegments
    worker   descriptors                  one for each segment
    client   Attach + descriptor          begin a session, and write stderr to this descriptor
    worker   Attached                     the session begins (see ``messages.py``), or a reason
    client   Retire                       write the staged saves, and leave

A reader of published weights:

    client   ListPublished
    worker   PublishedSegments            the segments with publications; the header pages have the versions
    client   OpenSegment
    worker   descriptor                   a read-only descriptor of one segment

    client   Follow                       mirror a publication of another host
    worker   Followed                     done, or a reason (its trainer publishes here, for example)

A process that loads from memory:

    client   AskImages                    ask for the list of images
    worker   Images
    client   AskImage                     ask for one image
    worker   FoundImage                   its layout and checksums (then OpenSegment, and a lease)
    client   Serve
    worker   Served

A process that lists workers. A worker may leave in spite of this connection:

    client   AskStatus
    worker   WorkerStatus
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from asyncckpt.format.segment_layout import CheckpointLayout, FileSetLayout, WeightsLayout
from asyncckpt.format.write_request import HeldImage, ImageKey, ImageSummary


class Inspect:
    """Ask for the inventory."""


@dataclass(frozen=True)
class TrainerAlive:
    """The process ids of the worker and of its trainer."""

    worker: int
    trainer: int


@dataclass(frozen=True)
class PublishedSegment:
    """A segment with publications. Its header page has the versions and their slots."""

    segment: int
    layout: CheckpointLayout | FileSetLayout | WeightsLayout


@dataclass(frozen=True)
class Inventory:
    """The memory of a worker without a trainer.

    Args:
        worker: The process id of the worker.
        session: The number of the last session.
        segments: The numbers of the segments with something in them.
        images: The images.
        published: The segments with weights or sets of files. They have no images.
        saves: The paths of saves under way without other ranks.
        follows: Whether the worker mirrors a publication of another host.
    """

    worker: int
    session: int
    segments: tuple[int, ...]
    images: tuple[HeldImage, ...]
    published: tuple[PublishedSegment, ...]
    saves: tuple[str, ...] = ()
    follows: bool = False


class TakeSegments:
    """Ask for the descriptors of the ``segments`` of ``Inventory``, in that order."""


@dataclass(frozen=True)
class Attach:
    """Ask for a session. A descriptor for stderr follows. The worker answers after everything staged is written.

    Args:
        fingerprint: The fingerprint of the worker that this trainer would start, see ``process.fingerprint``.
        session: The ``session`` of the inventory.
        options: The fields of ``process.WorkerOptions``. Another version may have others.
        surroundings: The fields of ``process.Surroundings``.
    """

    fingerprint: str
    session: int
    options: Mapping[str, Any]
    surroundings: Mapping[str, Any]


@dataclass(frozen=True)
class Attached:
    """The answer. ``trouble``: the reason why there is no session; None: it begins."""

    trouble: str | None


class Retire:
    """Tell the worker to leave after everything staged is written."""


class ListPublished:
    """Ask for the segments with publications."""


@dataclass(frozen=True)
class PublishedSegments:
    """The answer. ``trouble``: the reason why a mirror gets nothing newer; "": none is known."""

    published: tuple[PublishedSegment, ...]
    trouble: str = ""


@dataclass(frozen=True)
class OpenSegment:
    """Ask for a descriptor of that ``segment``. The worker hangs up if the segment was released."""

    segment: int


class AskImages:
    """Ask for the list of images."""


@dataclass(frozen=True)
class Images:
    """The complete images, the oldest first.

    ``trainer``: the process id of the trainer; None: it is gone. The images of a trainer that lives are left out.
    """

    images: tuple[ImageSummary, ...]
    trainer: int | None


@dataclass(frozen=True)
class AskImage:
    """Ask for one image with its layout and checksums."""

    key: ImageKey


@dataclass(frozen=True)
class FoundImage:
    """The answer. ``held``: the image; None if the worker no longer holds the image."""

    held: HeldImage | None


@dataclass(frozen=True)
class Serve:
    """Serve images to processes of other hosts.

    Args:
        key: The key that those processes know.
        address: The numeric address to listen at; "": all addresses.
    """

    key: bytes
    address: str


@dataclass(frozen=True)
class Served:
    """The answer. ``trouble``: the reason why there is no ``port``; None: there is one."""

    port: int
    trouble: str | None = None


@dataclass(frozen=True)
class Follow:
    """Mirror a publication. ``locator``: see ``transfer/requests.py``."""

    locator: str


@dataclass(frozen=True)
class Followed:
    """The answer. ``trouble``: the reason why there is no mirror; None: there is one."""

    trouble: str | None = None


class AskStatus:
    """Ask for the status of the worker."""


@dataclass(frozen=True)
class WorkerStatus:
    """The status of a worker.

    Args:
        worker: Its process id.
        has_trainer: Whether its trainer lives, as far as the worker knows.
        saving: The paths of the saves that have not ended.
        lingers: The seconds that the worker still waits for the next trainer; None: it does not wait.
        leaving: Whether it leaves as soon as everything is written.
    """

    worker: int
    has_trainer: bool
    saving: tuple[str, ...]
    lingers: float | None
    leaving: bool
