"""Test pinned staging memory, and its layout for tensors of a device."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from support.accelerators import module, registrations
from support.states import same, zeros_like

from asyncckpt import Checkpointer
from asyncckpt.config import Config
from asyncckpt.devices.pinners import CudaPinner
from asyncckpt.staging.buffer import StagingBuffer
from asyncckpt.staging.device_copy import BytesCopy
from asyncckpt.staging.host_copy import CopyUnit

pytestmark = pytest.mark.device

MIB = 1 << 20


def _buffer(checkpointer: Checkpointer) -> StagingBuffer:
    buffer = checkpointer._engine._buffers.known[0].buffer
    assert buffer is not None
    return buffer


def _pinned(checkpointer: Checkpointer) -> list[int]:
    pinned = _buffer(checkpointer)._pinned
    assert pinned is not None
    return pinned.addresses


def _device_units(checkpointer: Checkpointer) -> list[CopyUnit]:
    return [unit for copy in _buffer(checkpointer)._stagers[0]._device_copies for unit in copy.units]


def _comes_back(checkpointer: Checkpointer, step: int, state: dict[str, Any]) -> bool:
    """Return whether a save and its loads, to the device and to the host, keep the values."""
    checkpointer.save(step, state).result(60)
    checkpointer.load(into := zeros_like(state), step)
    on_host = {name: torch.zeros_like(tensor, device="cpu") for name, tensor in state.items()}
    checkpointer.load(on_host, step)
    values = {name: tensor.cpu() for name, tensor in state.items()}
    return same({name: tensor.cpu() for name, tensor in into.items()}, values) and same(on_host, values)


def _kill_worker(checkpointer: Checkpointer) -> None:
    worker = checkpointer._engine.worker
    assert worker is not None
    os.kill(worker.pid, signal.SIGKILL)
    deadline = time.monotonic() + 30
    while worker.alive:
        assert time.monotonic() < deadline
        time.sleep(0.005)


def _large(device: str, count: int, elements: int = MIB // 2) -> dict[str, torch.Tensor]:
    return {f"{number}": torch.randn(elements, device=device) for number in range(count)}


def test_in_pieces_that_no_copy_crosses(device_type: str, root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(CudaPinner, "limit", 4 * MIB)
    state = _large(device_type, 6) | {f"small {number}": torch.randn(333, device=device_type) for number in range(99)}
    with Checkpointer(root) as checkpointer:
        assert all(_comes_back(checkpointer, step, state) for step in (1, 2))
        assert len(_pinned(checkpointer)) >= 6


def test_what_the_driver_refuses_whole_is_pinned_in_halves(
    device_type: str, root: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    register = CudaPinner.register

    def grudging(self: CudaPinner, address: int, nbytes: int) -> int:
        return register(self, address, nbytes) if nbytes <= 6 * MIB else 1

    state = _large(device_type, 6)
    with Checkpointer(root) as checkpointer:
        with monkeypatch.context() as patch:
            patch.setattr(CudaPinner, "register", grudging)
            checkpointer.prepare(state)
        assert len(_pinned(checkpointer)) >= 4 and "not pinned" not in caplog.text
        assert _comes_back(checkpointer, 1, state)


def test_new_memory_is_pinned_when_the_worker_dies(device_type: str, root: Path) -> None:
    state = _large(device_type, 3) | {"small": torch.randn(10, device=device_type)}
    with Checkpointer(root, Config(failure="warn")) as checkpointer:
        assert _comes_back(checkpointer, 1, state)
        before = len(_pinned(checkpointer))
        _kill_worker(checkpointer)
        checkpointer.save(2, state).result(60)
        assert len(_pinned(checkpointer)) == before
        assert _comes_back(checkpointer, 3, state)


def test_memory_that_goes_is_not_pinned_any_more(device_type: str, root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another structure usually takes memory at the same addresses."""
    before = registrations()
    with Checkpointer(root) as checkpointer:
        for step in range(1, 4):
            assert _comes_back(checkpointer, step, _large(device_type, 3, (step + 1) * MIB // 4))
            assert len(_pinned(checkpointer)) == 1
            assert registrations() - before <= 1
    assert registrations() == before


def test_memory_of_a_worker_that_died_gives_way(device_type: str, root: Path) -> None:
    """The memory is still pinned, but for another structure."""
    with Checkpointer(root, Config(failure="warn")) as checkpointer:
        assert _comes_back(checkpointer, 1, _large(device_type, 3))
        _kill_worker(checkpointer)
        assert _comes_back(checkpointer, 2, _large(device_type, 4))


def test_memory_of_a_slot_that_goes_is_not_pinned_any_more(
    device_type: str, root: Path, gate: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The memory of two slots was pinned at once: a state moved to the device while saves overlapped."""
    monkeypatch.setattr("asyncckpt.staging.buffer._LONG", 3)
    with Checkpointer(root) as checkpointer:
        saves = [checkpointer.save(step, _large("cpu", 3)) for step in (1, 2)]
        gate.touch()
        for save in saves:
            save.result(60)
        assert _comes_back(checkpointer, 3, state := _large(device_type, 3))
        buffer = _buffer(checkpointer)
        assert buffer._memory.taken == 2
        for step in range(4, 9):
            assert _comes_back(checkpointer, step, state)
        assert buffer._memory.taken == 1
        last = buffer.segment.address + buffer._memory.end
        assert _pinned(checkpointer) and max(_pinned(checkpointer)) < last
        gate.unlink()
        saves = [checkpointer.save(step, state) for step in (9, 10)]
        gate.touch()
        for save in saves:
            save.result(60)
        assert buffer._memory.taken == 2 and max(_pinned(checkpointer)) >= last
        assert _comes_back(checkpointer, 11, state)


def test_values_of_the_host_stand_behind_those_of_the_device(device_type: str, root: Path) -> None:
    """AdamW has steps on the host between moments on the device. One call of the driver copies the moments."""
    state: dict[str, torch.Tensor] = {}
    for number in range(50):
        state[f"{number}.exp_avg"] = torch.randn(200, device=device_type)
        state[f"{number}.exp_avg_sq"] = torch.randn(200, device=device_type).bfloat16()
        state[f"{number}.step"] = torch.tensor(float(number))
    with Checkpointer(root) as checkpointer:
        assert _comes_back(checkpointer, 1, state)
        assert [type(unit) for unit in _device_units(checkpointer)] == [BytesCopy]


@pytest.mark.parametrize("elements", [100, 50_000, 200_000])
def test_tensors_are_brought_over_many_at_a_time(device_type: str, root: Path, elements: int) -> None:
    with Checkpointer(root) as checkpointer:
        assert _comes_back(checkpointer, 1, _large(device_type, 20, elements))
        assert [type(unit) for unit in _device_units(checkpointer)] == [BytesCopy]


def test_large_tensors_arrive_in_chunks(device_type: str, root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("asyncckpt.staging.device_copy._CHUNK_BYTES", MIB)
    state = _large(device_type, 2, MIB) | {"turned": torch.randn(900, 1200, device=device_type).t()}
    with Checkpointer(root) as checkpointer:
        assert _comes_back(checkpointer, 1, state)
        assert sum(isinstance(unit, BytesCopy) for unit in _device_units(checkpointer)) >= 10


@pytest.mark.parametrize("moves", [False, True])
def test_what_is_kept_of_halves_is_of_those_at_hand(device_type: str, root: Path, moves: bool) -> None:
    state: dict[str, torch.Tensor] = {}
    with Checkpointer(root, Config(slots=1)) as checkpointer:
        for step in range(1, 6):
            if moves or step == 1:
                state = {f"{number}": torch.empty(40_000, device=device_type).bfloat16() for number in range(50)}
            for number, tensor in enumerate(state.values()):
                tensor.fill_(step + number)
            assert _comes_back(checkpointer, step, state)
        held, nbytes = module().memory_reserved(), sum(tensor.nbytes for tensor in state.values())
        del state, tensor
        module().empty_cache()
        assert module().memory_reserved() <= held - nbytes


def test_bits_that_are_no_numbers_stay(device_type: str, root: Path) -> None:
    bits = torch.arange(1 << 16, dtype=torch.int32).to(torch.int16)
    state = {
        f"{dtype} {part}": bits.view(dtype)[part * 2000 : part * 2000 + 2000].to(device_type)
        for dtype in (torch.bfloat16, torch.float16)
        for part in range(32)
    }
    with Checkpointer(root) as checkpointer:
        checkpointer.save(1, state).result(60)
        checkpointer.load(into := {name: torch.zeros_like(tensor, device="cpu") for name, tensor in state.items()})
    for name, tensor in into.items():
        part = int(name.split()[1])
        assert torch.equal(tensor.view(torch.int16), bits[part * 2000 : part * 2000 + 2000]), name
