"""Test saves that overlap with a training on a device: they store the values at the time of the call."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from offload import OffloadedParameters
from support.accelerators import busy, copy_stream_of, module
from support.states import zeros_like

from asyncckpt import Checkpointer
from asyncckpt.config import Config
from asyncckpt.devices import kinds
from asyncckpt.devices.kinds import TorchDevices
from asyncckpt.errors import CheckpointError
from asyncckpt.staging import device_copy
from asyncckpt.staging.device_copy import BytesCopy, DeviceCopy

pytestmark = pytest.mark.device

OVERLAP = Config(overlap=True, timeout=60)
LARGE = 600_000
"""The number of elements of a tensor that is copied alone."""


def _full(device: str, value: float, sizes: list[int]) -> dict[str, torch.Tensor]:
    return {f"{number}": torch.full((size,), value, device=device) for number, size in enumerate(sizes)}


def _holds(checkpointer: Checkpointer, step: int, like: dict[str, torch.Tensor], value: float) -> bool:
    """Return whether the checkpoint of ``step`` has ``value`` everywhere."""
    checkpointer.load(into := zeros_like(like), step)
    return all(bool((tensor == value).all()) for tensor in into.values())


@pytest.fixture
def checkpointer(device_type: str, root: Path) -> Iterator[Checkpointer]:
    with Checkpointer(root, OVERLAP) as checkpointer:
        yield checkpointer


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("sizes", [[LARGE] * 3, [500] * 40], ids=["large", "small"])
def test_copies_wait_for_what_was_computed(device_type: str, root: Path, overlap: bool, sizes: list[int]) -> None:
    """The state needs only one kind of copy, so no other copy causes the wait."""
    state = _full(device_type, 0, sizes)
    with Checkpointer(root, Config(overlap=overlap)) as checkpointer:
        checkpointer.prepare(state)
        busy(0.15)
        for tensor in state.values():
            tensor.fill_(1)
        checkpointer.save(1, state).result(60)
        assert _holds(checkpointer, 1, state, 1)


def test_work_on_a_stream_of_the_callers_own(device_type: str, checkpointer: Checkpointer) -> None:
    state = _full(device_type, 0, [LARGE, *[500] * 20])
    checkpointer.prepare(state)
    with module().stream(module().Stream(device_type)):
        module().current_stream().wait_stream(module().default_stream())
        busy(0.15)
        for tensor in state.values():
            tensor.fill_(1)
        checkpointer.save(1, state).result(60)
    assert _holds(checkpointer, 1, state, 1)


@pytest.mark.parametrize("overlap", [False, True])
def test_a_device_that_is_not_known_is_waited_for(
    device_type: str, root: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, overlap: bool
) -> None:
    monkeypatch.delitem(kinds.KINDS, device_type)
    kinds._warn_of_unknown.cache_clear()
    state = _full(device_type, 0, [LARGE, *[500] * 20]) | {"host": torch.zeros(10)}
    with Checkpointer(root, Config(overlap=overlap)) as checkpointer:
        for step in (1, 2):
            with module().stream(module().Stream(device_type)):
                busy(0.1)
                for tensor in state.values():
                    tensor.fill_(step)
                checkpointer.save(step, state).wait_staged(60)
        checkpointer.wait(60)
        assert _holds(checkpointer, 1, state, 1) and _holds(checkpointer, 2, state, 2)
    assert caplog.text.count("asyncckpt does not know this type") == 1


def test_a_side_stream_that_is_behind(
    device_type: str, checkpointer: Checkpointer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(device_copy, "_MOST_COMMANDS", 1)
    monkeypatch.setattr(device_copy, "_CALL_COPIES", 20)
    state = {f"{number}": torch.zeros(500, device=device_type) for number in range(200)}
    checkpointer.prepare(state)
    device = next(iter(state.values())).device
    stream = copy_stream_of(device)
    for step in (1, 2):
        for number, tensor in enumerate(state.values()):
            tensor.fill_(1000 * step + number)
        with module().stream(stream):
            busy(0.2)
        save = checkpointer.save(step, state)
        save.result(60)
        checkpointer.load(into := zeros_like(state), step)
        assert [float(tensor[0]) for tensor in into.values()] == [1000 * step + number for number in range(200)]


def _guarded(checkpointer: Checkpointer, sizes: list[int], device: str) -> tuple[dict[str, Any], torch.optim.Optimizer]:
    """Return parameters of value 5, and a guarded optimizer that subtracts 1 from them."""
    parameters = {f"{n}": torch.nn.Parameter(torch.full((size,), 5.0, device=device)) for n, size in enumerate(sizes)}
    for parameter in parameters.values():
        parameter.grad = torch.ones_like(parameter)
    optimizer = torch.optim.SGD(parameters.values(), lr=1.0)
    checkpointer.guard(optimizer)
    return {name: parameter.detach() for name, parameter in parameters.items()}, optimizer


@pytest.mark.parametrize("sizes", [[LARGE] * 3, [*[500] * 40, LARGE]], ids=["large", "both"])
def test_a_guarded_step_comes_after_the_copies(
    device_type: str, checkpointer: Checkpointer, monkeypatch: pytest.MonkeyPatch, sizes: list[int]
) -> None:
    """The step must wait for the last copy, because it waits for nothing else."""
    monkeypatch.setattr(device_copy, "_CALL_COPIES", 1 + len(sizes) // 10)
    copy = BytesCopy.copy

    def late(self: BytesCopy, tensors: Sequence[torch.Tensor]) -> None:
        busy(0.05)  # on the stream that copies
        copy(self, tensors)

    monkeypatch.setattr(BytesCopy, "copy", late)
    state, optimizer = _guarded(checkpointer, sizes, device_type)
    checkpointer.prepare(state)
    for step in range(1, 4):
        checkpointer.save(step, state)
        optimizer.step()
    checkpointer.wait(60)
    assert all(_holds(checkpointer, step, state, 6.0 - step) for step in range(1, 4))


@pytest.mark.parametrize("newest", ["skipped", "refused"])
def test_a_guarded_step_waits_for_older_saves_too(device_type: str, root: Path, newest: str) -> None:
    """A skipped or refused newest save counts as staged."""
    config = Config(overlap=True, slots=1, when_busy="skip", failure="warn")
    with Checkpointer(root, config) as checkpointer:
        state, optimizer = _guarded(checkpointer, [LARGE] * 2, device_type)
        checkpointer.prepare(state)
        with module().stream(copy_stream_of(state["0"].device)):
            busy(0.3)
        first = checkpointer.save(1, state)
        meta = {"a": torch.empty(3, device="meta")}
        second = checkpointer.save(2, state if newest == "skipped" else meta)
        assert second.staged() and not first.staged()
        optimizer.step()
        first.result(60)
        assert second.future.exception(60) is not None
        assert _holds(checkpointer, 1, state, 5.0)


def test_each_guarded_optimizer_waits(device_type: str, checkpointer: Checkpointer) -> None:
    one, first = _guarded(checkpointer, [LARGE], device_type)
    other, second = _guarded(checkpointer, [LARGE], device_type)
    state = {"one": one["0"], "other": other["0"]}
    checkpointer.prepare(state)
    with module().stream(copy_stream_of(one["0"].device)):
        busy(0.15)
    save = checkpointer.save(1, state)
    second.step()
    first.step()
    save.result(60)
    assert _holds(checkpointer, 1, state, 5.0)


def test_a_parameter_gets_other_memory(
    device_type: str, checkpointer: Checkpointer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """``Module.to`` replaces the memory before the copy thread has looked at the parameter."""
    model = torch.nn.ParameterDict({"a": torch.full((LARGE,), 1.0, device=device_type)})
    state = {"a": model["a"], "b": torch.full((LARGE,), 1.0, device=device_type)}
    checkpointer.prepare(state)
    queue, is_moved = DeviceCopy.queue, threading.Event()

    def late(self: DeviceCopy, *args: Any) -> Any:
        assert is_moved.wait(60)
        return queue(self, *args)

    monkeypatch.setattr(DeviceCopy, "queue", late)
    save = checkpointer.save(1, state)
    model["a"].data = torch.full((LARGE,), 2.0, device=device_type)
    is_moved.set()
    save.result(60)
    assert _holds(checkpointer, 1, {name: tensor.detach() for name, tensor in state.items()}, 1.0)


def test_offloading_waits_for_copies(
    device_type: str, checkpointer: Checkpointer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Offloading also waits for copies that the copy thread has not queued yet."""
    model = torch.nn.Linear(700, 700).to(device_type).requires_grad_(False)
    for parameter in model.parameters():
        parameter.fill_(1.0)
    offloaded = OffloadedParameters(model, device_type)
    state = dict(model.state_dict())
    checkpointer.prepare(state)
    queue = DeviceCopy.queue

    def late(self: DeviceCopy, *args: Any) -> Any:
        time.sleep(0.5)
        return queue(self, *args)

    monkeypatch.setattr(DeviceCopy, "queue", late)
    save = checkpointer.save(1, state)
    assert offloaded.offload() > 0
    other = [torch.full((700, 700), -1.0, device=device_type) for _ in range(3)]  # takes the freed memory
    save.result(60)
    assert offloaded.load() > 0
    assert _holds(checkpointer, 1, state, 1.0)
    del other


def test_two_checkpointers_share_the_side_streams(device_type: str, tmp_path: Path) -> None:
    states = [_full(device_type, 0, [500] * 60), _full(device_type, 0, [300] * 80)]
    with Checkpointer(tmp_path / "0", OVERLAP) as one, Checkpointer(tmp_path / "1", OVERLAP) as other:
        for step in range(1, 5):
            saves = []
            for number, (checkpointer, state) in enumerate(zip((one, other), states, strict=True)):
                for tensor in state.values():
                    tensor.fill_(step + 100 * number)
                saves.append(checkpointer.save(step, state))
            for save in saves:
                save.synchronize_staging(60)
        for number, (checkpointer, state) in enumerate(zip((one, other), states, strict=True)):
            checkpointer.wait(60)
            assert all(_holds(checkpointer, step, state, step + 100 * number) for step in range(1, 5))


def test_a_copy_that_cannot_be_queued(device_type: str, root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The earlier copies finish first, because the caller may free the tensors once the save has failed."""
    monkeypatch.setattr(device_copy, "_CALL_COPIES", 20)
    state = _full(device_type, 1, [500] * 200)
    copy, calls = BytesCopy.copy, iter(range(100))

    def broken(self: BytesCopy, tensors: Sequence[torch.Tensor]) -> None:
        if next(calls) == 3:
            raise RuntimeError("launch failed")
        copy(self, tensors)

    with Checkpointer(root, OVERLAP) as checkpointer:
        checkpointer.prepare(state)
        stream = copy_stream_of(state["0"].device)
        with monkeypatch.context() as patch:
            patch.setattr(BytesCopy, "copy", broken)
            with module().stream(stream):
                busy(0.8)
            save = checkpointer.save(1, state)
            save.wait_staged(60)
            assert stream.query()
            with pytest.raises(CheckpointError, match="launch failed"):
                save.result(60)
        checkpointer.save(2, state).result(60)
        assert _holds(checkpointer, 2, state, 1)


@pytest.mark.parametrize("call", ["prepare", "save"])
def test_nothing_is_copied_while_a_graph_is_captured(
    device_type: str, root: Path, monkeypatch: pytest.MonkeyPatch, call: str
) -> None:
    state = _full(device_type, 1, [500] * 20)
    with Checkpointer(root) as checkpointer:
        calls: dict[str, Callable[[], object]] = {
            "prepare": partial(checkpointer.prepare, state),
            "save": partial(checkpointer.save, 1, state),
        }
        with monkeypatch.context() as patch:
            patch.setattr(module(), "is_current_stream_capturing", lambda: True)
            with pytest.raises(CheckpointError, match="graph is being captured"):
                calls[call]()
        checkpointer.save(2, state).result(60)
        assert _holds(checkpointer, 2, state, 1) and checkpointer.steps() == [2]


def test_a_guarded_step_that_is_captured(
    device_type: str,
    checkpointer: Checkpointer,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    state, optimizer = _guarded(checkpointer, [LARGE], device_type)
    checkpointer.prepare(state)
    busy(0.2)
    save = checkpointer.save(1, state)
    with monkeypatch.context() as patch:
        patch.setattr(module(), "is_current_stream_capturing", lambda: True)
        with pytest.raises(CheckpointError, match="still copies"):
            optimizer.step()
        save.result(60)
        assert "replays wait for no copy" not in caplog.text
        optimizer.step()
        assert "replays wait for no copy" in caplog.text
    assert _holds(checkpointer, 1, state, 5.0)


@pytest.mark.parametrize("by_one_call", [False, True])
def test_copies_leave_room_for_others_to_launch(
    device_type: str, root: Path, monkeypatch: pytest.MonkeyPatch, by_one_call: bool
) -> None:
    """A thread that fills a stream waits in the driver. No other thread can launch a kernel then."""
    if not by_one_call:
        monkeypatch.setattr(TorchDevices, "copies_many", lambda *_: False)
    monkeypatch.setattr(device_copy, "_UNIT_COPIES", 1)  # the simulated device makes one command of many copies
    monkeypatch.setattr(device_copy, "_CALL_COPIES", 1)
    state = _full(device_type, 1, [500] * 3000)
    others = torch.zeros(100, device=device_type)
    others.add_(1)  # loads the kernel
    with Checkpointer(root, OVERLAP) as checkpointer:
        checkpointer.prepare(state)
        copying = copy_stream_of(state["0"].device)
        is_free = module().Event()
        with module().stream(copying):
            busy(1.5)
            is_free.record(copying)
        save = checkpointer.save(1, state)
        time.sleep(0.3)  # the copying thread fills the stream as far as it may
        others.add_(1)
        assert not is_free.query()
        save.result(60)
        checkpointer.load(into := zeros_like(state), 1)
        assert all(float(tensor[0]) == 1.0 for tensor in into.values())


def test_a_driver_that_refuses_many_copies_is_not_asked_again(
    device_type: str, root: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    state = _full(device_type, 1, [500] * 200) | {"turned": torch.ones(30, 20, device=device_type).t()}
    kind = kinds.kind_of(state["0"].device)
    assert isinstance(kind, TorchDevices) and kind.copies_many(state["0"].device)
    monkeypatch.setattr(kind, "_copy_many", {state["0"].device.index: lambda *_: 801})
    with Checkpointer(root) as checkpointer:
        for step in (1, 2):
            checkpointer.save(step, state).result(60)
            checkpointer.load(into := zeros_like(state), step)
            assert all(float(tensor.min()) == 1.0 for tensor in into.values())
    assert caplog.text.count("one by one from now on") == 1 and not kind.copies_many(state["0"].device)
