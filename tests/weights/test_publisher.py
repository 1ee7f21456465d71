"""A publisher: readers get each version whole and unchanged."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from typing import Any

import numpy
import psutil
import pytest
import torch
from support.ranks import alone
from support.states import same
from support.weights import model, version_in

from asyncckpt.errors import (
    JobTakenError,
    MismatchError,
    OutOfMemoryError,
    UnsavableStateError,
    VersionError,
    WeightsTimeoutError,
)
from asyncckpt.weights import WeightPublisher, WeightSubscriber
from asyncckpt.weights.buffer import WeightBuffer

pytestmark = pytest.mark.usefixtures("forkserver")


def test_versions_grow(publisher: WeightPublisher, subscriber: WeightSubscriber) -> None:
    publisher.publish(model(7), 7)
    for version in (7, 6, 0):
        with pytest.raises(VersionError, match="not newer than 7"):
            publisher.publish(model(version), version)
    with pytest.raises(ValueError, match="from 0 on"):
        publisher.publish(model(), -1)
    with subscriber.acquire() as weights:
        assert version_in(weights) == 7
        epoch = weights.epoch
    publisher.publish(model(3), 3, roll_back=True)
    with subscriber.acquire() as weights:  # no error, because the publisher has announced the roll-back
        assert version_in(weights) == 3 and weights.epoch > epoch
    with subscriber.acquire(version=7) as weights:
        publisher.publish(model(4), 4)
        assert version_in(weights) == 7
    with subscriber.acquire() as weights:
        assert version_in(weights) == 4


def test_versions_of_numpy_are_numbers_too(publisher: WeightPublisher, subscriber: WeightSubscriber) -> None:
    for version, roll_back in ((numpy.int64(3), False), (numpy.uint8(2), True), (torch.tensor(3), False)):
        publication = publisher.publish(model(), version, roll_back=roll_back)  # type: ignore[arg-type]
        assert type(publication.version) is int and subscriber.versions()[-1] == version
    for wrong in (5.0, "5", None, True):
        with pytest.raises(TypeError, match="a version is a whole number, not"):
            publisher.publish(model(), wrong)  # type: ignore[arg-type]


def test_tensors_are_converted_on_the_way(publisher: WeightPublisher, subscriber: WeightSubscriber) -> None:
    torch.manual_seed(1)
    state = {"w": torch.randn(300, 500), "small": torch.randn(3), "half": torch.randn(5).half(), "n": torch.arange(9)}
    state |= {"scaled": torch.randn(8).to(torch.float8_e4m3fn), "columns": torch.randn(300, 500).t()}
    for version in range(1, 4):
        publisher.publish(iter(state.items()) if version == 2 else state, version, dtype=torch.bfloat16)
        with subscriber.acquire() as acquired:
            for name, tensor in state.items():
                converts = tensor.is_floating_point() and tensor.dtype.itemsize > 1
                assert same(acquired[name], tensor.to(torch.bfloat16) if converts else tensor), (version, name)
            del acquired
    publisher.publish(state, 4)
    with subscriber.acquire() as acquired:
        assert same(dict(acquired), {name: state[name] for name in acquired})


def test_a_stream_may_use_one_buffer_for_all(publisher: WeightPublisher, subscriber: WeightSubscriber) -> None:
    buffer = torch.empty(40, 50)

    def stream(version: int, last: int = 20) -> Iterator[tuple[str, torch.Tensor]]:
        for number in range(last):
            yield f"layer.{number}", buffer.fill_(version * 100 + number)

    for version, last in enumerate((20, 20, 25, 25, 10, 10), start=1):  # the structure changes twice
        assert not publisher.publish(stream(version, last), version).skipped
        with subscriber.acquire() as weights:
            assert list(weights) == [f"layer.{number}" for number in range(last)]
            assert all(weights[f"layer.{number}"].eq(version * 100 + number).all() for number in range(last))
    with pytest.raises(UnsavableStateError, match=r"'layer.0' comes twice"):
        publisher.publish([("layer.0", buffer), ("layer.0", buffer)], 10)
    with subscriber.acquire() as weights:
        assert weights.version == 6


def test_a_stream_that_is_skipped_is_walked_through(publisher: WeightPublisher, subscriber: WeightSubscriber) -> None:
    held = []
    for version in range(1, 4):
        publisher.publish(model(version), version)
        held.append(subscriber.acquire())
    walked = []

    def stream() -> Iterator[tuple[str, torch.Tensor]]:
        for name, tensor in model(4).items():
            walked.append(name)
            yield name, tensor

    assert publisher.publish(stream(), 4).skipped and walked == list(model())
    held[0].release()
    assert not publisher.publish(stream(), 4).skipped
    for weights in held:
        weights.release()


def test_another_structure_takes_the_place_of_the_old_one(
    publisher: WeightPublisher, subscriber: WeightSubscriber
) -> None:
    publisher.publish(model(1), 1)
    first = subscriber.acquire()
    publisher.publish({"other": torch.full((70,), 2.0)}, 2)
    with subscriber.acquire() as weights:
        assert list(weights) == ["other"] and version_in(weights) == 2
    assert subscriber.versions() == [2]
    assert version_in(first) == 1  # a leased version stays, even in old memory
    first.release()
    publisher.publish(model(3), 3)
    with subscriber.acquire(3) as weights:
        assert version_in(weights) == 3


def test_what_cannot_be_published(publisher: WeightPublisher, subscriber: WeightSubscriber) -> None:
    for bad in (torch.eye(3).to_sparse(), torch.empty(3, device="meta")):
        with pytest.raises(UnsavableStateError, match="'odd'"):
            publisher.publish({"odd": bad}, 1)
    publisher.publish({"model": {"w": torch.ones(3), "extra": b"bytes"}, "step": 4, "v": torch.zeros(2)}, 2)
    with subscriber.acquire() as weights:
        assert sorted(weights) == ["model.w", "v"]


class _Named(torch.nn.Parameter):
    """A subclass with unknown behavior."""


def test_of_subclasses_each_publication_says_the_same(publisher: WeightPublisher) -> None:
    plain, odd = {"w": torch.nn.Parameter(torch.ones(3))}, {"w": _Named(torch.ones(3))}
    for version in (1, 2):
        with pytest.raises(UnsavableStateError, match="'w' is a _Named"):
            publisher.publish(odd, version)
        publisher.publish(plain, version)


def test_what_was_freed_is_told(publisher: WeightPublisher, subscriber: WeightSubscriber) -> None:
    publisher.publish(model(1), 1)
    freed = torch.ones(300, 200)
    freed.untyped_storage().resize_(0)
    for weights in (model(2) | {"embed.weight": freed}, [("embed.weight", freed)], [("more", freed)]):
        with pytest.raises(UnsavableStateError, match="has no memory"):
            publisher.publish(weights, 2)
    assert subscriber.versions() == [1]


def _publish_beside() -> None:
    with WeightPublisher("policy") as other, pytest.raises(JobTakenError):
        other.publish(model(2), 2)


def test_an_address_is_taken_once(publisher: WeightPublisher) -> None:
    publisher.publish(model(1), 1)
    assert alone(_publish_beside)[0] == 0


def test_too_little_memory_means_fewer_versions(
    publisher: WeightPublisher,
    subscriber: WeightSubscriber,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    publisher.publish(model(1), 1)
    publisher.publish(model(2), 2)

    def no_memory(*_: Any) -> Any:
        raise OutOfMemoryError("no memory, as the test wants")

    client = publisher.worker
    assert client is not None
    monkeypatch.setattr(client, "allocate", no_memory)
    with subscriber.acquire(version=1):
        assert publisher.publish(model(3), 3).skipped and "memory for 2 versions instead of 3" in caplog.text
        for _ in range(5):
            assert publisher.publish(model(3), 3).skipped
    assert caplog.text.count("version 3 is not published: readers at") == 1
    for version in range(3, 6):
        assert not publisher.publish(model(version), version).skipped
    assert subscriber.versions() == [4, 5] and "version 3 is published; the 6 before it were not" in caplog.text
    with pytest.raises(OutOfMemoryError):
        publisher.publish({"new": torch.zeros(3)}, 6)
    with subscriber.acquire() as weights:
        assert version_in(weights) == 5


def test_the_death_of_the_worker_takes_nothing_away(publisher: WeightPublisher, subscriber: WeightSubscriber) -> None:
    publisher.publish(model(1), 1)
    first = subscriber.acquire()
    client = publisher.worker
    assert client is not None
    os.kill(client.pid, signal.SIGKILL)
    client.wait_for_end(30)
    with subscriber.acquire() as weights:  # from memory that is mapped already
        assert version_in(weights) == 1
    publisher.publish(model(2), 2)
    with subscriber.acquire(2) as weights:
        assert version_in(weights) == 2
    with WeightSubscriber("policy") as other:
        assert other.versions() == [1, 2]
    for version in range(3, 7):
        publisher.publish(model(version), version)
    assert version_in(first) == 1
    first.release()


def test_a_worker_that_died_is_replaced_at_once(publisher: WeightPublisher) -> None:
    """A reader that comes between two publications finds the newest version."""
    publisher.publish(model(1), 1)
    client = publisher.worker
    assert client is not None
    os.kill(client.pid, signal.SIGKILL)
    with WeightSubscriber("policy") as other, other.acquire(1, timeout=60) as weights:
        assert version_in(weights) == 1
    assert publisher.worker is not client


def _publish_and(death: str, *versions: int) -> None:
    publisher = WeightPublisher("policy")
    for version in versions:
        publisher.publish(model(version), version)
    if death == "copying":
        WeightBuffer.copy = _half_a_copy  # type: ignore[method-assign]
        publisher.publish(model(99), 99)
    os.kill(os.getpid(), signal.SIGKILL)


def _half_a_copy(self: WeightBuffer, slot: int, plan: Any, tensors: Any, threads: Any) -> None:
    self.views(slot, plan)[0].fill_(99.0)
    os.kill(os.getpid(), signal.SIGKILL)


@pytest.mark.parametrize("death", ["between", "copying"])
def test_another_trainer_goes_on_where_one_has_died(subscriber: WeightSubscriber, death: str) -> None:
    assert alone(_publish_and, death, 1, 2, 3)[0] == -signal.SIGKILL
    held = subscriber.acquire()
    assert version_in(held) == 3  # there is no trainer
    with WeightPublisher("policy") as publisher:
        with pytest.raises(VersionError, match="not newer than 3"):
            publisher.publish(model(2), 2)
        # Before the new trainer publishes, the old versions are there.
        with WeightSubscriber("policy") as other:
            assert other.versions()[-1] == 3
        for version in range(4, 9):
            assert not publisher.publish(model(version), version).skipped
            with subscriber.acquire(version) as weights:
                assert version_in(weights) == version and weights.epoch > held.epoch
        assert version_in(held) == 3
        assert subscriber.versions() == [3, 7, 8]
        memory = psutil.Process(publisher.worker.pid if publisher.worker else 0).memory_maps(grouped=False)
        assert sum("asyncckpt" in region.path for region in memory) == 4  # a page and three slots: no new segments
        held.release()


def test_mistakes_are_told(publisher: WeightPublisher, subscriber: WeightSubscriber) -> None:
    with pytest.raises(UnsavableStateError, match="no tensor"):
        publisher.publish({"step": 3}, 1)
    publisher.publish(model(1), 1)
    with pytest.raises(TypeError, match="state dict"):
        publisher.publish(torch.nn.Linear(2, 2), 2)  # type: ignore[arg-type]
    for wrong in (None, 3, "w", [torch.ones(1)], {1, 2}, [("w", 3)], [("w",)]):
        with pytest.raises(TypeError, match="publish takes a state dict, or pairs of name and tensor"):
            publisher.publish(wrong, 2)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="a Config, not a dict"):
        WeightPublisher("other", config={"linger": 3})  # type: ignore[arg-type]
    for dtype in (torch.int8, "bfloat16", getattr(torch, "float4_e2m1fn_x2", torch.int8)):
        with pytest.raises(ValueError, match="floating point"):
            publisher.publish(model(2), 2, dtype=dtype)  # type: ignore[arg-type]
    for version in ("2", 2.0):
        with pytest.raises(TypeError):
            publisher.publish(model(2), version)  # type: ignore[arg-type]
        with pytest.raises(TypeError):
            subscriber.acquire(version=version)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="exclude each other"):
        subscriber.acquire(1, version=1)
    with pytest.raises(ValueError, match="not empty"):
        WeightPublisher("")
    with WeightSubscriber("policy", prefix="modle.") as other, pytest.raises(MismatchError, match="'modle.'; they are"):
        other.acquire()
    with subscriber.acquire() as weights, pytest.raises(ValueError, match="a bucket has some bytes"):
        next(weights.buckets(0))
    with (
        WeightSubscriber("another") as other,
        pytest.raises(WeightsTimeoutError, match="no publisher was found at 'another'"),
    ):
        other.acquire(timeout=0.0)
