"""The calls of a worker, and the data in them. ``calls.py`` carries them.

Processes of this user connect to the endpoint of a worker, and call the methods of ``WorkerApi``. A process that
attaches becomes the worker's trainer. From then on it calls the methods of ``SessionApi`` on the same connection, and
the worker calls those of ``TrainerApi``. A worker that a trainer has started itself serves that trainer first, on a
socket pair. The calls of other hosts are in ``transfer/api.py``.

A save, in the order of the calls:

    trainer  begin                        a save is being staged: its request, slot and path
    trainer  staged                       the state is in the slot (the header page has this too, if the trainer dies)
             or cancel                    staging failed, or the save is no longer needed
    worker   cancelled                    whether the save was cancelled in time
    worker   written                      the slot is free again
    worker   replicated                   other hosts have copies of the images of all ranks, or why not
    worker   ended                        the end of the save, the same on all ranks

At the end the trainer calls ``close``. After an end of file without that call, the worker lingers for the next trainer.
The next trainer calls ``inspect``, ``segments`` and ``attach`` at the endpoint. A process that loads from memory calls
``images``, ``image`` and ``segment``, and leases the slot. A reader of weights calls ``published`` and ``segment``.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

from asyncckpt.errors import CheckpointError
from asyncckpt.format.segment_layout import SegmentLayout
from asyncckpt.format.write_request import CopiedRank, HeldImage, ImageKey, ImageSummary, WriteRequest
from asyncckpt.storage.uploads import Uploaded, UploadsUnderWay


@dataclass(frozen=True)
class Served:
    """Where a worker serves other hosts. ``trouble``: the reason why there is no ``port``; None: there is one."""

    port: int
    trouble: str | None = None


@dataclass(frozen=True)
class TrainerAlive:
    """The process ids of the worker and of its trainer."""

    worker: int
    trainer: int


@dataclass(frozen=True)
class PublishedSegment:
    """A segment with publications. Its header page has the versions and their slots."""

    segment: int
    layout: SegmentLayout


@dataclass(frozen=True)
class Inventory:
    """The memory of a worker without a trainer.

    Args:
        worker: The process id of the worker.
        session: The number of the last session.
        segments: The numbers of the segments with something in them.
        images: The images.
        published: The segments with publications of weights, or of sets of files without images.
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


@dataclass(frozen=True)
class PublishedSegments:
    """The segments with publications. ``trouble``: the reason why a mirror gets nothing newer; "": none is known."""

    published: tuple[PublishedSegment, ...]
    trouble: str = ""


@dataclass(frozen=True)
class Images:
    """The complete images, the oldest first.

    ``trainer``: the process id of the trainer; None: it is gone. The images of a trainer that lives are left out.
    """

    images: tuple[ImageSummary, ...]
    trainer: int | None


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


class WorkerApi(Protocol):
    """The calls that any process of this user may make at the endpoint of a worker."""

    def status(self) -> WorkerStatus:
        """Return the status of the worker. The worker may leave in spite of this connection."""

    def inspect(self) -> TrainerAlive | Inventory:
        """Return the memory of a worker without a trainer, for a restarted trainer."""

    def segments(self) -> None:
        """Send the descriptors of the ``segments`` of the last ``Inventory``, in that order."""

    def attach(
        self, fingerprint: str, session: int, options: Mapping[str, Any], surroundings: Mapping[str, Any]
    ) -> str | None:
        """Begin a session after everything staged is written. A descriptor for the worker's stderr follows the call.

        Args:
            fingerprint: The fingerprint of the worker that this trainer would start, see ``process.fingerprint``.
            session: The ``session`` of the inventory.
            options: The fields of ``process.WorkerOptions``. Another version may have others.
            surroundings: The fields of ``process.Surroundings``.

        Returns:
            The reason why other processes cannot find the worker; None: they can. The next calls are those of
            ``SessionApi``. A worker that a trainer has started gives this answer without a call.

        Raises:
            CheckpointError: There is no session.
        """

    def retire(self) -> None:
        """Leave after everything staged is written. The end of the connection shows the end of the worker."""

    def published(self) -> PublishedSegments:
        """Return the segments with publications."""

    def segment(self, number: int) -> None:
        """Send a read-only descriptor of a segment. The worker hangs up if the segment was released."""

    def images(self) -> Images:
        """Return the images that a restarted job can load."""

    def image(self, key: ImageKey) -> HeldImage | None:
        """Return one image with its layout and checksums; None: the worker no longer holds it."""

    def follow(self, locator: str) -> str | None:
        """Mirror a publication of another host. Return the reason why there is no mirror; None: there is one.

        ``locator``: see ``transfer/locator.py``.
        """

    def serve(self, key: bytes, address: str) -> Served:
        """Serve images and published versions to processes of other hosts.

        Args:
            key: The key that those processes know.
            address: The numeric address to listen at; "": all addresses.
        """


@dataclass(frozen=True)
class Claim:
    """The lock of a root, to be taken.

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
    """The result of a claim.

    Args:
        holder: The other worker that has the lock; None: no other worker has it.
        trouble: The reason why a lock is not possible; None: it is possible.
    """

    holder: RootHolder | None = None
    trouble: str | None = None


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
class Hosting:
    """The store listens. ``address``: the only address that it listens at; "": all addresses of the host."""

    port: int
    address: str


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


class SessionApi(Protocol):
    """The calls that the trainer may make in its session."""

    def claim(self, claim: Claim) -> Claimed:
        """First rank: lock a root, unless another worker has the lock. Raises ``JobTakenError``."""

    def host(self, port: int, address: str, secret: bytes) -> Hosting:
        """First rank: host the store that joins the ranks. Raises ``WorkerDiedError``.

        Args:
            port: The port to listen at; 0: any port that the options of the worker allow.
            address: The only numeric address to listen at; "": all addresses of the host.
            secret: The secret of the ranks.
        """

    def join(self, rendezvous: Rendezvous, timeout: float) -> None:
        """Join the other ranks. ``timeout``: timeout in seconds for each call to the store."""

    def allocate(self, nbytes: int, end: int) -> int:
        """Make a segment of ``nbytes``, and take its memory up to byte ``end``. Raises ``OutOfMemoryError``.

        Returns the number of the segment. Its descriptor follows.
        """

    def adopt(self) -> int:
        """Take over a segment of weights of a dead worker. Its descriptor follows the call. Return its number."""

    def describe(self, segment: int, layout: SegmentLayout) -> None:
        """Note the layout of a segment after its constant parts are written. Other processes may see it now."""

    def take(self, segment: int, begin: int, end: int) -> None:
        """Take more memory of a segment in the background, from byte ``begin`` up to ``end``, then call ``taken``."""

    def give_back(self, segment: int, begin: int, slots: tuple[int, ...]) -> None:
        """Give back the memory of a segment from byte ``begin`` on. No save uses the ``slots`` in that memory."""

    def release(self, segment: int) -> None:
        """Forget a segment. No save in it may be under way."""

    def serve(self, key: bytes, address: str) -> Served:
        """Serve images and published versions to processes of other hosts, see ``WorkerApi.serve``."""

    def follow(self, locator: str) -> str | None:
        """Mirror a publication of another host, see ``WorkerApi.follow``."""

    def keep_copies(
        self, plan: int, ranks: tuple[CopiedRank, ...], plans: tuple[int, ...], transport: str, rate: float | None
    ) -> None:
        """Keep copies of images of ranks on other hosts, and take the memory for them.

        Raises ``OutOfMemoryError``, and ``WorkerDiedError`` if the worker has not joined the other ranks.

        Args:
            plan: The number of the plan of these images.
            ranks: The ranks, with the sizes of their segments.
            plans: The numbers of the plans to keep. Copies of other plans are released.
            transport: See ``Config``.
            rate: See ``Config.replica_rate``.
        """

    def uploads(self) -> UploadsUnderWay:
        """First rank: return the uploads that have not ended."""

    def begin(self, request: WriteRequest) -> None:
        """Note that a save is being staged."""

    def staged(self, staged: Staged) -> None:
        """Note that the image of a save is staged."""

    def cancel(self, save_id: int, reason: CheckpointError) -> None:
        """Cancel a save, unless it is too late, then call ``cancelled``."""

    def close(self) -> None:
        """Finish the staged saves, and leave."""


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
    """The end of a save that is not committed."""

    save_id: int
    error: CheckpointError


class TrainerApi(Protocol):
    """The calls that a worker makes in its trainer. The trainer answers none of them."""

    def taken(self, segment: int, error: CheckpointError | None) -> None:
        """Note the end of ``SessionApi.take``. ``error``: the reason why the memory is not taken."""

    def cancelled(self, save_id: int, in_time: bool, slot_free: bool) -> None:
        """Note the end of ``SessionApi.cancel``.

        Args:
            save_id: The number of the save.
            in_time: Whether the save was cancelled in time.
            slot_free: Whether the slot is free already. Otherwise ``written`` follows.
        """

    def written(self, save_id: int, inode: int | None, timings: dict[str, float]) -> None:
        """Note that the slot of a save is free again.

        Args:
            save_id: The number of the save.
            inode: The inode of a single file, which identifies the file under its final name.
            timings: All timings so far.
        """

    def replicated(self, save_id: int, failure: CheckpointError | None) -> None:
        """Note that a save is replicated. ``failure``: the reason why it never will be."""

    def ended(self, outcome: Committed | Failed) -> None:
        """Note the end of a save."""

    def uploaded(self, uploaded: Uploaded) -> None:
        """Note the end of an attempt to upload a checkpoint, at any time."""

    def logged(self, level: int, text: str) -> None:
        """Log a line of the worker, at any time. ``level``: a level of ``logging``."""
