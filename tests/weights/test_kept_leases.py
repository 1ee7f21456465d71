"""A leased version stays readable when the subscriber maps another trainer's memory or another structure."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from support.ranks import alone
from support.weights import model

from asyncckpt.weights import WeightFolders, WeightPublisher, WeightSubscriber

pytestmark = pytest.mark.usefixtures("forkserver")


def _publish_and_die(version: int) -> None:
    WeightPublisher("policy").publish(model(version), version)
    os.kill(os.getpid(), signal.SIGKILL)


def _take_over_and_die() -> None:
    WeightPublisher("policy").prepare(model(1))
    os.kill(os.getpid(), signal.SIGKILL)


def _is(folder: Path, version: int) -> bool:
    loaded = load_file(folder / "model.safetensors")
    return all(torch.equal(loaded[name], tensor) for name, tensor in model(version).items())


def test_folders_stay_when_the_trainer_is_started_anew(tmp_path: Path) -> None:
    alone(_publish_and_die, 1)
    with WeightSubscriber("policy") as reader, WeightFolders(reader, tmp_path / "updates") as folders:
        first = folders.update()
        assert _is(Path(first), 1)
        alone(_take_over_and_die)
        assert folders.update() == first and _is(Path(first), 1)  # no new version
        alone(_publish_and_die, 2)
        folders.update(2)
        assert _is(Path(first), 1)  # one of the two folders that are kept


def test_folders_stay_when_the_structure_changes(
    publisher: WeightPublisher, subscriber: WeightSubscriber, tmp_path: Path
) -> None:
    with WeightFolders(subscriber, tmp_path / "updates", keep=4) as folders:
        found = {}
        for version in range(1, 5):  # two versions for each structure
            publisher.publish({"w": torch.full((1000 * ((version + 1) // 2),), float(version))}, version)
            found[version] = Path(folders.update())
        for version, path in found.items():
            assert load_file(path / "model.safetensors")["w"].eq(version).all()


def test_what_has_changed_is_told_across_structures(publisher: WeightPublisher, subscriber: WeightSubscriber) -> None:
    publisher.publish({"w": torch.ones(1000)}, 1)
    with subscriber.acquire() as weights:
        publisher.publish({"w": torch.ones(1000), "more": torch.ones(1)}, 2)
        assert weights.changed_since(2) == set()


def test_what_is_compared_stays_mapped() -> None:
    """Another thread acquires a newer version while two versions are compared."""
    script = """
import torch
import asyncckpt.weights.lease as lease
from asyncckpt.weights import WeightPublisher, WeightSubscriber

compare = lease.memcmp

def late(*arguments):
    publisher.publish({"w": torch.ones(1000), "more": torch.ones(1)}, 3)
    reader.acquire(3)  # as another thread does: here in the midst of the call
    return compare(*arguments)

with WeightPublisher("policy") as publisher, WeightSubscriber("policy") as reader:
    for version in (1, 2):
        publisher.publish({"w": torch.ones(1000)}, version)
    weights = reader.acquire()
    lease.memcmp = late
    print(weights.changed_since(1))
"""
    ended = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=120, check=False)
    assert (ended.returncode, ended.stdout.strip()) == (0, "set()"), ended
