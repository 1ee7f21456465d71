"""What is said on a sealed connection between a process that reads images and the worker that holds them.

Any number of connections may stand between the two.

    reader  OpenImage                 let me read this one
    holder  Opened                    under a lease that ends with this connection      (or NotHeld)
    reader  AskChecksums              of some spans of it
    holder  Checksums
    reader  CloseImage                I have what I need of it
    reader  ReadBytes                 of an image that is open, on this connection or another one
    holder  bytes
    reader  NextImage                 which is the newest that you have staged since?
    holder  NewestStaged              this one, or none, after some seconds
    reader  Ping                      are you there?
    holder  Pong                      also before an answer that takes time: I am at it
"""

from __future__ import annotations

from dataclasses import dataclass

from asyncckpt.worker.held_image import HeldImage, ImageKey


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
class AskChecksums:
    """Of the spans from ``first`` up to ``last`` of an image that is open."""

    lease: str
    first: int
    last: int


@dataclass(frozen=True)
class Checksums:
    """``checksums``: unsigned 64-bit numbers."""

    checksums: bytes


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


class Ping:
    """Say that you are there."""


class Pong:
    """I am."""
