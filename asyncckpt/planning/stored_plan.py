"""Restore the plan of a checkpoint, so that a resumed job with the same structure plans nothing.

DCP's default planner decides for all ranks by their local plans, and by nothing else. The index of a rank has a digest
of its local plan (``asked``), and the result. If the digests of all ranks are those of one attempt, its plan is the
plan of this job. No plan of a rank is sent, and nothing is decided again.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch.distributed.checkpoint.planner import SavePlan

from asyncckpt.format.index import Index
from asyncckpt.planning.draft import Draft
from asyncckpt.planning.plan import CheckpointPlan
from asyncckpt.planning.structure import StructureChanged


@dataclass(frozen=True)
class StoredPlan:
    """The plan of one rank, as the checkpoint of an ``attempt`` has it.

    ``indexes``: those of the rank's data files, in their order. ``metadata``: DCP's, on the first rank, without the
    bytes of a single save.
    """

    attempt: str
    indexes: Sequence[Index]
    metadata: bytes = b""

    @property
    def names(self) -> frozenset[str]:
        """The names of the values in the rank's data files."""
        return frozenset(item.name for index in self.indexes for item in index.items)


def restored_plan(draft: Draft, stored: StoredPlan, number: int) -> CheckpointPlan | None:
    """Return the plan of a checkpoint for a new state, or None if the plan does not fit.

    Use the plan only if all ranks have one of the same attempt.

    Args:
        draft: The draft for the state.
        stored: The plan as the checkpoint has it.
        number: The number of the new plan.

    Raises:
        UnsavableStateError: The state cannot be saved.
    """
    if not draft.is_plain:
        return None
    draft.plan_alone()
    if any(index.asked != draft.asked for index in stored.indexes):
        return None
    items = [item for index in stored.indexes for item in index.items]
    local = {(item.index.fqn, tuple(item.index.offset or ())): item for item in draft.local.items}
    final = [local.get((item.name, tuple(item.offsets))) for item in items]
    if None in final:
        return None
    draft.reserved = [item.nbytes for item in items if item.kind == "object"]
    try:
        draft.lay_out(SavePlan([item for item in final if item is not None]), number)
    except StructureChanged:  # an object has grown
        return None
    plan: CheckpointPlan = draft.plan
    # To the byte: a tensor may be on another device, or be one with another, and then stand elsewhere.
    heads = [Index.head(index.data, index.items, asked=index.asked) for index in stored.indexes]
    if heads != [file.index_head for file in plan.files]:
        return None
    draft.finish(stored.metadata)
    return plan
