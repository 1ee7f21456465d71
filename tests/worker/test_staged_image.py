"""The worker writes each arrived part of an image at once, for example of a copy from a device."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from support.ranks import script
from support.workers import Faulty

from asyncckpt import Checkpointer
from asyncckpt.config import Config
from asyncckpt.devices.kinds import ReadyEvents
from asyncckpt.engine.saves import SaveOperation
from asyncckpt.errors import CheckpointError, SaveDroppedError, StorageError
from asyncckpt.link.trainer_saves import RunningSaves
from asyncckpt.protocol.trainer import Ended
from asyncckpt.shm.slots import State
from asyncckpt.staging.device_copy import Fence
from asyncckpt.staging.host_copy import CopyThreads
from asyncckpt.staging.slot_copy import SlotStager
from asyncckpt.storage.local_file import LocalFile

HALF = 2 * LocalFile.piece_bytes
real_copy = SlotStager.copy


def state_of(step: int) -> dict[str, torch.Tensor]:
    return {"first": torch.full((HALF // 8,), float(step)), "then": torch.full((HALF // 3,), -float(step))}


def half_copy(root: Path, middle: Callable[[], None]) -> Callable[..., None]:
    """Return a copy function that copies in two halves, as the events of a device would.

    When the first half is in the file, the function calls ``middle``. The second half of the slot is still empty then.
    """

    def copy(
        self: SlotStager,
        tensors: Sequence[torch.Tensor],
        ready: ReadyEvents,
        threads: CopyThreads,
        arrived: Callable[[int], None],
        queued: Callable[[Sequence[Fence]], None],
        devices: object | None,
    ) -> None:
        real_copy(self, tensors, ready, threads, arrived, queued, devices)
        assert self._views is not None
        begin = self._views._offset
        image = self._views._view[begin : begin + self._nbytes]
        kept = bytes(image[HALF:])
        image[HALF:] = os.urandom(len(kept))
        arrived(HALF)
        deadline = time.monotonic() + 30
        while not is_written(root, bytes(image[:HALF])):
            assert time.monotonic() < deadline
            time.sleep(0.01)
        middle()
        image[HALF:] = kept

    return copy


def is_written(root: Path, half: bytes) -> bool:
    for path in root.glob(".*/__0_0.distcp"):
        with contextlib.suppress(FileNotFoundError), open(path, "rb") as file:  # the file may be removed meanwhile
            return file.read(len(half)) == half
    return False


def test_the_first_half_is_written_before_the_second_is_there(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with Checkpointer(root) as checkpointer:
        checkpointer.prepare(state_of(0))
        monkeypatch.setattr(SlotStager, "copy", half_copy(root, lambda: None))
        for step in (1, 2):
            checkpointer.save(step, state_of(step)).result(60)
            assert checkpointer.load(state := state_of(0)) == step
            assert all(torch.equal(state[name], tensor) for name, tensor in state_of(step).items())


def test_staging_that_fails_half_way_leaves_nothing(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def trouble() -> None:
        raise RuntimeError("a device has left")

    with Checkpointer(root) as checkpointer:
        checkpointer.prepare(state_of(0))
        with monkeypatch.context() as patch:
            patch.setattr(SlotStager, "copy", half_copy(root, trouble))
            for step in (1, 2, 3):  # more saves than slots
                with pytest.raises(CheckpointError, match="a device has left"):
                    checkpointer.save(step, state_of(step))
        checkpointer.save(4, state_of(4)).result(60)
        assert checkpointer.steps() == [4] and not list(root.glob(".*"))


def test_a_slot_is_not_free_while_it_is_staged_for_a_save_that_has_failed(
    root: Path, monkeypatch: pytest.MonkeyPatch, faulty_worker: Faulty
) -> None:
    faulty_worker("begin:enospc")
    with Checkpointer(root, Config(slots=1)) as checkpointer:
        state = state_of(1)
        checkpointer.prepare(state)
        (known,) = checkpointer._engine._buffers.known
        buffer = known.buffer
        assert buffer is not None
        states = []

        def copy(self: SlotStager, *arguments: object) -> None:
            real_copy(self, *arguments)  # type: ignore[arg-type]
            (pending,) = filter(None, buffer.saves)
            assert isinstance(pending, SaveOperation)
            with pytest.raises(StorageError):
                pending.future.result(30)
            states.append((buffer.slots.state(0), pending.slot_free.is_set()))

        with monkeypatch.context() as patch:
            patch.setattr(SlotStager, "copy", copy)
            save = checkpointer.save(1, state)
        assert states == [(State.STAGING, False)]
        with pytest.raises(StorageError, match="No space left"):
            save.result(60)
        checkpointer.wait(60)


def test_what_is_being_staged_is_not_replaced(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With ``latest``, another save cannot take a slot while a save is copied into it."""
    with Checkpointer(root, Config(slots=1, when_busy="latest", overlap=True)) as checkpointer:
        checkpointer.prepare(state_of(0))
        monkeypatch.setattr(SlotStager, "copy", half_copy(root, lambda: time.sleep(0.2)))
        saves = [checkpointer.save(step, state_of(step)) for step in (1, 2)]
        for save in saves:
            try:
                save.result(60)
            except SaveDroppedError:
                assert save.step == 1
        assert checkpointer.load(state := state_of(0)) == 2
        assert all(torch.equal(state[name], tensor) for name, tensor in state_of(2).items())


def test_a_slot_is_nobodys_while_a_failed_save_is_copied_into_it(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The save fails on another rank while this rank copies."""
    go_on = threading.Event()

    def copy(self: SlotStager, *arguments: object) -> None:
        assert go_on.wait(30)
        real_copy(self, *arguments)  # type: ignore[arg-type]

    with Checkpointer(root, Config(slots=1, overlap=True)) as checkpointer:
        checkpointer.prepare(state_of(0))
        monkeypatch.setattr(SlotStager, "copy", copy)
        first = checkpointer.save(1, state_of(1))
        (known,) = checkpointer._engine._buffers.known
        buffer = known.buffer
        assert buffer is not None and (pending := buffer.saves[0]) is not None
        elsewhere = SaveDroppedError("replaced")
        buffer.client.saves.post(Ended(pending.number, elsewhere))
        with pytest.raises(SaveDroppedError):
            first.result(30)
        assert not first.staged() and buffer.claim_slot() is None
        timer = threading.Timer(0.2, go_on.set)
        timer.start()
        checkpointer.save(2, state_of(2)).result(60)
        timer.join()
        assert checkpointer.load(state := state_of(0)) == 2
        assert all(torch.equal(state[name], tensor) for name, tensor in state_of(2).items())


def test_what_was_written_of_a_slot_that_is_anothers_is_not_committed(root: Path, gate: Path) -> None:
    """No trainer does this. If a trainer did, no job should load a mixture of two saves."""
    with Checkpointer(root, Config(slots=1)) as checkpointer:
        save = checkpointer.save(1, state_of(1))
        (known,) = checkpointer._engine._buffers.known
        assert known.buffer is not None
        known.buffer.slots.take(0, 99)
        gate.touch()
        with pytest.raises(CheckpointError, match="another save was staged in its place"):
            save.result(60)
        assert not checkpointer.steps()
        checkpointer.save(2, state_of(2)).result(60)
        assert checkpointer.load(state_of(0)) == 2


def test_interrupted_before_the_copy_it_is_called_off(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    begin = RunningSaves.begin

    def interrupted(self: RunningSaves, *arguments: Any) -> None:
        begin(self, *arguments)
        raise KeyboardInterrupt

    with Checkpointer(root, Config(slots=1)) as checkpointer:
        checkpointer.prepare(state_of(0))
        with monkeypatch.context() as patch:
            patch.setattr(RunningSaves, "begin", interrupted)
            with pytest.raises(KeyboardInterrupt):
                checkpointer.save(1, state_of(1))
        with contextlib.suppress(CheckpointError):  # the first save's error
            checkpointer.wait(60)
        checkpointer.save(2, state_of(2)).result(60)
        assert checkpointer.steps() == [2]


TRAINER = """
import os, signal, sys
from pathlib import Path
sys.path[:0] = sys.argv[2:]
from test_staged_image import half_copy, state_of
from asyncckpt.checkpointer import Checkpointer
from asyncckpt.staging.slot_copy import SlotStager
root = Path(sys.argv[1])
checkpointer = Checkpointer(root)
checkpointer.save(1, state_of(1)).result(60)
SlotStager.copy = half_copy(root, lambda: os.kill(os.getpid(), signal.SIGKILL))
checkpointer.save(2, state_of(2))
"""


HERE = [str(Path(__file__).parent), str(Path(__file__).parents[1])]


@pytest.mark.usefixtures("forkserver")
def test_killed_half_way_it_has_saved_nothing(root: Path) -> None:
    assert script(TRAINER, str(root), *HERE) == -signal.SIGKILL
    with Checkpointer(root) as checkpointer:
        assert checkpointer.load(state := state_of(0)) == 1
        assert all(torch.equal(state[name], tensor) for name, tensor in state_of(1).items())
        assert checkpointer.steps() == [1]
        deadline = time.monotonic() + 30  # the worker may still remove its unfinished files
        while left := list(root.glob(".*")):
            assert time.monotonic() < deadline, left
            time.sleep(0.01)
