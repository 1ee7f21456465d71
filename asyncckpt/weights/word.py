"""The word in a sync of weights: what has been published at a place, told to all who wait for that.

It goes over a store that the sender hosts, in rounds (see ``worker/rounds.py``): JSON, sealed; an end of the store is
noticed at once.
"""

from __future__ import annotations

import json
import logging
from dataclasses import asdict, dataclass

from asyncckpt.errors import CheckpointError, RankFailedError, WorkerDiedError
from asyncckpt.weights.topology import Seat
from asyncckpt.worker.rounds import Rounds, round_name

logger = logging.getLogger(__name__)

# How long anybody looks for the store, which is there before a sync begins.
_PATIENCE_S = 10.0


@dataclass(frozen=True)
class Said:
    """What was published at a place, and by which address it is found there."""

    version: int
    epoch: int
    address: str

    def check(self, version: int | None) -> None:
        """Raises ``RankFailedError`` if it is not that ``version`` (None: whichever)."""
        if version is not None and self.version != version:
            raise RankFailedError(f"version {version} was to come, and version {self.version} was sent", step=version)


class Word:
    """A worker's connection to the store, for the sync in which it has that ``seat``."""

    def __init__(self, seat: Seat, timeout: float) -> None:
        """``timeout``: seconds that anything may take."""
        self._seat = seat
        self._timeout = timeout
        self._rounds = Rounds(seat.meeting, timeout, _PATIENCE_S)

    def say(self, place: int, said: Said | BaseException) -> None:
        """Tell what was published at ``place``, or why it was not; the first word is the last."""
        name = round_name(_kind(place), self._seat.sync)
        if isinstance(said, Said):
            self._rounds.conclude(name, json.dumps(asdict(said)).encode())
            return
        if not isinstance(said, CheckpointError):
            said = RankFailedError(f"{type(said).__name__}: {said}")
        try:
            self._rounds.conclude_failed(name, said)
        except CheckpointError as trouble:  # they notice by themselves
            logger.warning("the rollouts could not be told of a failure: %s", trouble)

    def give_up(self, error: BaseException) -> None:
        """Tell those who still wait, at any place, that nothing more will be published in this sync."""
        for place in range(self._seat.places):
            self.say(place, error)

    def hear(self, place: int) -> Said:
        """Wait for what is published at ``place``. Raises why it is not; ``SaveTimeoutError``."""
        try:
            outcome = self._rounds.outcome(round_name(_kind(place), self._seat.sync), self._timeout)
        except WorkerDiedError as error:
            raise RankFailedError("the trainer is gone, in the midst of a sync") from error
        if isinstance(outcome, CheckpointError):
            raise outcome
        return Said(**json.loads(outcome))

    def clear(self) -> None:
        """The sender: the sync is over. What it left in the store is removed in time."""
        for place in range(self._seat.places):
            self._rounds.clear(_kind(place), self._seat.sync)

    def close(self) -> None:
        """Drop the connection. Who still waits over it may go on to."""
        self._rounds.close()


def _kind(place: int) -> str:
    return f"weights-{place}"
