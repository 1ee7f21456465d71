"""Test copies from fake devices: the staged bytes are exact in any order that the streams allow."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import closing
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from support.checkpoints import PAGE
from support.devices import CPU, TYPE, MadeUpDevices, MadeUpStream
from support.images import Slot, refill, tensors_of_all_kinds

from asyncckpt.staging import device_copy
from asyncckpt.staging.device_copy import DeviceCopy
from asyncckpt.staging.host_copy import BatchCopy, CopyThreads
from asyncckpt.staging.slot_copy import SlotStager

DEVICE = torch.device(TYPE, 0)


@pytest.fixture
def kind(monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> Iterator[MadeUpDevices]:
    """Install fake devices with the parameter as seed. If it is odd, the driver takes many copies in one call."""
    seed = getattr(request, "param", 0)
    made_up = MadeUpDevices(seed, copies_by_address=seed % 2 == 1)
    made_up.install(monkeypatch)
    yield made_up
    assert not made_up.current


@pytest.mark.parametrize("most_commands", [1, 20, 512])
@pytest.mark.parametrize("kind", range(6), indirect=True)
def test_any_order_the_streams_allow_is_right(
    kind: MadeUpDevices, monkeypatch: pytest.MonkeyPatch, most_commands: int
) -> None:
    """Save tensors of two fake devices and the host repeatedly, each time with new values that come late."""
    monkeypatch.setattr(device_copy, "_CHUNK_BYTES", 250_000)
    monkeypatch.setattr(device_copy, "_MOST_COMMANDS", most_commands)
    tensors = tensors_of_all_kinds()
    tensors[60] = tensors[50]
    where = [torch.device(TYPE, number // 200) if number % 90 > 2 else CPU for number in range(len(tensors))]
    slot = Slot(tensors, {60: 50})
    numbers, _ = slot.own()
    monkeypatch.setattr(SlotStager, "_divide", _dividing_by([where[number] for number in numbers]))
    stager = SlotStager(slot.layout, slot.segment, PAGE)
    try:
        with closing(CopyThreads(2, "test-copy")) as threads:
            for _ in range(3):
                _save(slot, stager, tensors, where, kind, threads)
                refill(tensors)
    finally:
        stager.close()
        slot.segment.close()


def _save(
    slot: Slot,
    stager: SlotStager,
    tensors: list[torch.Tensor],
    where: list[torch.device],
    kind: MadeUpDevices,
    threads: CopyThreads,
) -> None:
    late = [tensor if each == CPU else torch.zeros_like(tensor) for tensor, each in zip(tensors, where, strict=True)]
    late[60] = late[50]
    ready: dict[Any, Any] = {}

    def compute(number: int) -> None:
        late[number].copy_(tensors[number])

    for each in set(where) - {CPU}:
        stream = MadeUpStream(kind)
        for number, its in enumerate(where):
            if its == each:
                stream.add(partial(compute, number))
        ready[each] = kind.record(stream)
    told = [0]
    fences: list[Any] = []
    expected = slot.expected(tensors)

    def arrived(nbytes: int) -> None:
        assert bytes(slot.segment.view[PAGE + told[-1] : PAGE + nbytes]) == expected[told[-1] : nbytes]
        told.append(nbytes)

    stager.copy(late, ready, threads, arrived, fences.extend)
    assert told == sorted(told) and told[-1] == slot.layout.nbytes
    assert len(fences) == len(ready)
    assert slot.image_bytes() == expected


def _dividing_by(where: list[torch.device]) -> Callable[[SlotStager, Any], None]:
    real, tensors = SlotStager._divide, [SimpleNamespace(device=device) for device in where]
    return lambda self, _: real(self, tensors)  # type: ignore[arg-type]


def test_a_copy_that_cannot_be_queued_is_settled(kind: MadeUpDevices, monkeypatch: pytest.MonkeyPatch) -> None:
    tensors = [torch.full((100,), float(number)) for number in range(2000)]
    slot = Slot(tensors)
    numbers, views = slot.own()
    monkeypatch.setattr(device_copy, "_MOST_COMMANDS", 1000)
    copy = DeviceCopy(DEVICE, kind, range(len(numbers)), views)
    try:
        real, calls = BatchCopy.copy, iter(range(100))

        def broken(self: BatchCopy, tensors: list[torch.Tensor]) -> None:
            if next(calls) == 3:
                raise RuntimeError("launch failed")
            real(self, tensors)

        monkeypatch.setattr(BatchCopy, "copy", broken)
        ready: dict[Any, Any] = {DEVICE: kind.record(MadeUpStream(kind))}
        with pytest.raises(RuntimeError, match="launch failed"):
            copy.queue(tensors, ready)
        copy.settle()
        assert not any(stream.queue for stream in kind.streams)
    finally:
        del copy, views
        slot.segment.close()


def _copy_all(copy: DeviceCopy, tensors: list[torch.Tensor], ready: dict[Any, Any]) -> None:
    told: list[Any] = []
    queued = copy.queue(tensors, ready)
    while queued.left:
        copy.queue_more(queued, told.append)
    copy.wait(queued, told.append)
    assert told == copy.units and len(told) > 2  # each unit when it has arrived, so that the worker writes early


def test_large_tensors_alone_wait_for_the_compute_stream(kind: MadeUpDevices, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device_copy, "_CHUNK_BYTES", 250_000)
    monkeypatch.setattr(device_copy, "_MOST_COMMANDS", 20)
    tensors = [torch.zeros(300_000) for _ in range(3)]
    slot = Slot(tensors)
    _, views = slot.own()
    compute = MadeUpStream(kind)
    compute.add(lambda: torch._foreach_add_(tensors, 7.0))
    copy = DeviceCopy(DEVICE, kind, range(3), views)
    try:
        ready: dict[Any, Any] = {DEVICE: kind.record(compute)}
        _copy_all(copy, tensors, ready)
        assert slot.image_bytes() == slot.expected([torch.full((300_000,), 7.0)] * 3)
    finally:
        del copy, views
        slot.segment.close()
