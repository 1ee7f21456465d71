"""Weights on a device: publication with conversion, and offload."""

from __future__ import annotations

import gc
import time
from collections import deque
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from offload import OffloadedParameters
from support import accelerators, simulated_device
from support.accelerators import busy, module, registrations
from support.ranks import alone, say
from support.states import same
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from asyncckpt import Checkpointer
from asyncckpt.errors import CheckpointError
from asyncckpt.shm.segment import Segment
from asyncckpt.staging import device_copy
from asyncckpt.weights import WeightPublisher, WeightSubscriber, streamed_copies
from asyncckpt.weights.buffer import WeightBuffer
from asyncckpt.weights.streamed_copies import StreamedCopies

pytestmark = [pytest.mark.device, pytest.mark.usefixtures("forkserver")]


def _weights(device: str) -> dict[str, torch.Tensor]:
    weights = {f"small {number}": torch.randn(37, 41 + number, device=device) for number in range(30)}
    weights |= {"large": torch.randn(1200, 900, device=device), "turned": torch.randn(900, 700, device=device).t()}
    weights |= {"half": torch.randn(7, device=device).half(), "number": torch.arange(9, device=device)}
    return weights | {"host": torch.randn(50)}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
def test_what_is_converted_is_so_on_the_device(
    device_type: str,
    publisher: WeightPublisher,
    subscriber: WeightSubscriber,
    monkeypatch: pytest.MonkeyPatch,
    dtype: torch.dtype,
) -> None:
    """The conversion runs on a side stream, like all copies. No tensor is copied by a blocking copy of its own."""
    monkeypatch.setattr(device_copy, "_CHUNK_BYTES", 1 << 20)
    monkeypatch.setattr(WeightBuffer, "views", lambda *_: pytest.fail("copied one by one"))
    weights = _weights(device_type)
    for version in (1, 2):
        busy(0.1)
        for tensor in weights.values():
            tensor.add_(1)
        publisher.publish(weights, version, dtype=dtype)
        with subscriber.acquire(version) as acquired:
            for name, tensor in weights.items():
                expected = tensor.to(dtype) if tensor.is_floating_point() else tensor
                assert same(acquired[name].clone(), expected.cpu()), (version, name)


def test_a_reader_copies_from_pinned_memory(
    device_type: str, publisher: WeightPublisher, subscriber: WeightSubscriber
) -> None:
    """The copy runs on the reader's stream, from registered memory. Nobody overwrites the slot before the copy ends."""
    before = accelerators.registrations()
    for version in range(1, 13, 3):
        weights = {name: tensor.cpu() + version for name, tensor in _weights(device_type).items()}
        publisher.publish(weights, version)
        with subscriber.acquire(version, pin=device_type) as acquired:
            busy(0.1)
            copied = {name: tensor.to(device_type, non_blocking=True) for name, tensor in acquired.items()}
        for more in (1, 2):  # these go into the slot of the copied version
            publisher.publish({name: tensor * 0 for name, tensor in weights.items()}, version + more)
        assert all(same(copied[name].cpu(), tensor) for name, tensor in weights.items())
    pinned = accelerators.registrations() - before
    assert pinned == 2 or device_type == "cuda"  # once for each slot
    kept = subscriber.acquire(pin=device_type)["large"]
    subscriber.close()
    assert accelerators.registrations() == before
    assert same(kept, weights["large"] * 0)  # the memory is still mapped


def test_memory_that_may_be_given_back_is_not_pinned(
    device_type: str, publisher: WeightPublisher, subscriber: WeightSubscriber
) -> None:
    """The driver registers pages. The third slot may have other pages when it is used again, without any error."""
    before = accelerators.registrations()
    held = []
    for version in (1, 2, 3):  # the third version is in the slot for readers of older versions
        publisher.publish({"at": torch.full((300, 300), float(version))}, version)
        held.append(subscriber.acquire(version, pin=device_type))
        assert torch.equal(held[-1]["at"].to(device_type).cpu(), torch.full((300, 300), float(version)))
    assert accelerators.registrations() - before == 2 or device_type == "cuda"
    for each in held:
        each.release()


class _Crossings(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Records the source dtype and the target dtype of each copy from a device to the host."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.dtypes: list[tuple[torch.dtype, torch.dtype]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten.copy_.default and args[0].is_cpu and not args[1].is_cpu:
            self.dtypes.append((args[1].dtype, args[0].dtype))
        elif func is torch.ops.aten._to_copy.default and not args[0].is_cpu and kwargs.get("device") is not None:
            self.dtypes.append((args[0].dtype, kwargs.get("dtype") or args[0].dtype))
        return func(*args, **(kwargs or {}))


def test_what_comes_one_by_one_is_converted_on_the_device(device_type: str, publisher: WeightPublisher) -> None:
    weights = _weights(device_type)
    for version in (1, 2):  # the first time, nothing is planned
        with _Crossings() as crossings:
            publisher.publish(iter(weights.items()), version, dtype=torch.bfloat16)
        assert len(crossings.dtypes) == len(weights) - 1  # all but the tensor on the host
        assert all(one == other for one, other in crossings.dtypes)


@pytest.mark.parametrize("most", [0, 5_000_000, 1 << 30])
def test_what_comes_one_by_one_may_use_the_same_memory_on_any_stream(
    device_type: str,
    publisher: WeightPublisher,
    subscriber: WeightSubscriber,
    monkeypatch: pytest.MonkeyPatch,
    most: int,
) -> None:
    """Before the next tensor is requested, the last tensor is on the host, or in a copy of its own on the device."""
    monkeypatch.setattr(streamed_copies, "_MOST_BYTES", most)
    memory = torch.empty(1200, 900, device=device_type)
    other = module().Stream(device_type)

    def gathered(version: int) -> Iterator[tuple[str, torch.Tensor]]:
        for number in range(8):
            with module().stream(other):
                memory.fill_(version * 10 + number)
            module().current_stream().wait_stream(other)
            yield f"{number}", memory[: 1200 - number]
            yield f"turned {number}", memory.t() if number % 2 else memory.bfloat16()

    for version in range(1, 6):  # the first time, nothing is planned
        publisher.publish(gathered(version), version)
        with subscriber.acquire(version) as acquired:
            for number in range(8):
                for name in (f"{number}", f"turned {number}"):
                    tensor = acquired[name]
                    assert bool((tensor == torch.tensor(version * 10.0 + number).to(tensor.dtype)).all()), name


def test_the_next_one_is_asked_for_while_one_is_under_way(
    device_type: str, publisher: WeightPublisher, subscriber: WeightSubscriber
) -> None:
    """Ranks that gather the next tensor together must not wait for a copy to the host. ``publish`` waits at its end."""
    weights = {f"{number}": torch.full((300, 200), float(number), device=device_type) for number in range(4)}
    asked: list[float] = []

    def gathered(version: int) -> Iterator[tuple[str, torch.Tensor]]:
        for name, tensor in weights.items():
            asked.append(time.monotonic())
            yield name, tensor + version

    for version in (1, 2):
        publisher.publish(gathered(version), version)
    (side_stream,) = publisher._streamed._streams.values()
    asked.clear()
    with module().stream(side_stream):
        busy(1.0)
    publisher.publish(gathered(3), 3)
    assert asked[-1] - asked[0] < 0.5 < time.monotonic() - asked[0]
    with subscriber.acquire(3) as acquired:
        assert all(same(acquired[name].clone(), (tensor + 3).cpu()) for name, tensor in weights.items())


@pytest.mark.parametrize("at", ["waiting", "queued"])
def test_no_copy_is_under_way_when_an_interrupt_is_raised(
    device_type: str,
    publisher: WeightPublisher,
    subscriber: WeightSubscriber,
    monkeypatch: pytest.MonkeyPatch,
    at: str,
) -> None:
    """After Ctrl-C, the next publication, from the host, uses the same memory."""

    def gathered(device: str, value: float) -> Iterator[tuple[str, torch.Tensor]]:
        for number in range(4):
            yield f"{number}", torch.full((300, 200), value, device=device)

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    class _Interrupting(deque[Any]):
        append = interrupt

    for version in (1, 2):
        publisher.publish(gathered(device_type, version), version)
    (side_stream,) = publisher._streamed._streams.values()
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        if at == "waiting":
            wait = StreamedCopies._wait
            patch.setattr(StreamedCopies, "_wait", lambda self, n: wait(self, n) if n else interrupt())
        else:
            patch.setattr(publisher._streamed, "_under_way", _Interrupting())
        with module().stream(side_stream):
            busy(0.5)
        publisher.publish(gathered(device_type, 3), 3)
    publisher.publish(gathered("cpu", 4), 4)
    module().synchronize()
    with subscriber.acquire(4) as acquired:
        assert all(bool((tensor == 4).all()) for tensor in acquired.values())


def test_a_device_that_is_full_is_copied_from_directly(
    device_type: str, publisher: WeightPublisher, subscriber: WeightSubscriber, monkeypatch: pytest.MonkeyPatch
) -> None:
    weights = _weights(device_type)
    publisher.publish(iter(weights.items()), 1)
    with monkeypatch.context() as patch:
        patch.setattr(torch.Tensor, "resolve_conj", lambda _: _raise(torch.OutOfMemoryError("full")))
        publisher.publish(iter({name: tensor + 1 for name, tensor in weights.items()}.items()), 2)
    with subscriber.acquire(2) as acquired:
        assert all(same(acquired[name].clone(), (tensor + 1).cpu()) for name, tensor in weights.items())


def _raise(error: Exception) -> None:
    raise error


def test_nothing_is_published_while_a_graph_is_captured(
    device_type: str, publisher: WeightPublisher, monkeypatch: pytest.MonkeyPatch
) -> None:
    weights = _weights(device_type)
    with monkeypatch.context() as patch:
        patch.setattr(module(), "is_current_stream_capturing", lambda: True)
        with pytest.raises(CheckpointError, match="graph is being captured"):
            publisher.publish(weights, 1)
    publisher.publish(weights, 2)


def test_the_driver_is_told_before_memory_is_given_back(
    device_type: str, publisher: WeightPublisher, subscriber: WeightSubscriber, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Otherwise copies would go to pages that are gone."""
    pinned: list[bool] = []
    give_back = Segment.give_back

    def given_back(segment: Segment) -> None:
        pinned.extend(slot._pinned is not None for slot in publisher._buffers[-1]._slots if slot.segment is segment)
        give_back(segment)

    monkeypatch.setattr(Segment, "give_back", given_back)
    weights = {name: tensor for name, tensor in _weights(device_type).items() if name != "host"}
    simulated = accelerators.CHOICE == simulated_device.TYPE
    for version in range(1, 40):
        for tensor in weights.values():
            tensor.fill_(version)
        if version in (3, 23):
            held = subscriber.acquire(version - 1)
        assert not publisher.publish(weights, version).skipped
        if version in (4, 24):
            held.release()
            assert not simulated or registrations() == 3
        with subscriber.acquire(version) as acquired:
            assert all(bool((tensor == version).all()) for tensor in acquired.values())
    assert pinned == [False, False] and (not simulated or registrations() == 2)


@pytest.mark.filterwarnings("ignore:unclosed file:ResourceWarning")
def test_what_is_dropped_keeps_no_memory_pinned(device_type: str, root: Path) -> None:
    """The system cannot take back pinned memory."""
    before = registrations()
    weights = _weights(device_type)
    publisher, checkpointer = WeightPublisher("dropped"), Checkpointer(root)
    publisher.publish(weights, 1)
    checkpointer.save(1, weights).result(60)
    assert registrations() > before or accelerators.CHOICE != simulated_device.TYPE
    with pytest.warns(ResourceWarning, match="not closed"):
        del publisher, checkpointer
        gc.collect()
    assert registrations() == before


def _filled(model: nn.Module, value: float) -> bool:
    return all(bool((parameter == value).all()) for parameter in model.parameters())


@pytest.mark.parametrize("index", [0, 1])
def test_parameters_go_off_the_device_and_come_back(device_type: str, index: int) -> None:
    """The caller and the copying threads use different streams, and have to wait for each other."""
    if index >= module().device_count():
        pytest.skip("one device")
    device = f"{device_type}:{index}"
    model = nn.Sequential(*(nn.Linear(300, 200) for _ in range(8))).to(device).requires_grad_(False)
    parameters = OffloadedParameters(model, device)
    nbytes = sum(parameter.nbytes for parameter in model.parameters())
    module().empty_cache()
    module().synchronize(index)
    held = module().memory_reserved(index)
    with module().stream(module().Stream(device)):
        for value in (1.0, 2.0, 3.0):
            busy(0.1)
            for parameter in model.parameters():
                parameter.fill_(value)
            assert parameters.offload() == nbytes
            module().empty_cache()
            assert module().memory_reserved(index) <= held - nbytes
            assert parameters.load() == nbytes
            assert _filled(model, value)
        assert parameters.offload(unchanged=True) == 0
        parameters.load()
        assert _filled(model, 3.0)


def _train(device: str, *, offloads: bool) -> list[torch.Tensor]:
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(50, 60), nn.GELU(), nn.Linear(60, 50)).to(device)
    parameters = OffloadedParameters(model, device)
    optimizer = torch.optim.AdamW(model.parameters())
    batch = torch.linspace(-1, 1, 500).reshape(10, 50).to(device)
    for _ in range(4):
        model(batch).pow(2).mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        if offloads:
            parameters.offload()
            parameters.load()
    return [parameter.detach().cpu() for parameter in model.parameters()]


def _trains_alike() -> None:
    device = accelerators.load()
    say(same(_train(device, offloads=True), _train(device, offloads=False)))


def test_trains_as_if_it_was_never_offloaded() -> None:
    accelerators.load()  # or skip
    assert alone(_trains_alike) == (0, True)
