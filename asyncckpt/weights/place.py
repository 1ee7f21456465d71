"""A place, as a worker of a sync sees it: the publication there, which is its own or another's."""

from __future__ import annotations

import threading
import uuid
from collections.abc import Iterable
from typing import Any

import torch

from asyncckpt.config import Config
from asyncckpt.errors import JobTakenError
from asyncckpt.weights.publisher import WeightPublisher
from asyncckpt.weights.subscriber import WeightSubscriber
from asyncckpt.weights.weights import Weights
from asyncckpt.weights.word import Said


class Place:
    """The publication by the name ``address``, and what this worker has of it. ``close`` it."""

    def __init__(self, address: str, slots: int, timeout: float) -> None:
        """As of ``WeightPublisher``; it waits ``timeout`` seconds for a slot."""
        self.address = address
        self._slots = slots
        self._timeout = timeout
        self._publisher: WeightPublisher | None = None
        self._substitute: WeightPublisher | None = None
        # One for syncs and one for between them: neither waits for the other.
        self.in_sync = Subscription()
        self.between = Subscription()

    @property
    def is_published_here(self) -> bool:
        """Whether this worker is the one that publishes at this place."""
        return self._publisher is not None

    def publish(
        self,
        weights: Iterable[tuple[str, torch.Tensor]],
        version: int,
        dtype: torch.dtype | None,
        *,
        roll_back: bool,
        substitute: bool,
    ) -> Said:
        """Publish ``weights``; from now on this worker is the one that does.

        With ``substitute``, by another address where another process has this one, and for as long as it has it: a
        rollout that takes part in no sync any more, and lives. Raises ``JobTakenError``, and what a publisher raises.
        """
        publisher = self._publisher or self._publisher_at(self.address)
        try:
            publication = publisher.publish(weights, version, dtype=dtype, roll_back=roll_back)
        except JobTakenError:
            publisher.close()
            self._publisher = None
            if not substitute:
                raise
            # It has asked for none of the weights yet.
            publisher = self._substitute = self._substitute or self._publisher_at(f"{self.address}\n{uuid.uuid4().hex}")
            publication = publisher.publish(weights, version, dtype=dtype, roll_back=roll_back)
        else:
            self._publisher = publisher
            if self._substitute is not None:
                self._substitute.close()
                self._substitute = None
        return Said(publication.version, publication.epoch, publisher.address)

    def newest(self) -> int | None:
        """The newest version here."""
        return next(reversed(self.in_sync.of(self.address).versions()), None)

    def close(self) -> None:
        """Give all back, and what was published."""
        for each in (self.in_sync, self.between, self._publisher, self._substitute):
            if each is not None:
                each.close()
        self._publisher = self._substitute = None

    def _publisher_at(self, address: str) -> WeightPublisher:
        config = Config(timeout=self._timeout)
        return WeightPublisher(address, slots=self._slots, when_busy="wait", config=config)


class Subscription:
    """A subscriber to the address that is asked for, which seldom changes. For any thread, one after the other."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._address: str | None = None
        self._subscriber: WeightSubscriber | None = None

    def of(self, address: str) -> WeightSubscriber:
        """The subscriber to ``address``."""
        if self._subscriber is None or address != self._address:
            self.close()
            self._address, self._subscriber = address, WeightSubscriber(address)
        return self._subscriber

    def acquire(self, address: str, min_version: int | None = None, **which: Any) -> Weights:
        """As ``WeightSubscriber.acquire``."""
        with self._lock:
            return self.of(address).acquire(min_version, **which)

    def close(self) -> None:
        """Let go, and forget which version was the last. What is leased stays so."""
        subscriber, self._subscriber = self._subscriber, None
        if subscriber is not None:
            subscriber.close()
