"""The publication on a worker's host, which is its own or another worker's, and the notices of what is published where.

Notices go over a store that the sender hosts, in rounds (see ``worker/rounds.py``): JSON, sealed. The end of the store
is noticed at once.
"""

from __future__ import annotations

import json
import logging
import uuid
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from typing import Any

import torch

from asyncckpt.config import Config
from asyncckpt.errors import CheckpointError, JobTakenError, RankFailedError, WorkerDiedError, located
from asyncckpt.integrations.verl.topology import Role
from asyncckpt.weights.publisher import WeightPublisher
from asyncckpt.weights.subscriber import WeightSubscriber
from asyncckpt.worker.rounds import Rounds, round_name
from asyncckpt.worker.store_connection import Patience

logger = logging.getLogger(__name__)

# Seconds that a worker looks for the store, which is there before a sync begins.
_PATIENCE_S = 10.0


@dataclass(frozen=True)
class Notice:
    """What was published on a host, and under which address it is found there."""

    version: int
    epoch: int
    address: str

    def check(self, version: int | None) -> None:
        """Raises ``RankFailedError`` if it is not of that ``version`` (None: whichever)."""
        if version is not None and self.version != version:
            raise RankFailedError(f"version {version} was to come, and version {self.version} was sent", step=version)


class LocalPublication:
    """The publication under ``address``, and what this worker has of it. ``close`` it."""

    def __init__(self, address: str, slots: int, timeout: float) -> None:
        """Nothing is published yet.

        Args:
            address, slots: As of ``WeightPublisher``.
            timeout: Seconds to wait for a slot.
        """
        self.address = address
        self._slots = slots
        self._timeout = timeout
        self._publisher: WeightPublisher | None = None
        self._substitute: WeightPublisher | None = None
        self._subscriber: tuple[str, WeightSubscriber] | None = None
        self._checkpoints: dict[str, WeightSubscriber] = {}

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
        """Publish ``weights``, on this worker from now on. Raises as ``WeightPublisher.publish``.

        Args:
            weights, version, dtype, roll_back: As of that.
            substitute: Where another process has the address, publish under another for as long as it has it: a rollout
                that takes part in no sync any more, and lives.
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
        for each in (subscriber, self._publisher, self._substitute, *self._checkpoints.values()):
            if each is not None:
                each.close()
        self._subscriber = self._publisher = self._substitute = None

    def _publisher_at(self, address: str) -> WeightPublisher:
        config = Config(timeout=self._timeout)
        return WeightPublisher(address, slots=self._slots, when_busy="wait", config=config)


class NoticeBoard:
    """A worker's connection to the store, for the sync in which it has ``role``. Hosts count from the sender's."""

    def __init__(self, role: Role, timeout: float) -> None:
        self.role = role
        self._timeout = timeout
        self._rounds = Rounds(role.rendezvous, timeout, Patience(_PATIENCE_S))

    def post(self, host: int, notice: Notice) -> None:
        """Tell what was published on ``host``. What is posted first stays."""
        self._rounds.conclude(self._round(host), json.dumps(asdict(notice)).encode())

    def post_failure(self, host: int, error: BaseException) -> None:
        """Tell why nothing will be published on ``host``."""
        try:
            self._rounds.conclude_failed(self._round(host), located(error, otherwise=RankFailedError))
        except CheckpointError as trouble:  # the others will notice by themselves
            logger.warning("the rollouts could not be told of a failure: %s", trouble)

    def give_up(self, error: BaseException) -> None:
        """Tell all who still wait that nothing more will be published in this sync, on any host."""
        for host in range(self.role.hosts):
            self.post_failure(host, error)

    def wait(self, host: int) -> Notice:
        """Wait for what is published on ``host``. Raises why it is not, or ``SaveTimeoutError``."""
        try:
            outcome = self._rounds.outcome(self._round(host), self._timeout)
        except WorkerDiedError as error:
            raise RankFailedError("the trainer is gone, in the midst of a sync") from error
        if isinstance(outcome, CheckpointError):
            raise outcome
        return Notice(**json.loads(outcome))

    def clear(self) -> None:
        """The sender: the sync is over. What it left in the store is removed in time."""
        for host in range(self.role.hosts):
            self._rounds.clear(_kind(host), self.role.sync)

    def close(self) -> None:
        """Drop the connection; a wait over it ends."""
        self._rounds.close()

    def _round(self, host: int) -> str:
        return round_name(_kind(host), self.role.sync)


def _kind(host: int) -> str:
    return f"weights-{host}"
