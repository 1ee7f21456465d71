"""Weights on other hosts: one worker of each host has them for all its readers, even if processes die."""

from __future__ import annotations

import multiprocessing
import os
import signal
import time
from collections.abc import Iterator
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file
from support.hosts import host_folder, hosts_of
from support.ranks import run
from support.weights import model, sharded, version_in, whole
from support.workers import wait_for

from asyncckpt.config import Config
from asyncckpt.errors import CheckpointError, WeightsTimeoutError
from asyncckpt.link.client import WorkerClient
from asyncckpt.link.endpoint import FOLDER_VARIABLE, connect, endpoint_names, peer_pid
from asyncckpt.weights import WeightPublisher, WeightSubscriber

pytestmark = pytest.mark.usefixtures("forkserver")

CONFIG = Config(timeout=30, linger=0.0)
ADDRESS = "policy"
_context = multiprocessing.get_context("forkserver")


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, runtime: Path) -> Iterator[Path]:
    yield from hosts_of(tmp_path, monkeypatch, runtime)


@pytest.fixture
def at(folder: Path, monkeypatch: pytest.MonkeyPatch) -> At:
    return At(folder, monkeypatch)


class At:
    """Moves this process to the host of a number."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self._folder, self._monkeypatch = folder, monkeypatch

    def __call__(self, host: int) -> At:
        self._monkeypatch.setenv(FOLDER_VARIABLE, str(host_folder(self._folder, host)))
        return self

    def workers(self) -> list[int]:
        """Return the process ids of the workers on the current host."""
        found = []
        for name in endpoint_names():
            if (connection := connect(name)) is not None:
                with connection:
                    found.append(peer_pid(connection))
        return found


def test_readers_of_other_hosts(at: At) -> None:
    at(0)
    with WeightPublisher(ADDRESS, config=CONFIG) as publisher:
        locator = publisher.serve("127.0.0.1")
        publisher.publish(model(1), 1)
        readers = {}
        for host in (1, 2):
            at(host)
            readers[host] = [WeightSubscriber(ADDRESS, locator=locator, config=CONFIG) for _ in range(2)]
            for reader in readers[host]:
                with reader.acquire(timeout=60) as weights:
                    assert version_in(weights) == weights.version == 1
                    assert {name: tensor.dtype for name, tensor in weights.items()} == {
                        name: tensor.dtype for name, tensor in model().items()
                    }
            assert len(at.workers()) == 1
        at(0)
        publisher.publish(model(2), 2)
        for host, (one, other) in readers.items():
            at(host)
            with one.acquire(2, timeout=60) as weights, weights.safetensors() as paths:
                assert torch.equal(load_file(paths[0])["embed.weight"], model(2)["embed.weight"])
                weights["embed.weight"].add_(1)  # no other reader sees this
            with other.acquire(2, timeout=60) as weights:
                assert version_in(weights) == 2
        # A reader without a locator finds the version of its host.
        with WeightSubscriber(ADDRESS) as reader, reader.acquire() as weights:
            assert version_in(weights) == 2
        for each in (*readers[1], *readers[2]):
            each.close()


def test_on_the_host_of_the_publisher_nothing_is_fetched(at: At) -> None:
    at(0)
    with WeightPublisher(ADDRESS, config=CONFIG) as publisher:
        locator = publisher.serve("127.0.0.1")
        publisher.publish(model(1), 1)
        with WeightSubscriber(ADDRESS, locator=locator) as reader, reader.acquire() as weights:
            assert version_in(weights) == 1
        assert publisher.worker is not None
        assert at.workers() == [publisher.worker.pid]


def test_what_a_reader_has_stays_as_it_is(at: At) -> None:
    at(0)
    with WeightPublisher(ADDRESS, config=CONFIG) as publisher:
        locator = publisher.serve("127.0.0.1")
        at(1)
        held = []
        with WeightSubscriber(ADDRESS, locator=locator, config=CONFIG) as reader:
            for version in range(1, 4):
                publisher.publish(model(version), version)
                held.append(reader.acquire(version, timeout=60))
            # All slots of the host are being read, so no newer version comes until one slot is released.
            assert not publisher.publish(model(4), 4).skipped
            with pytest.raises(WeightsTimeoutError):
                reader.acquire(4, timeout=0.5)
            assert [version_in(weights) for weights in held] == [1, 2, 3]
            held.pop(0).release()
            with reader.acquire(4, timeout=60) as weights:
                assert version_in(weights) == 4
            assert [version_in(weights) for weights in held] == [2, 3]
            for each in held:
                each.release()


def test_a_worker_that_is_killed_is_replaced(at: At) -> None:
    at(0)
    with WeightPublisher(ADDRESS, config=CONFIG) as publisher:
        locator = publisher.serve("127.0.0.1")
        publisher.publish(model(1), 1)
        at(1)
        with WeightSubscriber(ADDRESS, locator=locator, config=CONFIG) as reader:
            weights = reader.acquire(timeout=60)
            (worker,) = at.workers()
            os.kill(worker, signal.SIGKILL)
            publisher.publish(model(2), 2)
            with reader.acquire(2, timeout=60) as newer:
                assert version_in(newer) == 2
            assert version_in(weights) == 1  # the mapped version stays
            weights.release()
            assert at.workers() != [worker]


@pytest.mark.parametrize("when", ["call", "detach"])
def test_a_worker_that_is_killed_as_it_begins_is_replaced(when: str, at: At, monkeypatch: pytest.MonkeyPatch) -> None:
    killed: list[int] = []
    go_on: Any = getattr(WorkerClient, when)

    def kill(worker: WorkerClient, *arguments: Any) -> Any:
        if not killed:
            killed.append(worker.pid)
            os.kill(worker.pid, signal.SIGKILL)
        return go_on(worker, *arguments)

    at(0)
    with WeightPublisher(ADDRESS, config=CONFIG) as publisher:
        locator = publisher.serve("127.0.0.1")
        publisher.publish(model(1), 1)
        monkeypatch.setattr(WorkerClient, when, kill)
        at(1)
        with WeightSubscriber(ADDRESS, locator=locator, config=CONFIG) as reader, reader.acquire(timeout=60) as weights:
            assert version_in(weights) == 1
        assert killed
        assert killed != at.workers()
        at(0)


def _publish(folder: str, version: int, file: str, told: Connection) -> None:
    os.environ[FOLDER_VARIABLE] = folder
    publisher = WeightPublisher(ADDRESS, config=CONFIG)
    publisher.serve("127.0.0.1", file=file)
    publisher.publish(model(version), version, roll_back=True)
    told.send(version)
    time.sleep(600)


def test_a_trainer_that_is_started_anew_is_followed(at: At, folder: Path) -> None:
    """The new trainer has a new worker and an older version. Readers of other hosts still accept the version."""
    file = str(folder / "locator")
    reader = None
    for version in (7, 3):
        at(0)
        ours, theirs = _context.Pipe()
        arguments = [os.environ[FOLDER_VARIABLE], version, file, theirs]
        trainer = _context.Process(target=_publish, args=arguments, daemon=True)
        trainer.start()
        assert ours.recv() == version
        workers = at.workers()
        at(1)
        if reader is None:
            reader = WeightSubscriber(ADDRESS, locator=file, config=CONFIG)
        with reader.acquire(version=version, timeout=60) as weights:
            assert version_in(weights) == version
        for process in (trainer.pid, *workers):
            assert process is not None
            os.kill(process, signal.SIGKILL)
        trainer.join()
    assert reader is not None
    reader.close()


def _serve_together(root: str, file: str) -> str | None:
    os.environ[FOLDER_VARIABLE] = f"{root}/trainer-{dist.get_rank()}"  # a host for each rank
    with WeightPublisher(ADDRESS, process_group=dist.group.WORLD, config=CONFIG) as publisher:
        publisher.serve("127.0.0.1", file=file)
        for step in (1, 2):
            publisher.publish(sharded(step), step)
        dist.barrier()
        seen = None
        if dist.get_rank() == 0:
            os.environ[FOLDER_VARIABLE] = f"{root}/rollout"
            reader = WeightSubscriber(ADDRESS, locator=file, config=CONFIG)
            with reader, reader.acquire(2, timeout=60) as weights:
                assert weights.keys() == whole(2).keys()
                assert all(torch.equal(weights[name], tensor) for name, tensor in whole(2).items())
            seen = "all of it"
        dist.barrier()
    return seen


def test_parts_from_several_hosts_come_together_on_another(tmp_path: Path, folder: Path) -> None:
    assert run(2, _serve_together, str(folder), str(folder / "locator"), folder=tmp_path)[0] == "all of it"


def test_nobody_is_there(at: At) -> None:
    at(1)
    nowhere = "asyncckpt://00ff@127.0.0.1:9?transport=sockets"
    with WeightSubscriber(ADDRESS, locator=nowhere, config=CONFIG) as reader:
        begun = time.monotonic()
        with pytest.raises(WeightsTimeoutError, match="no weights.*sends nothing newer.*refused"):
            reader.acquire(timeout=0.5)
        assert time.monotonic() - begun < 20
    reader = WeightSubscriber("another", locator="policy", config=CONFIG)
    with reader, pytest.raises(CheckpointError, match="cannot be fetched.*policy"):
        reader.acquire(timeout=5)


def test_a_key_that_is_refused_is_told(at: At, folder: Path) -> None:
    """The mirror reads the locator again, because a restarted trainer writes a new one."""
    at(0)
    place = folder / "locator"
    with WeightPublisher(ADDRESS, config=CONFIG) as publisher:
        locator = publisher.serve("127.0.0.1")
        publisher.publish(model(1), 1)
        key, at_, places = locator.removeprefix("asyncckpt://").partition("@")
        place.touch(0o600)
        place.write_text(f"asyncckpt://{key[::-1]}{at_}{places}")
        at(1)
        with WeightSubscriber(ADDRESS, locator=str(place), config=CONFIG) as reader:
            with pytest.raises(
                WeightsTimeoutError, match="none; the publisher sends nothing newer.*refuses the key.*take the newest"
            ):
                reader.acquire(timeout=2)
            place.write_text(locator)
            with reader.acquire(timeout=30) as weights:
                assert version_in(weights) == 1
            with pytest.raises(WeightsTimeoutError, match="in order: 1$"):
                reader.acquire(min_version=2, timeout=0.5)


def test_a_worker_leaves_when_nobody_has_read_for_a_while(at: At) -> None:
    at(0)
    with WeightPublisher(ADDRESS, config=CONFIG) as publisher:
        locator = publisher.serve("127.0.0.1")
        publisher.publish(model(1), 1)
        at(1)
        with WeightSubscriber(ADDRESS, locator=locator, config=CONFIG) as reader:
            reader.acquire(timeout=60).release()
        wait_for(lambda: not at.workers())


def test_what_has_changed_since_a_version(at: At) -> None:
    at(0)
    with WeightPublisher(ADDRESS, config=CONFIG) as publisher:
        locator = publisher.serve("127.0.0.1")
        state = model(1)
        publisher.publish(state, 1)
        at(1)
        with WeightSubscriber(ADDRESS, locator=locator, config=CONFIG) as reader:
            reader.acquire(1, timeout=60).release()
            state["norm.weight"][3] += 1
            publisher.publish(state, 2)
            with reader.acquire(2, timeout=60) as weights:
                weights["embed.weight"].add_(1)  # the reader's own change does not count
                assert weights.changed_since(1) == {"norm.weight"}
                assert weights.changed_since(2) == set()
                assert [change.name for change in weights.patch(1) or ()] == ["norm.weight"]
                assert weights.changed_since(0) == set(weights)  # version 0 is not known
            at(0)
            with WeightSubscriber(ADDRESS, prefix="norm.") as near, near.acquire(2) as weights:
                assert weights.changed_since(1) == {"weight"}
