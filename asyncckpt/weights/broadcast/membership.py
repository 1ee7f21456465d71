"""Membership: which of the ranks that share weights have come, which have left, and why, as a store of theirs says."""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping
from dataclasses import dataclass

from torch.distributed.distributed_c10d import Store

from asyncckpt.errors import CheckpointError, RankFailedError, decode, encode

logger = logging.getLogger(__name__)

# How long the survivors wait for each other. They notice at once, unless they are loading.
_GRACE_S = 5.0
_READING_S = 0.5
_POLL_S = 0.01


@dataclass(frozen=True)
class Membership:
    """That of one ``rank`` of ``world_size``, who have ``store`` for themselves."""

    rank: int
    world_size: int
    store: Store

    def wait_for_all(self, timeout: float) -> None:
        """Wait until all have come. Raises ``RankFailedError`` if one does not; then this one has not come either."""
        missing = list(range(self.world_size))
        deadline = time.monotonic() + timeout
        try:
            self.store.set(f"here/{self.rank}", "")
            while missing := [each for each in missing if not self.store.check([f"here/{each}"])]:
                if time.monotonic() > deadline:
                    self.store.delete_key(f"here/{self.rank}")
                    which = ", ".join(map(str, missing))
                    raise RankFailedError(
                        f"rank {which} has not come to share weights within {timeout:g} s", rank=missing[0]
                    )
                time.sleep(_POLL_S)
        except RuntimeError as error:
            raise _lost_store(error) from error

    def leave(self, reason: CheckpointError | None) -> None:
        """Record that this rank has left, and what it knows of the reason."""
        try:
            self.store.set(f"left/{self.rank}", "" if reason is None else encode(reason).decode())
        except RuntimeError as error:
            logger.warning("the other ranks could not be told of a failure: %s", str(error).split("\n")[0])

    def find_reason(self, reason: CheckpointError | None, cause: BaseException) -> CheckpointError:
        """Leave, because connections broke, and find out why: the same answer on all ranks.

        ``reason`` is what this rank knows of it, ``cause`` the error that it saw.
        """
        self.leave(reason)
        left: dict[int, CheckpointError | None] = {self.rank: reason}
        try:
            deadline = time.monotonic() + _GRACE_S
            while len(left) < self.world_size and time.monotonic() < deadline and not self.store.check(["verdict"]):
                for rank in set(range(self.world_size)) - set(left):
                    if self.store.check([f"left/{rank}"]):
                        recorded = self.store.get(f"left/{rank}")
                        left[rank] = decode(recorded) if recorded else None
                time.sleep(_POLL_S)
            verdict = self.store.compare_set("verdict", "", encode(self._judge(left, cause)).decode())
            # This process may be about to end, and the store with it: the others are to have read it before.
            readers = self.store.add("readers", 1)
            deadline = time.monotonic() + _READING_S
            while readers < len(left) and time.monotonic() < deadline:
                time.sleep(_POLL_S)
                readers = self.store.add("readers", 0)
            return decode(verdict)
        except RuntimeError as error:
            return _lost_store(error)

    def _judge(self, left: Mapping[int, CheckpointError | None], cause: BaseException) -> CheckpointError:
        missing = [rank for rank in range(self.world_size) if rank not in left]
        if missing:
            which = ", ".join(map(str, missing))
            return RankFailedError(f"rank {which} died, or does not answer, while weights were shared", rank=missing[0])
        for _, reason in sorted(left.items()):
            if reason is not None:
                return reason
        return RankFailedError(f"the ranks lost their connections: {str(cause).splitlines()[0]}", rank=self.rank)


def _lost_store(error: BaseException) -> CheckpointError:
    # Which process hosts it is not known to torch.distributed; without a launcher that does, it is the first rank.
    return RankFailedError(
        f"the ranks lost their connections and the store of the job, which rank 0 hosts as a rule: it may have"
        f" died ({str(error).splitlines()[0]})",
        rank=0,
    )
