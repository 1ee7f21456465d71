"""Make all workers of an engine load the same version: the first worker picks it, and the others take exactly that.

The workers form a grid with one dimension for each kind of parallelism. In each dimension a worker is in one process
group, which is a line of the grid. All ``groups`` here are the groups of one worker, innermost first. ``groups`` is
empty for a single worker.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch.distributed as dist

from asyncckpt.errors import CheckpointError, VersionError, located
from asyncckpt.extension import ranks_of
from asyncckpt.weights import Weights, WeightSubscriber

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup


def acquire_together(subscriber: WeightSubscriber, groups: Sequence[ProcessGroup], **wanted: Any) -> Weights:
    """Lease the same version on all workers of an engine, or raise on all of them.

    The first worker's lease keeps the version alive until the others have their leases, so no worker can be too late.

    Args:
        subscriber: This worker's subscriber.
        groups: The worker's groups, see the module.
        wanted: As for ``WeightSubscriber.acquire``.

    Raises:
        CheckpointError: The error of a worker, with its rank.
    """
    if not groups:
        return subscriber.acquire(**wanted)
    is_first = all(dist.get_rank(group) == 0 for group in groups)
    mine, failure = _leased(subscriber, wanted) if is_first else (None, None)
    found = _of_the_first(failure if mine is None else (mine.version, mine.epoch), groups)
    if isinstance(found, CheckpointError):
        raise found
    version, epoch = found
    if not is_first:
        mine, failure = _leased(subscriber, {"version": version, "timeout": wanted["timeout"]})
        if mine is not None and mine.epoch != epoch:
            failure = VersionError(f"another trainer has published a version {version} meanwhile; update again")
    try:
        raise_together(failure, groups)
    except CheckpointError:
        if mine is not None:
            mine.release()
        raise
    if mine is None:
        raise CheckpointError(f"this worker has no lease on version {version}, and all others have one")
    return mine


def raise_together(failure: CheckpointError | None, groups: Sequence[ProcessGroup]) -> None:
    """Raise the failure of the first failed worker, with its rank, on all workers.

    Args:
        failure: This worker's failure; None if the worker has not failed.
        groups: The worker's groups, see the module.
    """
    failures = _of_all(failure, groups)
    for rank, each in enumerate(failures):
        if each is not None:
            raise located(each, rank=rank if groups else None) from failure


def is_last(groups: Sequence[ProcessGroup]) -> bool:
    """Return whether this worker is the last of all. vLLM reads the last worker's answer after all others."""
    return all(dist.get_rank(group) == dist.get_world_size(group) - 1 for group in groups)


def _leased(subscriber: WeightSubscriber, wanted: dict[str, Any]) -> tuple[Weights | None, CheckpointError | None]:
    """Return the weights, or the error, because a worker that raised alone would leave the others waiting."""
    try:
        return subscriber.acquire(**wanted), None
    except Exception as error:
        return None, located(error)


def _of_the_first(said: object, groups: Sequence[ProcessGroup]) -> Any:
    """Return the first worker's value: pass it along the outermost line of that worker, then along the next lines."""
    for group in reversed(groups):
        said = ranks_of(group).gather(said)[0]
    return said


def _of_all(said: object, groups: Sequence[ProcessGroup]) -> list[Any]:
    """Return the values of all workers, in their order."""
    each = [said]
    for group in groups:
        each = [one for line in ranks_of(group).gather(each) for one in line]
    return each
