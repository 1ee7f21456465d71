"""When a rank of a broadcast fails, all ranks raise the same; what is damaged is found."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from support import ranks
from support.broadcasts import SOON_S, Taken, both_ways, odd_weights, plain, share, told
from support.states import same
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard

from asyncckpt.errors import CheckpointError, DamagedCheckpointError, RankFailedError, UnsavableStateError
from asyncckpt.weights.broadcast import buckets, sender, transport
from asyncckpt.weights.broadcast.broadcast import broadcast_weights, close_broadcasts, receive_weights

pytestmark = pytest.mark.usefixtures("forkserver")


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
    real_checksum, real_post, real_land = buckets.checksum, transport.Wire.post, transport.Wire.land

    def flip() -> None:
        if len(seen) == 3:
            seen[-1][5] ^= 4

    def checksum(data: torch.Tensor) -> int:
        digest = real_checksum(data)
        seen.append(data)
        flip()
        return digest

    def post(self: transport.Wire, data: torch.Tensor, keep: object = None) -> None:
        seen.append(data)
        real_post(self, data, keep)

    def land(self: transport.Wire) -> None:
        real_land(self)
        flip()

    if local and dist.get_rank() == 0:
        sender.checksum = checksum  # type: ignore[attr-defined]
    if not local and dist.get_rank() == 1:
        transport.Wire.post, transport.Wire.land = post, land  # type: ignore[method-assign]
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
