"""Test saves with overlap that fail during their copy: they keep their tensors until the copy ends.

Otherwise the training would change the tensors, and the image would silently mix two steps.
"""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from support.workers import Faulty, stop, wait_for

from asyncckpt import Checkpointer, Save
from asyncckpt.config import Config
from asyncckpt.errors import CheckpointError, StorageError
from asyncckpt.integrations.nvrx import AbortAsyncckpt
from asyncckpt.staging import host_copy
from asyncckpt.weights import WeightSubscriber

_SIZE = 1_500_000  # more than one batch of the copy


class Training:
    """A training with two parameters, both 1 before its step and 2 after it."""

    def __init__(self) -> None:
        self.state = {name: torch.nn.Parameter(torch.ones(_SIZE)) for name in ("a", "b")}
        self.optimizer = torch.optim.SGD(self.state.values(), lr=1.0)

    def step(self) -> None:
        for each in self.state.values():
            each.grad = torch.full_like(each, -1.0)
        self.optimizer.step()

    @contextmanager
    def saved_half(self, checkpointer: Checkpointer, monkeypatch: pytest.MonkeyPatch) -> Iterator[Save]:
        """Yield a save that has copied one parameter. Then try a guarded step, which must wait for the other one."""
        checkpointer.guard(self.optimizer)
        checkpointer.prepare(self.state)
        is_half, may_go_on = threading.Event(), threading.Event()
        copy: Callable[..., None] = host_copy._ByteCopy.copy

        def waits(unit: Any, tensors: Any) -> None:
            if 1 in unit._numbers:
                is_half.set()
                assert may_go_on.wait(60)
            copy(unit, tensors)

        with monkeypatch.context() as patch:
            patch.setattr(host_copy._ByteCopy, "copy", waits)
            save = checkpointer.save(1, self.state)
            assert is_half.wait(60)
            yield save
            stepping = threading.Thread(target=self.step)
            stepping.start()
            stepping.join(0.3)
            may_go_on.set()
            stepping.join(60)
        wait_for(save.staged)


@contextmanager
def held_copies(monkeypatch: pytest.MonkeyPatch) -> Iterator[threading.Event]:
    """Hold copies of tensors until the event is set."""
    copy, may_go_on = host_copy._ByteCopy.copy, threading.Event()

    def waits(unit: Any, tensors: Any) -> None:
        assert may_go_on.wait(60)
        copy(unit, tensors)

    with monkeypatch.context() as patch:
        patch.setattr(host_copy._ByteCopy, "copy", waits)
        yield may_go_on


def _loaded(root: Path, *, memory: bool) -> list[float]:
    with Checkpointer(root) as checkpointer:
        into = {name: torch.zeros(_SIZE) for name in ("a", "b")}
        assert checkpointer.load(into, memory=memory) == 1
        return [float(each[0]) for each in into.values()]


def test_storage_that_fails_at_once(root: Path, monkeypatch: pytest.MonkeyPatch, faulty_worker: Faulty) -> None:
    """The image stays in memory for the next trainer."""
    faulty_worker("begin:enospc")
    training, first = Training(), Checkpointer(root, Config(overlap=True))
    with training.saved_half(first, monkeypatch) as save, pytest.raises(StorageError):
        save.result(60)
    wait_for(lambda: save._state.slot_free.is_set())  # type: ignore[attr-defined]
    AbortAsyncckpt()(None)  # as if the trainer had died
    assert _loaded(root, memory=True) == [1, 1]


def test_it_may_be_published_all_the_same(root: Path, monkeypatch: pytest.MonkeyPatch, faulty_worker: Faulty) -> None:
    faulty_worker("begin:enospc")
    training = Training()
    with Checkpointer(root, Config(overlap=True, slots=2)) as checkpointer:
        with training.saved_half(checkpointer, monkeypatch) as save, pytest.raises(StorageError):
            save.result(60)
        assert not checkpointer.publish(save).skipped
        with WeightSubscriber.of_checkpoints(root) as readers, readers.acquire() as weights:
            assert [float(weights[name][0]) for name in ("a", "b")] == [1, 1]


def test_given_up_before_the_worker_sees_it(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The worker writes the saves that are staged when it continues."""
    training, first = Training(), Checkpointer(root, Config(overlap=True))
    with training.saved_half(first, monkeypatch) as save:
        assert first._engine.worker is not None
        stop(worker := first._engine.worker.pid)
        AbortAsyncckpt()(None)
        with pytest.raises(CheckpointError):
            save.result(60)
    os.kill(worker, signal.SIGCONT)
    for memory in (True, False):
        assert _loaded(root, memory=memory) == [1, 1]


def test_a_save_of_another_state_does_not_wait_for_a_copy(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with Checkpointer(root, Config(overlap=True)) as checkpointer:
        states = {"a": torch.ones(1000)}, {"b": torch.ones(2000)}
        for step, state in enumerate(states):
            checkpointer.save(step, state).result(60)
        with held_copies(monkeypatch) as may_go_on:
            saves = [checkpointer.save(2 + step, state) for step, state in enumerate(states)]
            assert not any(save.staged() for save in saves)
            may_go_on.set()
            for save in saves:
                save.result(60)


def test_a_load_waits_for_copies(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A training that goes back fills tensors that its last save still copies."""
    with Checkpointer(root, Config(overlap=True)) as checkpointer:
        state = {"a": torch.ones(1000)}
        checkpointer.save(1, state).result(60)
        state["a"].fill_(2)
        with held_copies(monkeypatch) as may_go_on:
            save = checkpointer.save(2, state)
            timer = threading.Timer(0.3, may_go_on.set)
            timer.start()
            assert checkpointer.load(state, 1) == 1 and state["a"].eq(1).all()
            timer.join()
        save.result(60)
        assert checkpointer.load(state, 2) == 2 and state["a"].eq(2).all()
