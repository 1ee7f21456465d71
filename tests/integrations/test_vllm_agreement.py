"""The workers of one engine, in two kinds of groups, lease the same version or none. No vLLM is needed."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from support.forked_ranks import on_ranks
from support.peers import python

from asyncckpt.errors import WeightsTimeoutError
from asyncckpt.integrations.vllm.agreement import acquire_together, is_last, raise_together
from asyncckpt.weights import WeightPublisher, WeightSubscriber

WORLD = 4


@pytest.mark.usefixtures("forkserver")
def test_a_grid_of_workers(tmp_path: Path) -> None:
    path = [str(Path(__file__).parents[1]), str(Path(__file__).parent)]
    code = f"import sys; sys.path[:0] = {path!r}; import test_vllm_agreement; test_vllm_agreement.main()"
    python(code, arguments=(str(tmp_path),))


def main() -> None:
    on_ranks(WORLD, _workers, folder=Path(sys.argv[1]))


def _workers() -> None:
    rank = dist.get_rank()
    inner = [dist.new_group(line) for line in ([0, 1], [2, 3])][rank // 2]
    outer = [dist.new_group(line) for line in ([0, 2], [1, 3])][rank % 2]
    groups = [inner, outer]
    assert is_last(groups) == (rank == WORLD - 1) and is_last([])
    publisher = WeightPublisher("grid", slots=2) if rank == 3 else None
    subscriber = WeightSubscriber("grid" if rank != 2 else "elsewhere")
    others = WeightSubscriber("grid")
    for version in range(1, 20):
        if publisher is not None:  # at any time, even while other ranks lease the version before
            assert not publisher.publish({"weight": torch.full((9,), float(version))}, version).skipped
        elif version == 1:
            others.acquire(timeout=20).release()
        wanted: dict[str, Any] = {"min_version": None, "version": None, "roll_back": False, "timeout": 20.0}
        with acquire_together(others, groups, **wanted) as weights:
            found: list[Any] = [None] * WORLD
            dist.all_gather_object(found, (weights.version, weights["weight"].tolist()))
        assert all(each == (found[0][0], [float(found[0][0])] * 9) for each in found)
        dist.barrier()
    # First no rank finds the version, then rank 2 alone finds none. All ranks raise, and hold no lease.
    with pytest.raises(WeightsTimeoutError, match="no weights of version 99 or later"):
        acquire_together(others, groups, **(wanted | {"min_version": 99, "timeout": 0.1}))
    with pytest.raises(WeightsTimeoutError, match="no publisher was found") as raised:
        acquire_together(subscriber, groups, **(wanted | {"timeout": 0.1}))
    assert raised.value.rank == 2
    with pytest.raises(WeightsTimeoutError) as raised:
        raise_together(WeightsTimeoutError("mine") if rank == 3 else None, groups)
    assert raised.value.rank == 3
    dist.barrier()
    if publisher is not None:
        for version in range(20, 30):
            assert not publisher.publish({"weight": torch.zeros(9)}, version).skipped
        publisher.close()
    dist.barrier()
