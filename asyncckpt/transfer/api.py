"""The calls of other hosts, and the data in them. ``link/calls.py`` carries them over a sealed connection.

A reader calls the methods of ``ImageApi`` in the worker that holds images or published versions. It may have several
connections to the same worker. Before a slow answer the worker sends answers with the number 0, as signs of life.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from asyncckpt.format.write_request import HeldImage, ImageKey
from asyncckpt.shm.slots import PublishedVersion, VersionKey


@dataclass(frozen=True)
class TransferAddress:
    """The address where a worker serves images and versions."""

    host: str
    port: int


@dataclass(frozen=True)
class Opened:
    """An image that is open under a lease.

    ``lease``: the name of the lease, which other connections use to read. ``described``: the image of a save, or the
    sizes of a version's files, in bytes (see ``versions.py``). ``offer``: data for the transport kind.
    """

    lease: str
    described: HeldImage | tuple[int, ...]
    offer: bytes


@dataclass(frozen=True)
class NotHeld:
    """The worker does not hold the image. ``why``: the reason, for messages."""

    why: str


@dataclass(frozen=True)
class NewestVersion:
    """The newest version.

    ``version``: the version, or None. ``holder``: the host to read this version from; None: the publisher.
    """

    version: PublishedVersion | None
    holder: TransferAddress | None


class ImageApi(Protocol):
    """The calls that a process of the same job may make over a sealed connection."""

    def ping(self) -> None:
        """Give a sign of life."""

    def open(self, key: ImageKey | VersionKey, transport: str, with_checksums: bool) -> Opened | NotHeld:
        """Open an image under a lease, which ends with this connection.

        Args:
            key: The image of a save, or a published version that may still be arriving.
            transport: The name of the transport kind that will read the bytes.
            with_checksums: For the image of a save, wait until the worker has all checksums. The worker may have to
                compute the checksums of the whole image.
        """

    def digests(self, lease: str, first: int, seconds: float) -> bytes | None:
        """Return digests of spans of an open image that have arrived, concatenated.

        Args:
            lease: The name of the lease.
            first: The first span.
            seconds: Maximum time to wait for a span.

        Returns:
            The digests; ``b""`` after a timeout; None: no more digests will arrive.
        """

    def patches(self, lease: str, first: int, bases: bytes) -> list[bytes]:
        """Return patches of spans of an open version that have arrived (see ``patches.py``).

        Args:
            lease: The name of the lease.
            first: The first span.
            bases: The concatenated digests of the spans that the reader has.

        Returns:
            A patch for each digest; b"" if the holder lacks the reader's span, or if most of the span has changed.
        """

    def read(self, lease: str, offset: int, nbytes: int) -> None:
        """Send ``nbytes`` from ``offset`` of the segment that holds an open image.

        ``lease``: the name of the lease. The reader only *tells* this call, on any of its connections. The bytes come
        without an ``Answer``.
        """

    def end_lease(self, lease: str) -> None:
        """End a lease."""

    def next_image(self, after: int, seconds: float) -> tuple[int, ImageKey] | None:
        """Wait for the trainer to stage another image.

        Args:
            after: The count from the previous answer; 0: return the newest image, if there is one.
            seconds: Maximum time to wait.

        Returns:
            The number of images that the trainer has staged, and the key of the newest image; None after a timeout.
        """

    def next_version(
        self,
        after: PublishedVersion | None,
        seconds: float,
        own: TransferAddress,
        refused: tuple[TransferAddress, ...],
    ) -> NewestVersion:
        """Wait for a version other than ``after``.

        Args:
            after: The newest version that the reader has.
            seconds: Maximum time to wait.
            own: The address where the reader serves its versions (no host: the address that it connects from).
            refused: The hosts from which the reader could not get the version.
        """
