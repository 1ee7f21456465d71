"""The publisher's memory: two images at rest, more while readers keep older versions, and two again afterwards."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
from support.ranks import alone, run
from support.weights import model, reads, sharded, version_in

from asyncckpt.errors import OutOfMemoryError
from asyncckpt.shm.segment import Segment
from asyncckpt.weights import WeightPublisher, Weights, WeightSubscriber, buffer

pytestmark = pytest.mark.usefixtures("forkserver")


def images(publisher: WeightPublisher) -> float:
    """Return the number of images that have memory, from the allocated blocks of the segments."""
    segments = [slot.segment for slot in publisher._buffers[-1]._slots]
    pages = [-(-segment.nbytes // 4096) for segment in segments]
    return sum(os.fstat(segment.fileno()).st_blocks / 8 for segment in segments) / pages[0]


def numbered(first: int = 1) -> Iterator[int]:
    return iter(range(first, 1000))


def publish(publisher: WeightPublisher, versions: Iterator[int], times: int) -> int:
    """Publish ``times`` versions. Return the last one."""
    version = 0
    for _ in range(times):
        version = next(versions)
        assert not publisher.publish(model(version), version).skipped
    return version


def grow(publisher: WeightPublisher, subscriber: WeightSubscriber, versions: Iterator[int], slots: int) -> None:
    """Publish while readers keep versions, until there are ``slots`` slots."""
    with ExitStack() as held:
        for number in range(slots):
            version = publish(publisher, versions, 1)
            if number < slots - 1:
                held.enter_context(subscriber.acquire(version=version))
    assert images(publisher) == slots


@pytest.mark.parametrize("slots", [3, 5])
def test_memory_is_given_back_when_readers_have_left(slots: int) -> None:
    versions = numbered()
    with WeightPublisher("policy", slots=slots) as publisher, WeightSubscriber("policy") as subscriber:
        for _ in range(2):
            publish(publisher, versions, 3)
            assert images(publisher) == 2
            grow(publisher, subscriber, versions, slots)
            publish(publisher, versions, 2)
            assert images(publisher) == slots  # not at once
            last = publish(publisher, versions, buffer._UNUSED)
            assert images(publisher) == 2 and subscriber.versions() == [last - 1, last]
            for each in (subscriber, WeightSubscriber("policy")):
                with each.acquire() as weights:
                    assert version_in(weights) == last
        assert len(publisher._buffers[-1]._slots) == slots  # the slots are reused


def test_what_is_read_stays(publisher: WeightPublisher, subscriber: WeightSubscriber) -> None:
    versions = numbered()
    with ExitStack() as held:
        for _ in range(2):
            held.enter_context(subscriber.acquire(publish(publisher, versions, 1)))
        third = subscriber.acquire(publish(publisher, versions, 1))
    with third:
        publish(publisher, versions, 3 * buffer._UNUSED)
        assert version_in(third) == 3 and images(publisher) == 3
    publish(publisher, versions, buffer._UNUSED)
    assert images(publisher) == 2


def test_without_memory_it_is_as_if_it_had_never_been_there(
    publisher: WeightPublisher,
    subscriber: WeightSubscriber,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    versions = numbered()
    grow(publisher, subscriber, versions, 3)
    last = publish(publisher, versions, buffer._UNUSED + 1)

    def no_memory(*_: Any) -> None:
        raise OutOfMemoryError("no memory, as the test wants")

    monkeypatch.setattr(buffer, "take_memory", no_memory)
    with subscriber.acquire(version=last - 1):
        version = next(versions)
        assert publisher.publish(model(version), version).skipped
        assert "memory for 2 versions instead of 3: no memory, as the test wants" in caplog.text
        assert images(publisher) == 2
    publish(publisher, versions, 3)


def _die(instant: str) -> None:
    """Die while the memory of a slot is given back, while it is taken again, or after it is taken."""
    versions = numbered()
    publisher, subscriber = WeightPublisher("policy"), WeightSubscriber("policy")
    grow(publisher, subscriber, versions, 3)
    last = publish(publisher, versions, buffer._UNUSED + 1)
    if instant != "given back":
        if instant == "taking":
            Segment.touch = lambda *_: os.kill(os.getpid(), signal.SIGKILL)  # type: ignore[method-assign]
        else:
            WeightPublisher._show = lambda *_: os.kill(os.getpid(), signal.SIGKILL)  # type: ignore[method-assign]
        with subscriber.acquire(version=last - 1):
            publish(publisher, versions, 1)
    os.kill(os.getpid(), signal.SIGKILL)


@pytest.mark.parametrize("instant", ["given back", "taking", "taken"])
def test_another_trainer_finds_it_given_back(subscriber: WeightSubscriber, instant: str) -> None:
    assert alone(_die, instant)[0] == -signal.SIGKILL
    with WeightPublisher("policy") as publisher:
        versions = numbered(100)
        with subscriber.acquire() as held:
            publish(publisher, versions, 1)
            assert images(publisher) == (3 if instant == "taken" else 2)
            with subscriber.acquire() as other:
                last = publish(publisher, versions, 1)
                assert images(publisher) == 3 and version_in(other) == 100
                with WeightSubscriber("policy") as late, late.acquire() as newest:
                    assert version_in(newest) == last
            assert version_in(held) < 100
        assert len(publisher._buffers[-1]._slots) == 3


def _publish_together(address: str) -> list[float]:
    found: list[float] = []
    held: list[Weights] = []
    with WeightPublisher(address, process_group=dist.group.WORLD) as publisher, WeightSubscriber(address) as subscriber:
        for version in range(1, 30):
            assert not publisher.publish(sharded(version), version).skipped
            dist.barrier()
            if version in (1, 15) and dist.get_rank() == 0:
                held.append(subscriber.acquire())  # a lease on both ranks
            if version in (4, 18) and dist.get_rank() == 0:
                held.pop().release()
            dist.barrier()
            found.append(round(images(publisher)))
        if dist.get_rank() == 0:
            assert reads(subscriber, 29)
        dist.barrier()  # a rank that leaves removes its part
    return found


def test_ranks_give_back_alike(tmp_path: Path) -> None:
    first, second = run(2, _publish_together, "policy", folder=tmp_path)
    assert first == second and max(first) == 3 and first[13] == first[-1] == 2
