"""The channel ends for all ranks when one is killed, does not come, or leaves; and errors travel over it."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from support import ranks
from support.broadcasts import Taken, odd_weights, share, told
from support.states import same

from asyncckpt.errors import CheckpointError, DamagedCheckpointError, RankFailedError
from asyncckpt.weights.broadcast import broadcast as broadcast_module
from asyncckpt.weights.broadcast import membership
from asyncckpt.weights.broadcast.broadcast import close_broadcasts
from asyncckpt.weights.broadcast.channel import pack, unpack

pytestmark = pytest.mark.usefixtures("forkserver")

LONG_S = 60.0


def is_killed(victim: int, at: str) -> tuple[str, str, int | None]:
    rank = dist.get_rank()
    membership._GRACE_S = 10.0  # a survivor may stand still for a while
    weights = {str(number): torch.full((900,), float(number)) for number in range(8)}
    share(weights, Taken(), timeout=LONG_S)

    def load(bucket: list[tuple[str, torch.Tensor]]) -> None:
        if rank == victim and bucket[0][0] == at:
            os.kill(os.getpid(), signal.SIGKILL)

    def given() -> Iterator[tuple[str, torch.Tensor]]:
        for name, tensor in weights.items():
            if rank == victim and name == at:
                os.kill(os.getpid(), signal.SIGKILL)
            yield name, tensor

    begun = time.monotonic()
    error = told(lambda: share(given, load, timeout=LONG_S))
    assert time.monotonic() - begun < LONG_S
    return error


@pytest.mark.parametrize(("victim", "at"), [(0, "3"), (1, "7"), (3, "3")])
def test_a_rank_is_killed(victim: int, at: str, tmp_path: Path) -> None:
    ended = ranks.Job(4, is_killed, victim, at, folder=tmp_path).wait()
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
        dist.barrier()
        return None
    error = told(lambda: share({"a": torch.ones(2)}, Taken(), timeout=10.0))
    dist.barrier()
    return error


def test_a_rank_that_does_not_come(tmp_path: Path) -> None:
    ended = ranks.run(3, misses, folder=tmp_path)
    for error in (ended[0], ended[2]):
        assert error == (RankFailedError.__name__, "rank 1 has not come to share weights within 10 s", 1)


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


def misses_later(folder: Path) -> tuple[str, str, int | None] | None:
    membership._GRACE_S = 15.0  # a survivor may stand still for a while
    share({"a": torch.ones(2)}, Taken())
    if dist.get_rank() == 1:
        deadline = time.monotonic() + 100
        while len(list(folder.glob("told-*"))) < 2:
            assert time.monotonic() < deadline, "the others do not give up"
            time.sleep(0.05)
        return None
    error = told(lambda: share({"a": torch.ones(2)}, Taken(), timeout=1.5))
    (folder / f"told-{dist.get_rank()}").touch()
    return error


def test_a_rank_that_does_not_come_again(tmp_path: Path) -> None:
    ended = ranks.run(3, misses_later, tmp_path, folder=tmp_path)
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


def test_descriptors_and_threads_do_not_grow(tmp_path: Path) -> None:
    for before, after in ranks.run(2, nothing_grows, folder=tmp_path):
        # Less is right too: under load, gloo's thread closes a socket it connected by only during a later broadcast.
        assert after <= before


def test_errors_travel() -> None:
    for text in ("é\n" * 3000, "\U0001f600" * 3000, '\\"' * 3000):
        packed = pack(DamagedCheckpointError(text, rank=3, step=7), 0)
        assert len(json.dumps({"error": packed})) <= 8192
        error = unpack(packed)
        assert isinstance(error, DamagedCheckpointError)
        assert (error.rank, error.step) == (3, 7) and text.startswith(error.message) and len(error.message) == 500
    error = unpack(pack(DamagedCheckpointError("torn", path="/a/b", step=7), 2))
    assert (error.message, error.path, error.rank, error.step) == ("torn", "/a/b", 2, 7)
    assert unpack(pack(OSError("gone"), 2)).rank == 2
    assert type(unpack('{"kind": "os", "message": "", "path": null, "rank": 1, "step": null}')) is RankFailedError
