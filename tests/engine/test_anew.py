"""Test that a training can restart in the same process after an interrupt at any point."""

from __future__ import annotations

import gc
import os
import random
import threading
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from support.interrupts import Restarted, interrupted_everywhere, interrupted_once
from support.segments import mapped_segments
from support.states import same

from asyncckpt import Checkpointer, Save
from asyncckpt.config import Config
from asyncckpt.engine.saves import SaveOperation
from asyncckpt.errors import ClosedError, MismatchError, WorkerDiedError
from asyncckpt.integrations.nvrx import AbortAsyncckpt
from asyncckpt.link.process import detached_workers
from asyncckpt.staging.buffer import SlotMemory
from asyncckpt.supervisor import Supervisor, known_supervisors

# Interrupt once in this number of instructions. 1 interrupts at every instruction, and takes hours.
EVERY = int(os.environ.get("ASYNCCKPT_TEST_EVERY", 149))

# Python closes the files and sockets that an exception left without an owner, and warns about each.
pytestmark = pytest.mark.filterwarnings("ignore:unclosed (file|<socket):ResourceWarning")


def _state(step: int) -> dict[str, Any]:
    return {"w": torch.full((30_000,), float(step)), "step": step}


class Trainings:
    """Consecutive trainings in one process. Their checkpointers are never closed."""

    def __init__(self, root: Path, config: Config, slots: int | None = 2) -> None:
        self._root, self._config, self.others = root, replace(config, slots=slots), _children()
        self.step = self.durable = 0
        self.checkpointer = Checkpointer(root, self._config)
        # The worker of a checkpointer that is collected exits. These checkpointers must leave their workers.
        self.before: list[Checkpointer] = []

    def save(self) -> Save:
        """Save under the next step."""
        self.step += 1
        return self.checkpointer.save(self.step, _state(self.step))

    def make(self) -> None:
        """Create another checkpointer while the previous ones are still referenced."""
        self.before.append(self.checkpointer)
        self.checkpointer = Checkpointer(self._root, self._config)

    def begin_anew(self) -> None:
        """Check that the last durable step or a newer one loads, and save the next step."""
        self.make()
        if self.durable:
            into = _state(0)
            loaded = self.checkpointer.load(into)
            assert self.durable <= loaded <= self.step and same(into, _state(loaded))
        self.step += 1
        self.save().result(60)
        self.durable = self.step

    def load(self) -> int:
        """Load with a new checkpointer, as a restarted training does."""
        self.make()
        return self.checkpointer.load(_state(0))


def _threads() -> set[threading.Thread]:
    return {each for each in threading.enumerate() if each.name.startswith("asyncckpt")}


def _children() -> set[int]:
    return {each.pid for each in psutil.Process().children()}


def _with_workers() -> list[Supervisor]:
    return [each for each in known_supervisors() if each.client is not None]


def _check_threads(trainings: Trainings) -> None:
    """Check that only the last checkpointer has threads. A collected checkpointer ends its threads."""
    trainings.before.clear()
    engine = trainings.checkpointer._engine
    assert engine.worker is not None
    mine = {engine.worker._listener, *engine._copier.threads._threads, *engine._copier._stager._threads}
    deadline = time.monotonic() + 30
    while _threads() != mine and time.monotonic() < deadline:
        gc.collect()
        time.sleep(0.002)
    assert _threads() == mine


def _check(trainings: Trainings, memory: set[int]) -> None:
    """Check that one segment, one worker and one checkpointer's threads exist, and that the segments are ``memory``."""
    assert set(mapped_segments()) == memory
    _check_one_of_all(trainings)


def _check_one_of_all(trainings: Trainings) -> None:
    _check_threads(trainings)
    assert len(mapped_segments()) == 1 and len(_with_workers()) == 1
    deadline = time.monotonic() + 30
    while len(_children() - trainings.others) > 1 and time.monotonic() < deadline:
        detached_workers()  # forgets the workers that have ended
        time.sleep(0.002)
    worker = trainings.checkpointer._engine.worker
    assert worker is not None and _children() - trainings.others == {worker.pid}


@pytest.mark.timeout(900)
@pytest.mark.parametrize("overlap", [False, True], ids=["copied", "overlapping"])
@pytest.mark.parametrize("part", ["asyncckpt/engine/", "asyncckpt/staging/", "asyncckpt/link/"])
def test_after_an_interrupt_at_any_instruction(root: Path, part: str, overlap: bool) -> None:
    trainings = Trainings(root, Config(overlap=overlap, keep_last=3))
    trainings.begin_anew()
    memory = set(mapped_segments())
    for _ in interrupted_everywhere(lambda: trainings.save(), part, every=EVERY, error=Restarted):
        trainings.begin_anew()
        _check(trainings, memory)
    trainings.checkpointer.close()


@pytest.mark.timeout(900)
def test_after_an_interrupt_while_memory_is_taken_and_given_back(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Overlapping saves take memory for another image. A save without overlap gives the memory back."""
    taken: list[None] = []
    given_back: list[None] = []
    on_taken, give_back = SlotMemory._on_taken, SlotMemory.give_back_last
    monkeypatch.setattr("asyncckpt.staging.buffer._LONG", 1)
    monkeypatch.setattr(SlotMemory, "_on_taken", lambda *of: taken.append(on_taken(*of)))
    monkeypatch.setattr(SlotMemory, "give_back_last", lambda of: given_back.append(give_back(of)))
    # Make each write take some time.
    monkeypatch.setitem(globals(), "_state", lambda step: {"w": torch.full((2_000_000,), float(step)), "step": step})
    trainings = Trainings(root, Config(keep_last=3), slots=None)
    trainings.begin_anew()

    def overlap() -> None:
        for saves in (3, 1, 1, 1):
            for save in [trainings.save() for _ in range(saves)]:
                save.result(60)

    for _ in interrupted_everywhere(overlap, "asyncckpt/staging/buffer.py", every=5, error=Restarted):
        trainings.begin_anew()
        _check_one_of_all(trainings)
    overlap()
    trainings.checkpointer.close()
    assert taken and given_back


@pytest.mark.timeout(900)
def test_after_an_interrupt_at_any_instruction_of_the_first_save(root: Path) -> None:
    """The first save takes over the memory of the previous checkpointer."""
    trainings = Trainings(root, Config(keep_last=3))
    trainings.begin_anew()

    def first() -> None:
        trainings.make()
        trainings.save()

    for _ in interrupted_everywhere(first, "asyncckpt/", every=13 * EVERY, error=Restarted):
        trainings.begin_anew()
        _check_threads(trainings)
        assert len(mapped_segments()) == 1 and len(_with_workers()) == 1
    trainings.checkpointer.close()


@pytest.mark.timeout(900)
def test_after_an_interrupt_at_any_instruction_of_a_load(root: Path) -> None:
    """Each training takes over from the previous one and closes it. Every second time the abort hook runs first."""
    trainings = Trainings(root, Config(keep_last=3))
    trainings.begin_anew()
    memory = set(mapped_segments())
    everywhere = interrupted_everywhere(trainings.load, "asyncckpt/", every=9 * EVERY, error=Restarted)
    for number, _ in enumerate(everywhere):
        if number % 2:
            AbortAsyncckpt()(None)
        trainings.begin_anew()
        _check(trainings, memory)
    trainings.checkpointer.close()


@pytest.mark.timeout(900)
@pytest.mark.parametrize("overlap", [False, True], ids=["copied", "overlapping"])
def test_after_an_interrupt_at_any_instruction_of_a_close(root: Path, overlap: bool) -> None:
    """An error ends the training. Every second time the abort hook runs after the interrupt."""
    trainings = Trainings(root, Config(overlap=overlap, keep_last=3))
    trainings.begin_anew()
    memory = set(mapped_segments())

    def end() -> None:
        trainings.checkpointer.__exit__(RuntimeError, RuntimeError(), None)

    for number, _ in enumerate(interrupted_everywhere(end, "asyncckpt/", every=EVERY // 3, error=Restarted)):
        if number % 2:
            AbortAsyncckpt()(None)
        trainings.begin_anew()
        _check(trainings, memory)
    trainings.checkpointer.close()


def test_one_that_could_only_load_leaves_nothing(root: Path) -> None:
    """The next checkpointer that loads closes a checkpointer that was given up after a failed load."""
    with Checkpointer(root) as first:
        first.save(1, _state(1)).result(60)
    for _ in range(3):
        with pytest.raises(MismatchError):
            Checkpointer(root).load({"w": torch.zeros(3)})
        AbortAsyncckpt()(None)
    with Checkpointer(root) as last:
        assert last.load(_state(0)) == 1
        copier = last._engine._copier
        assert _threads() == {*copier.threads._threads, *copier._stager._threads}


@pytest.mark.parametrize("overlap", [False, True], ids=["copied", "overlapping"])
def test_after_an_exception_out_of_another_thread(root: Path, overlap: bool) -> None:
    trainings = Trainings(root, Config(overlap=overlap, keep_last=3))
    trainings.begin_anew()
    memory, turn = set(mapped_segments()), random.Random(7)
    for _ in range(10):
        interrupted_once(trainings.save, turn.random() / 20)
        trainings.begin_anew()
        _check(trainings, memory)
    trainings.checkpointer.close()


def test_what_was_given_up_says_so(root: Path, gate: Path) -> None:
    first = Checkpointer(root)
    first.save(1, _state(1))
    pending = first.save(2, _state(2))
    AbortAsyncckpt()(None)
    with pytest.raises(ClosedError, match="a new checkpointer loads the save"):
        pending.result(10)
    for call in (lambda: first.save(3, _state(3)), lambda: first.load(_state(0)), lambda: first.prepare(_state(0))):
        with pytest.raises(ClosedError, match="restarts the training"):
            call()
    gate.touch()
    with Checkpointer(root) as second:
        into = _state(0)
        assert second.load(into) == 2 and same(into, _state(2))
        assert second.loaded is not None and second.loaded.source == "memory"
        second.save(3, _state(3)).result(60)
        first.close()
        second.save(4, _state(4)).result(60)


def test_who_waits_for_a_slot_as_all_is_given_up_takes_none(
    root: Path, gate: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All saves have ended for this process, but the detached worker still writes their slots."""
    first = Checkpointer(root, Config(slots=1))
    first.save(1, _state(1))
    stage: Any = SaveOperation.stage

    def stage_when_given_up(*arguments: Any) -> Any:
        AbortAsyncckpt()(None)
        return stage(*arguments)

    with monkeypatch.context() as patch:
        patch.setattr(SaveOperation, "stage", stage_when_given_up)
        with pytest.raises(WorkerDiedError):
            first.save(2, _state(2))
    gate.touch()
    with Checkpointer(root) as second:
        for source in ("memory", "storage"):
            into = _state(0)
            assert second.load(into, memory=source == "memory") == 1 and same(into, _state(1))
            assert second.loaded is not None and second.loaded.source == source


@pytest.mark.parametrize("is_committed", [True, False])
def test_a_worker_that_was_just_left_is_not_taken_for_dead(
    root: Path, gate: Path, monkeypatch: pytest.MonkeyPatch, is_committed: bool
) -> None:
    """The new checkpointer does not end the worker during a write."""
    first = Checkpointer(root, Config(slots=2, timeout=3))
    save = first.save(1, _state(1))
    if is_committed:
        gate.touch()
        save.result(60)
    check_usable, calls = Supervisor.check_usable, iter(range(100))

    def check_and_be_given_up(self: Supervisor) -> None:
        check_usable(self)
        if next(calls) == 1:  # the first call is by ``save`` itself
            AbortAsyncckpt()(None)

    with monkeypatch.context() as patch:
        patch.setattr(Supervisor, "check_usable", check_and_be_given_up)
        with pytest.raises(ClosedError):
            first.save(2, _state(2))
    gate.touch()
    with Checkpointer(root) as second:
        into = _state(0)
        assert second.load(into) == 1 and same(into, _state(1))
        assert second.loaded is not None and second.loaded.source == "memory"
