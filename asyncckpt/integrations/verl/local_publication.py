"""The publication on a worker's host, which is its own or another worker's."""

from __future__ import annotations

import uuid
from collections.abc import Iterable
from typing import Any

import torch

from asyncckpt.config import Config
from asyncckpt.errors import JobTakenError
from asyncckpt.integrations.verl.notice import Notice
from asyncckpt.weights.publisher import WeightPublisher
from asyncckpt.weights.subscriber import WeightSubscriber


class LocalPublication:
    """The publication under ``address``, and what this worker has of it. ``close`` it."""

    def __init__(self, address: str, slots: int, timeout: float) -> None:
        """Nothing is published yet.

        Args:
            address, slots: As of ``WeightPublisher``.
            timeout: Seconds that it waits for a slot.
        """
        self.address = address
        self._slots = slots
        self._timeout = timeout
        self._publisher: WeightPublisher | None = None
        self._substitute: WeightPublisher | None = None
        self._subscriber: tuple[str, WeightSubscriber] | None = None

    @property
    def is_published_here(self) -> bool:
        """Whether this worker is the one that publishes on its host."""
        return self._publisher is not None

    def publish(
        self,
        weights: Iterable[tuple[str, torch.Tensor]],
        version: int,
        dtype: torch.dtype | None,
        *,
        roll_back: bool,
        substitute: bool,
    ) -> Notice:
        """Publish ``weights``; from now on this worker is the one that does.

        Args:
            weights: By name; taken one after the other.
            version: Of the weights.
            dtype: What floating-point weights are converted to; None: they stay as they are.
            roll_back: Whether ``version`` may be below the newest.
            substitute: Where another process has the address, publish under another for as long as it has it: a rollout
                that takes part in no sync any more, and lives.

        Raises:
            JobTakenError: Another process has the address.
            CheckpointError: As ``WeightPublisher.publish`` raises.
        """
        how: dict[str, Any] = {"dtype": dtype, "roll_back": roll_back}
        publisher = self._publisher or self._publisher_at(self.address)
        try:
            publication = publisher.publish(weights, version, **how)
        except JobTakenError:
            publisher.close()
            self._publisher = None
            if not substitute:
                raise
            # None of the weights has been taken yet.
            publisher = self._substitute = self._substitute or self._publisher_at(f"{self.address}\n{uuid.uuid4().hex}")
            publication = publisher.publish(weights, version, **how)
        else:
            self._publisher = publisher
            if self._substitute is not None:
                self._substitute.close()
                self._substitute = None
        return Notice(publication.version, publication.epoch, publisher.address)

    def newest(self) -> int | None:
        """The newest version here."""
        return next(reversed(self.subscriber(self.address).versions()), None)

    def subscriber(self, address: str) -> WeightSubscriber:
        """The subscriber to ``address``, which seldom changes; for any thread."""
        if self._subscriber is None or self._subscriber[0] != address:
            # The one before is not closed: another thread may still wait in it.
            self._subscriber = address, WeightSubscriber(address)
        return self._subscriber[1]

    def forget_versions(self) -> None:
        """Let versions be acquired that are older than the last."""
        self._subscriber = None

    def close(self) -> None:
        """Give everything back, what was published too."""
        subscriber = None if self._subscriber is None else self._subscriber[1]
        for each in (subscriber, self._publisher, self._substitute):
            if each is not None:
                each.close()
        self._subscriber = self._publisher = self._substitute = None

    def _publisher_at(self, address: str) -> WeightPublisher:
        config = Config(timeout=self._timeout)
        return WeightPublisher(address, slots=self._slots, when_busy="wait", config=config)
