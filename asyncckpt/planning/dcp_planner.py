"""DCP's own planner, which makes the plans of all ranks: so all works as its users know it."""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch.distributed import checkpoint
from torch.distributed.checkpoint._nested_dict import flatten_state_dict
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner
from torch.distributed.tensor import DTensor

from asyncckpt.errors import UnsavableStateError, unless_interrupt
from asyncckpt.planning.forms import has_shards, is_partial
from asyncckpt.planning.plan import StateDict

# Who decides what comes of it: to be counted up where we plan, or describe a plan, in another way.
PLANNED_BY = (1, *torch.__version__.split(".")[:2])

# torch 2.14 and later.
_KNOWS_PARTS = hasattr(checkpoint, "CheckpointableTensor")


def flat_names(state_dict: StateDict, planner: SavePlanner | None) -> frozenset[str]:
    """The names of the values of ``state_dict``, as DCP's default planner would give them.

    Raises ``UnsavableStateError`` where two have the same.
    """
    if type(planner) is DefaultSavePlanner and not planner.flatten_state_dict:
        return frozenset(map(str, state_dict))
    with planning():
        return frozenset(flatten_state_dict(dict(state_dict))[0])


def options(planner: DefaultSavePlanner) -> dict[str, bool]:
    """What it was told that decides what it plans."""
    names = "flatten_state_dict", "flatten_sharded_tensors", "dedup_save_to_lowest_rank"
    return {name: getattr(planner, name) for name in names}


def fresh(planner: SavePlanner | None) -> SavePlanner:
    """A planner of DCP's own that does as ``planner``, but knows nothing of earlier saves; a user's own as it is."""
    if planner is None:
        return DefaultSavePlanner()
    if type(planner) is not DefaultSavePlanner:
        return planner
    return DefaultSavePlanner(**options(planner))


def kept_items(local: SavePlan, final: SavePlan) -> bytes | SavePlan:
    """Which items DCP's default planner has left to a rank, in their order: 1 for each, 0 for one that another writes.

    It changes nothing else that the rank needs to know. Should a release of torch do so, it is the whole plan.
    """
    kept, left = bytearray(), deque(final.items)
    for item in local.items:
        is_kept = bool(left) and left[0].index == item.index
        kept.append(is_kept)
        if is_kept:
            left.popleft()
    return final if left else bytes(kept)


@contextlib.contextmanager
def planning() -> Iterator[None]:
    """What a planner raises is about the state dict."""
    try:
        yield
    except UnsavableStateError:
        raise
    except unless_interrupt(Exception) as error:
        raise UnsavableStateError(f"the state dict cannot be planned: {type(error).__name__}: {error}") from error


def is_sharded(value: object) -> bool:
    """Whether DCP has its own way to take ``value`` apart (ShardedTensor and its like, but not DTensor)."""
    if isinstance(value, torch.Tensor) and has_shards(value):
        return True
    return hasattr(value, "__create_write_items__") and not isinstance(value, DTensor) or hasattr(value, "local_shards")


def check_shards(state: Mapping[str, Any]) -> None:
    """Raise ``UnsavableStateError`` for a tensor that is a part of a larger one, in a way that DCP cannot save."""
    for name, value in state.items():
        if is_partial(value):
            raise UnsavableStateError(
                f"{name!r} is a DTensor placed as {list(value.placements)}: each rank has only a summand of its values;"
                " redistribute it to Replicate() or Shard() first"
            )
        if isinstance(value, torch.Tensor) and has_shards(value) and not _KNOWS_PARTS:
            raise UnsavableStateError(
                f"{name!r} says by its global_shape and global_offsets that it is a part of a larger tensor, and torch"
                f" {torch.__version__} cannot save it as one; take torch 2.14 or later, a DTensor, or leave it out"
            )
