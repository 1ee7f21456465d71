"""When a rank of a broadcast fails, all ranks raise the same; what is damaged is found."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from support import ranks
from support.broadcasts import SOON_S, Taken, odd_weights, plain, share, told
from support.states import same

from asyncckpt.errors import CheckpointError, DamagedCheckpointError, RankFailedError, UnsavableStateError
from asyncckpt.weights.broadcast import transport
from asyncckpt.weights.broadcast.broadcast import broadcast_weights, close_broadcasts, receive_weights

pytestmark = pytest.mark.usefixtures("forkserver")


def fails(fault: str) -> tuple[tuple[str, str, int | None], bool]:
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
        return share(given, load)

    error = told(call)
    taken = Taken()
    share(weights, taken)
    close_broadcasts()
    return error, rank == 0 or same(dict(taken), plain(weights))


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
    fault: str, rank: int, kind: type[CheckpointError], text: str, tmp_path: Path
) -> None:
    for error, goes_on in ranks.run(3, fails, fault, folder=tmp_path):
        assert error[0] == kind.__name__
        assert text in error[1]
        assert error[2] == rank
        assert goes_on


def damaged() -> tuple[tuple[str, str, int | None], bool]:
    """A bit of the third bucket flips as it lands at rank 1."""
    weights = {str(number): torch.full((900,), float(number)) for number in range(8)}
    seen: list[torch.Tensor] = []
    real_post, real_land = transport.Wire.post, transport.Wire.land

    def post(self: transport.Wire, data: torch.Tensor, keep: object = None) -> None:
        seen.append(data)
        real_post(self, data, keep)

    def land(self: transport.Wire) -> None:
        real_land(self)
        if len(seen) == 3:
            seen[-1][5] ^= 4

    if dist.get_rank() == 1:
        transport.Wire.post, transport.Wire.land = post, land  # type: ignore[method-assign]
    error = told(lambda: share(weights, Taken()))
    taken = Taken()
    share(weights, taken)
    close_broadcasts()
    return error, dist.get_rank() == 0 or same(dict(taken), weights)


def test_a_flipped_bit_is_found(tmp_path: Path) -> None:
    for error, goes_on in ranks.run(2, damaged, folder=tmp_path):
        assert error[0] == DamagedCheckpointError.__name__
        assert "bucket 2 did not arrive as rank 0 sent it: '2'" in error[1]
        assert error[2] == 1
        assert goes_on
