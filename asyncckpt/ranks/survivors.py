"""The survivors: which workers of a job are still there when its first trainer is gone.

A trainer that has died is told of by its worker. But a host may be lost with all that was on it, and then nobody says
anything. So while a save is under way each worker but the first rank's says that it is there, and once the job seems to
be started again, the first rank's waits no more for those that say nothing. (It seems so, too, where somebody only
looks what the workers hold: then those whose trainers live are waited for all the same.)
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
# How often each says that it is there, and after how long a silence it is not.
_SAY_S = 0.5
_SILENCE_S = 5.0
# Of so many ranks the store hears that often; of more, each says it less often.
_RANKS = 1000
_ANSWER_S = 5.0


class Survivors:
    """One worker's part: of the first rank from when its trainer is gone, of any other from its first save on."""

    def __init__(self, rendezvous: Rendezvous, saves: Callable[[], bool]) -> None:
        """Begin to say that this one is there, whenever it ``saves``."""
        self._rounds = Rounds(rendezvous, _ANSWER_S, Patience(0.0))
        self._rank, self._saves = rendezvous.rank, saves
        self._slower = max(1.0, rendezvous.world_size / _RANKS)
        # By rank: what it has said last, since when, and when it was last looked at.
        self._heard: dict[int, tuple[bytes | None, float, float]] = {}
        self.gone: set[int] = set()
        """First rank: the ranks that ``lost`` has taken for lost."""
        self._is_restarted = False
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._say, name="asyncckpt-survives", daemon=True)
        if self._rank > 0:
            self._thread.start()

    def restarted(self) -> None:
        """The job is started again, or so it seems. Waits for nothing."""
        self._is_restarted = True

    def lost(self, rank: int) -> CheckpointError | None:
        """First rank: an error where the worker of ``rank`` has gone without a word. Asked again and again.

        A silence from before the job was started again counts, as far as it was listened to.
        """
        if rank == self._rank:
            return None
        now = time.monotonic()
        try:
            said = self._rounds.get(_KIND, rank)
        except CheckpointError:  # the store is this worker's own: it is closing
            return None
        silence = _SILENCE_S * self._slower
        before, since, looked_at = self._heard.get(rank, (b"", now, now))
        if said != before or now - looked_at > silence:  # this one was stopped, perhaps, and that one too
            since = now
        self._heard[rank] = said, since, now
        if not self._is_restarted or now - since <= silence:
            return None
        self.gone.add(rank)
        return RankFailedError("its trainer and its worker are gone", rank=rank)

    def close(self) -> None:
        """Say nothing any more."""
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
