"""A lease keeps a version unchanged while it is read, and ends with its reader."""

from __future__ import annotations

import contextlib
import gc
import logging
import os
import signal
import subprocess
import sys
import threading
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
from support.published import Publishing
from support.ranks import alone, say
from support.weights import model, version_in

from asyncckpt.config import Config
from asyncckpt.errors import (
    ClosedError,
    WeightsTimeoutError,
)
from asyncckpt.link.endpoint import endpoint_name
from asyncckpt.link.takeover import ReaderClient
from asyncckpt.transfer.serving import Serving
from asyncckpt.weights import WeightPublisher, WeightSubscriber
from asyncckpt.weights.lease import RankPublications
from asyncckpt.worker.endpoint_service import EndpointService

pytestmark = pytest.mark.usefixtures("forkserver")


def test_nothing_is_copied_and_nothing_can_be_written(publisher: WeightPublisher) -> None:
    publisher.publish(model(5), 5)
    code, said = alone(_write_to_what_is_published)
    assert code == -signal.SIGSEGV and said == (5, True)
    with WeightSubscriber("policy") as subscriber, subscriber.acquire() as weights:
        assert version_in(weights) == 5


def _write_to_what_is_published() -> None:
    weights = WeightSubscriber("policy").acquire(readonly=True)
    address = weights["embed.weight"].data_ptr()
    maps = [line.split() for line in Path("/proc/self/maps").read_text().splitlines() if "asyncckpt" in line]
    places = [(range(*(int(end, 16) for end in line[0].split("-"))), line[1]) for line in maps]
    say((version_in(weights), any(address in place and mode.startswith("r--s") for place, mode in places)))
    weights["embed.weight"].fill_(99.0)


def test_readers_may_change_what_they_have(publisher: WeightPublisher, subscriber: WeightSubscriber) -> None:
    publisher.publish(model(1), 1)
    with subscriber.acquire() as one, subscriber.acquire() as other, subscriber.acquire(readonly=True) as shared:
        for tensor in one.values():
            tensor.fill_(7)
        del tensor
        assert version_in(one) == 7 and version_in(other) == version_in(shared) == 1
        assert _private_bytes() >= one["embed.weight"].nbytes
    assert _private_bytes() == 0
    with subscriber.acquire() as again:
        assert version_in(again) == 1
    with WeightSubscriber("policy") as another, another.acquire() as elsewhere:
        assert version_in(elsewhere) == 1


def _private_bytes() -> int:
    """Return the private bytes of this process in its mappings of the worker's memory."""
    nbytes, is_ours = 0, False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        if "-" in line.split()[0]:
            is_ours = "memfd:asyncckpt" in line and line.split()[1].endswith("p")
        elif is_ours and line.startswith("Anonymous:"):
            nbytes += int(line.split()[1]) << 10
    return nbytes


def test_a_lease_keeps_a_version_and_ends_with_its_block(
    publisher: WeightPublisher, subscriber: WeightSubscriber
) -> None:
    for version in range(1, 4):
        publisher.publish(model(version), version)
    assert subscriber.versions() == [2, 3] and _images() == 2
    with subscriber.acquire(version=2) as second:
        for version in range(4, 10):
            assert not publisher.publish(model(version), version).skipped
            assert version_in(second) == 2 and _images() == 3  # one more image, for this reader
            with subscriber.acquire() as newest:
                assert version_in(newest) == newest.version == version
        assert subscriber.versions() == [2, 8, 9]
    publisher.publish(model(10), 10)
    assert subscriber.versions() == [8, 9, 10] and _images() == 3


def _images() -> int:
    """Return the number of images of the weights that this process has mapped for writing."""
    lines = map(str.split, Path("/proc/self/maps").read_text().splitlines())
    ours = [line for line in lines if "memfd:asyncckpt" in line[-2] and line[1] == "rw-s"]
    return len(ours) - 1  # one mapping is the page of publications


def test_a_tensor_that_outlives_the_block_keeps_its_slot(
    publisher: WeightPublisher, subscriber: WeightSubscriber, caplog: pytest.LogCaptureFixture
) -> None:
    publisher.publish(model(1), 1)
    with caplog.at_level(logging.INFO), subscriber.acquire() as weights:
        kept = weights["embed.weight"][3]
    assert "version 1 are still in use" in caplog.text
    with pytest.raises(ClosedError, match="lease on version 1"):
        weights["embed.weight"]
    subscriber.close()
    for version in range(2, 8):
        publisher.publish(model(version), version)
    assert kept.eq(1.0).all()
    del kept
    publisher.publish(model(8), 8)
    with WeightSubscriber("policy") as other:
        assert other.versions() == [6, 7, 8]


def test_readers_who_have_all_slots_do_not_hold_the_trainer_up(
    publisher: WeightPublisher, subscriber: WeightSubscriber
) -> None:
    held = []
    for version in range(1, 4):
        publisher.publish(model(version), version)
        held.append(subscriber.acquire())
    publication = publisher.publish(model(4), 4)
    assert publication.skipped and publication.version == 4
    assert [version_in(weights) for weights in held] == [1, 2, 3]
    held[0].release()
    assert not publisher.publish(model(5), 5).skipped
    assert subscriber.versions() == [2, 3, 5]
    assert [version_in(weights) for weights in held[1:]] == [2, 3]
    for weights in held[1:]:
        weights.release()


def test_or_the_trainer_waits_for_them() -> None:
    patient = Config(timeout=60.0)
    with WeightPublisher("1", slots=2, when_busy="wait", config=patient) as publisher, WeightSubscriber("1") as reader:
        publisher.publish(model(1), 1)
        first = reader.acquire()
        publisher.publish(model(2), 2)
        second = reader.acquire()
        releaser = threading.Timer(0.2, first.release)
        releaser.start()
        assert not publisher.publish(model(3), 3).skipped
        releaser.join()
        assert reader.versions() == [2, 3] and version_in(second) == 2
        third = reader.acquire()
    with WeightPublisher("2", slots=2, when_busy="wait", config=patient) as publisher, WeightSubscriber("2") as reader:
        publisher.publish(model(1), 1)
        first = reader.acquire()
        publisher.publish(model(2), 2)
        # Set the short timeout only now, because it also limits other answers of the worker.
        publisher._config = replace(patient, timeout=0.2)
        with pytest.raises(WeightsTimeoutError, match="readers have kept all slots"):
            publisher.publish(model(3), 3)
        assert version_in(first) == 1
    assert (version_in(second), version_in(third)) == (2, 3)  # the leases outlive the trainer and its worker


def test_the_lease_of_a_killed_reader_ends(publisher: WeightPublisher) -> None:
    publisher.publish(model(1), 1)
    code, said = alone(_acquire_and_die)
    assert (code, said) == (-signal.SIGKILL, 1)
    for version in range(2, 8):
        assert not publisher.publish(model(version), version).skipped
    with WeightSubscriber("policy") as subscriber:
        assert subscriber.versions() == [6, 7]


def _acquire_and_die() -> None:
    weights = WeightSubscriber("policy").acquire()
    say(version_in(weights))
    os.kill(os.getpid(), signal.SIGKILL)


def test_a_reader_that_is_only_let_go_of_leaves_nothing(publisher: WeightPublisher) -> None:
    publisher.publish(model(1), 1)
    gc.collect()
    before = set(os.listdir("/proc/self/fd"))
    for _ in range(5):
        with WeightSubscriber("policy").acquire() as weights, weights.safetensors() as (path,):
            assert version_in(weights) == 1 and os.path.exists(path)
        del weights
    assert len(set(os.listdir("/proc/self/fd")) - before) <= 1  # the descriptor of listdir


def test_the_interpreter_may_end_with_all_of_it_alive() -> None:
    script = """if True:
        import torch
        from asyncckpt.weights import WeightPublisher, WeightSubscriber
        publisher = WeightPublisher("policy")
        publisher.publish({"w": torch.ones(10)}, 1)
        subscriber = WeightSubscriber("policy")
        weights = subscriber.acquire()
        kept = weights["w"]
    """
    ended = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=120)
    assert (ended.returncode, ended.stderr) == (0, "")


def test_what_is_mapped_stays_while_the_worker_leaves() -> None:
    """A worker may still answer after it has released its memory, before it hangs up."""
    publishing, name = Publishing(100), endpoint_name("policy", 0)
    service = EndpointService(name, "", 60, publishing.store, Serving(publishing.store))
    rank = RankPublications(partial(ReaderClient.connect, name))
    with contextlib.closing(publishing), contextlib.closing(service), contextlib.closing(rank):
        service.open(os.getpid())
        publishing.publish(3, bytes(100))
        rank.refresh(60)
        publishing.store.close()
        rank.refresh(60)
        assert [published.version for published in rank.versions()] == [3]
