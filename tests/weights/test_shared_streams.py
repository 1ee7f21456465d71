"""Ranks that iterate over equal streams of tensors each take a share of the tensors."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from support.ranks import run

from asyncckpt.errors import UnsavableStateError
from asyncckpt.extension import Ranks
from asyncckpt.weights import WeightPublisher, WeightSubscriber
from asyncckpt.weights.shards import Sharding

pytestmark = pytest.mark.usefixtures("forkserver")


class _Ranks(Ranks):
    """Ranks without communication. ``gather`` repeats this rank's value."""

    def __init__(self, rank: int, size: int) -> None:
        self.rank, self.size = rank, size

    def gather(self, value: Any) -> list[Any]:
        return [value] * self.size


@pytest.mark.parametrize("ranks", [2, 3, 8])
def test_shares_of_a_stream_are_alike(ranks: int) -> None:
    """Each tensor belongs to one rank, and the shares have about the same size."""
    dice = random.Random(ranks)
    tensors = [(f"{number}", torch.zeros(dice.choice([0, 1, 7, 1000, 30_000]))) for number in range(200)]
    taken: dict[str, int] = {}
    shares = [0] * ranks
    for rank in range(ranks):
        sharding = Sharding(_Ranks(rank, ranks))

        def take(name: str, tensor: torch.Tensor, sharding: Sharding = sharding) -> None:
            if sharding.takes(sharding.form(name, tensor, None), tensor):
                assert taken.setdefault(name, sharding.rank) == sharding.rank
                shares[sharding.rank] += tensor.nbytes

        for _ in range(2):  # the shares start over with each stream
            sharding.walk(iter(tensors), take)
            assert sharding.have_walked(as_planned=True)
    assert len(taken) == len(tensors)
    assert max(shares) - min(shares) <= 2 * max(tensor.nbytes for _, tensor in tensors)


def _stream_what_is_not_the_same(address: str) -> list[str]:
    said = []
    with WeightPublisher(address, process_group=dist.group.WORLD) as publisher:
        for version in range(1, 7):
            weights = {f"{number}": torch.full((5 + number,), float(version)) for number in range(4)}
            if dist.get_rank() == 1 and version == 3:
                del weights["2"]
            if dist.get_rank() == 1 and version == 5:
                weights["2"] = weights["2"][:-1]
            try:
                publisher.publish(iter(weights.items()), version)
                said.append("published")
            except UnsavableStateError as error:
                assert "streams of different tensors" in str(error)
                said.append("refused")
        dist.barrier()
        if dist.get_rank() == 0:
            with WeightSubscriber(address) as subscriber, subscriber.acquire() as acquired:
                assert {name: len(tensor) for name, tensor in acquired.items()} == {f"{n}": 5 + n for n in range(4)}
                assert all(bool((tensor == 6).all()) for tensor in acquired.values())
        dist.barrier()
    return said


def test_streams_that_are_not_the_same_are_refused(tmp_path: Path) -> None:
    wanted = ["published", "published", "refused", "published", "refused", "published"]
    assert run(2, _stream_what_is_not_the_same, "policy", folder=tmp_path) == [wanted] * 2
