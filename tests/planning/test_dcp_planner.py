"""Test DCP's own planner as asyncckpt uses it."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.planner import SavePlan

from asyncckpt.planning.metadata import kept_items


def _local_plan(rank: int, shared: int) -> SavePlan:
    """Plan some values of this rank alone, mixed with ``shared`` values that all ranks have."""
    planner = DefaultSavePlanner()
    state = {f"{rank}.{number}": torch.zeros(number + 1) for number in range(3)}
    both = {f"shared.{number}": torch.zeros(5) for number in range(shared)} | {"step": 3, "none": torch.zeros(0)}
    mixed = [each for pair in itertools.zip_longest(state.items(), both.items()) for each in pair if each is not None]
    planner.set_up_planner(dict(mixed), is_coordinator=rank == 0)
    return planner.create_local_plan()


@pytest.mark.parametrize("ranks", [1, 2, 3])
@pytest.mark.parametrize("shared", [0, 1, 7])
def test_the_items_that_are_kept_are_those_of_the_final_plan(ranks: int, shared: int) -> None:
    local = [_local_plan(rank, shared) for rank in range(ranks)]
    finals, _ = DefaultSavePlanner().create_global_plan(local)
    written = []
    for mine, final in zip(local, finals, strict=True):
        kept = kept_items(mine, final)
        assert isinstance(kept, bytes) and len(kept) == len(mine.items) and set(kept) <= {0, 1}
        items = list(itertools.compress(mine.items, kept))
        assert [item.index for item in items] == [item.index for item in final.items]
        assert [item.tensor_data for item in items] == [item.tensor_data for item in final.items]
        written += [item.index.fqn for item in items]
    assert sorted(written) == sorted({item.index.fqn for plan in local for item in plan.items})


def test_a_plan_that_is_no_part_of_the_local_one_is_sent_whole() -> None:
    local = _local_plan(0, 2)
    other = _local_plan(1, 0)
    for items in (local.items[::-1], [*local.items, other.items[0]], other.items):
        final = SavePlan(items)
        assert kept_items(local, final) is final
