"""Test that the ranks of a host read from storage once what several of them need."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from support import ranks
from support.object_stores import s3_root, s3_server
from support.ranks import run
from support.shared_files import flip
from support.states import same, zeros_like
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard

from asyncckpt import Checkpointer
from asyncckpt.errors import CheckpointError
from asyncckpt.format.index import SPAN_BYTES
from asyncckpt.loading import host_reads
from asyncckpt.storage.local_file import LocalInputFile
from asyncckpt.storage.object_store import ObjectInputFile
from asyncckpt.storage.storage import InputFile

__all__ = ["s3_root", "s3_server"]

pytestmark = pytest.mark.usefixtures("forkserver")

RANKS = 4
patch = pytest.MonkeyPatch().setattr  # for the processes of ranks, which end with their test
# Page by page, a direct read has bytes beside the requested bytes.
ONCE = 1.03


def replicas(large: int = 6) -> dict[str, Any]:
    """Return a state that is equal on all ranks: large tensors with several spans, small ones, and an object."""
    generator = torch.Generator().manual_seed(3)
    sizes = [3 << 20] * large + [1000] * 40
    model = {f"w{number}": torch.randn(size, generator=generator) for number, size in enumerate(sizes)}
    return {"model": model, "lr": [1e-3], "step": 1}


def nbytes_of(state: dict[str, Any]) -> int:
    return sum(tensor.nbytes for tensor in state["model"].values())


def counted(before: Callable[[int], None] = lambda number: None) -> list[int]:
    """On a rank: return a list that gets the bytes of each read from storage. Call ``before`` with its number."""
    found: list[int] = []

    def wrap(kind: type[InputFile], name: str) -> None:
        real = getattr(kind, name)

        def read(file: InputFile, views: Sequence[memoryview], offset: int) -> int | None:
            before(len(found))
            done: int | None = real(file, views, offset)
            found.append(done or 0)
            return done

        patch(kind, name, read)

    for kind in (LocalInputFile, ObjectInputFile):
        wrap(kind, "read")
        wrap(kind, "read_in_place")
    return found


def save(root: str, state: dict[str, Any], *steps: int) -> None:
    with Checkpointer(root) as checkpointer:
        for step in steps or (1,):
            checkpointer.save(step, state).result(60)


def load(root: str, state: dict[str, Any], **options: Any) -> int | None:
    with Checkpointer(root) as checkpointer:
        return checkpointer.load(state, memory=False, **options)


def _read_by_replicas(root: str) -> tuple[int, bool]:
    state = replicas()
    save(root, state)
    into, found = zeros_like(state), counted()
    load(root, into)
    return sum(found), same(into, state)


def test_replicas_read_once(tmp_path: Path) -> None:
    found = run(RANKS, _read_by_replicas, str(tmp_path / "root"), folder=tmp_path)
    assert all(is_same for _, is_same in found)
    assert nbytes_of(replicas()) <= sum(nbytes for nbytes, _ in found) < ONCE * nbytes_of(replicas())


def test_replicas_read_once_from_an_object_store(s3_root: str, tmp_path: Path) -> None:
    found = run(RANKS, _read_by_replicas, s3_root, folder=tmp_path)
    assert all(is_same for _, is_same in found)
    assert nbytes_of(replicas()) <= sum(nbytes for nbytes, _ in found) < ONCE * nbytes_of(replicas())


def _on_hosts(root: str) -> tuple[int, bool]:
    patch(host_reads, "pid_scope", lambda: f"host {dist.get_rank() % 2}")
    return _read_by_replicas(root)


def test_hosts_share_nothing(tmp_path: Path) -> None:
    found = run(RANKS, _on_hosts, str(tmp_path / "root"), folder=tmp_path)
    assert all(is_same for _, is_same in found)
    for host in (0, 1):
        assert 1 <= sum(nbytes for nbytes, _ in found[host::2]) / nbytes_of(replicas()) < ONCE


def _read_some_by_all(root: str) -> tuple[int, int, bool]:
    """Load shards of this rank, two copies of other shards, and replicas, with small ones between them."""
    rank = dist.get_rank()
    pairs = init_device_mesh("cpu", (2, 2), mesh_dim_names=("copies", "shards"))
    state: dict[str, Any] = {"model": {}, "step": 1}
    for number in range(3):
        generator = torch.Generator().manual_seed(number)
        whole = torch.randn(1 << 20, generator=generator)
        mine = DTensor.from_local(whole.chunk(RANKS)[rank].clone(), init_device_mesh("cpu", (RANKS,)), [Shard(0)])
        half = DTensor.from_local(whole.chunk(2)[rank % 2].clone(), pairs["shards"], [Shard(0)])
        model: dict[str, torch.Tensor] = state["model"]
        model |= {f"shard{number}": mine, f"half{number}": half, f"norm{number}": torch.full((512,), 1.0)}
        model[f"embedding{number}"] = whole.clone()
    save(root, state)
    into: dict[str, Any] = {
        "model": {name: torch.zeros_like(value) for name, value in state["model"].items()},
        "step": 0,
    }
    found = counted()
    load(root, into)
    is_same = all(
        torch.equal(value.to_local() if isinstance(value, DTensor) else value, _local(into["model"][name]))
        for name, value in state["model"].items()
    )
    return sum(found), sum(path.stat().st_size for path in Path(root).rglob("*.distcp")), is_same


def _local(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def test_ranks_share_what_several_of_them_need(tmp_path: Path) -> None:
    found = run(RANKS, _read_some_by_all, str(tmp_path / "root"), folder=tmp_path)
    assert all(is_same for _, _, is_same in found)
    assert sum(nbytes for nbytes, _, _ in found) < ONCE * found[0][1]


def _with_a_killed_rank(root: str) -> tuple[str, float]:
    state = replicas(large=40)  # more blocks than slots
    save(root, state)

    def die(number: int) -> None:
        if dist.get_rank() == 1 and number == 2:
            os.kill(os.getpid(), signal.SIGKILL)

    counted(die)
    begun = time.monotonic()
    with pytest.raises(CheckpointError) as caught:
        load(root, zeros_like(state))
    return str(caught.value), time.monotonic() - begun


def test_a_rank_that_is_killed_holds_up_no_other(tmp_path: Path) -> None:
    ended = ranks.Job(RANKS, _with_a_killed_rank, str(tmp_path / "root"), folder=tmp_path).wait()
    assert [end.killed for end in ended] == [False, True, False, False]
    for words, seconds in (end.result for end in ended if not end.killed):
        assert "one of them may have died" in words and seconds < 40


def _with_a_slow_rank(root: str) -> tuple[int, bool]:
    state = replicas(large=40)
    save(root, state)
    patch(host_reads, "NOTICE_S", 0.2)

    def wait(number: int) -> None:
        if dist.get_rank() == 1 and number == 1:
            time.sleep(2)

    into, found = zeros_like(state), counted(wait)
    load(root, into)
    return sum(found), same(into, state)


def test_a_slow_rank_holds_up_no_other(tmp_path: Path) -> None:
    found = run(RANKS, _with_a_slow_rank, str(tmp_path / "root"), folder=tmp_path)
    assert all(is_same for _, is_same in found)
    # The others have read at least the block of the slow rank themselves.
    total = nbytes_of(replicas(large=40))
    assert total + SPAN_BYTES <= sum(nbytes for nbytes, _ in found) < RANKS * total


def _with_memory_that_one_rank_cannot_open(root: str) -> tuple[int, bool]:
    if dist.get_rank() == 2:
        patch(host_reads, "Descriptor", _Refusing)
    return _read_by_replicas(root)


class _Refusing:
    @staticmethod
    def of(*_: object) -> int:
        raise PermissionError(13, "no access to the other process")


def test_memory_that_one_rank_cannot_open(tmp_path: Path) -> None:
    """This rank reads alone, and the others share."""
    found = run(RANKS, _with_memory_that_one_rank_cannot_open, str(tmp_path / "root"), folder=tmp_path)
    assert all(is_same for _, is_same in found)
    total = nbytes_of(replicas())
    assert total <= found[2][0] < ONCE * total and 2 * total <= sum(nbytes for nbytes, _ in found) < 2 * ONCE * total


def _with_a_damaged_file(root: str) -> tuple[str, str | None, int | None, bool]:
    state = replicas()
    save(root, state, 1, 2)
    dist.barrier()
    if dist.get_rank() == 0:
        flip(Path(root, "step-00000002", "__1_0.distcp"), 5_000_000)
    dist.barrier()
    with pytest.raises(CheckpointError) as caught:
        load(root, zeros_like(state), step=2)
    step = load(root, into := zeros_like(state), fallback=True)
    return str(caught.value), caught.value.path, step, same(into, state)


def test_all_ranks_find_a_damaged_file(tmp_path: Path) -> None:
    root = str(tmp_path / "root")
    found = run(RANKS, _with_a_damaged_file, root, folder=tmp_path)
    assert len({words for words, *_ in found}) == 1 and "are damaged: 'model.w" in found[0][0]
    assert all(each[1:] == (f"{root}/step-00000002/__1_0.distcp", 1, True) for each in found)
