"""A subscriber finds or waits for the requested version, and outlives trainers and workers."""

from __future__ import annotations

import os
import signal
import threading
import time

import pytest
import torch
from support.weights import model, version_in
from support.workers import stop

from asyncckpt.errors import (
    ClosedError,
    VersionError,
    WeightsTimeoutError,
)
from asyncckpt.weights import WeightPublisher, WeightSubscriber


def test_a_reader_waits_for_the_version_it_wants(
    publisher: WeightPublisher, subscriber: WeightSubscriber, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("asyncckpt.weights.subscriber._LEAST_ANSWER_S", 30.0)  # the worker may need a moment
    with pytest.raises(WeightsTimeoutError, match=r"no publisher was found at 'policy' within 0.05 s"):
        subscriber.acquire(timeout=0.05)
    publisher.publish(model(1), 1)
    with pytest.raises(WeightsTimeoutError, match=r"version 2 or later at 'policy' within 0.05 s; .* order: 1"):
        subscriber.acquire(2, timeout=0.05)
    with pytest.raises(WeightsTimeoutError, match="of version 5 at 'policy' within"):
        subscriber.acquire(version=5, timeout=0.05)
    got: list[int] = []

    def read() -> None:
        with subscriber.acquire(2) as weights:
            got.append(version_in(weights))

    reader = threading.Thread(target=read)
    reader.start()
    publisher.publish(model(2), 2)
    reader.join(30)
    assert got == [2]


def test_a_reader_may_be_there_first() -> None:
    with WeightSubscriber("policy") as subscriber:
        got: list[int] = []

        def read() -> None:
            with subscriber.acquire() as weights:
                got.append(version_in(weights))

        reader = threading.Thread(target=read)
        reader.start()
        with WeightPublisher("policy") as publisher:
            publisher.publish(model(1), 1)
            reader.join(30)
        assert got == [1]
    with pytest.raises(ClosedError):
        subscriber.acquire()
    with pytest.raises(ClosedError):
        publisher.publish(model(2), 2)


def test_a_closed_subscriber_has_no_files(publisher: WeightPublisher, subscriber: WeightSubscriber) -> None:
    publisher.publish(model(1), 1)
    weights = subscriber.acquire()
    subscriber.close()
    assert version_in(weights) == 1
    with pytest.raises(ClosedError, match="its subscriber is closed"), weights.safetensors():
        pass
    weights.release()


def test_threads_may_share_a_subscriber(publisher: WeightPublisher, subscriber: WeightSubscriber) -> None:
    wrong: list[str] = []
    done = threading.Event()
    publisher.publish(model(1), 1)

    def read() -> None:
        while not done.is_set():
            with subscriber.acquire() as weights:
                if version_in(weights) != weights.version:
                    wrong.append("torn")

    readers = [threading.Thread(target=read, daemon=True) for _ in range(3)]
    for reader in readers:
        reader.start()
    for version in range(2, 60):  # other structures, so that readers have to ask the worker
        publisher.publish({f"{version % 7}": torch.full((300,), float(version))}, version)
        time.sleep(0.002)
    done.set()
    for reader in readers:
        reader.join(30)
        assert not reader.is_alive()
    assert not wrong


def test_a_fork_asks_for_itself(publisher: WeightPublisher, subscriber: WeightSubscriber) -> None:
    publisher.publish(model(1), 1)
    subscriber.acquire().release()
    ours = subscriber._ranks[0]._client
    assert ours is not None
    if (child := os.fork()) == 0:
        ours.published = None  # type: ignore[assignment,method-assign]  # a request over the parent's connection fails
        try:
            with subscriber.acquire() as weights:
                os._exit(weights.version + 10)
        except BaseException:
            os._exit(1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 11
    assert subscriber.versions() == [1] and subscriber._ranks[0]._client is ours


def test_a_stopped_worker_holds_nobody_up_at_its_endpoint(
    publisher: WeightPublisher, monkeypatch: pytest.MonkeyPatch
) -> None:
    publisher.publish(model(1), 1)
    monkeypatch.setattr("asyncckpt.weights.subscriber.ANSWER_S", 0.001)
    monkeypatch.setattr("asyncckpt.link.endpoint.ANSWER_S", 0.1)
    client = publisher.worker
    assert client is not None
    stop(client.pid)
    ended: list[int] = []

    def ask() -> None:
        for number in range(70):  # more clients than may wait at the endpoint
            with WeightSubscriber("policy") as reader, pytest.raises(TimeoutError):
                reader.acquire(timeout=0.001)
            ended.append(number)

    asker = threading.Thread(target=ask, daemon=True)
    asker.start()
    try:
        asker.join(90)
        assert len(ended) == 70
    finally:
        os.kill(client.pid, signal.SIGCONT)
    asker.join(30)


def test_a_reader_is_told_when_a_trainer_went_back_unawares(subscriber: WeightSubscriber) -> None:
    with WeightPublisher("policy") as publisher:
        publisher.publish(model(50), 50)
        with subscriber.acquire() as weights:
            assert version_in(weights) == 50
    # The old worker is gone, so a new trainer cannot know the last version.
    with WeightPublisher("policy") as publisher:
        publisher.publish(model(1), 1)
        with pytest.raises(VersionError, match="version 1 is the newest, and this reader has had 50"):
            subscriber.acquire()
        with subscriber.acquire(roll_back=True) as weights:
            assert version_in(weights) == 1
        publisher.publish(model(2), 2)
        with subscriber.acquire() as weights:
            assert version_in(weights) == 2


def test_what_a_trainer_before_said_of_going_back_holds(subscriber: WeightSubscriber) -> None:
    with WeightPublisher("policy") as publisher:
        publisher.publish(model(50), 50)
        subscriber.acquire().release()
        publisher.publish(model(40), 40, roll_back=True)
        publisher._close(linger=True)
    with WeightPublisher("policy") as publisher:
        publisher.publish(model(41), 41)
        with subscriber.acquire() as weights:
            assert version_in(weights) == 41


def test_a_stopped_worker_is_not_waited_for_for_ever(
    publisher: WeightPublisher, monkeypatch: pytest.MonkeyPatch
) -> None:
    publisher.publish(model(1), 1)
    monkeypatch.setattr("asyncckpt.weights.subscriber._LEAST_ANSWER_S", 0.2)
    client = publisher.worker
    assert client is not None
    with WeightSubscriber("policy") as subscriber:
        stop(client.pid)
        try:
            with pytest.raises(TimeoutError, match="did not answer at its endpoint within 0.2 s"):
                subscriber.acquire(timeout=0.1)
        finally:
            os.kill(client.pid, signal.SIGCONT)
        with subscriber.acquire() as weights:
            assert version_in(weights) == 1
