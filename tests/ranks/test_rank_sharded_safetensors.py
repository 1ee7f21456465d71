"""Many ranks: safetensors files that all of them write together."""

from __future__ import annotations

import math
import os
from itertools import product
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file
from support.ranks import QUICK, run
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from asyncckpt.config import Config
from asyncckpt.engine.engine import Engine
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
