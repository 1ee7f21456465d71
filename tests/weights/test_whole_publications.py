"""Publications of several ranks, by streams and to other hosts, are never partial, mixed, or half announced."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from support.hosts import host_folder, hosts_of
from support.ranks import run
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, distribute_tensor

from asyncckpt.config import Config
from asyncckpt.errors import CheckpointError, UnsavableStateError
from asyncckpt.link.endpoint import FOLDER_VARIABLE
from asyncckpt.shm.slots import PublishedVersion
from asyncckpt.weights import WeightPublisher, WeightSubscriber
from asyncckpt.weights.buffer import WeightBuffer

pytestmark = pytest.mark.usefixtures("forkserver")
CONFIG = Config(timeout=30, linger=0.0)


def _prepared_then_streamed(address: str, prepares: bool) -> list[str]:
    weights = {f"{number}": torch.full((5 + number,), 1.0) for number in range(4)}
    with WeightPublisher(address, process_group=dist.group.WORLD) as publisher:
        if prepares:
            publisher.prepare(weights)
        else:
            publisher.publish(weights, 0)
        publisher.publish(iter(weights.items()), 1)
        dist.barrier()
        names = []
        if dist.get_rank() == 0:
            with WeightSubscriber(address) as subscriber, subscriber.acquire(1) as acquired:
                names = sorted(acquired)
        dist.barrier()
    return names


@pytest.mark.parametrize("prepares", [True, False])
def test_a_stream_after_a_state_dict_is_whole(tmp_path: Path, prepares: bool) -> None:
    assert run(2, _prepared_then_streamed, "policy", prepares, folder=tmp_path)[0] == ["0", "1", "2", "3"]


def _replica_of_one(address: str) -> list[str] | str:
    mesh = init_device_mesh("cpu", (2,))
    both = {name: distribute_tensor(torch.ones(4), mesh, [Replicate()]) for name in ("a", "b")}
    with WeightPublisher(address, process_group=dist.group.WORLD) as publisher:
        publisher.publish(iter(both.items()), 1)
        rank = dist.get_rank()
        stream = dict(both)
        if rank == 0:
            del stream["b"]
        names: list[str] | str = []
        try:
            publisher.publish(iter(stream.items()), 2)
        except UnsavableStateError as error:
            names = str(error)
        dist.barrier()
        if rank == 0 and not names:
            with WeightSubscriber(address) as subscriber, subscriber.acquire(2) as acquired:
                names = sorted(acquired)
        dist.barrier()
    return names


def test_a_replica_that_only_another_has_is_not_lost(tmp_path: Path) -> None:
    names = run(2, _replica_of_one, "policy", folder=tmp_path)[0]
    assert names == ["a", "b"] or "b" in names and "publish again" in names


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, runtime: Path) -> Iterator[Path]:
    yield from hosts_of(tmp_path, monkeypatch, runtime)


@pytest.mark.parametrize("how", ["dtype", "names", "shapes"])
def test_a_mirror_of_another_structure_of_the_same_size(
    folder: Path, monkeypatch: pytest.MonkeyPatch, how: str
) -> None:

    def at(host: int) -> None:
        monkeypatch.setenv(FOLDER_VARIABLE, str(host_folder(folder, host)))

    one, two = torch.arange(6.0).reshape(2, 3), torch.arange(6.0, 12.0).reshape(2, 3)
    first = {"a": one, "b": two}
    then = {"dtype": first, "names": {"b": two, "a": one}, "shapes": {"a": one.reshape(3, 2), "b": two}}[how]
    at(0)
    with WeightPublisher("policy", config=CONFIG) as publisher:
        locator = publisher.serve("127.0.0.1")
        publisher.publish(first, 1, dtype=torch.bfloat16)
        at(1)
        with WeightSubscriber("policy", locator=locator, config=CONFIG) as reader:
            with reader.acquire(1, timeout=60) as weights:
                assert torch.equal(weights["a"].float(), one)
            at(0)
            dtype = torch.float16 if how == "dtype" else torch.bfloat16
            publisher.publish(then, 2, dtype=dtype)
            with WeightSubscriber("policy") as near, near.acquire(2) as weights:
                assert torch.equal(weights["a"].float(), then["a"]) and weights["a"].dtype == dtype
            at(1)
            with reader.acquire(2, timeout=60) as weights:
                seen = {name: tensor.float().clone() for name, tensor in weights.items()}
                dtypes = {tensor.dtype for tensor in weights.values()}
    assert dtypes == {dtype}
    assert all(torch.equal(seen[name], then[name]) for name in then), seen


def _locator_that_cannot_be_written(address: str, place: str, calls: str) -> list[object]:
    said: list[object] = []
    rank, folder = dist.get_rank(), Path(place)

    def tell(call: Callable[[], object]) -> str:
        begun = time.monotonic()
        try:
            call()
            became = "well"
        except CheckpointError as error:
            became = f"{type(error).__name__}: {error}"
        time.sleep(max(0.0, 8 - (time.monotonic() - begun)))  # a training has other things to do
        said.append((calls, became, time.monotonic() - begun < 8.5))
        return became

    with WeightPublisher(address, process_group=dist.group.WORLD, config=CONFIG) as publisher:
        if calls == "serve":
            tell(lambda: publisher.serve("127.0.0.1", file=folder / "locator"))
            return said
        publisher.serve("127.0.0.1", file=folder / "locator")
        publisher.publish({"a": torch.ones(3)}, 1)
        publisher.publish({"a": torch.ones(3)}, 2)
        dist.barrier()
        if rank == 0:
            (folder / "locator").unlink()
            folder.rmdir()
        worker = publisher.worker
        assert worker is not None and worker.pid is not None
        if rank == 0:
            os.kill(worker.pid, signal.SIGKILL)
            time.sleep(2)
        dist.barrier()
        if "StorageError" not in (first := tell(lambda: publisher.publish({"a": torch.ones(3)}, 3))) and rank == 0:
            said.append(first)
        dist.barrier()
        if rank == 0:
            with WeightSubscriber(address) as subscriber:
                said.append(subscriber.versions())
        dist.barrier()
    return said


@pytest.mark.parametrize("calls", ["serve", "publish"])
def test_a_locator_that_cannot_be_written_fails_on_all_ranks(tmp_path: Path, calls: str) -> None:
    place = tmp_path / "place"
    if calls == "publish":
        place.mkdir()
    said = run(2, _locator_that_cannot_be_written, "policy", str(place), calls, folder=tmp_path)
    (_, first, soon), (_, second, _) = said[0][0], said[1][0]
    assert "StorageError: the file for the locator cannot be written" in first
    assert "rank 0 cannot publish" in second
    assert soon
    if calls == "publish":
        assert said[0][1] == [2]


def _worker_dies_after_the_last_word(address: str) -> list[object]:
    rank, said = dist.get_rank(), list[object]()
    original = WeightBuffer.publish

    def publish(self: WeightBuffer, slot: int, version: PublishedVersion) -> None:
        original(self, slot, version)
        if rank == 0 and version.version == 2:
            worker = self._client
            os.kill(worker.pid, signal.SIGKILL)
            worker._listener.join(10)

    WeightBuffer.publish = publish  # type: ignore[method-assign]
    with WeightPublisher(address, process_group=dist.group.WORLD, config=CONFIG) as publisher:
        publisher.publish({"a": torch.ones(3)}, 1)
        begun = time.monotonic()
        try:
            publisher.publish({"a": torch.ones(4)}, 2)  # another structure, so the memory of the old one is released
            said.append("well")
        except CheckpointError as error:
            said.append(f"{type(error).__name__}")
        said.append(time.monotonic() - begun < 6)
        time.sleep(max(0.0, 8 - (time.monotonic() - begun)))  # a training has other things to do
        publisher.publish({"a": torch.ones(4)}, 3)
        dist.barrier()
        if rank == 0:
            with WeightSubscriber(address) as subscriber, subscriber.acquire() as weights:
                said.append(weights.version)
        dist.barrier()
    return said


def test_what_fails_after_the_last_word_keeps_no_rank_waiting(tmp_path: Path) -> None:
    said = run(2, _worker_dies_after_the_last_word, "policy", folder=tmp_path)
    assert said == [["WorkerDiedError", True, 3], ["well", True]]


@pytest.mark.skipif(os.geteuid() != 0, reason="needs another user's file")
def test_a_stranger_gives_no_key(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(FOLDER_VARIABLE, str(host_folder(folder, 0)))
    file = folder / "locator"
    key = "ab" * 32
    file.write_text(f"asyncckpt://{key}@127.0.0.1:9?transport=sockets\n")
    os.chown(file, 12345, 12345)
    partial = Path(f"{file}.{os.getpid()}.partial")
    partial.write_text("")
    partial.chmod(0o666)
    os.chown(partial, 12345, 12345)
    with WeightPublisher("policy", config=CONFIG) as publisher:
        locator = publisher.serve("127.0.0.1", file=file)
        found = os.stat(file)
        assert key not in locator
        assert (found.st_uid, found.st_mode & 0o777) == (os.geteuid(), 0o600)
        assert not partial.samefile(file) and partial.read_text() == ""
