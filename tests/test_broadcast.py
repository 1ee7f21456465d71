"""Weights from one rank to all others, by real jobs of two to four processes."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import ranks
import torch
import torch.distributed as dist
from conftest import same
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Shard

from asyncckpt.errors import CheckpointError, DamagedCheckpointError, RankFailedError, UnsavableStateError
from asyncckpt.weights import WeightPublisher, WeightSubscriber, buckets, sender, wire
from asyncckpt.weights import broadcast as broadcast_module
from asyncckpt.weights.broadcast import Broadcast, broadcast_weights, close_broadcasts, receive_weights
from asyncckpt.weights.buckets import Buffers, Entry, buffer_bytes, describe, fill, read_description, view, views
from asyncckpt.weights.channel import pack, unpack
from asyncckpt.weights.shared_buffers import SharedBuffers, attach

BUCKET = 4096
SOON_S = 20.0

both_ways = pytest.mark.parametrize("local", [True, False], ids=["shared", "sent"])


@pytest.fixture(scope="module", autouse=True)
def server() -> Iterator[None]:
    yield from ranks.serve()


def odd_weights(seed: int = 0) -> dict[str, torch.Tensor]:
    """Of every kind."""
    dice = torch.Generator().manual_seed(seed)

    def some(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=dice)

    flat = some(3000)
    return {
        "odd bf16": some(3).bfloat16(),
        "fp32 after it": some(5),
        "no dimension": some(),
        "nothing": torch.empty(0, 4),
        "large": some(50, 70),
        "large, turned": some(60, 40).T,
        "bool": some(7) > 0,
        "complex": torch.complex(some(4), some(4)),
        "conjugate": torch.complex(some(4), some(4)).conj(),
        "conjugate, large": torch.complex(some(40, 50), some(40, 50)).conj(),
        "negative": torch.complex(some(4), some(4)).conj().imag,
        "fp8": some(33).to(torch.float8_e4m3fn),
        "fp8, every other": some(34).to(torch.float8_e5m2)[::2],
        "every other": some(20, 20)[::2, ::3],
        "expanded": some(1, 3).expand(4, 3),
        "int64": torch.arange(9),
        "double": some(2, 2).double(),
        **{f"side by side {number}": flat[number * 300 : (number + 1) * 300] for number in range(10)},
        "parameter": torch.nn.Parameter(some(6)),
        "last, ünïcode": some(1),
    }


def plain(weights: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {name: tensor.detach() for name, tensor in weights.items()}


class Taken(dict[str, torch.Tensor]):
    """A ``load`` that keeps copies."""

    def __call__(self, bucket: list[tuple[str, torch.Tensor]]) -> None:
        for name, tensor in bucket:
            assert tensor.data_ptr() % tensor.element_size() == 0
            self[name] = tensor.clone()


def told(call: Callable[[], object]) -> tuple[str, str, int | None]:
    """The error that it raises."""
    try:
        call()
    except CheckpointError as error:
        return type(error).__name__, error.message, error.rank
    raise AssertionError("it has raised nothing")


def share(weights: Any, load: Any = None, **options: Any) -> Broadcast:
    """The first rank sends, the others load."""
    options = {"timeout": SOON_S, "bucket_bytes": BUCKET} | options
    if dist.get_rank() == 0:
        return broadcast_weights(weights() if callable(weights) else weights, **options)
    return broadcast_weights(load=load, timeout=options["timeout"], group=options.get("group"))


def arrives(local: bool) -> tuple[list[Broadcast], bool]:
    found = []
    right = True
    for turn in range(4):
        expected = odd_weights(turn // 2)
        given = iter(expected.items()) if turn % 2 else expected
        taken = Taken()
        found.append(share(given, taken, version=turn, local=local))
        if dist.get_rank() > 0:
            right = right and list(taken) == list(expected) and same(dict(taken), plain(expected))
    close_broadcasts()
    return found, right


@both_ways
@pytest.mark.parametrize("world_size", [2, 3])
def test_every_kind_of_tensor_arrives(world_size: int, local: bool, tmp_path: Path) -> None:
    ended = ranks.run(world_size, arrives, local, folder=tmp_path)
    nbytes = sum(tensor.nbytes for tensor in odd_weights().values())
    for rank, (found, right) in enumerate(ended):
        assert right
        for turn, broadcast in enumerate(found):
            assert (broadcast.version, broadcast.nbytes, broadcast.retained) == (turn, nbytes, False)
            assert broadcast.buckets == ended[0][0][turn].buckets > 5
            seconds = broadcast.seconds
            assert 0 < sum(seconds.values()) - seconds["total"] < seconds["total"] * 1.01
            assert seconds["load" if rank == 0 else "fill"] == 0.0


def one_tensor_at_a_time(local: bool) -> bool:
    """The source's iterator uses the same memory again, and it may be larger than a bucket."""

    def each() -> Iterator[tuple[str, torch.Tensor]]:
        memory = torch.empty(3 * BUCKET)
        for number in range(6):
            size = 3 * BUCKET if number % 2 else 10
            yield str(number), memory[:size].fill_(number)

    taken = Taken()
    share(each, taken, local=local)
    close_broadcasts()
    return dist.get_rank() == 0 or all(bool((taken[str(number)] == number).all()) for number in range(6))


@both_ways
def test_an_iterator_may_use_its_memory_again(local: bool, tmp_path: Path) -> None:
    assert all(ranks.run(2, one_tensor_at_a_time, local, folder=tmp_path))


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


def of_shards() -> bool:
    """Ranks 0 and 1 train, 2 and 3 are given the weights."""
    rank = dist.get_rank()
    trainers = dist.new_group([0, 1])
    full = {
        str(number): torch.randn(9 + number, 130, generator=torch.Generator().manual_seed(number))
        for number in range(12)
    }
    full["large"] = torch.arange(7 * BUCKET).reshape(7, BUCKET)
    taken = Taken()
    if rank < 2:
        mesh = DeviceMesh.from_group(trainers, "cpu")
        weights: dict[str, torch.Tensor] = {}
        for name, tensor in full.items():
            local = tensor.chunk(2)[rank]
            weights[name] = DTensor.from_local(local, mesh, [Shard(0)], shape=tensor.shape, stride=tensor.stride())
        weights["plain"] = torch.ones(3)
        broadcast_weights(weights, bucket_bytes=BUCKET, timeout=SOON_S)
    else:
        broadcast_weights(load=taken, timeout=SOON_S)
    close_broadcasts()
    return rank < 2 or same(dict(taken), full | {"plain": torch.ones(3)})


def test_shards_are_gathered(tmp_path: Path) -> None:
    assert all(ranks.run(4, of_shards, folder=tmp_path))


def without_the_other_half() -> tuple[str, str, int | None]:
    mesh = init_device_mesh("cpu", (2,))
    weights = {"half": DTensor.from_local(torch.ones(2, 2), mesh, [Shard(0)])}
    return told(lambda: share(weights, Taken()))


def test_shards_of_a_rank_that_gives_none(tmp_path: Path) -> None:
    ended = ranks.run(2, without_the_other_half, folder=tmp_path)
    assert ended[0] == ended[1]
    assert ended[0][0] == UnsavableStateError.__name__
    assert "'half'" in ended[0][1]


def gathers_something_else(count: int) -> tuple[tuple[str, str, int | None], bool]:
    """Rank 1 says that it helps to gather, and has not the weights that the source has."""
    rank = dist.get_rank()
    weights = {str(number): torch.ones(900) for number in range(6)}

    def call(count: int, taken: Taken) -> object:
        if rank == 1:
            return broadcast_weights({str(number): torch.ones(900) for number in range(count)}, timeout=SOON_S)
        return share(weights, taken)

    error = told(lambda: call(count, Taken()))
    taken = Taken()
    call(6, taken)
    close_broadcasts()
    return error, rank != 2 or same(dict(taken), weights)


@pytest.mark.parametrize(("count", "text"), [(4, "fewer weights"), (8, "more weights")])
def test_gathering_something_else(count: int, text: str, tmp_path: Path) -> None:
    for error, goes_on in ranks.run(3, gathers_something_else, count, folder=tmp_path):
        assert text in error[1]
        assert error[2] == 1
        assert goes_on


def fails(fault: str, local: bool) -> tuple[tuple[str, str, int | None], bool]:
    """Whatever fails, all ranks raise the same, and go on with the next call."""
    rank = dist.get_rank()
    weights = odd_weights()

    def load(bucket: list[tuple[str, torch.Tensor]]) -> None:
        if fault == "load" and rank == 2 and any(name == "complex" for name, _ in bucket):
            raise KeyError("no such parameter")

    def torn() -> Iterator[tuple[str, torch.Tensor]]:
        yield from weights.items()
        raise OSError("no more of them")

    def stops() -> None:
        receipt = receive_weights(timeout=SOON_S)
        next(receipt)
        receipt.close()
        raise RankFailedError("stopped", rank=rank)

    def call() -> object:
        if fault == "close" and rank == 1:
            stops()
        given: Any = {"generator": torn, "not a tensor": {"fine": torch.ones(1), "value": 3}}.get(fault, weights)
        if fault == "arguments" and rank == 1:
            return broadcast_weights(timeout=SOON_S)
        if fault == "source" and rank == 0:
            return broadcast_weights(timeout=SOON_S)
        return share(given, load, local=local)

    error = told(call)
    taken = Taken()
    share(weights, taken, local=local)
    close_broadcasts()
    return error, rank == 0 or same(dict(taken), plain(weights))


@both_ways
@pytest.mark.parametrize(
    ("fault", "rank", "kind", "text"),
    [
        ("load", 2, RankFailedError, "KeyError: 'no such parameter'"),
        ("generator", 0, RankFailedError, "OSError: no more of them"),
        ("not a tensor", 0, UnsavableStateError, "'value' is no tensor"),
        ("arguments", 1, RankFailedError, "ValueError: a rank other than the source"),
        ("source", 0, RankFailedError, "ValueError: the source gives weights"),
        ("close", 1, RankFailedError, "stopped"),
    ],
)
def test_what_one_raises_all_raise(
    fault: str, rank: int, kind: type[CheckpointError], text: str, local: bool, tmp_path: Path
) -> None:
    for error, goes_on in ranks.run(3, fails, fault, local, folder=tmp_path):
        assert error[0] == kind.__name__
        assert text in error[1]
        assert error[2] == rank
        assert goes_on


def damaged(local: bool) -> tuple[tuple[str, str, int | None], bool]:
    """A bit of the third bucket flips on its way to rank 1: in shared memory, or as it lands."""
    weights = {str(number): torch.full((900,), float(number)) for number in range(8)}
    seen: list[torch.Tensor] = []
    real_checksum, real_post, real_land = buckets.checksum, wire.HostWire.post, wire.HostWire.land

    def flip() -> None:
        if len(seen) == 3:
            seen[-1][5] ^= 4

    def checksum(data: torch.Tensor) -> int:
        digest = real_checksum(data)
        seen.append(data)
        flip()
        return digest

    def post(self: wire.HostWire, data: torch.Tensor) -> dist.Work:
        seen.append(data)
        return real_post(self, data)

    def land(self: wire.HostWire, work: dist.Work) -> None:
        real_land(self, work)
        flip()

    if local and dist.get_rank() == 0:
        sender.checksum = checksum  # type: ignore[attr-defined]
    if not local and dist.get_rank() == 1:
        wire.HostWire.post, wire.HostWire.land = post, land  # type: ignore[method-assign]
    error = told(lambda: share(weights, Taken(), local=local))
    taken = Taken()
    share(weights, taken, local=local)
    close_broadcasts()
    return error, dist.get_rank() == 0 or same(dict(taken), weights)


@both_ways
def test_a_flipped_bit_is_found(local: bool, tmp_path: Path) -> None:
    for error, goes_on in ranks.run(2, damaged, local, folder=tmp_path):
        assert error[0] == DamagedCheckpointError.__name__
        assert "bucket 2 did not arrive as rank 0 sent it: '2'" in error[1]
        assert error[2] == 1
        assert goes_on


def is_killed(victim: int, local: bool, at: str) -> tuple[str, str, int | None]:
    rank = dist.get_rank()
    weights = {str(number): torch.full((900,), float(number)) for number in range(8)}
    share(weights, Taken(), local=local)

    def load(bucket: list[tuple[str, torch.Tensor]]) -> None:
        if rank == victim and bucket[0][0] == at:
            os.kill(os.getpid(), signal.SIGKILL)

    def given() -> Iterator[tuple[str, torch.Tensor]]:
        for name, tensor in weights.items():
            if rank == victim and name == at:
                os.kill(os.getpid(), signal.SIGKILL)
            yield name, tensor

    begun = time.monotonic()
    error = told(lambda: share(given, load, local=local))
    assert time.monotonic() - begun < SOON_S
    return error


@both_ways
@pytest.mark.parametrize(("victim", "at"), [(0, "3"), (1, "7"), (3, "3")])
def test_a_rank_is_killed(victim: int, local: bool, at: str, tmp_path: Path) -> None:
    ended = ranks.Job(4, is_killed, victim, local, at, folder=tmp_path).wait()
    for rank, end in enumerate(ended):
        if rank == victim:
            assert end.killed
            continue
        assert end.error is None, end.error
        kind, text, named = end.result
        assert kind == RankFailedError.__name__
        assert f"rank {victim} died" in text
        assert named == victim


def misses() -> tuple[str, str, int | None] | None:
    if dist.get_rank() == 1:
        time.sleep(4)
        return None
    return told(lambda: share({"a": torch.ones(2)}, Taken(), timeout=2.0))


def test_a_rank_that_does_not_come(tmp_path: Path) -> None:
    ended = ranks.run(3, misses, folder=tmp_path)
    for error in (ended[0], ended[2]):
        assert error == (RankFailedError.__name__, "rank 1 has not come to share weights within 2 s", 1)


def comes_late() -> bool:
    """To the first call, for which nobody waits any more; and to the second."""
    rank = dist.get_rank()
    weights = {"a": torch.ones(2)}
    if rank != 1:
        told(lambda: share(weights, Taken(), timeout=1.0))
    dist.barrier()
    taken = Taken()
    share(weights, taken)
    close_broadcasts()
    return rank == 0 or same(dict(taken), weights)


def test_a_rank_that_comes_late(tmp_path: Path) -> None:
    assert all(ranks.run(3, comes_late, folder=tmp_path))


def goes_on_in_another_group() -> int:
    """How many connections are kept after one has broken and its group is given up."""
    weights = {"a": torch.ones(2)}
    broken, next_one = dist.new_group(), dist.new_group()

    def stop(bucket: list[tuple[str, torch.Tensor]]) -> None:
        raise KeyboardInterrupt

    with contextlib.suppress(KeyboardInterrupt, CheckpointError):
        share(weights, stop, group=broken)
    share(weights, Taken(), group=next_one)
    kept = sum(map(len, broadcast_module._open.values()))
    close_broadcasts()
    return kept


def test_what_is_broken_is_given_back(tmp_path: Path) -> None:
    assert ranks.run(2, goes_on_in_another_group, folder=tmp_path) == [1, 1]


def misses_later() -> tuple[str, str, int | None] | None:
    share({"a": torch.ones(2)}, Taken())
    if dist.get_rank() == 1:
        time.sleep(9)
        return None
    return told(lambda: share({"a": torch.ones(2)}, Taken(), timeout=1.5))


def test_a_rank_that_does_not_come_again(tmp_path: Path) -> None:
    ended = ranks.run(3, misses_later, folder=tmp_path)
    assert ended[0] == ended[2]
    assert ended[0] is not None
    assert ended[0][2] == 1


def leaves() -> tuple[str, str, int | None] | str:
    def load(bucket: list[tuple[str, torch.Tensor]]) -> None:
        if dist.get_rank() == 1:
            raise KeyboardInterrupt

    try:
        return told(lambda: share(odd_weights(), load))
    except KeyboardInterrupt:
        return "interrupted"


def test_a_rank_that_is_interrupted(tmp_path: Path) -> None:
    ended = ranks.run(3, leaves, folder=tmp_path)
    assert ended[1] == "interrupted"
    for rank in (0, 2):
        assert ended[rank] == (RankFailedError.__name__, "it left with KeyboardInterrupt", 1)


def test_what_is_not_the_sources_memory_is_not_attached(tmp_path: Path) -> None:
    """Its process id may mean another process here, which may have anything by that number."""
    shared = SharedBuffers(BUCKET)
    offer = shared.offer()
    os.mkfifo(tmp_path / "pipe")
    pipe = os.open(tmp_path / "pipe", os.O_RDONLY | os.O_NONBLOCK)
    try:
        assert attach(offer, BUCKET) is not None
        assert attach(offer | {"token": "00"}, BUCKET) is None
        assert attach(offer, 2 * BUCKET) is None
        assert attach(offer | {"fd": 1 << 20}, BUCKET) is None
        assert attach(offer | {"fd": pipe}, BUCKET) is None
    finally:
        os.close(pipe)
        shared.close()


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


def nothing_grows() -> tuple[int, int]:
    weights = {str(number): torch.ones(200) for number in range(20)}

    def held() -> int:
        return len(os.listdir("/proc/self/fd")) + len(os.listdir("/proc/self/task"))

    for _ in range(3):
        share(weights, Taken())
    before = held()
    for _ in range(30):
        share(weights, Taken())
    after = held()
    close_broadcasts()
    return before, after


def test_descriptors_and_threads_are_flat(tmp_path: Path) -> None:
    for before, after in ranks.run(2, nothing_grows, folder=tmp_path):
        assert before == after


def between_devices(bypass_cpu: bool) -> tuple[bool, Broadcast]:
    rank = dist.get_rank()
    torch.cuda.set_device(rank)
    group = dist.new_group(backend="nccl")
    weights = {name: tensor.detach() for name, tensor in odd_weights().items()}
    if bypass_cpu:
        weights = {name: tensor.cuda() for name, tensor in weights.items()}
    taken = Taken()
    if rank == 0:
        broadcast = broadcast_weights(
            weights, group=group, bucket_bytes=BUCKET, timeout=SOON_S, bypass_cpu=bypass_cpu, version=1
        )
    else:
        broadcast = broadcast_weights(load=taken, group=group, timeout=SOON_S)
    torch.cuda.synchronize()
    close_broadcasts()
    on_device = all(tensor.is_cuda for tensor in taken.values())
    found = {name: tensor.cpu() for name, tensor in taken.items()}
    return rank == 0 or (on_device and same(found, plain(odd_weights()))), broadcast


@pytest.mark.cuda
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="NCCL wants a device for each rank")
@pytest.mark.parametrize("bypass_cpu", [True, False])
def test_from_device_to_device(bypass_cpu: bool, tmp_path: Path) -> None:
    for right, broadcast in ranks.run(2, between_devices, bypass_cpu, folder=tmp_path):
        assert right
        assert not broadcast.retained


def from_a_device(local: bool) -> bool:
    taken = Taken()
    weights = {name: tensor.detach().cuda() for name, tensor in odd_weights().items()}
    share(weights, taken, local=local, bypass_cpu=True)
    close_broadcasts()
    return dist.get_rank() == 0 or same(dict(taken), plain(odd_weights()))


@pytest.mark.cuda
@both_ways
def test_from_a_device_by_gloo(local: bool, tmp_path: Path) -> None:
    assert all(ranks.run(2, from_a_device, local, folder=tmp_path))


def of_a_publication() -> tuple[Broadcast, tuple[str, str, int | None]]:
    weights = {str(number): torch.full((900,), float(number)) for number in range(10)}
    taken = Taken()
    with contextlib.ExitStack() as stack:
        mine: Any = None
        if dist.get_rank() == 0:
            publisher = stack.enter_context(WeightPublisher("policy"))
            publisher.publish(weights, 7)
            subscriber = stack.enter_context(WeightSubscriber("policy"))
            mine = stack.enter_context(subscriber.acquire())
            none = Buffers([torch.empty(0, dtype=torch.uint8)] * 2)
            assert all(bucket.buffer is None for bucket in fill(buckets.entries(mine), BUCKET, none)), "copied"
        broadcast = share(mine, taken, local=False)
        assert dist.get_rank() == 0 or same(dict(taken), weights)
        error = told(partial(share, mine, taken, bypass_cpu=True))
        close_broadcasts()
        del mine
    return broadcast, error


def test_only_a_publication_is_retained(tmp_path: Path) -> None:
    for broadcast, error in ranks.run(2, of_a_publication, folder=tmp_path):
        assert (broadcast.version, broadcast.retained) == (7, True)
        assert broadcast.epoch is not None
        assert "bypass_cpu" in error[1]


DTYPES = [torch.float32, torch.bfloat16, torch.uint8, torch.float64, torch.bool, torch.int16]
tensors = st.lists(
    st.tuples(st.sampled_from(DTYPES), st.integers(0, 700), st.booleans(), st.booleans()), min_size=0, max_size=20
)


@settings(max_examples=200, deadline=None)
@given(tensors, st.integers(256, 2000), st.booleans(), st.booleans())
def test_buckets_hold_all_bytes(
    kinds: list[tuple[torch.dtype, int, bool, bool]], bucket_bytes: int, borrow: bool, stays: bool
) -> None:
    """What is filled at one end and read at the other is the same, whatever lies where; no bucket is too large."""
    side_by_side = torch.arange(20_000, dtype=torch.int64).view(torch.uint8).clone()
    expected: dict[str, torch.Tensor] = {}
    at = 0
    for number, (dtype, elements, joins, turned) in enumerate(kinds):
        nbytes = elements * dtype.itemsize
        if joins:
            at += -at % dtype.itemsize
            raw = side_by_side[at : at + nbytes]
            at += nbytes
        else:
            raw = torch.arange(nbytes).to(torch.uint8)
        if dtype is torch.bool:
            raw %= 2
        tensor = raw.view(dtype)
        expected[str(number)] = tensor.view(-1, 2).T if turned and elements % 2 == 0 else tensor
    pair = [torch.zeros(buffer_bytes(bucket_bytes), dtype=torch.uint8) for _ in range(2)]
    entries = [Entry(name, tensor, stays) for name, tensor in expected.items()]
    found: dict[str, torch.Tensor] = {}
    merged = torch.empty(0, dtype=torch.uint8)
    cuts = []
    for bucket in fill(entries, bucket_bytes, Buffers(pair), borrow=borrow):
        assert 0 <= bucket.data.numel() <= bucket_bytes
        there = torch.zeros(buffer_bytes(bucket_bytes), dtype=torch.uint8)
        there[bucket.skew : bucket.skew + bucket.data.numel()] = bucket.data
        items = read_description(describe(bucket.items))
        assert items == list(bucket.items)
        cuts.append([item.name for item in items])
        if items[0].is_piece:
            merged = torch.empty(items[0].total, dtype=torch.uint8) if items[0].begin == 0 else merged
            merged[items[0].begin :][: items[0].nbytes] = bucket.data
            if items[0].is_last_piece:
                found[items[0].name] = view(items[0], merged)
            continue
        found.update(views(items, there))
    assert list(found) == list(expected)
    assert same(found, expected)
    shadow = [[item.name for item in each.items] for each in fill(entries, bucket_bytes, None, borrow=False)]
    assert borrow or shadow == cuts


def test_side_by_side_is_not_copied() -> None:
    image = torch.arange(1000, dtype=torch.float32)
    weights = {str(number): image[number * 100 : (number + 1) * 100] for number in range(10)}
    made = list(fill(buckets.entries(weights), 2000, Buffers([torch.zeros(0)] * 2)))
    assert [bucket.buffer for bucket in made] == [None] * len(made)
    assert made[0].data.data_ptr() == image.data_ptr()


class Wrapper(torch.Tensor):
    """As those of quantized weights: a tensor that has its data in others."""

    @staticmethod
    def __new__(cls, inner: torch.Tensor) -> Wrapper:
        return torch.Tensor._make_wrapper_subclass(cls, inner.shape, dtype=inner.dtype)

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Wrapper:  # type: ignore[override]
        return cls(args[0])  # nothing but detach is called


def offloaded() -> torch.Tensor:
    tensor = torch.ones(3)
    tensor.untyped_storage().resize_(0)
    return tensor


def test_what_has_no_memory_is_refused() -> None:
    ones = torch.ones(3)
    for tensor in (Wrapper(ones), offloaded(), ones.to_sparse(), ones.to("meta")):
        with pytest.raises(UnsavableStateError, match="'w' has no plain memory"):
            list(buckets.entries({"w": tensor}))


def test_the_sum_of_a_device_finds_what_changes() -> None:
    data = torch.from_numpy(np.random.default_rng(0).integers(0, 256, 100_003, np.uint8))
    right = buckets.sum_on_device(data)
    assert right == buckets.sum_on_device(data.clone())
    for place in (0, 7, 8, 40_000, 99_999, 100_002):
        other = data.clone()
        other[place] ^= 1
        assert buckets.sum_on_device(other) != right
    swapped = data.clone()
    swapped[0:8], swapped[8:16] = data[8:16], data[0:8]
    assert buckets.sum_on_device(swapped) != right
    assert buckets.sum_on_device(data[:-1]) != right
    for nbytes in (0, 1, 7, 8, 9):
        buckets.sum_on_device(data[:nbytes])
    for begin in range(1, 9):  # a receiver's bucket begins anywhere in its buffer
        there = torch.zeros(100_100, dtype=torch.uint8)[begin : begin + data.numel()].copy_(data)
        assert buckets.sum_on_device(there) == right


def test_errors_travel() -> None:
    error = unpack(pack(DamagedCheckpointError("é\n" * 3000, rank=3), 0))
    assert isinstance(error, DamagedCheckpointError)
    assert error.rank == 3
    assert unpack(pack(OSError("gone"), 2)).rank == 2
    assert type(unpack({"kind": "os", "text": "", "rank": 1})) is CheckpointError
