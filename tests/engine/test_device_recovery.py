"""Test that a killed training on a device resumes from memory or from storage."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from support import accelerators
from support.accelerators import busy, copy_stream_of, module
from support.ranks import alone
from support.states import same, stock_load, zeros_like

from asyncckpt import Checkpointer
from asyncckpt.config import Config
from asyncckpt.errors import CheckpointError
from asyncckpt.integrations import torch_file
from asyncckpt.link.trainer_saves import RunningSaves
from asyncckpt.staging.device_copy import DeviceCopy

pytestmark = [pytest.mark.device, pytest.mark.usefixtures("forkserver")]


def _state(device: str) -> dict[str, Any]:
    small = {f"small {number}": torch.zeros(300, device=device) for number in range(50)}
    return {"model": {"large": torch.zeros(700_000, device=device), **small}, "step": 0}


def _fill(state: dict[str, Any], step: int) -> None:
    busy(0.05)
    for tensor in state["model"].values():
        tensor.fill_(step)
    state["step"] = step


def _is_of(state: dict[str, Any], step: int) -> bool:
    return state["step"] == step and all(bool((tensor == step).all()) for tensor in state["model"].values())


def _train_and_die(root: str, last: int, overlap: bool, durable: bool) -> None:
    state = _state(accelerators.load())
    checkpointer = Checkpointer(root, Config(overlap=overlap, linger=600.0))
    for step in range(1, last + 1):
        _fill(state, step)
        save = checkpointer.save(step, state)
        save.wait_staged(60)
    if durable:
        checkpointer.wait(60)
    os.kill(os.getpid(), signal.SIGKILL)


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("memory", [False, True])
def test_killed_and_resumed(device_type: str, root: Path, overlap: bool, memory: bool) -> None:
    code, _ = alone(_train_and_die, str(root), 3, overlap, not memory)
    assert code == -signal.SIGKILL
    with Checkpointer(root, Config(overlap=overlap)) as checkpointer:
        state = _state(device_type)
        assert checkpointer.load(state, memory=memory) == 3 and _is_of(state, 3)
        assert checkpointer.loaded is not None
        assert checkpointer.loaded.source == ("memory" if memory else "storage")
        _fill(state, 4)
        checkpointer.save(4, state).result(60)
        stock_load(into := _state("cpu"), root / "step-00000004")
        assert all(bool((tensor == 4).all()) for tensor in into["model"].values())


@pytest.mark.parametrize("at", ["queue", "wait"])
def test_nothing_is_copied_any_more_when_an_interrupt_is_raised(
    device_type: str, root: Path, gate: Path, monkeypatch: pytest.MonkeyPatch, at: str
) -> None:
    """Ctrl-C arrives while the copies are queued or awaited. The next save takes the same slot."""

    def interrupted(real: Callable[..., Any], *args: Any) -> Any:
        if at == "wait":
            interrupt()
        found = real(*args)
        if at == "queue":
            interrupt()
        return found

    def interrupt() -> None:
        signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGUSR1)
        assert posted.wait(60)
        time.sleep(0.2)  # the listener tells the copy to stop

    def handler(*_: object) -> None:
        raise KeyboardInterrupt

    def post(saves: RunningSaves, *given: Any) -> None:
        post_it(saves, *given)
        posted.set()

    posted, post_it = threading.Event(), RunningSaves.interrupt
    monkeypatch.setattr(RunningSaves, "interrupt", post)
    state = _state(device_type)
    device = state["model"]["large"].device
    before = signal.signal(signal.SIGUSR1, handler)
    with Checkpointer(root, Config(slots=1)) as checkpointer:
        checkpointer.prepare(state)
        _fill(state, 1)
        with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
            real = getattr(DeviceCopy, at)
            patch.setattr(DeviceCopy, at, lambda *args: interrupted(real, *args))
            with module().stream(copy_stream_of(device)):
                busy(0.5)
            checkpointer.save(1, state)
        signal.signal(signal.SIGUSR1, before)
        on_host = _state("cpu")
        for tensor in on_host["model"].values():
            tensor.fill_(2)
        on_host["step"] = 2
        save = checkpointer.save(2, on_host)
        module().synchronize()
        gate.touch()
        save.result(60)
        assert checkpointer.load(into := _state("cpu"), memory=False) == 2 and _is_of(into, 2)


def test_the_worker_is_killed_while_copies_are_under_way(device_type: str, root: Path) -> None:
    with Checkpointer(root, Config(overlap=True)) as checkpointer:
        checkpointer.prepare(state := _state(device_type))
        _fill(state, 1)
        busy(0.2)
        save = checkpointer.save(1, state)
        worker = checkpointer._engine.worker
        assert worker is not None
        os.kill(worker.pid, signal.SIGKILL)
        with contextlib.suppress(CheckpointError):
            save.result(60)
        _fill(state, 2)
        checkpointer.save(2, state).result(60)
        checkpointer.load(into := _state(device_type), 2)
        assert _is_of(into, 2)


@pytest.mark.parametrize("index", [0, 1])
def test_loaded_to_the_device(device_type: str, root: Path, index: int) -> None:
    """Load into strided tensors and into another dtype. The load waits for the device's earlier work."""
    if index >= module().device_count():
        pytest.skip("one device")
    device = f"{device_type}:{index}"
    saved = {"plain": torch.randn(400, 500), "turned": torch.randn(300, 200), "half": torch.randn(1000).bfloat16()}
    saved |= {"converted": torch.randn(50, 60), **{f"{number}": torch.randn(number) for number in range(20)}}
    with Checkpointer(root) as checkpointer:
        checkpointer.save(1, saved).result(60)
        into = {name: torch.zeros_like(tensor, device=device) for name, tensor in saved.items()}
        into["turned"] = torch.zeros(200, 300, device=device).t()
        into["converted"] = torch.zeros(50, 60, dtype=torch.float64, device=device)
        with module().device(index):
            busy(0.1)
            for tensor in into.values():
                tensor.fill_(-1)
            checkpointer.load(into)
        expected = saved | {"converted": saved["converted"].double()}
        assert same({name: tensor.cpu() for name, tensor in into.items()}, expected)


def test_states_of_several_devices(device_type: str, root: Path) -> None:
    if module().device_count() < 2:
        pytest.skip("one device")
    state = {
        f"{index} {name}": tensor
        for index in (0, 1)
        for name, tensor in _state(f"{device_type}:{index}")["model"].items()
    }
    state |= {"host": torch.zeros(1000)}
    with Checkpointer(root, Config(overlap=True)) as checkpointer:
        checkpointer.prepare(state)
        optimizer = torch.optim.SGD([torch.nn.Parameter(tensor) for tensor in state.values()], lr=1.0)
        checkpointer.guard(optimizer)
        for step in range(1, 4):
            for index in (0, 1):
                with module().device(index):
                    busy(0.05 * (index + 1))
            for tensor in state.values():
                tensor.fill_(step)
            save = checkpointer.save(step, state)
            for index in (0, 1):  # a step on one device waits only for the copies from this device
                with module().device(index):
                    save.synchronize_staging(60)
            for tensor in state.values():
                tensor.fill_(-1)
        checkpointer.wait(60)
        for step in range(1, 4):
            checkpointer.load(into := zeros_like(state), step)
            assert all(bool((tensor == step).all()) for tensor in into.values())


def test_a_file_of_torch_save(device_type: str, tmp_path: Path) -> None:
    state = _state(device_type)
    _fill(state, 7)
    path = tmp_path / "state.pt"
    torch_file.torch_save(state, path).result(60)
    loaded = torch.load(path, map_location="cpu")
    assert loaded["step"] == 7 and all(bool((tensor == 7).all()) for tensor in loaded["model"].values())
