"""Loads to a device through pinned buffers: from storage and from memory, directly and by DCP's planner."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch
from support import accelerators
from support.accelerators import busy, module
from support.ranks import alone
from support.states import same, zeros_like

from asyncckpt import Checkpointer
from asyncckpt.devices.pinners import CudaPinner
from asyncckpt.errors import CheckpointError, DamagedCheckpointError
from asyncckpt.loading import device_buffers, load, read_requests

pytestmark = [pytest.mark.device, pytest.mark.usefixtures("forkserver")]


def _state(device_type: str, seed: int = 0) -> dict[str, torch.Tensor]:
    torch.manual_seed(seed)
    return {
        **{f"small {number}": torch.randn(33, 7).to(device_type) for number in range(300)},
        "large": torch.randn(3 << 20).to(device_type),
        "half": torch.randn(1000, 300).bfloat16().to(device_type),
        "strided": torch.randn(300, 500).to(device_type).t(),
        "number": torch.tensor(3.0).to(device_type),
        "empty": torch.empty(0, 3, device=device_type),
        "on the host": torch.randn(1000),
    }


def _on_host(state: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {name: tensor.cpu() for name, tensor in state.items()}


def _save_and_die(root: str) -> None:
    checkpointer = Checkpointer(root)
    checkpointer.save(1, _state(accelerators.load())).result(60)
    os._exit(1)


@pytest.fixture(params=["one batch", "many batches"])
def batches(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    if request.param == "many batches":
        monkeypatch.setattr(read_requests, "_BATCH_BYTES", 100_000)
        monkeypatch.setattr(device_buffers, "_LEAST_BYTES", 1 << 12)


@pytest.mark.usefixtures("batches")
@pytest.mark.parametrize("source", ["storage", "memory"])
def test_all_of_a_state(device_type: str, root: Path, source: str) -> None:
    """Work that the device gets before the load runs first, and changes no loaded value."""
    assert alone(_save_and_die, str(root))[0] == 1
    state = _state(device_type)
    into = zeros_like(state)
    with Checkpointer(root) as checkpointer:
        busy(0.05)
        for tensor in into.values():
            tensor.fill_(7)
        assert checkpointer.load(into, memory=source == "memory") == 1
        assert checkpointer.loaded is not None and checkpointer.loaded.source == source
        assert same(_on_host(into), _on_host(state))


@pytest.mark.usefixtures("batches")
def test_by_dcp_s_planner(device_type: str, root: Path) -> None:
    """A tensor stored with another dtype is loaded by DCP's planner."""
    state = _state(device_type)
    with Checkpointer(root) as checkpointer:
        checkpointer.save(1, state).result(60)
    into = zeros_like(state) | {"half": torch.zeros(1000, 300, device=device_type)}
    load.load(into, str(root / "step-00000001"))
    expected = state | {"half": state["half"].float()}
    assert same(_on_host(into), _on_host(expected))


def test_to_two_devices(device_type: str, root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if module().device_count() < 2:
        pytest.skip("there is one device")
    monkeypatch.setattr(read_requests, "_BATCH_BYTES", 100_000)
    state = {f"{number}": torch.full((5000,), float(number)) for number in range(100)}
    with Checkpointer(root) as checkpointer:
        checkpointer.save(1, state).result(60)
        into = {name: torch.zeros(5000, device=f"{device_type}:{int(name) % 2}") for name in state}
        checkpointer.load(into)
    assert same(_on_host(into), state)


def test_a_driver_that_pins_nothing(device_type: str, root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with Checkpointer(root) as checkpointer:
        checkpointer.save(1, state := _state(device_type)).result(60)
        monkeypatch.setattr(CudaPinner, "register", lambda *_: 1)
        checkpointer.load(into := zeros_like(state))
    assert same(_on_host(into), _on_host(state))


def test_no_damaged_batch_is_sent(device_type: str, root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(read_requests, "_BATCH_BYTES", 100_000)
    state = {f"{number}": torch.full((30_000,), 1.0, device=device_type) for number in range(4)}
    with Checkpointer(root) as checkpointer:
        checkpointer.save(1, state).result(60)
        (file,) = (root / "step-00000001").glob("*.distcp")
        data = bytearray(file.read_bytes())
        data[data.rfind(torch.ones(1000).numpy().tobytes())] ^= 1
        file.write_bytes(data)
        into = zeros_like(state)
        with pytest.raises(DamagedCheckpointError):
            checkpointer.load(into, memory=False)
    *good, damaged = [set(tensor.tolist()) for tensor in _on_host(into).values()]
    assert good == [{1.0}] * 3 and damaged == {0.0}


def test_nothing_is_loaded_while_a_graph_is_captured(
    device_type: str, root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with Checkpointer(root) as checkpointer:
        checkpointer.save(1, state := _state(device_type)).result(60)
        into = zeros_like(state)
        with monkeypatch.context() as patch:
            patch.setattr(module(), "is_current_stream_capturing", lambda: True)
            with pytest.raises(CheckpointError, match="graph is being captured"):
                checkpointer.load(into)
        checkpointer.load(into)
    assert same(_on_host(into), _on_host(state))
