"""The messages on a sealed connection between a reader and the worker that holds images or published versions.

Any number of connections may exist between the two.

    reader  Open                      let me read this image: of a save, or of a version, which may still arrive there
    holder  Opened                    under a lease that ends with this connection      (or NotHeld)
    reader  AskDigests                for spans that are there
    holder  Digests                   of at least one span; of none after a timeout; None if no more will arrive
    reader  ReadBytes                 of an open image, on this connection or another
    holder  bytes
    reader  EndLease                  I have what I need of the image
    reader  NextImage                 which image have you staged since my last question?
    holder  NewestStaged              the newest one; none after a timeout
    reader  NextVersion               which is your newest version? I have read the version that I asked for before
    holder  NewestVersion             the newest one, and where to read it; none after a timeout
    reader  Ping                      do you answer?
    holder  Pong                      yes. Also sent before an answer that takes time: I am working on it
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
    """``key``: of an image of a save, or of a published version. ``transport``: the name of the kind that will read
    the bytes. ``with_checksums``: for an image of a save, the answer waits until the worker has all checksums, which
    it may have to compute over the whole image.
    """

    key: ImageKey | VersionKey
    transport: str
    with_checksums: bool


@dataclass(frozen=True)
class Opened:
    """``lease``: the lease's name, which other connections use to read. ``described``: the image of a save, or the
    sizes of a version's files, in bytes (see ``versions.py``). ``offer``: data for the transport kind.
    """

    lease: str
    described: HeldImage | tuple[int, ...]
    offer: bytes


@dataclass(frozen=True)
class NotHeld:
    """``why``: the reason, for messages."""

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
    """``after``: the count from the previous answer. ``seconds``: maximum time to wait for another image."""

    after: int
    seconds: float


@dataclass(frozen=True)
class NewestStaged:
    """``count`` and ``key`` of the newest image. If no other was staged, ``count`` is as asked and ``key`` is None."""

    count: int
    key: ImageKey | None


@dataclass(frozen=True)
class NextVersion:
    """``after``: the newest version that the reader has. ``seconds``: maximum time to wait for another version.
    ``own``: where the reader serves what it has (no host: the address that it connects from). ``refused``: the hosts
    from which the reader could not get the version.
    """

    after: PublishedVersion | None
    seconds: float
    own: TransferAddress
    refused: tuple[TransferAddress, ...]


@dataclass(frozen=True)
class NewestVersion:
    """``version``: the newest, or None. ``holder``: the host to read that version from; None: the publisher."""

    version: PublishedVersion | None
    holder: TransferAddress | None


@dataclass(frozen=True)
class Digests:
    """``digests``: one after the other; None: no more will ever arrive."""

    digests: bytes | None


class Ping:
    """Asks the other end for a sign of life."""


class Pong:
    """Tells the other end that this end is alive."""


_SCHEME = "asyncckpt"


@dataclass(frozen=True)
class Locator:
    """``addresses``: of the workers of all ranks, by rank. ``transport``: the name of the transport kind."""

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
        """Read a file that only this user can have read or written. Raises ``ValueError``, ``OSError``."""
        with open(os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK), encoding="utf-8") as file:
            found = os.fstat(file.fileno())
            if found.st_uid != os.geteuid() or not stat.S_ISREG(found.st_mode) or found.st_mode & 0o077:
                raise ValueError("others may know the key in that file")
            return cls.parse(file.read())

    def write(self, path: str) -> None:
        """Write the locator atomically to a file that only this user may read. Raises ``OSError``."""
        partial = f"{path}.{secrets.token_hex(8)}.partial"  # unguessable, so nobody else holds it open
        fd = os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        try:
            with open(fd, "w", encoding="utf-8") as file:
                file.write(f"{self}\n")
            os.replace(partial, path)
        except BaseException:
            with contextlib.suppress(OSError):
                os.unlink(partial)
            raise
