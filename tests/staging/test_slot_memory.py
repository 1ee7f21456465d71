"""Test the memory of an engine: one image, and a second one while saves overlap."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from support.recovery import empty, is_of, source, train
from support.states import same

from asyncckpt import Checkpointer, Save
from asyncckpt.config import Config
from asyncckpt.errors import CheckpointError, OutOfMemoryError, SaveDroppedError
from asyncckpt.staging.buffer import StagingBuffer

pytestmark = pytest.mark.usefixtures("forkserver")

BYTES = 8 << 20


class Training:
    """A training with an object in its state, and padding between its tensors."""

    def __init__(self, root: Path, config: Config) -> None:
        self.checkpointer = Checkpointer(root, config)
        self.step = 0

    def state(self, step: int) -> dict[str, Any]:
        large, small = torch.full((BYTES // 4,), float(step)), torch.full((3,), float(-step))
        return {"w": large, "small": small, "step": step, "names": [str(step)] * 100}

    def save(self) -> Save:
        self.step += 1
        return self.checkpointer.save(self.step, self.state(self.step))

    def check(self, *steps: int) -> None:
        """Check that the checkpoints of ``steps`` have the saved values."""
        for step in steps:
            into = self.state(0)
            assert self.checkpointer.load(into, step, memory=False) == step and same(into, self.state(step))

    @property
    def buffer(self) -> StagingBuffer:
        (known,) = self.checkpointer._engine._buffers.known
        assert known.buffer is not None
        return known.buffer

    @property
    def images(self) -> float:
        """Return the number of images that the memory has room for."""
        return os.fstat(self.buffer.segment.fileno()).st_blocks * 512 / BYTES


@pytest.fixture
def training(root: Path) -> Any:
    training = Training(root, Config(linger=0))
    yield training
    training.checkpointer.close()


def _wait_for(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.005)


def test_saves_that_do_not_overlap_need_one_image(training: Training) -> None:
    training.checkpointer.prepare(training.state(0))
    for _ in range(4):
        training.save().result(60)
        assert 1.0 <= training.images < 1.1
    training.check(1, 2, 3, 4)


def test_another_is_taken_while_saves_overlap(training: Training, gate: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("asyncckpt.staging.buffer._LONG", 3)
    first = training.save()
    second = training.save()  # the worker writes nothing yet
    assert not first.done() and 2.0 <= training.images < 2.1 and second.timings["slot_s"] > 0
    gate.touch()
    for save in (first, second):
        save.result(60)
    for _ in range(3):
        training.save().result(60)
        assert training.images >= 2.0
    for _ in range(3):
        training.save().result(60)
    _wait_for(lambda: training.images < 1.1)
    training.check(*range(1, 9))
    # The memory grows again with the next overlap.
    gate.unlink()
    first, second = training.save(), training.save()
    assert not first.done() and training.images >= 2.0
    gate.touch()
    second.result(60)
    training.check(9, 10)


def test_where_there_is_no_memory_for_another_saves_wait(
    root: Path, gate: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    training = Training(root, Config(linger=0))
    first = training.save()

    def refuse(segment: int, begin: int, end: int, taken: Callable[[CheckpointError | None], object]) -> None:
        taken(OutOfMemoryError("there is none"))
        gate.touch()  # let the first save continue

    monkeypatch.setattr(training.buffer.client, "take", refuse)
    second = training.save()
    second.result(60)
    assert first.done() and training.images < 1.1
    assert caplog.text.count("one image in memory") == 1
    training.check(1, 2)
    training.checkpointer.close()


def test_the_worker_says_that_there_is_none(training: Training, gate: Path) -> None:
    """The limit of a container may be the reason. The worker gives back the memory that it has begun to take."""
    first = training.save()
    buffer, refused = training.buffer, list[CheckpointError | None]()
    buffer.client.take(buffer.number, buffer._memory.end, 1 << 50, refused.append)
    _wait_for(lambda: bool(refused))
    assert isinstance(refused[0], OutOfMemoryError) and training.images < 1.1
    gate.touch()
    first.result(60)


def test_skip(root: Path, gate: Path) -> None:
    """The first early save is skipped. From then on, there is memory for another image."""
    training = Training(root, Config(linger=0, when_busy="skip"))
    first = training.save()
    with pytest.raises(SaveDroppedError, match="skipped"):
        training.save().result(1)
    _wait_for(lambda: not training.buffer._memory.is_coming)
    third = training.save()
    with pytest.raises(SaveDroppedError, match="skipped"):
        training.save().result(1)
    gate.touch()
    for save in (first, third):
        save.result(60)
    training.check(1, 3)
    training.checkpointer.close()


def test_slots_that_are_asked_for_are_there(root: Path) -> None:
    training = Training(root, Config(linger=0, slots=3))
    training.save().result(60)
    assert 3.0 <= training.images < 3.1
    training.checkpointer.close()


def test_who_dies_while_the_only_image_is_staged_has_the_last_one_in_storage(root: Path) -> None:
    train(root, 3, "staging", slots=None)
    with Checkpointer(root) as checkpointer:
        assert checkpointer.load(state := empty()) == 2 and is_of(state, 2)
        assert source(checkpointer) == "storage"


def test_who_dies_after_that_has_it_in_memory(root: Path) -> None:
    train(root, 3, slots=None)
    with Checkpointer(root) as checkpointer:
        assert checkpointer.load(state := empty()) == 3 and is_of(state, 3)
        assert source(checkpointer) == "memory"
        checkpointer.save(4, state).result(60)
        assert checkpointer.load(state := empty(), 4, memory=False) == 4


def test_a_worker_that_dies_while_both_are_used(root: Path, gate: Path) -> None:
    """The next worker takes new memory, for one image."""
    training = Training(root, Config(linger=0))
    saves = [training.save(), training.save()]
    worker = training.checkpointer._engine.worker
    assert worker is not None and training.images >= 2.0
    segment = os.fstat(training.buffer.segment.fileno()).st_ino
    os.kill(worker.pid, signal.SIGKILL)
    for save in saves:
        with pytest.raises(Exception, match="worker"):
            save.result(60)
    gate.touch()
    training.save().result(60)
    assert os.fstat(training.buffer.segment.fileno()).st_ino != segment and training.images < 1.1
    training.check(3)
    training.checkpointer.close()
