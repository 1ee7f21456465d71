"""The kinds of transport: each moves bytes of a segment that one process holds under a lease to where another reads it.

A kind moves bytes, and no more. It checks nothing, and knows no deadline: who reads compares checksums, sees by other
means whether the holder lives, and closes what has taken too long. Every kind keeps ``tests/support/
transport_contract.py``.
"""

from __future__ import annotations

from abc import ABC, abstractmethod

from asyncckpt.shm.segment import Segment
from asyncckpt.transfer.requests import Opened, OpenedVersion, TransferAddress


class Reading(ABC):
    """The side that reads what was opened. Any thread may call, several at once."""

    @abstractmethod
    def read(self, offset: int, into: memoryview) -> None:
        """Fill ``into`` with the bytes of the segment from ``offset`` on. Raises ``OSError``: they cannot be had."""

    @abstractmethod
    def close(self) -> None:
        """End it: whoever reads gets an ``OSError`` soon, and nothing is written to memory any more when this returns.

        Safe to call twice, by any thread.
        """


class Offering(ABC):
    """The side that holds, for one lease. ``description`` is what the other side has to know."""

    description: bytes = b""

    @abstractmethod
    def close(self) -> None:
        """From now on nothing can be read."""


class TransportKind(ABC):
    """A kind, as one server or one reader uses it: what is slow to begin is kept until this is closed.

    All that it offers or reads has to be closed before.
    """

    offer_s: float = 0.0
    """How long an offer may take."""

    @abstractmethod
    def offer(self, segment: Segment) -> Offering:
        """Let the other side read a segment as long as the lease lasts. Raises ``OSError``."""

    @abstractmethod
    def read_from(self, address: TransferAddress, key: bytes, opened: Opened | OpenedVersion) -> Reading:
        """Begin to read what was opened at ``address`` with the job's ``key``. Raises ``OSError``."""

    @abstractmethod
    def close(self) -> None:
        """Let go of what it has kept."""
