"""The plan that a checkpoint was saved by: a job that goes on from there, with the same structure, plans nothing.

DCP's default planner decides for all ranks by what each is asked to save, and by nothing else. The index of a rank has
a digest of that (``asked``), and says what came of it. So where the digests of all ranks are those of one attempt, its
plan is that of this job: no plan of a rank has to travel, and nothing is decided again.
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
    """What this rank finds of it in the checkpoint of an ``attempt``: the ``indexes`` of its data files, in their
    order, and, on the first rank, DCP's ``metadata``, without what differs from save to save.
    """

    attempt: str
    indexes: Sequence[Index]
    metadata: bytes = b""

    @property
    def names(self) -> frozenset[str]:
        """Those of the values that this rank has stored."""
        return frozenset(item.name for index in self.indexes for item in index.items)


def restored_plan(draft: Draft, stored: StoredPlan, number: int) -> CheckpointPlan | None:
    """The plan of a checkpoint, made anew out of what is stored; None: it is not for what is to be saved.

    It is good only if all ranks have one of the same attempt.

    Args:
        draft: Of what is to be saved.
        stored: What is known of the plan.
        number: That of the new plan.

    Raises:
        UnsavableStateError: It cannot be saved.
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
