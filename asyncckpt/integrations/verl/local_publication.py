"""The publication of a sync, as the sender and the rollouts of all hosts have it; and the notices of it.

Notices go over a store that the sender hosts, in rounds (see ``worker/rounds.py``): JSON, sealed. The end of the store
is noticed at once.
"""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Iterable
from dataclasses import asdict, dataclass

import torch

from asyncckpt.config import Config
from asyncckpt.errors import CheckpointError, RankFailedError, WorkerDiedError, located
from asyncckpt.integrations.verl.topology import Role
from asyncckpt.weights.publisher import WeightPublisher
from asyncckpt.weights.subscriber import WeightSubscriber
from asyncckpt.weights.weights import Weights
from asyncckpt.worker.rounds import Rounds, round_name
from asyncckpt.worker.store_connection import Patience

logger = logging.getLogger(__name__)

_KIND = "weights"
# Seconds that a worker looks for the store, which is there before a sync begins.
_PATIENCE_S = 10.0
_PAUSE_S = 0.01


@dataclass(frozen=True)
class Notice:
    """What was published."""

    version: int
    epoch: int

    def check(self, version: int | None) -> None:
        """Raises ``RankFailedError`` if it is not of that ``version`` (None: whichever)."""
        if version is not None and self.version != version:
            raise RankFailedError(f"version {version} was to come, and version {self.version} was sent", step=version)


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
        self._locator_of_publisher: str | None = None
        self._subscriber: tuple[str | None, WeightSubscriber] | None = None
        self._checkpoints: dict[str, WeightSubscriber] = {}

    def serve(self, host: str) -> str:
        """Publish here from now on, and let other hosts, which know this one as ``host``, have it. Returns the locator.

        Raises as ``WeightPublisher.serve``.
        """
        if self._locator_of_publisher is None:
            self._locator_of_publisher = self._published().serve(host)
        return self._locator_of_publisher

    def publish(
        self, weights: Iterable[tuple[str, torch.Tensor]], version: int, dtype: torch.dtype | None, *, roll_back: bool
    ) -> Notice:
        """Publish ``weights``. The arguments are those of ``WeightPublisher.publish``, which says what is raised."""
        publication = self._published().publish(weights, version, dtype=dtype, roll_back=roll_back)
        return Notice(publication.version, publication.epoch)

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

    def _published(self) -> WeightPublisher:
        if self._publisher is None:
            self._publisher = WeightPublisher(self.address, slots=self._slots, when_busy="wait", config=self._config)
        return self._publisher


class NoticeBoard:
    """A worker's connection to the store, for the sync in which it has ``role``."""

    def __init__(self, role: Role, timeout: float) -> None:
        self.role = role
        self._timeout = timeout
        self._rounds = Rounds(role.rendezvous, timeout, Patience(_PATIENCE_S))
        self._round = round_name(_KIND, role.sync)

    def post(self, notice: Notice) -> None:
        """Tell what was published. What is posted first stays."""
        self._rounds.conclude(self._round, json.dumps(asdict(notice)).encode())

    def post_failure(self, error: BaseException) -> None:
        """Tell all who wait why nothing will be published in this sync."""
        try:
            self._rounds.conclude_failed(self._round, located(error, otherwise=RankFailedError))
        except CheckpointError as trouble:  # the others will notice by themselves
            logger.warning("the rollouts could not be told of a failure: %s", trouble)

    def wait(self) -> Notice:
        """Wait for what is published. Raises why it is not, or ``SaveTimeoutError``."""
        try:
            outcome = self._rounds.outcome(self._round, self._timeout)
        except WorkerDiedError as error:
            raise RankFailedError("the trainer is gone, in the midst of a sync") from error
        if isinstance(outcome, CheckpointError):
            raise outcome
        return Notice(**json.loads(outcome))

    def clear(self) -> None:
        """The sender: the sync is over. What it left in the store is removed in time."""
        self._rounds.clear(_KIND, self.role.sync)

    def close(self) -> None:
        """Drop the connection; a wait over it ends."""
        self._rounds.close()
