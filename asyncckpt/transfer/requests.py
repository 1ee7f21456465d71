"""What is said on a sealed connection between who reads images, or published versions, and the worker that has them.

Any number of connections may stand between the two.

    reader  OpenImage                 let me read this one
    holder  Opened                    under a lease that ends with this connection      (or NotHeld)
    reader  AskImageDigests           of some spans of it
    holder  Digests
    reader  OpenVersion               let me read what you have published as that version, or are just getting yourself
    holder  OpenedVersion             under a lease as above                            (or NotHeld)
    reader  AskVersionDigests         of those of its spans that are there
    holder  Digests                   of at least one, or of none after some seconds; or it will never be whole
    reader  CloseImage                I have what I need of it
    reader  ReadBytes                 of an image that is open, on this connection or another one
    holder  bytes
    reader  NextImage                 which is the newest that you have staged since?
    holder  NewestStaged              this one, or none, after some seconds
    reader  NextVersion               which is the newest that you have published? I have read what I asked for before
    holder  NewestVersion             this one, to be read there; or none, after some seconds
    reader  Ping                      are you there?
    holder  Pong                      also before an answer that takes time: I am at it
"""

from __future__ import annotations

from dataclasses import dataclass

from asyncckpt.format.write_request import HeldImage, ImageKey
from asyncckpt.shm.slots import PublishedVersion


@dataclass(frozen=True)
class TransferAddress:
    """Where a worker serves what it has."""

    host: str
    port: int


@dataclass(frozen=True)
class OpenImage:
    """``transport``: the kind by which its bytes are to be read. Without its checksums it is open at once: these may
    have to be made, of all of it.
    """

    key: ImageKey
    transport: str
    with_checksums: bool


@dataclass(frozen=True)
class Opened:
    """``lease``: its name, by which other connections may read. ``offer``: what the kind has to know to read it."""

    lease: str
    held: HeldImage
    offer: bytes


@dataclass(frozen=True)
class NotHeld:
    """``why``: in words."""

    why: str


@dataclass(frozen=True)
class CloseImage:
    lease: str


@dataclass(frozen=True)
class AskImageDigests:
    """Of the spans from ``first`` up to ``last`` of an image that is open."""

    lease: str
    first: int
    last: int


@dataclass(frozen=True)
class ReadBytes:
    """``nbytes`` from ``offset`` of the segment that the image is in."""

    lease: str
    offset: int
    nbytes: int


@dataclass(frozen=True)
class NextImage:
    """``after``: how many had been staged when this was asked before. ``seconds``: to wait for another."""

    after: int
    seconds: float


@dataclass(frozen=True)
class NewestStaged:
    """``key``: None where no other was staged; then ``count`` is as it was."""

    count: int
    key: ImageKey | None


@dataclass(frozen=True)
class NextVersion:
    """``after``: the newest that the reader has. ``seconds``: to wait for another. ``own``: where the reader passes on
    what it has (no host: at the address it asks from). ``refused``: from whom it could not be had.
    """

    after: PublishedVersion | None
    seconds: float
    own: TransferAddress
    refused: tuple[TransferAddress, ...]


@dataclass(frozen=True)
class NewestVersion:
    """``version``: None where there is no other. ``holder``: who passes it on; None: who has published it."""

    version: PublishedVersion | None
    holder: TransferAddress | None


@dataclass(frozen=True)
class OpenVersion:
    """``epoch``, ``version``: as of ``PublishedVersion``. ``transport``: as of ``OpenImage``."""

    epoch: int
    version: int
    transport: str


@dataclass(frozen=True)
class OpenedVersion:
    """``lease``, ``offer``: as of ``Opened``. ``sizes``: of its files, in bytes (see ``versions.py``)."""

    lease: str
    sizes: tuple[int, ...]
    offer: bytes


@dataclass(frozen=True)
class AskVersionDigests:
    """Of the spans of a version that is open, from ``first`` on. ``seconds``: to wait for one to be there."""

    lease: str
    first: int
    seconds: float


@dataclass(frozen=True)
class Digests:
    """``digests``: one after the other; None: what is there is all that will ever be."""

    digests: bytes | None


class Ping:
    """Say that you are there."""


class Pong:
    """I am."""
