"""Test that parameters leave the device and return to their own places."""

from __future__ import annotations

import gc
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import offload as offload_module
import psutil
import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st
from offload import OffloadedError, OffloadedParameters
from support.ranks import fsdp2_on_cpu, run
from support.states import same
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn.parallel import DistributedDataParallel

from asyncckpt.errors import CheckpointError, OutOfMemoryError
from asyncckpt.shm import budget

pytestmark = pytest.mark.usefixtures("forkserver")


DEVICES = ["cpu"]  # for other devices, see tests/weights/test_device_weights.py


class Model(nn.Module):
    """A transformer with tied embeddings, an empty buffer and others, and two parameters in one storage."""

    def __init__(self, width: int = 32) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding = nn.Embedding(50, width)
        layer = nn.TransformerEncoderLayer(width, 4, 2 * width, dropout=0.0, batch_first=True)
        self.layers = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.head = nn.Linear(width, 50, bias=False)
        self.head.weight = self.embedding.weight
        self.norm = nn.BatchNorm1d(50)
        both = torch.randn(2, 50)
        self.scale, self.shift = nn.Parameter(both[0]), nn.Parameter(both[1])
        self.register_buffer("nothing", torch.empty(0))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        scores: torch.Tensor = self.norm(self.head(self.layers(self.embedding(tokens)))[:, -1])
        return scores * self.scale + self.shift


def train(model: nn.Module, steps: int, between: Callable[[], object], device: str = "cpu") -> dict[str, Any]:
    """Train, and call ``between`` before each step. Return the state of ``model`` and its optimizer."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    generator = torch.Generator().manual_seed(1)
    for _ in range(steps):
        between()
        tokens = torch.randint(0, 50, (4, 8), generator=generator).to(device)
        nn.functional.cross_entropy(model(tokens), tokens[:, 0]).backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        optimizer.zero_grad()
    state = {"model": dict(model.state_dict()), "moments": list(optimizer.state.values())}
    return {name: _on_host(value) for name, value in state.items()}


def _on_host(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _on_host(each) for key, each in value.items()}
    if isinstance(value, list):
        return [_on_host(each) for each in value]
    return (value.to_local() if isinstance(value, DTensor) else value).detach().cpu().clone()


def cycle(parameters: OffloadedParameters) -> None:
    parameters.offload()
    parameters.load()
    parameters.offload(unchanged=True)
    parameters.load()


@pytest.mark.parametrize("device", DEVICES)
def test_trains_as_if_it_was_never_offloaded(device: str) -> None:
    model = Model().to(device)
    offloaded = train(model, 5, partial(cycle, OffloadedParameters(model, device)), device)
    assert same(offloaded, train(Model().to(device), 5, lambda: None, device))


@pytest.mark.parametrize("device", DEVICES)
def test_memory_of_the_device_is_given_back(device: str) -> None:
    model = Model().to(device)
    values = _on_host(dict(model.state_dict()))
    tensors = [*model.parameters(), *model.buffers()]
    storages = {tensor.untyped_storage()._cdata: tensor.untyped_storage() for tensor in tensors}
    nbytes = sum(storage.nbytes() for storage in storages.values())
    held = torch.cuda.memory_allocated() if device == "cuda" else 0
    parameters = OffloadedParameters(model, device)
    assert parameters.offload() == nbytes
    assert all(tensor.untyped_storage().nbytes() == 0 for tensor in tensors)
    assert device == "cpu" or torch.cuda.memory_allocated() <= held - nbytes
    assert parameters.offload() == 0
    assert parameters.load() == nbytes and parameters.loaded
    assert parameters.load() == 0
    assert same(_on_host(dict(model.state_dict())), values)
    assert all(one is other for one, other in zip(tensors, [*model.parameters(), *model.buffers()], strict=True))


def test_what_is_tied_or_a_view_stays_so() -> None:
    model = Model()
    view = model.embedding.weight.detach()[3:5]
    cycle(OffloadedParameters(model, "cpu"))
    assert model.head.weight is model.embedding.weight
    assert model.scale.untyped_storage()._cdata == model.shift.untyped_storage()._cdata
    with torch.no_grad():
        model.embedding.weight.fill_(4)
    assert (view == 4).all() and (model.head.weight == 4).all()


def test_what_has_not_changed_is_not_copied_again() -> None:
    model = Model()
    parameters = OffloadedParameters(model, "cpu")
    nbytes, its_nbytes = parameters.offload(), 4 * 50
    parameters.load()
    assert parameters.offload(unchanged=True) == 0
    parameters.load()
    assert parameters.offload() == nbytes  # ``unchanged`` is not set
    parameters.load()
    with torch.no_grad():
        model.norm.weight.add_(1)
    assert parameters.offload(unchanged=True) == its_nbytes  # torch counts the change
    parameters.load()
    assert (model.norm.weight == 2).all()
    model.register_buffer("more", torch.ones(3))  # the layout is different
    assert parameters.offload(unchanged=True) == nbytes + 12
    parameters.load()
    assert (model.norm.weight == 2).all() and (model.get_buffer("more") == 1).all()
    model.register_buffer("more", torch.zeros(3))  # another buffer of the same size and version
    assert parameters.offload(unchanged=True) == 12
    parameters.load()
    assert (model.get_buffer("more") == 0).all()


def test_inference_mode_does_not_matter() -> None:
    model = Model()
    with torch.inference_mode():
        model.register_buffer("made here", torch.ones(3))
    values = _on_host(dict(model.state_dict()))
    parameters = OffloadedParameters(model, "cpu")
    with torch.inference_mode():
        parameters.offload()
    parameters.load()
    with torch.inference_mode():
        parameters.offload(unchanged=True)
        parameters.load()
    assert same(_on_host(dict(model.state_dict())), values)


def test_an_offloaded_module_refuses() -> None:
    model = Model()
    parameters = OffloadedParameters(model, "cpu")
    parameters.offload()
    tokens = torch.zeros(4, 8, dtype=torch.long)
    for use in (partial(model, tokens), partial(model.embedding, tokens), model.state_dict, model.layers.state_dict):
        with pytest.raises(OffloadedError, match="load them first"):
            use()
    parameters.load()
    model(tokens)
    assert not any(module._forward_pre_hooks or module._state_dict_pre_hooks for module in model.modules())


def test_a_module_keeps_what_it_is_offloaded_to() -> None:
    model = Model()
    values = _on_host(dict(model.state_dict()))
    OffloadedParameters(model, "cpu").offload()
    gc.collect()
    with pytest.raises(OffloadedError) as caught:
        model.state_dict()
    parameters = caught.traceback[-1].frame.f_locals["self"]
    parameters.load()
    assert same(_on_host(dict(model.state_dict())), values)


def test_too_little_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    model = Model()
    values = _on_host(dict(model.state_dict()))
    parameters = OffloadedParameters(model, "cpu")
    with monkeypatch.context() as patch:
        patch.setattr(budget, "available_bytes", lambda _: 1 << 20)
        with pytest.raises(OutOfMemoryError, match="offloading parameters"):
            parameters.offload()
    assert parameters.loaded and same(_on_host(dict(model.state_dict())), values)
    cycle(parameters)
    assert same(_on_host(dict(model.state_dict())), values)


@pytest.mark.parametrize("direction", ["_to_host", "_to_device"])
def test_a_copy_that_fails_half_way(direction: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model = Model()
    values = _on_host(dict(model.state_dict()))
    parameters = OffloadedParameters(model, "cpu")
    cycle(parameters)
    real, made = getattr(offload_module, direction), []

    def fail(*args: object) -> object:
        made.append(1)
        if len(made) > 5:
            raise MemoryError("no more")
        return real(*args)

    with monkeypatch.context() as patch:
        patch.setattr(offload_module, direction, fail)
        with pytest.raises(MemoryError, match="no more"):
            parameters.offload()
            parameters.load()
    assert parameters.loaded == (direction == "_to_host")
    if parameters.loaded:
        assert parameters.offload(unchanged=True) > 0  # the copy on the host is incomplete
    assert all(parameter.untyped_storage().nbytes() == 0 for parameter in model.parameters())
    parameters.load()
    assert same(_on_host(dict(model.state_dict())), values)


def test_memory_that_is_not_torchs_own() -> None:
    model = nn.Linear(3, 3)
    model.weight = nn.Parameter(torch.from_numpy(np.ones((3, 3), np.float32)))
    with pytest.raises(CheckpointError, match="cannot give back"):
        OffloadedParameters(model, "cpu").offload()
    assert model(torch.ones(1, 3)).shape == (1, 3)


def test_only_what_is_on_the_device() -> None:
    model = nn.Linear(3, 3)
    parameters = OffloadedParameters(model, "cuda")
    assert parameters.offload() == 0 and parameters.load() == 0
    assert model.weight.untyped_storage().nbytes() == model.weight.nbytes


@settings(max_examples=40, deadline=None)
@given(
    st.lists(
        st.tuples(st.integers(0, 3000), st.sampled_from([torch.uint8, torch.bfloat16, torch.float64])), max_size=60
    ),
    st.integers(1, 16),
)
def test_every_tensor_comes_back_to_its_own_place(kinds: list[tuple[int, torch.dtype]], threads: int) -> None:
    module = nn.Module()
    for number, (count, dtype) in enumerate(kinds):
        module.register_buffer(f"b{number}", torch.full((count,), number % 251).to(dtype))
    parameters = OffloadedParameters(module, "cpu", threads=threads)
    for unchanged in (False, True, False):
        parameters.offload(unchanged=unchanged)
        parameters.load()
    for number, (count, dtype) in enumerate(kinds):
        assert torch.equal(module.get_buffer(f"b{number}"), torch.full((count,), number % 251).to(dtype))


@pytest.mark.parametrize("device", DEVICES)
def test_nothing_grows(device: str) -> None:
    model = Model(256).to(device)
    parameters = OffloadedParameters(model, device)
    process = psutil.Process()

    def used() -> tuple[int, int]:
        gc.collect()
        return process.memory_info().rss, process.num_fds()

    for _ in range(10):
        cycle(parameters)
    before = used()
    for _ in range(100):
        cycle(parameters)
    after = used()
    assert after[0] - before[0] < 2 << 20 and after[1] == before[1]


def test_replaced_parameters_are_let_go() -> None:
    model = nn.Linear(64, 64)
    parameters = OffloadedParameters(model, "cpu")
    cycle(parameters)
    storage = StorageWeakRef(model.weight.untyped_storage())  # type: ignore[no-untyped-call]
    model.weight = nn.Parameter(torch.ones(64, 64))
    gc.collect()
    assert storage.expired()  # type: ignore[no-untyped-call]
    cycle(parameters)
    assert (model.weight == 1).all()


def _sharded(offloads: bool, uneven: int) -> list[Any]:
    torch.manual_seed(0)
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    model = nn.Sequential(nn.Embedding(50, uneven), nn.Linear(uneven, uneven), nn.ReLU(), nn.Linear(uneven, 50))
    for layer in (model[1], model):
        fully_shard(layer, mesh=mesh)
    wrapped = nn.Sequential(model, _Last())
    parameters = OffloadedParameters(model, "cpu")
    between = partial(cycle, parameters) if offloads else lambda: None
    state = train(wrapped, 4, between)
    emptied = True
    if offloads:
        with torch.no_grad():
            model(torch.zeros(4, 8, dtype=torch.long))
        parameters.offload()
        shards = [each.to_local() for each in model.parameters() if isinstance(each, DTensor)]
        emptied = all(shard.untyped_storage().nbytes() == 0 for shard in shards) and len(shards) == 5
        parameters.load()
    return [state, emptied]


class _Last(nn.Module):
    def forward(self, scores: torch.Tensor) -> torch.Tensor:
        return scores[:, -1]


@fsdp2_on_cpu
def test_shards_of_fsdp2(tmp_path: Path) -> None:
    """FSDP2 keeps views of its shards, and gathers from these views."""
    offloaded = run(2, _sharded, True, 13, folder=tmp_path)
    assert all(emptied for _, emptied in offloaded)
    assert same(offloaded, run(2, _sharded, False, 13, folder=tmp_path))


def _replicated(offloads: bool) -> dict[str, Any]:
    model = DistributedDataParallel(Model())
    torch.manual_seed(dist.get_rank())
    between = partial(cycle, OffloadedParameters(model, "cpu")) if offloads else lambda: None
    return train(model, 4, between)


def test_replicas_of_ddp(tmp_path: Path) -> None:
    one, other = run(2, _replicated, True, folder=tmp_path)
    assert same(one, other)
    assert same(one, run(2, _replicated, False, folder=tmp_path)[0])
