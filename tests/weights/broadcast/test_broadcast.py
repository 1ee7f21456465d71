"""Weights from one rank to all others, by real jobs of two to four processes."""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from support import ranks
from support.broadcasts import BUCKET, SOON_S, Taken, odd_weights, plain, share, told
from support.states import same
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard

from asyncckpt.weights import WeightPublisher, WeightSubscriber
from asyncckpt.weights.broadcast import buckets
from asyncckpt.weights.broadcast.broadcast import broadcast_weights, close_broadcasts, receive_weights
from asyncckpt.weights.broadcast.buckets import (
    fill,
)
from asyncckpt.weights.broadcast.sender import Broadcast
from asyncckpt.weights.broadcast.transport import Buffers

pytestmark = pytest.mark.usefixtures("forkserver")


def arrives() -> tuple[list[Broadcast], bool]:
    found = []
    right = True
    for turn in range(4):
        expected = odd_weights(turn // 2)
        given = iter(expected.items()) if turn % 2 else expected
        taken = Taken()
        found.append(share(given, taken, version=turn))
        if dist.get_rank() > 0:
            right = right and list(taken) == list(expected) and same(dict(taken), plain(expected))
    close_broadcasts()
    return found, right


@pytest.mark.parametrize("world_size", [2, 3])
def test_every_kind_of_tensor_arrives(world_size: int, tmp_path: Path) -> None:
    ended = ranks.run(world_size, arrives, folder=tmp_path)
    nbytes = sum(tensor.nbytes for tensor in odd_weights().values())
    for rank, (found, right) in enumerate(ended):
        assert right
        for turn, broadcast in enumerate(found):
            assert (broadcast.version, broadcast.nbytes) == (turn, nbytes)
            assert broadcast.buckets == ended[0][0][turn].buckets > 5
            seconds = broadcast.seconds
            assert 0 < sum(seconds.values()) - seconds["total"] < seconds["total"] * 1.01
            assert seconds["load" if rank == 0 else "fill"] == 0.0


def one_tensor_at_a_time() -> bool:
    """The source's iterator uses the same memory again, and it may be larger than a bucket."""

    def each() -> Iterator[tuple[str, torch.Tensor]]:
        memory = torch.empty(3 * BUCKET)
        for number in range(6):
            size = 3 * BUCKET if number % 2 else 10
            yield str(number), memory[:size].fill_(number)

    taken = Taken()
    share(each, taken)
    close_broadcasts()
    return dist.get_rank() == 0 or all(bool((taken[str(number)] == number).all()) for number in range(6))


def test_an_iterator_may_use_its_memory_again(tmp_path: Path) -> None:
    assert all(ranks.run(2, one_tensor_at_a_time, folder=tmp_path))


def asks() -> bool:
    weights = odd_weights()
    if dist.get_rank() == 0:
        broadcast_weights(weights, bucket_bytes=BUCKET, timeout=SOON_S)
        return True
    taken = Taken()
    receipt = receive_weights(timeout=SOON_S)
    while True:
        try:
            taken(next(receipt))
        except StopIteration as end:
            close_broadcasts()
            return same(dict(taken), plain(weights)) and end.value.buckets > 5


def test_the_receiving_end_as_a_generator(tmp_path: Path) -> None:
    assert all(ranks.run(2, asks, folder=tmp_path))


def of_shards() -> tuple[tuple[str, str, int | None] | None, bool]:
    """Ranks 0 and 1 train, 2 and 3 are given the weights by the first, which gathers them with the second."""
    rank = dist.get_rank()
    trainers, given = dist.new_group([0, 1]), dist.new_group([0, 2, 3])
    full = {
        str(number): torch.randn(9 + number, 130, generator=torch.Generator().manual_seed(number))
        for number in range(12)
    }
    full["large"] = torch.arange(7 * BUCKET).reshape(7, BUCKET)
    taken, refused = Taken(), None
    weights: dict[str, torch.Tensor] = {}
    if rank < 2:
        mesh = DeviceMesh.from_group(trainers, "cpu")
        for name, tensor in full.items():
            local = tensor.chunk(2)[rank]
            weights[name] = DTensor.from_local(local, mesh, [Shard(0)], shape=tensor.shape, stride=tensor.stride())
    if rank != 1:
        refused = told(partial(share, weights, taken, group=given))
    whole = ((name, each.full_tensor() if isinstance(each, DTensor) else each) for name, each in weights.items())
    if rank == 1:
        deque(whole, maxlen=0)
    else:
        share(whole, taken, group=given)
    close_broadcasts()
    return refused, rank < 2 or same(dict(taken), full)


def test_shards_are_gathered_by_a_generator(tmp_path: Path) -> None:
    for rank, (refused, right) in enumerate(ranks.run(4, of_shards, folder=tmp_path)):
        assert right
        assert rank == 1 or (refused is not None and "'0' is a DTensor" in refused[1] and "full_tensor" in refused[1])


def other_source_and_group() -> bool:
    rank = dist.get_rank()
    group = dist.new_group([1, 2])
    if rank == 0:
        return True
    taken = Taken()
    weights = odd_weights()
    if rank == 2:
        broadcast_weights(weights, src=2, group=group, bucket_bytes=BUCKET, timeout=SOON_S)
    else:
        broadcast_weights(load=taken, src=2, group=group, timeout=SOON_S)
    close_broadcasts()
    return rank == 2 or same(dict(taken), plain(weights))


def test_another_source_and_group(tmp_path: Path) -> None:
    assert all(ranks.run(3, other_source_and_group, folder=tmp_path))


def between_devices(on_device: bool) -> bool:
    rank = dist.get_rank()
    torch.cuda.set_device(rank)
    group = dist.new_group(backend="nccl")
    weights = {name: tensor.detach() for name, tensor in odd_weights().items()}
    if on_device:
        weights = {name: tensor.cuda() for name, tensor in weights.items()}
    taken = Taken()
    share(weights, taken, group=group, version=1)
    torch.cuda.synchronize()
    close_broadcasts()
    found = {name: tensor.cpu() for name, tensor in taken.items()}
    return rank == 0 or (all(tensor.is_cuda for tensor in taken.values()) and same(found, plain(odd_weights())))


@pytest.mark.device
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="NCCL wants a device for each rank")
@pytest.mark.parametrize("on_device", [True, False])
def test_from_device_to_device(on_device: bool, tmp_path: Path) -> None:
    assert all(ranks.run(2, between_devices, on_device, folder=tmp_path))


def from_a_device() -> bool:
    taken = Taken()
    weights = {name: tensor.detach().cuda() for name, tensor in odd_weights().items()}
    share(weights, taken)
    close_broadcasts()
    return dist.get_rank() == 0 or same(dict(taken), plain(odd_weights()))


@pytest.mark.device
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_from_a_device_by_gloo(tmp_path: Path) -> None:
    assert all(ranks.run(2, from_a_device, folder=tmp_path))


def of_a_publication() -> Broadcast:
    weights = {str(number): torch.full((900,), float(number)) for number in range(10)}
    taken = Taken()
    with contextlib.ExitStack() as stack:
        mine: Any = None
        if dist.get_rank() == 0:
            publisher = stack.enter_context(WeightPublisher("policy"))
            publisher.publish(weights, 7)
            subscriber = stack.enter_context(WeightSubscriber("policy"))
            mine = stack.enter_context(subscriber.acquire())
            nowhere = Buffers([torch.empty(0, dtype=torch.uint8)] * 2)
            assert list(fill(buckets.tensors_of(mine), BUCKET, nowhere)), "nothing is copied"
        broadcast = share(mine, taken)
        assert dist.get_rank() == 0 or same(dict(taken), weights)
        close_broadcasts()
        del mine
    return broadcast


def test_a_publication_is_sent_from_where_it_is(tmp_path: Path) -> None:
    for broadcast in ranks.run(2, of_a_publication, folder=tmp_path):
        assert broadcast.version == 7 and broadcast.epoch is not None
