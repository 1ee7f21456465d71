"""The messages on a sealed connection between a reader and the worker that holds images or published versions.

A reader may have several connections to the same worker.

    reader  Open                      read the image of a save, or of a version that may still be arriving
    holder  Opened                    a lease that ends with this connection      (or NotHeld)
    reader  AskDigests                get digests of spans that have arrived
    holder  Digests                   digests of some spans; none after a timeout; None if no more will arrive
    reader  ReadBytes                 read bytes of an open image, on this or another connection
    holder  bytes
    reader  EndLease                  end the lease on the image
    reader  NextImage                 get the newest image that was staged since the last question
    holder  NewestStaged              the newest image; no image after a timeout
    reader  NextVersion               get the newest version (and report the version that the reader has)
    holder  NewestVersion             the newest version, and the host to read from; no version after a timeout
    reader  Ping                      check that the holder answers
    holder  Pong                      the answer; also sent as a sign of life before a slow answer
"""

from __future__ import annotations

import contextlib
import os
import secrets
import stat
from dataclasses import dataclass
from urllib.parse import parse_qs, urlsplit

from asyncckpt.format.write_request import HeldImage, ImageKey
from asyncckpt.shm.slots import PublishedVersion, VersionKey


@dataclass(frozen=True)
class TransferAddress:
    """The address where a worker serves images and versions."""

    host: str
    port: int


@dataclass(frozen=True)
class Open:
    """Asks for a lease on an image.

    ``key``: the image of a save, or a published version. ``transport``: the name of the transport kind that will read
    the bytes. ``with_checksums``: for the image of a save, wait until the worker has all checksums. The worker may have
    to compute the checksums of the whole image.
    """

    key: ImageKey | VersionKey
    transport: str
    with_checksums: bool


@dataclass(frozen=True)
class Opened:
    """Answers ``Open`` with a lease.

    ``lease``: the name of the lease, which other connections use to read. ``described``: the image of a save, or the
    sizes of a version's files, in bytes (see ``versions.py``). ``offer``: data for the transport kind.
    """

    lease: str
    described: HeldImage | tuple[int, ...]
    offer: bytes


@dataclass(frozen=True)
class NotHeld:
    """Answers ``Open`` if the worker does not hold the image. ``why``: the reason, for messages."""

    why: str


@dataclass(frozen=True)
class EndLease:
    """Ends a lease."""

    lease: str


@dataclass(frozen=True)
class AskDigests:
    """Asks for digests of an open image, from span ``first`` on. ``seconds``: maximum time to wait for a span."""

    lease: str
    first: int
    seconds: float


@dataclass(frozen=True)
class ReadBytes:
    """Asks for ``nbytes`` from ``offset`` of the segment that holds the image."""

    lease: str
    offset: int
    nbytes: int


@dataclass(frozen=True)
class NextImage:
    """Asks for the newest staged image.

    ``after``: the count from the previous answer. ``seconds``: maximum time to wait for another image.
    """

    after: int
    seconds: float


@dataclass(frozen=True)
class NewestStaged:
    """The ``count`` and ``key`` of the newest image. If no other image was staged, ``key`` is None.

    In this case ``count`` is ``NextImage.after``.
    """

    count: int
    key: ImageKey | None


@dataclass(frozen=True)
class NextVersion:
    """Asks for the newest version.

    ``after``: the newest version that the reader has. ``seconds``: maximum time to wait for another version. ``own``:
    the address where the reader serves its versions (no host: the address that it connects from). ``refused``: the
    hosts from which the reader could not get the version.
    """

    after: PublishedVersion | None
    seconds: float
    own: TransferAddress
    refused: tuple[TransferAddress, ...]


@dataclass(frozen=True)
class NewestVersion:
    """The answer to ``NextVersion``.

    ``version``: the newest version, or None. ``holder``: the host to read this version from; None: the publisher.
    """

    version: PublishedVersion | None
    holder: TransferAddress | None


@dataclass(frozen=True)
class Digests:
    """The answer to ``AskDigests``. ``digests``: concatenated digests; None: no more digests will arrive."""

    digests: bytes | None


class Ping:
    """Asks the other end for a sign of life."""


class Pong:
    """Tells the other end that this end is alive."""


_SCHEME = "asyncckpt"


@dataclass(frozen=True)
class Locator:
    """The key and the addresses of a publication.

    ``addresses``: the workers' addresses, by rank. ``transport``: the name of the transport kind.
    """

    key: bytes
    addresses: tuple[TransferAddress, ...]
    transport: str

    def __str__(self) -> str:
        places = ",".join(
            f"[{each.host}]:{each.port}" if ":" in each.host else f"{each.host}:{each.port}" for each in self.addresses
        )
        return f"{_SCHEME}://{self.key.hex()}@{places}?transport={self.transport}"

    @classmethod
    def parse(cls, text: str) -> Locator:
        """Parse a locator's text. Raises ``ValueError`` with a message that omits the key."""
        try:
            parts = urlsplit(text.strip())
            key, _, places = parts.netloc.partition("@")
            if parts.scheme != _SCHEME or not key:
                raise ValueError
            split = [place.rpartition(":") for place in places.split(",")]
            addresses = tuple(TransferAddress(host.strip("[]"), int(port)) for host, _, port in split if host)
            (transport,) = parse_qs(parts.query)["transport"]
            if len(addresses) != len(split):
                raise ValueError
            return cls(bytes.fromhex(key), addresses, transport)
        except (ValueError, KeyError):
            raise ValueError(
                f"this is no locator: it begins with {_SCHEME}://, and a publisher's serve() gives it"
            ) from None

    @classmethod
    def read(cls, text: str) -> Locator:
        """Return the locator in ``text``, or in the file at that path. Raises ``ValueError``, ``OSError``."""
        if text.strip().startswith(f"{_SCHEME}://"):
            return cls.parse(text)
        with open(text, encoding="utf-8") as file:
            return cls.parse(file.read())

    @classmethod
    def read_own(cls, path: str) -> Locator:
        """Read a locator from a file that only this user can read or write. Raises ``ValueError``, ``OSError``."""
        with open(os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK), encoding="utf-8") as file:
            found = os.fstat(file.fileno())
            if found.st_uid != os.geteuid() or not stat.S_ISREG(found.st_mode) or found.st_mode & 0o077:
                raise ValueError("others may know the key in that file")
            return cls.parse(file.read())

    def write(self, path: str) -> None:
        """Write the locator atomically to a file that only this user may read. Raises ``OSError``."""
        partial = f"{path}.{secrets.token_hex(8)}.partial"  # unguessable, so no other process has it open
        fd = os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        try:
            with open(fd, "w", encoding="utf-8") as file:
                file.write(f"{self}\n")
            os.replace(partial, path)
        except BaseException:
            with contextlib.suppress(OSError):
                os.unlink(partial)
            raise
