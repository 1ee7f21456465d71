"""How the workers of one engine come to load the same version: the first picks it, the others take exactly that.

The workers stand in a grid, and are in one group for each way in which the engine is split, which is a line of it. All
``groups`` here are those of one worker, innermost first; none where it is the only one.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch.distributed as dist

from asyncckpt.errors import CheckpointError, VersionError, located
from asyncckpt.weights import Weights, WeightSubscriber

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup


def acquire_together(subscriber: WeightSubscriber, groups: Sequence[ProcessGroup], **wanted: Any) -> Weights:
    """Lease the same version on all workers of an engine, or raise on all of them.

    The first worker's lease keeps its version there until the others have theirs, so none can come too late for it.

    Args:
        subscriber: This worker's.
        groups: See the module.
        wanted: As of ``WeightSubscriber.acquire``.

    Raises:
        CheckpointError: What a worker has raised, with its rank.
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
        raise CheckpointError(f"all workers have leased version {version}, and this one has not")
    return mine


def raise_together(failure: CheckpointError | None, groups: Sequence[ProcessGroup]) -> None:
    """Raise what any worker has failed with, the first one's with its rank, on all of them.

    Args:
        failure: This worker's; None: it has not failed.
        groups: See the module.
    """
    failures = _of_all(failure, groups)
    for rank, each in enumerate(failures):
        if each is not None:
            raise located(each, rank=rank if groups else None) from failure


def is_last(groups: Sequence[ProcessGroup]) -> bool:
    """Whether this worker is the last one of all, of which vLLM reads the answer after those of all others."""
    return all(dist.get_rank(group) == dist.get_world_size(group) - 1 for group in groups)


def _leased(subscriber: WeightSubscriber, wanted: dict[str, Any]) -> tuple[Weights | None, CheckpointError | None]:
    """The weights, or why there are none: who raises by itself leaves the others waiting."""
    try:
        return subscriber.acquire(**wanted), None
    except Exception as error:
        return None, located(error)


def _of_the_first(said: object, groups: Sequence[ProcessGroup]) -> Any:
    """What the first worker says: along the outermost line that it is in, then from there along the next."""
    for group in reversed(groups):
        said = _gather(said, group)[0]
    return said


def _of_all(said: object, groups: Sequence[ProcessGroup]) -> list[Any]:
    """What all workers say, in their order."""
    each = [said]
    for group in groups:
        each = [one for line in _gather(each, group) for one in line]
    return each


def _gather(said: object, group: ProcessGroup) -> list[Any]:
    each: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(each, said, group=group)
    return each
