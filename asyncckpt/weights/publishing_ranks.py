"""The ranks that publish together, and how they tell each other what they have."""

from __future__ import annotations

from typing import Any, Protocol

import torch.distributed as dist

from asyncckpt.errors import RankFailedError


class PublishingRanks(Protocol):
    """The ranks that publish together: this one is ``rank`` of ``ranks``. All make the same calls in the same order."""

    @property
    def rank(self) -> int: ...

    @property
    def ranks(self) -> int: ...

    def all_gather(self, value: Any) -> list[Any]:
        """The ``value`` of each rank, in their order. Raises ``RankFailedError``: one is gone, or does not answer."""


class OneRank:
    """A process that publishes alone."""

    rank, ranks = 0, 1

    def all_gather(self, value: Any) -> list[Any]:
        return [value]


class ProcessGroupRanks:
    """Those of a process group of ``torch.distributed``."""

    def __init__(self, process_group: dist.ProcessGroup) -> None:
        """Raises ``ValueError`` where this process is not in it."""
        self._process_group = process_group
        self.rank, self.ranks = dist.get_rank(process_group), dist.get_world_size(process_group)
        if self.rank < 0:
            raise ValueError("this process is not in the process group it should publish with")

    def all_gather(self, value: Any) -> list[Any]:
        told: list[Any] = [None] * self.ranks
        try:
            dist.all_gather_object(told, value, group=self._process_group)
        except RuntimeError as error:
            raise RankFailedError(f"the ranks that publish together lost each other: {error}") from error
        return told


def ranks_of(process_group: dist.ProcessGroup | PublishingRanks | None) -> PublishingRanks:
    """Those of ``process_group``; None: this process alone."""
    if process_group is None:
        return OneRank()
    return ProcessGroupRanks(process_group) if isinstance(process_group, dist.ProcessGroup) else process_group
