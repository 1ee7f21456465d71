"""Test states on a device: a save stores the exact values of its call, through pinned memory."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from support.accelerators import busy, module
from support.checkpoints import PAGE
from support.states import same, zeros_like

from asyncckpt import Checkpointer, FileSet
from asyncckpt.config import Config
from asyncckpt.devices import pinners
from asyncckpt.devices.kinds import TorchDevices
from asyncckpt.devices.pinned import PinnedMemory
from asyncckpt.shm.segment import Segment
from asyncckpt.staging import device_copy
from asyncckpt.weights import WeightPublisher, WeightSubscriber

pytestmark = pytest.mark.device


def _state(device_type: str) -> dict[str, torch.Tensor]:
    return {
        **{f"small {number}": torch.randn(33, 7, device=device_type) for number in range(200)},
        "large": torch.randn(8 << 20, device=device_type),
        "half": torch.randn(1000, 300, device=device_type).bfloat16(),
        "strided": torch.randn(300, 500, device=device_type).t(),
        "on the host": torch.randn(1000),
    }


@pytest.mark.parametrize("overlap", [False, True])
def test_saved_as_of_the_call(device_type: str, root: Path, overlap: bool) -> None:
    """The compute stream is busy before the call, and changes everything after it."""
    state = _state(device_type)
    with Checkpointer(root, Config(overlap=overlap)) as checkpointer:
        checkpointer.prepare(state)
        for step in range(1, 6):
            busy(0.03)  # the next operations are queued behind this
            for tensor in state.values():
                tensor.fill_(step)
            save = checkpointer.save(step, state)
            save.wait_staged(60)
            for tensor in state.values():
                tensor.fill_(-1)
        checkpointer.wait(60)
        for step in range(1, 6):
            into = zeros_like(state)
            checkpointer.load(into, step)
            assert all((tensor == step).all() for tensor in into.values())


@pytest.mark.parametrize("overlap", [False, True])
def test_tensors_that_move_between_saves(device_type: str, root: Path, overlap: bool) -> None:
    """The tensors move from the host to devices and back, under the same names, behind work on a stream."""
    here, host = torch.device(device_type, 0), torch.device("cpu")
    there = torch.device(device_type, module().device_count() - 1)
    value = {f"small {number}": torch.randn(33, 7) for number in range(40)} | {"large": torch.randn(1 << 20)}
    names = list(value)
    ways = [[host] * 41, [here] * 41, [*[here] * 20, *[there] * 21], [here, host] * 20 + [there], [host] * 41]
    stream = module().Stream(here)
    with Checkpointer(root, Config(overlap=overlap, slots=2)) as checkpointer, module().stream(stream):
        for step, way in enumerate([each for each in ways for _ in range(3)]):
            busy(0.03)
            state = {name: value[name].to(device) + step for name, device in zip(names, way, strict=True)}
            checkpointer.save(step, state).wait_staged(60)
            for tensor in state.values():
                tensor.fill_(-1)
        checkpointer.wait(60)
        for step in range(15):
            checkpointer.load(into := zeros_like(value), step)
            assert same(into, {name: each + step for name, each in value.items()})


@pytest.mark.parametrize("overlap", [False, True])
def test_a_set_of_files_is_saved_as_of_the_call(device_type: str, root: Path, overlap: bool) -> None:
    state = _state(device_type)
    contiguous = {name: tensor.contiguous() for name, tensor in state.items()}
    tensors = [*state.values(), *contiguous.values()]

    def files() -> FileSet:
        added = FileSet()
        added.add_safetensors("it.safetensors", contiguous)
        added.add_torch_file("it.pt", state)
        added.add_torch_file("small.pt", state["half"])
        return added

    with Checkpointer(root, Config(overlap=overlap)) as checkpointer:
        checkpointer.prepare(files())
        for step in range(1, 4):
            busy(0.03)
            for tensor in tensors:
                tensor.fill_(step)
            save = checkpointer.save(step, files())
            save.wait_staged(60)
            for tensor in tensors:
                tensor.fill_(-1)
        checkpointer.wait(60)
    for step in range(1, 4):
        path = root / f"step-{step:08d}"
        loaded = torch.load(path / "it.pt", map_location="cpu")
        loaded["small"] = torch.load(path / "small.pt", map_location="cpu")
        assert all(
            (tensor == step).all() for tensor in [*loaded.values(), *load_file(path / "it.safetensors").values()]
        )


def test_memory_for_the_host_s_tensors_alone_is_not_pinned(device_type: str, root: Path) -> None:
    """The process uses a device, but its state has no tensors there."""
    torch.zeros(1, device=device_type)
    with Checkpointer(root) as checkpointer:
        checkpointer.save(1, {"w": torch.zeros(1 << 16), "on": torch.zeros(3)}).result(60)
        buffer = checkpointer._engine._buffers.known[0].buffer
        assert buffer is not None and buffer._pinned is None


def test_the_staging_memory_is_pinned(device_type: str, root: Path) -> None:
    with Checkpointer(root) as checkpointer:
        checkpointer.prepare(state := _state(device_type))
        buffer = checkpointer._engine._buffers.known[0].buffer
        assert buffer is not None and buffer._pinned is not None and buffer._pinned.addresses
        target = torch.frombuffer(buffer.segment.view, dtype=torch.uint8)
        assert target.is_pinned()
        del target
        checkpointer.save(1, state).result(60)
        checkpointer.load(into := zeros_like(state))
        assert same({name: tensor.cpu() for name, tensor in into.items()}, {n: t.cpu() for n, t in state.items()})


def test_pinned_ranges_end_within_large_tensors(device_type: str, root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Registration blocks launches, so each range is shorter than the largest tensor. No copy crosses an end."""
    monkeypatch.setattr(device_copy, "_CHUNK_BYTES", 1 << 20)
    monkeypatch.setattr(pinners.CudaPinner, "limit", 1 << 20)
    square = torch.randn(1500, 1500)
    state = {"whole": torch.randn(3 << 20), "turned": square.t()}
    with Checkpointer(root) as checkpointer:
        there = {name: tensor.to(device_type) for name, tensor in state.items()}
        assert not there["turned"].is_contiguous()
        checkpointer.save(1, there).result(60)
        buffer = checkpointer._engine._buffers.known[0].buffer
        assert buffer is not None and buffer._pinned is not None and len(buffer._pinned.addresses) >= 20
        checkpointer.load(into := zeros_like(state))
    assert same(into, state)


def _data_files(folder: Path) -> dict[str, bytes]:
    return {file.name: file.read_bytes() for file in folder.iterdir() if file.suffix == ".distcp"}


def _of_all_kinds() -> dict[str, torch.Tensor]:
    """Return host tensors of every dtype with random bits, small and large, in every layout."""
    dtypes = [
        *(torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.complex64, torch.complex32),
        *(torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.uint16, torch.float8_e4m3fn),
    ]
    state: dict[str, torch.Tensor] = {}
    for dtype in dtypes:
        for number, elements in enumerate((1, 17, 1000, 1 << 17)):
            raw = torch.randint(0, 256, (elements * dtype.itemsize,), dtype=torch.uint8)
            state[f"{dtype} {number}"] = raw.view(dtype)
        state[f"{dtype} scalar"] = raw.view(dtype)[0]
        state[f"{dtype} strided"] = raw.view(dtype)[: 40 * 30].view(40, 30).t()
        state[f"{dtype} empty"] = raw.view(dtype)[:0]
    numbers = torch.randn(700, 900, dtype=torch.complex64)
    state |= {"bool": torch.rand(99) < 0.5, "large and strided": torch.randn(900, 700).t()}
    state |= {f"shared {number}": numbers for number in range(2)}
    for name, part in {"small": numbers[:5, :5], "large": numbers, "strided": numbers.t()}.items():
        state |= {f"conjugate {name}": part.conj(), f"negative {name}": part.conj().imag}
    return state


def _on_device(state: dict[str, torch.Tensor], device_type: str) -> dict[str, torch.Tensor]:
    """Copy the state to the device with the same layouts, lazy signs and shared memory."""
    moved: dict[int, torch.Tensor] = {}
    result = {}
    for name, tensor in state.items():
        if id(tensor) not in moved:
            there = torch.empty_strided(tensor.size(), tensor.stride(), dtype=tensor.dtype, device=device_type)
            # CUDA's copy of a lazily negated tensor from the host has a wrong sign (torch 2.11).
            there.copy_(tensor.resolve_conj().resolve_neg())
            if tensor.is_conj():
                there = there.conj_physical_().conj()
            elif tensor.is_neg():
                there = torch._neg_view(there.neg_())
            moved[id(tensor)] = there
        result[name] = moved[id(tensor)]
    return result


@pytest.mark.parametrize("cut", [False, True])
@pytest.mark.parametrize("by_one_call", [False, True])
def test_the_same_bytes_as_from_the_host(
    device_type: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, cut: bool, by_one_call: bool
) -> None:
    if cut:
        monkeypatch.setattr(device_copy, "_CHUNK_BYTES", 300_000)
    if not by_one_call:
        monkeypatch.setattr(TorchDevices, "copies_many", lambda *_: False)
    host = _of_all_kinds()
    state = _on_device(host, device_type)
    for name, tensor in state.items():
        assert tensor.is_conj() == host[name].is_conj() and tensor.is_neg() == host[name].is_neg()
    with Checkpointer(tmp_path / "host") as checkpointer:
        checkpointer.save(1, host).result(60)
    with Checkpointer(tmp_path / "device") as checkpointer:
        for step in (1, 2):
            path = Path(checkpointer.save(step, state).result(60))
            assert _data_files(path) == _data_files(tmp_path / "host" / "step-00000001")


def test_the_host_goes_on_while_the_step_waits(device_type: str, root: Path) -> None:
    """The copies wait for a busy compute stream. The optimizer's step is queued meanwhile, and runs after them."""
    model = torch.nn.ParameterList([torch.full((1 << 20,), 1.0, device=device_type) for _ in range(8)])
    model.extend(torch.nn.Parameter(torch.full((50,), 1.0, device=device_type)) for _ in range(500))
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    with Checkpointer(root, Config(overlap=True)) as checkpointer:
        checkpointer.prepare({"model": model})
        checkpointer.guard(optimizer)
        for parameter in model:
            parameter.grad = torch.ones_like(parameter)
        optimizer.step()  # loads the kernels
        module().current_stream().synchronize()
        for step in range(1, 4):
            before = [parameter.detach().clone() for parameter in model]
            busy(1.0)
            save = checkpointer.save(step, {"model": model})
            optimizer.step()
            assert not save.staged()
            save.result(60)
            checkpointer.load(into := {"model": zeros_like(dict(model.state_dict()))}, step)
            assert all(torch.equal(now, then) for now, then in zip(into["model"].values(), before, strict=True))
            assert all(torch.equal(now + 1, then) for now, then in zip(model, before, strict=True))


def test_what_only_the_save_holds_stays_until_it_is_copied(device_type: str, root: Path) -> None:
    """The caller frees temporaries and takes memory again before the side streams have read them."""
    with Checkpointer(root, Config(overlap=True)) as checkpointer:
        for step in range(1, 4):
            busy(0.3)
            kept = {f"{number}": torch.full((number * 9000 + 1,), 1.0, device=device_type) for number in range(60)}
            save = checkpointer.save(step, {name: tensor * step for name, tensor in kept.items()})
            other = [torch.full_like(tensor, -1.0) for tensor in kept.values()]
            save.result(60)
            checkpointer.load(into := zeros_like(kept), step)
            assert all((tensor == step).all() for tensor in into.values())
            del other


def test_a_refused_registration_leaves_no_error_and_is_no_harm(
    device_type: str, root: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(pinners, "_PORTABLE", 0xFFFF)  # invalid flags
    state = _state(device_type)
    with Checkpointer(root) as checkpointer:
        checkpointer.prepare(state)
        assert "are not pinned" in caplog.text
        assert torch.ones(3, device=device_type).sum() == 3
        checkpointer.save(1, state).result(60)
        checkpointer.load(into := zeros_like(state))
        assert same({name: tensor.cpu() for name, tensor in into.items()}, {n: t.cpu() for n, t in state.items()})


def test_what_is_pinned_follows_the_slots(
    device_type: str, root: Path, gate: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The second slot is pinned before a copy goes there, and unpinned when its memory is given back."""
    monkeypatch.setattr("asyncckpt.staging.buffer._LONG", 2)
    state = _state(device_type)
    with Checkpointer(root) as checkpointer:
        checkpointer.prepare(state)
        (known,) = checkpointer._engine._buffers.known
        assert known.buffer is not None and (pinned := known.buffer._pinned) is not None
        segment, one = known.buffer.segment, pinned.end
        saves = [checkpointer.save(step, state) for step in (1, 2)]
        assert one < pinned.end == segment.nbytes
        gate.touch()
        for save in saves:
            save.result(60)
        for step in range(3, 9):
            checkpointer.save(step, state).result(60)
        assert pinned.end == one and max(pinned.addresses) < segment.address + one
        for step in (2, 8):
            checkpointer.load(into := zeros_like(state), step)
            assert same({name: tensor.cpu() for name, tensor in into.items()}, {n: t.cpu() for n, t in state.items()})


def test_a_stale_registration_is_replaced(device_type: str) -> None:
    device = torch.device(device_type, module().current_device())
    with Segment.create("asyncckpt-test", 4 * PAGE) as segment:
        segment.touch()
        pinner = pinners.CudaPinner(device_type)
        assert pinner.register(segment.address, segment.nbytes) == 0
        memory = PinnedMemory(segment, [], device)
        assert memory.addresses == [segment.address]
        assert torch.ones(3, device=device_type).sum() == 3
        memory.close()
        assert pinner.unregister(segment.address) == 713  # cudaErrorHostMemoryNotRegistered: already taken back
        assert torch.ones(3, device=device_type).sum() == 3


def test_threads_use_the_device_of_the_tensors(device_type: str, root: Path) -> None:
    """The staging thread has no current device of its own. It opens no context on another device."""
    if module().device_count() < 2:
        pytest.skip("one device")
    state = {
        "a": torch.arange(1 << 20, device=f"{device_type}:1"),
        **{f"{n}": torch.ones(n, device=f"{device_type}:1") for n in range(50)},
    }
    free = module().mem_get_info(0)[0]
    with Checkpointer(root, Config(overlap=True)) as checkpointer:
        checkpointer.save(1, state).result(60)
        checkpointer.load(into := zeros_like(state))
        assert all(torch.equal(into[name], state[name]) for name in state)
    assert free - module().mem_get_info(0)[0] < 100 << 20


def test_weights_are_published_from_the_device(device_type: str) -> None:
    torch.manual_seed(0)
    weights = {f"layer.{number}": torch.randn(37, 41 + number, device=device_type) for number in range(40)}
    weights |= {
        "large": torch.randn(3000, 2000, device=device_type),
        "columns": torch.randn(90, 70, device=device_type).t(),
    }
    weights |= {
        "half": torch.randn(7, device=device_type).bfloat16(),
        "host": torch.randn(50),
        "n": torch.arange(9, device=device_type),
    }
    with WeightPublisher("policy") as publisher, WeightSubscriber("policy") as subscriber:
        for version, dtype in enumerate((None, None, torch.bfloat16, torch.bfloat16), start=1):
            weights["large"].add_(1.0)  # queued, and not awaited
            publisher.publish(weights, version, dtype=dtype)
            with subscriber.acquire(version) as acquired:
                for name, tensor in weights.items():
                    expected = tensor.to(dtype) if dtype is not None and tensor.is_floating_point() else tensor
                    assert same(acquired[name].clone(), expected.cpu()), (version, name)
        publisher.publish(iter(weights.items()), 5)
        publisher.publish(iter(weights.items()), 6)
        with subscriber.acquire(6) as acquired:
            assert all(same(acquired[name].clone(), tensor.cpu()) for name, tensor in weights.items())
