"""Notices in a sync of weights: what has been published on a host, for all who wait for that.

They go over a store that the sender hosts, in rounds (see ``worker/rounds.py``): JSON, sealed. The end of the store is
noticed at once.
"""

from __future__ import annotations

import json
import logging
from dataclasses import asdict, dataclass

from asyncckpt.errors import CheckpointError, RankFailedError, WorkerDiedError, located
from asyncckpt.integrations.verl.topology import Role
from asyncckpt.worker.rounds import Rounds, round_name

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


class NoticeBoard:
    """A worker's connection to the store, for the sync in which it has that ``role``. Hosts count from the sender's."""

    def __init__(self, role: Role, timeout: float) -> None:
        """``timeout``: seconds that anything may take."""
        self._role = role
        self._timeout = timeout
        self._rounds = Rounds(role.rendezvous, timeout, _PATIENCE_S)

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
        for host in range(self._role.hosts):
            self.post_failure(host, error)

    def wait(self, host: int) -> Notice:
        """Wait for what is published on ``host``. Raises why it is not; ``SaveTimeoutError``."""
        try:
            outcome = self._rounds.outcome(self._round(host), self._timeout)
        except WorkerDiedError as error:
            raise RankFailedError("the trainer is gone, in the midst of a sync") from error
        if isinstance(outcome, CheckpointError):
            raise outcome
        return Notice(**json.loads(outcome))

    def clear(self) -> None:
        """The sender: the sync is over. What it left in the store is removed in time."""
        for host in range(self._role.hosts):
            self._rounds.clear(_kind(host), self._role.sync)

    def close(self) -> None:
        """Drop the connection. A wait over it may still go on."""
        self._rounds.close()

    def _round(self, host: int) -> str:
        return round_name(_kind(host), self._role.sync)


def _kind(host: int) -> str:
    return f"weights-{host}"
