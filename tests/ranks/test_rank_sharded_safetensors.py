"""Many ranks: safetensors files that all of them write together."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Callable
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from support.ranks import CONSTANT, QUICK, faulty, fsdp2_on_cpu, run
from support.states import same
from torch.distributed import checkpoint
from torch.distributed.checkpoint import state_dict_loader
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from asyncckpt.checkpointer import Checkpointer
from asyncckpt.config import Config
from asyncckpt.engine.engine import Engine
from asyncckpt.errors import CheckpointError
from asyncckpt.loading.contents import contents
from asyncckpt.loading.source import verify
from asyncckpt.planning.file_set import FileSet

pytestmark = pytest.mark.usefixtures("forkserver")

METADATA = {"format": "pt"}
DTYPES = [torch.float32, torch.bfloat16, torch.int64, torch.uint8, torch.bool, torch.float8_e4m3fn]


class Form(NamedTuple):
    """A tensor of a state; ``cuts``: for each dimension of the mesh that of the tensor that it cuts, or None."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    cuts: tuple[int | None, ...]


def _whole(form: Form, seed: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    nbytes = math.prod(form.shape) * form.dtype.itemsize
    high = 2 if form.dtype is torch.bool else 256
    data = torch.randint(0, high, (nbytes,), dtype=torch.uint8, generator=generator)
    return data.view(form.dtype).view(form.shape)


def _mesh(world_size: int) -> tuple[int, ...]:
    return (2, 2) if world_size == 4 else (world_size,)


def _part(form: Form, seed: int) -> torch.Tensor:
    """What this rank has of it."""
    mesh = init_device_mesh("cpu", _mesh(dist.get_world_size()))
    placements: list[Placement] = [Replicate() if cut is None else Shard(cut) for cut in form.cuts]
    whole = _whole(form, seed)
    sizes, offsets = compute_local_shape_and_global_offset(form.shape, mesh, placements)
    local = whole[tuple(slice(at, at + size) for at, size in zip(offsets, sizes, strict=True))]
    return DTensor.from_local(local, mesh, placements, run_check=False, shape=whole.shape, stride=whole.stride())


def _save(root: str, config: Config, states: list[dict[str, Form]], most: int, dtype: torch.dtype | None) -> None:
    with Engine(config) as engine:
        for step, (number, forms) in product(range(2), enumerate(states)):
            files = FileSet(str(number))
            state = {name: _part(form, step + place) for place, (name, form) in enumerate(forms.items())}
            if number % 2:  # what DCP takes for replicas, or for a rank's own
                state[f"plain.{dist.get_rank() // 2}"] = torch.full((3,), float(dist.get_rank() // 2))
            files.add_sharded_safetensors("model.safetensors", state, METADATA, most, dtype)
            files.add_dcp_folder("rest", {"step": step})
            engine.save(os.path.join(root, f"{number}-{step}"), files, step=step).result(60)


def _expected(forms: dict[str, Form], number: int, step: int, world_size: int) -> dict[str, torch.Tensor]:
    state = {name: _whole(form, step + place) for place, (name, form) in enumerate(forms.items())}
    plain = range((world_size + 1) // 2) if number % 2 else ()
    return state | {f"plain.{half}": torch.full((3,), float(half)) for half in plain}


@st.composite
def _forms(draw: st.DrawFn, dimensions: int) -> Form:
    shape = tuple(draw(st.lists(st.integers(0, 9), max_size=3)))
    if draw(st.booleans()) and shape:  # large enough for whole pages, and for several runs in a window
        shape = (*(max(size, 1) * 7 for size in shape[:-1]), 4099)
    cut = st.integers(0, len(shape) - 1) if shape else st.none()
    return Form(draw(st.sampled_from(DTYPES)), shape, tuple(draw(st.none() | cut) for _ in range(dimensions)))


@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
@settings(max_examples=2, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_it_is_the_file_of_the_gathered_state(tmp_path_factory: Any, world_size: int, data: st.DataObject) -> None:
    each = _forms(len(_mesh(world_size)))
    names = st.text("abcÄ.0", min_size=1, max_size=5)
    states = data.draw(st.lists(st.dictionaries(names, each, min_size=1, max_size=6), min_size=4, max_size=4))
    folder = tmp_path_factory.mktemp("states")
    run(world_size, _save, str(folder / "root"), QUICK, states, 10**9, None, folder=folder)
    for step, (number, forms) in product(range(2), enumerate(states)):
        path = folder / "root" / f"{number}-{step}"
        save_file(_expected(forms, number, step, world_size), folder / "expected", METADATA)
        assert (path / "model.safetensors").read_bytes() == (folder / "expected").read_bytes()
        assert not verify(str(path)).damages


FORMS = {
    "rows": Form(torch.float32, (40, 2051), (0,)),
    "columns": Form(torch.bfloat16, (33, 4099), (1,)),
    "whole": Form(torch.float32, (7,), (None,)),
    "scalar": Form(torch.int64, (), (None,)),
}


def test_several_files_have_an_index(tmp_path: Path) -> None:
    run(2, _save, str(tmp_path / "root"), CONSTANT, [FORMS], 300_000, torch.bfloat16, folder=tmp_path)
    path = tmp_path / "root" / "0-1"
    index = json.loads((path / "model.safetensors.index.json").read_bytes())
    expected = {
        name: whole.bfloat16() if whole.is_floating_point() else whole
        for name, whole in _expected(FORMS, 0, 1, 2).items()
    }
    found: dict[str, torch.Tensor] = {}
    for file in {*index["weight_map"].values()}:
        its = load_file(path / file)
        save_file({name: expected[name] for name in its}, tmp_path / "expected", METADATA)
        assert (path / file).read_bytes() == (tmp_path / "expected").read_bytes()
        assert {index["weight_map"][name] for name in its} == {file}
        found |= its
    assert found.keys() == FORMS.keys() and len({*index["weight_map"].values()}) == 2
    assert index["metadata"]["total_size"] == sum(each.nbytes for each in expected.values())
    shards = {value.name: len(value.shards) for value in contents(str(path))}
    assert shards["model-00001-of-00002.safetensors/rows"] == 2 and not verify(str(path)).damages


def test_each_bad_byte_is_found(tmp_path: Path) -> None:
    run(2, _save, str(tmp_path / "root"), QUICK, [FORMS], 10**9, None, folder=tmp_path)
    path = tmp_path / "root" / "0-0"
    file, good = path / "model.safetensors", (path / "model.safetensors").read_bytes()
    length = int.from_bytes(good[:8], "little")
    for name, facts in [*json.loads(good[8 : 8 + length]).items(), ("header", {"data_offsets": [-9, 0]})]:
        if name == "__metadata__":
            continue
        for at in (facts["data_offsets"][0], facts["data_offsets"][1] - 1):
            bad = bytearray(good)
            bad[8 + length + at] ^= 1
            file.write_bytes(bad)
            (damage,) = verify(str(path)).damages
            assert str(file) in str(damage) and (name == "header" or f"model.safetensors/{name}" in str(damage))
    file.write_bytes(good[:-1])
    assert "was written with" in str(verify(str(path)).damages[0])
    file.write_bytes(good)
    assert not verify(str(path)).damages
    (path / "__1_0.index.json").unlink()
    assert verify(str(path)).damages


def _leave(root: str) -> str:
    """Rank 0's attempt never begins, while rank 1 writes; nobody leaves anything."""
    if dist.get_rank() == 0:
        faulty("begin:eio")
    with Engine(QUICK) as engine:
        files = FileSet()
        files.add_dcp_folder("rest", {"step": 1})
        files.add_sharded_safetensors("model.safetensors", {"rows": _part(FORMS["rows"], 0)})
        try:
            engine.save(os.path.join(root, "1"), files).result(60)
        except CheckpointError as error:
            return type(error).__name__
        return ""


def test_what_another_has_begun_goes(tmp_path: Path) -> None:
    (tmp_path / "root").mkdir()
    assert run(2, _leave, str(tmp_path / "root"), folder=tmp_path) == ["StorageError"] * 2
    assert not os.listdir(tmp_path / "root")


def _fault(root: str, fault: str, bad: int) -> str:
    """What a rank is told of a save that a worker spoils; the next one works."""
    if dist.get_rank() == bad:
        faulty(fault)
    with Engine(QUICK) as engine:
        told = ""
        for step in range(2):
            files = FileSet()
            files.add_sharded_safetensors(
                "model.safetensors", {name: _part(form, step) for name, form in FORMS.items()}, METADATA
            )
            try:
                engine.save(os.path.join(root, str(step)), files).result(60)
            except CheckpointError as error:
                told = type(error).__name__
            faulty("none:eio")
        return told


@pytest.mark.parametrize("bad", [0, 1])
@pytest.mark.parametrize("fault", ["create:kill", "write:enospc", "write:kill:2", "sync:eio", "report:kill"])
def test_where_one_cannot_write_there_is_no_file(tmp_path: Path, fault: str, bad: int) -> None:
    told = run(2, _fault, str(tmp_path / "root"), fault, bad, folder=tmp_path)
    assert all(told), told
    path = tmp_path / "root" / "1"
    # What a killed first worker leaves is hidden, and goes later.
    assert [name for name in os.listdir(tmp_path / "root") if name[0] != "."] == ["1"]
    assert not verify(str(path)).damages
    save_file({name: _whole(form, 1) for name, form in FORMS.items()}, tmp_path / "expected", METADATA)
    assert (path / "model.safetensors").read_bytes() == (tmp_path / "expected").read_bytes()


def _made(tensor: Any, change: Callable[[torch.Tensor], torch.Tensor]) -> torch.Tensor:
    """A DTensor that says the same of other memory."""
    mesh, shape, stride = tensor.device_mesh, tensor.shape, tensor.stride()
    return DTensor.from_local(
        change(tensor.to_local()), mesh, tensor.placements, run_check=False, shape=shape, stride=stride
    )


def _refused(root: str, how: str) -> str:
    with Engine(QUICK) as engine:
        files, rank, state = FileSet(), dist.get_rank(), {"rows": _part(FORMS["rows"], 0)}
        match how:
            case "object":
                state["step"] = 1  # type: ignore[assignment]
            case "tied":
                state["other"] = state["rows"]
            case "tied in part":
                state["one"] = torch.arange(9.0)
                state["other"] = state["one"][3:7]
            case "replicas":
                state["one"] = torch.ones(3 + rank)
            case "dtypes":
                state["rows"] = _made(state["rows"], lambda local: local.half() if rank else local)
            case "short":
                state["rows"] = _made(state["rows"], lambda local: local[: len(local) - rank])
            case "name" if rank == 0:
                files.add_bytes("model.safetensors.index.json", b"{}")
            case "metadata":
                files.add_sharded_safetensors("model.safetensors", state, {"format": 1}, 10**9)  # type: ignore[dict-item]
        if how != "metadata" and not (how == "one rank" and rank == 1):
            state["more"] = torch.ones(3)
            dtype = [torch.half, torch.bfloat16][rank] if how == "settings" else None
            most = 50 if how == "name" else 10**9
            files.add_sharded_safetensors("model.safetensors", state, METADATA, most, dtype)
        try:
            engine.save(os.path.join(root, "1"), files).result(60)
        except CheckpointError as error:
            return f"{type(error).__name__}: {error}"
        return ""


@pytest.mark.parametrize(
    ("how", "says"),
    [
        ("object", "'step' is no tensor"),
        ("tied", "'other' and 'rows' share memory"),
        ("tied in part", "'one' and 'other' share memory"),
        ("replicas", "'one' has another dtype or shape"),
        ("dtypes", "'rows' has another dtype or shape"),
        ("short", "its DTensor is not true"),
        ("settings", "of which all ranks have"),
        ("name", "'model.safetensors.index.json' is one of the files of"),
        ("metadata", "is text"),
        ("one rank", "of which all ranks have"),
    ],
)
def test_what_cannot_be_is_refused_on_all_ranks(tmp_path: Path, how: str, says: str) -> None:
    told: list[Any] = run(2, _refused, str(tmp_path / "root"), how, folder=tmp_path)
    assert all(says in each for each in told), told
    assert not (tmp_path / "root").exists() or not os.listdir(tmp_path / "root")


def _reopen(root: str) -> list[int]:
    """Saves the same in other ways; returns after which of them it was planned anew."""
    plans = []
    with Engine(QUICK) as engine:
        ways: list[tuple[int, torch.dtype | None]] = [
            (10**9, None),
            (10**9, None),
            (300_000, None),
            (10**9, torch.half),
        ]
        for step, (most, dtype) in enumerate(ways):
            files = FileSet()
            state = {name: _part(form, 0) for name, form in FORMS.items()}
            files.add_sharded_safetensors("model.safetensors", state, None, most, dtype)
            engine.save(os.path.join(root, str(step)), files).result(60)
            plans.append(len(os.listdir(os.path.join(root, str(step)))))
    return plans


def test_another_way_to_write_is_planned_anew(tmp_path: Path) -> None:
    found = run(2, _reopen, str(tmp_path / "root"), folder=tmp_path)
    assert found == [[4, 4, 8, 4], [4, 4, 8, 4]]
    assert load_file(tmp_path / "root" / "3" / "model.safetensors")["rows"].dtype is torch.half


def _save_model(root: str) -> None:
    """A model of transformers, of which FSDP2 has given each rank a part."""
    from torch.distributed.checkpoint.state_dict import get_model_state_dict
    from torch.distributed.fsdp import fully_shard
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(7)
    config = LlamaConfig(
        vocab_size=64, hidden_size=16, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2
    )
    model = LlamaForCausalLM(config)
    if dist.get_rank() == 0:
        torch.save(model.state_dict(), f"{root}.expected")
    for layer in model.model.layers:
        fully_shard(layer, mesh=init_device_mesh("cpu", (2,)))
    fully_shard(model, mesh=init_device_mesh("cpu", (2,)))
    files = FileSet()
    files.add_sharded_safetensors("model.safetensors", get_model_state_dict(model), METADATA, 10_000)
    if dist.get_rank() == 0:
        files.add_bytes("config.json", config.to_json_string().encode())
    with Checkpointer(root, QUICK) as checkpointer:
        checkpointer.save(1, files).result(60)


@fsdp2_on_cpu
@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_transformers_and_dcp_load_it(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    run(2, _save_model, str(tmp_path / "root"), folder=tmp_path)
    path, expected = tmp_path / "root" / "step-00000001", torch.load(tmp_path / "root.expected")
    model, told = transformers.AutoModelForCausalLM.from_pretrained(path, output_loading_info=True)
    assert not any(told.values()) and same(dict(model.state_dict()), dict(expected))
    if hasattr(checkpoint, "HuggingFaceStorageReader"):
        state = {name: torch.zeros_like(each) for name, each in expected.items()}
        state_dict_loader.load(state, storage_reader=checkpoint.HuggingFaceStorageReader(str(path)), no_dist=True)
        assert same(state, dict(expected))
