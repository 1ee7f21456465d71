"""Test that the ranks of a host read from storage once what several of them need."""

from __future__ import annotations

import ctypes
import errno
import gc
import os
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from support import ranks
from support.abilities import need_command
from support.object_stores import s3_root, s3_server
from support.ranks import run
from support.seccomp import need_seccomp, refuse
from support.segments import mapped_segments
from support.shared_files import flip
from support.states import same, zeros_like
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard

from asyncckpt import Checkpointer
from asyncckpt.errors import CheckpointError
from asyncckpt.loading import host_reads
from asyncckpt.loading.data_file import FilePart
from asyncckpt.loading.direct_load import DirectLoad, draft
from asyncckpt.loading.host_reads import HostReads
from asyncckpt.loading.source import StorageSource
from asyncckpt.shm import budget
from asyncckpt.shm.memcpy import memcpy
from asyncckpt.storage.local_file import LocalInputFile
from asyncckpt.storage.object_store import ObjectInputFile
from asyncckpt.storage.storage import InputFile

__all__ = ["s3_root", "s3_server"]

pytestmark = pytest.mark.usefixtures("forkserver")

RANKS = 4
patch = pytest.MonkeyPatch().setattr  # for the processes of ranks, which end with their test
# Page by page, a direct read has bytes beside the requested bytes.
ONCE = 1.03


def replicas(large: int = 6, size: int = 3 << 20) -> dict[str, Any]:
    """Return a state that is equal on all ranks: large tensors with several spans, small ones, and an object."""
    generator = torch.Generator().manual_seed(3)
    sizes = [size] * large + [1000] * 40
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


def late(rank: int) -> None:
    """On all other ranks: begin to read half a second after ``rank``."""
    real = DirectLoad.read

    def read(*args: Any, **options: Any) -> None:
        time.sleep(0.5)
        real(*args, **options)

    if dist.get_rank() != rank:
        patch(DirectLoad, "read", read)


def _read_by_replicas(root: str, before_load: Callable[[], None] = lambda: None, **options: Any) -> tuple[int, bool]:
    state = replicas()
    save(root, state)
    before_load()
    into, found = zeros_like(state), counted()
    load(root, into, **options)
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
    state = replicas(150, 300_000)  # more blocks than slots
    save(root, state)
    late(1)

    def die(number: int) -> None:
        if dist.get_rank() == 1 and number > 1:
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
    state = replicas(150, 300_000)
    save(root, state)
    late(1)
    patch(host_reads, "NOTICE_S", 0.2)

    def wait(number: int) -> None:
        if dist.get_rank() == 1 and number == 0:
            time.sleep(2)

    into, found = zeros_like(state), counted(wait)
    load(root, into)
    return sum(found), same(into, state)


def test_a_slow_rank_holds_up_no_other(tmp_path: Path) -> None:
    found = run(RANKS, _with_a_slow_rank, str(tmp_path / "root"), folder=tmp_path)
    assert all(is_same for _, is_same in found)
    # The others have read at least the block of the slow rank themselves.
    total = nbytes_of(replicas(150, 300_000))
    assert total + 1_200_000 <= sum(nbytes for nbytes, _ in found) < ONCE * RANKS * total


def _with_a_stopped_rank(root: str, is_locked: bool) -> float:
    """Return how long this rank reads, while rank 1 is stopped: with slots locked, or before it reads the first block.

    Rank 1 needs every second block, so that the other ranks find slots that are free, between slots that stay full.
    """
    state = replicas(150, 300_000)
    save(root, state)
    for number in range(1, 150, 2) if dist.get_rank() == 1 else ():
        del state["model"][f"w{number}"]
    late(1)
    patch(host_reads, "NOTICE_S", 0.5)
    rank, pids, ends, real = dist.get_rank(), [0] * 3, [0.0], HostReads.join
    dist.all_gather_object(pids, os.getpid())

    def read(_: int) -> None:
        if rank == 1 and is_locked and len(ends) == 1:
            ends.append(0.0)
            os.kill(os.getpid(), signal.SIGSTOP)
        ends.append(time.monotonic())

    def join(*args: Any) -> None:
        real(*args)
        if rank == 1 and not is_locked:
            os.kill(os.getpid(), signal.SIGSTOP)

    counted(read)
    patch(HostReads, "join", join)
    if rank == 0:
        threading.Timer(4, os.kill, (pids[1], signal.SIGCONT)).start()
    begun, into = time.monotonic(), zeros_like(state)
    load(root, into)
    assert same(into, state)
    return ends[-1] - begun


@pytest.mark.parametrize("is_locked", [True, False])
def test_a_stopped_rank_costs_one_wait(is_locked: bool, tmp_path: Path) -> None:
    """There are several blocks for each slot that the stopped rank keeps."""
    assert run(3, _with_a_stopped_rank, str(tmp_path / "root"), is_locked, folder=tmp_path)[0] < 3


def _with_memory_that_one_rank_cannot_open(root: str) -> tuple[int, bool]:
    if dist.get_rank() == 2:
        patch(host_reads, "Descriptor", _Refusing)
    return _read_by_replicas(root)


def _with_locks_that_one_rank_cannot_take(root: str) -> tuple[int, bool]:
    return _read_by_replicas(root, lambda: refuse("fcntl(F_OFD_SETLK)", errno.EPERM) if dist.get_rank() == 2 else None)


class _Refusing:
    @staticmethod
    def of(*_: object) -> int:
        raise PermissionError(13, "no access to the other process")


@pytest.mark.parametrize("refused", [_with_memory_that_one_rank_cannot_open, _with_locks_that_one_rank_cannot_take])
def test_a_rank_is_refused_memory_or_locks(refused: Callable[[str], tuple[int, bool]], tmp_path: Path) -> None:
    """This rank reads alone, and the others share."""
    need_seccomp()
    found = run(RANKS, refused, str(tmp_path / "root"), folder=tmp_path)
    assert all(is_same for _, is_same in found)
    total = nbytes_of(replicas())
    assert total <= found[2][0] < ONCE * total and 2 * total <= sum(nbytes for nbytes, _ in found) < 2 * ONCE * total


def limit_shm(size: str, then: str = "true") -> None:
    """On a rank: have only ``/dev/shm`` for shared memory, with that ``size``."""
    assert ctypes.CDLL(None).unshare(0x20000) == 0  # CLONE_NEWNS
    mount = f"mount --make-rprivate / && mount -t tmpfs -o size={size} tmpfs /dev/shm"
    subprocess.run(["sh", "-c", f"{mount} && {{ {then} || true; }}"], check=True, stderr=subprocess.DEVNULL)
    refuse("memfd_create", errno.EPERM)


def need_limits() -> None:
    need_seccomp()
    need_command("unshare", "--mount", "sh", "-c", "mount -t tmpfs tmpfs /dev/shm")


def _with_a_full_shm(root: str) -> tuple[int, bool]:
    return _read_by_replicas(root, lambda: limit_shm("4k", "cat /dev/zero > /dev/shm/all"))


def _with_little_memory(root: str) -> tuple[int, bool]:
    return _read_by_replicas(root, lambda: patch(budget, "available_bytes", lambda root: 300 << 20))


def _without_checksums(root: str) -> tuple[int, bool]:
    return _read_by_replicas(root, verify=False)


@pytest.mark.parametrize("alone", [_with_a_full_shm, _with_little_memory, _without_checksums])
def test_all_ranks_read_alone(alone: Callable[[str], tuple[int, bool]], tmp_path: Path) -> None:
    need_limits()
    found = run(2, alone, str(tmp_path / "root"), folder=tmp_path)
    assert all(is_same and 1 <= nbytes / nbytes_of(replicas()) < ONCE for nbytes, is_same in found)


def _without_memory_for_slots(root: str) -> float:
    save(root, state := replicas())
    limit_shm("64k")
    late(0)
    ends = [0.0]

    def wait(number: int) -> None:
        if dist.get_rank() == 0 and number == 0:
            time.sleep(3)
        ends.append(time.monotonic())

    counted(wait)
    begun, into = time.monotonic(), zeros_like(state)
    load(root, into)
    assert same(into, state)
    return ends[-1] - begun


def test_ranks_without_memory_for_slots_do_not_wait_for_each_other(tmp_path: Path) -> None:
    """Rank 0 keeps its first reads for three seconds."""
    need_limits()
    assert run(2, _without_memory_for_slots, str(tmp_path / "root"), folder=tmp_path)[1] < 2.5


def _facts(file: Path) -> tuple[int, ...]:
    """Return facts of a file. A read changes the time of access, and none of these."""
    found = file.stat()
    return found.st_ino, found.st_size, found.st_mtime_ns


def _with_stray_writes(root: str) -> tuple[int, bool, bool]:
    state = replicas()
    save(root, state)

    def copy(to: int, source: int, nbytes: int) -> None:
        memcpy(to, source, nbytes)
        ctypes.memset(to, 1, 10)

    patch(host_reads, "memcpy", copy)
    files = sorted(Path(root).rglob("*.distcp"))
    before = [_facts(file) for file in files]
    into, found = zeros_like(state), counted()
    step = load(root, into, fallback=True)
    is_intact = step == 1 and [_facts(file) for file in files] == before
    return sum(found), same(into, state), is_intact


def test_a_stray_write_to_the_slots_is_no_damage_of_the_file(tmp_path: Path) -> None:
    found = run(2, _with_stray_writes, str(tmp_path / "root"), folder=tmp_path)
    assert all(is_same and is_intact for _, is_same, is_intact in found)
    assert sum(nbytes for nbytes, *_ in found) >= 1.9 * nbytes_of(replicas())


def _with_a_join_that_fails(root: str) -> str:
    def fail(_: object) -> None:
        raise MemoryError

    save(root, replicas())
    if dist.get_rank() == 1:
        patch(np, "stack", fail)
    with pytest.raises(CheckpointError) as caught:
        load(root, zeros_like(replicas()))
    return str(caught.value)


def test_a_join_that_fails_fails_on_all_ranks(tmp_path: Path) -> None:
    found = set(run(2, _with_a_join_that_fails, str(tmp_path / "root"), folder=tmp_path))
    assert len(found) == 1 and "MemoryError" in found.pop()


def test_a_block_that_is_not_whole_is_not_shared(tmp_path: Path) -> None:
    root, state = str(tmp_path / "root"), replicas(1)
    save(root, state)
    path = f"{root}/step-00000001"
    with ExitStack() as held:
        both = []
        for _ in range(2):
            direct = draft(zeros_like(state), StorageSource(path), path, held)
            assert direct is not None and (host := direct.with_host_reads(held).host_reads) is not None
            both.append((direct, host))
        shared = []
        for direct, host in both:
            host.members = [each.member for _, each in both]
            host.join()
            shared.append(next(file.shared for file in direct.requests if file.shared))
        (begin, end), share = next(iter(shared[0].items()))
        list(share(iter([FilePart(begin, memoryview(bytearray(end - begin - 1)))])))
        stored = [FilePart(begin, memoryview(bytearray(b"1" * (end - begin))))]
        assert list(shared[1][begin, end](iter(stored))) == stored


def _with_a_damaged_file(root: str) -> tuple[str, str | None, int | None, bool]:
    gc.disable()
    segments = mapped_segments()
    state = replicas()
    save(root, state, 1, 2)
    dist.barrier()
    if dist.get_rank() == 0:
        flip(Path(root, "step-00000002", "__1_0.distcp"), 5_000_000)
    dist.barrier()
    with pytest.raises(CheckpointError) as caught:
        load(root, zeros_like(state), step=2)
    assert mapped_segments().keys() <= segments.keys()  # the memory is unmapped, even before the error is forgotten
    step = load(root, into := zeros_like(state), fallback=True)
    return str(caught.value), caught.value.path, step, same(into, state)


def test_all_ranks_find_a_damaged_file(tmp_path: Path) -> None:
    root = str(tmp_path / "root")
    found = run(RANKS, _with_a_damaged_file, root, folder=tmp_path)
    assert len({words for words, *_ in found}) == 1 and "are damaged: 'model.w" in found[0][0]
    assert all(each[1:] == (f"{root}/step-00000002/__1_0.distcp", 1, True) for each in found)
