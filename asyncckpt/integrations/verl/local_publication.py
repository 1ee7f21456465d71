"""The publication of the syncs, as the actors that publish and the rollouts of all hosts have it."""

from __future__ import annotations

import time
from collections.abc import Iterable

import torch

from asyncckpt.config import Config
from asyncckpt.errors import RankFailedError
from asyncckpt.integrations.verl.notices import Notice, PublishingActors
from asyncckpt.weights import WeightPublisher, Weights, WeightSubscriber

_PAUSE_S = 0.01


class LocalPublication:
    """The publication under ``address``, as one worker has it. ``close`` it."""

    def __init__(self, address: str, slots: int, timeout: float) -> None:
        """Nothing is published yet.

        Args:
            address, slots: As of ``WeightPublisher``.
            timeout: Seconds to wait for a slot, and for an answer.
        """
        self.address = address
        self.locator: str | None = None
        """Where it comes from; None: it is of this host. To be set before it is read."""
        self._slots = slots
        self._config = Config(timeout=timeout)
        self._publisher: WeightPublisher | None = None
        self._actors: PublishingActors | None = None
        self._last: tuple[int, int] | None = None
        self._subscriber: tuple[str | None, WeightSubscriber] | None = None
        self._checkpoints: dict[str, WeightSubscriber] = {}

    def publish(
        self,
        weights: Iterable[tuple[str, torch.Tensor]],
        version: int | None,
        dtype: torch.dtype | None,
        *,
        actors: PublishingActors,
        host: str,
        key: bytes,
    ) -> Notice:
        """Publish ``weights``, together with the other ``actors``, which make the same call.

        Args:
            weights, dtype: As of ``WeightPublisher.publish``, which says what is raised, too.
            version: The same, of the first actor, whose counts; the others have None. It may be lower than before.
            actors: Those that publish.
            host: The name by which other hosts know this one.
            key: Of those who may read.
        """
        publisher = self._publisher if actors is self._actors else None
        told = actors.all_gather((version, None if publisher is None else self._last))
        # Begun anew where some of them are new, or have not heard how the last sync ended: they must be of one mind.
        if publisher is None or any(last is None or last != self._last for _, last in told):
            if self._actors is not None and self._actors.rank != actors.rank:
                self.withdraw()
            actors.all_gather(None)  # else one may begin as a rank that another has not left yet
            publisher = self._begin(actors, host, key)
        published = publisher.publish(weights, told[0][0], dtype=dtype, roll_back=True)
        self._last = published.version, published.epoch
        return Notice.of(published.version, published.epoch, publisher.locator or "")

    def withdraw(self) -> None:
        """Publish nothing any more: others do."""
        if self._publisher is not None:
            self._publisher.close()
        self._publisher = None

    def newest(self) -> int | None:
        """The newest version here."""
        return next(reversed(self.subscriber().versions()), None)

    def acquire(self, notice: Notice, pin: str | None) -> Weights:
        """The weights of a sync, once they are on this host. ``pin``: as of ``WeightSubscriber.acquire``, which says
        what is raised.
        """
        deadline = time.monotonic() + self._config.timeout
        while True:
            left = max(0.0, deadline - time.monotonic())
            weights = self.subscriber().acquire(version=notice.version, pin=pin, timeout=left)
            if weights.epoch == notice.epoch:
                return weights
            # A sync that is repeated: this host has what came of that version before.
            weights.release()
            if not left:
                raise RankFailedError(f"version {notice.version} has not come to this host again", step=notice.version)
            time.sleep(_PAUSE_S)

    def subscriber(self) -> WeightSubscriber:
        """The subscriber to it; for any thread."""
        if self._subscriber is None or self._subscriber[0] != self.locator:
            # The one before is not closed: another thread may still wait in it.
            subscriber = WeightSubscriber(self.address, locator=self.locator, config=self._config)
            self._subscriber = self.locator, subscriber
        return self._subscriber[1]

    def checkpoints(self, folder: str) -> WeightSubscriber:
        """The subscriber to the models in the images of the checkpoints in ``folder``; for any thread."""
        if folder not in self._checkpoints:
            job_id = Config.from_env().job_id
            self._checkpoints[folder] = WeightSubscriber.of_checkpoints(folder, job_id=job_id, prefix="model.")
        return self._checkpoints[folder]

    def forget_versions(self) -> None:
        """Let versions be acquired that are older than the last."""
        self._subscriber = None

    def close(self) -> None:
        """Give everything back, what was published too."""
        subscriber = None if self._subscriber is None else self._subscriber[1]
        for each in (subscriber, self._publisher, *self._checkpoints.values()):
            if each is not None:
                each.close()
        self._subscriber = self._publisher = None

    def _begin(self, actors: PublishingActors, host: str, key: bytes) -> WeightPublisher:
        """Publish with these ``actors`` from now on, in the place of who did before."""
        publisher = WeightPublisher(
            self.address, slots=self._slots, when_busy="wait", process_group=actors, config=self._config
        )
        try:
            publisher.serve(host, key=key)
        except BaseException:
            publisher.close()
            raise
        self._publisher, self._actors, self._last = publisher, actors, None
        return publisher
