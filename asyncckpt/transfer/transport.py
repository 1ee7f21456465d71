"""The contract of a transport kind: move bytes of a segment from the process that holds a lease to a reader.

A transport kind only moves bytes. It verifies no checksums and has no timeouts. The reader verifies checksums, checks
that the holder lives, and closes a reading that takes too long. Every kind passes
``tests/support/transport_contract.py``.
"""

from __future__ import annotations

from abc import ABC, abstractmethod

from asyncckpt.shm.segment import Segment
from asyncckpt.transfer.api import Opened, TransferAddress


class Reading(ABC):
    """The reader's side of an open image. Several threads may call at once."""

    @abstractmethod
    def read(self, offset: int, into: memoryview) -> None:
        """Fill ``into`` with the bytes of the segment from ``offset`` on. Raises ``OSError``."""

    @abstractmethod
    def close(self) -> None:
        """End the reading. Threads that read soon get an ``OSError``. No memory is written after this returns.

        Any thread may call. Safe to call twice.
        """


class Offering(ABC):
    """The holder's side, for one lease. ``description``: the data that the reader's side needs."""

    description: bytes = b""

    @abstractmethod
    def close(self) -> None:
        """End the offer. Nothing can be read from now on."""


class TransportKind(ABC):
    """A transport kind, as used by one server or one reader. Slow setup is done once and kept until ``close``.

    Close all offerings and readings of the kind before ``close``.
    """

    offer_s: float = 0.0
    """Maximum duration of ``offer``, in seconds."""

    @abstractmethod
    def offer(self, segment: Segment) -> Offering:
        """Let the other side read a segment while the lease lasts. Raises ``OSError``."""

    @abstractmethod
    def read_from(self, address: TransferAddress, key: bytes, opened: Opened) -> Reading:
        """Start reading from ``address`` with the job's ``key``. Raises ``OSError``."""

    @abstractmethod
    def close(self) -> None:
        """Release all resources of this kind."""
