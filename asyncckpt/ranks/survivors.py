"""The survivors: detect workers that are lost together with their host, after the first rank's trainer is gone.

A worker reports the death of its trainer. But if a host is lost with all its processes, nobody reports it. So while a
save is under way, each worker except the first rank's sends a heartbeat. Once the job seems to be restarted, the first
rank's worker stops waiting for silent workers. A tool that only lists images looks like a restart, too. A rank with a
live trainer is never declared lost.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable

from asyncckpt.errors import CheckpointError, RankFailedError
from asyncckpt.link.messages import Rendezvous
from asyncckpt.ranks.rounds import Rounds
from asyncckpt.ranks.store_connection import Patience

logger = logging.getLogger(__name__)

_KIND = "survives"
# Interval of the heartbeat, and the silence after which a worker is lost.
_SAY_S = 0.5
_SILENCE_S = 5.0
# Number of ranks at which the heartbeats become less frequent, to limit the load on the store.
_RANKS = 1000
_ANSWER_S = 5.0


class Survivors:
    """One worker's part. The first rank's begins when its trainer is gone, all others' at their first save."""

    def __init__(self, rendezvous: Rendezvous, saves: Callable[[], bool]) -> None:
        """Begin to send heartbeats, whenever ``saves`` returns True."""
        self._rounds = Rounds(rendezvous, _ANSWER_S, Patience(0.0))
        self._rank, self._saves = rendezvous.rank, saves
        self._slower = max(1.0, rendezvous.world_size / _RANKS)
        # By rank: its last heartbeat, since when it is unchanged, and when it was last read.
        self._heard: dict[int, tuple[bytes | None, float, float]] = {}
        self.gone: set[int] = set()
        """First rank: the ranks that ``lost`` has declared lost."""
        self._is_restarted = False
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._say, name="asyncckpt-survives", daemon=True)
        if self._rank > 0:
            self._thread.start()

    def restarted(self) -> None:
        """Note that the job seems to be restarted. Returns at once."""
        self._is_restarted = True

    def lost(self, rank: int) -> CheckpointError | None:
        """First rank: return an error if the worker of ``rank`` is lost, otherwise None. Called repeatedly.

        A silence from before the restart of the job counts, as far as the heartbeats were read at that time.
        """
        if rank == self._rank:
            return None
        now = time.monotonic()
        try:
            said = self._rounds.get(_KIND, rank)
        except CheckpointError:  # the store belongs to this worker, which is closing
            return None
        silence = _SILENCE_S * self._slower
        before, since, looked_at = self._heard.get(rank, (b"", now, now))
        if said != before or now - looked_at > silence:  # this worker was stopped, and perhaps the other worker, too
            since = now
        self._heard[rank] = said, since, now
        if not self._is_restarted or now - since <= silence:
            return None
        self.gone.add(rank)
        return RankFailedError("its trainer and its worker are gone", rank=rank)

    def close(self) -> None:
        """Stop the heartbeats."""
        self._closed.set()
        if self._rank > 0:
            self._thread.join()
        self._rounds.close()

    def _say(self) -> None:
        number = 0
        while not self._closed.wait(_SAY_S * self._slower):
            if not self._saves():
                continue
            number += 1
            try:
                self._rounds.put(_KIND, str(number).encode())
            except CheckpointError as error:
                logger.debug("nobody hears that this worker is there: %s", error)
