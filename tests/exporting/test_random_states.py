"""Test random states in shards of any shape, through every format and back, with very small batches."""

from __future__ import annotations

import tempfile
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file
from support.checkpoints import verify
from support.shards import save_shards
from support.states import same, stock_load, zeros_like

from asyncckpt import export
from asyncckpt.exporting import batches, copying
from asyncckpt.format import index

DTYPES = (
    *(torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.int64, torch.int8, torch.uint8, torch.bool),
    *(torch.float8_e4m3fn, torch.complex64, torch.int32),
)


@pytest.fixture(autouse=True)
def small_batches(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make spans and batches so small that files of some kilobytes need many of them."""
    monkeypatch.setattr(index, "SPAN_BYTES", 192)
    for module in (batches, copying):
        monkeypatch.setattr(module, "BATCH_BYTES", 512)
    monkeypatch.setattr(copying, "_IN_FLIGHT_BYTES", 2048)
    monkeypatch.setattr(copying, "_WRITE_BYTES", 4096)
    monkeypatch.setattr(copying, "_own", threading.local())


@st.composite
def tensors(draw: st.DrawFn) -> tuple[torch.Tensor, Any]:
    """Draw a tensor and the cuts between its shards."""
    shape = draw(st.lists(st.integers(0, 9), max_size=3))
    if draw(st.booleans()) and shape:
        shape[draw(st.integers(0, len(shape) - 1))] = draw(st.integers(10, 90))
    cuts = tuple(tuple(draw(st.lists(st.integers(0, n), max_size=3))) for n in shape) if shape else None
    tensor = torch.randint(0, 255, (*shape, 8), dtype=torch.uint8, generator=torch.Generator().manual_seed(draw(SEEDS)))
    dtype = draw(st.sampled_from(DTYPES))
    values = tensor.view(torch.int64).squeeze(-1)
    if dtype in (torch.float32, torch.float64, torch.bfloat16, torch.float16):
        return (values % 20011 / 7 - 1000).to(dtype), cuts
    if dtype is torch.float8_e4m3fn:
        return (values % 200).to(torch.float32).to(dtype), cuts
    return values.to(dtype), cuts


SEEDS = st.integers(0, 1000)


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.lists(tensors(), min_size=1, max_size=5), st.sampled_from([None, "bf16", "fp32"]), st.integers(1, 3))
def test_any_state_comes_out_as_it_is(made: list[tuple[torch.Tensor, Any]], dtype: str | None, files: int) -> None:
    state: dict[str, Any] = {"model": {f"w{number}": tensor for number, (tensor, _) in enumerate(made)}, "step": 3}
    cuts = {f"model.w{number}": its for number, (_, its) in enumerate(made) if its is not None}
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder)
        save_shards(state, root / "stock", cuts, files)
        export(root / "stock", root / "ours", to="dcp")
        assert not verify(str(root / "ours")).damages
        stock_load(into := zeros_like(state), root / "ours")
        assert same(into, state)
        becomes = {None: None, "bf16": torch.bfloat16, "fp32": torch.float32}[dtype]
        expected = {
            name: each.to(becomes) if becomes and each.is_floating_point() and each.itemsize > 1 else each
            for name, each in state["model"].items()
        }
        for source in ("stock", "ours"):
            export(root / source, root / f"{source}.hf", only="model", dtype=dtype, max_shard_size=700)
            found: dict[str, torch.Tensor] = {}
            for file in (root / f"{source}.hf").glob("*.safetensors"):
                found |= load_file(file)
            assert same({name: found[name] for name in expected}, expected) and len(found) == len(expected)
            export(root / source, root / f"{source}.pt", to="torch", only="model", dtype=dtype)
            assert same(torch.load(root / f"{source}.pt"), expected)


def test_views_are_read_as_they_are_stored(tmp_path: Path) -> None:
    """Stock DCP's checkpoints keep the strides of transposed tensors."""
    base = torch.randn(40, 30)
    state = {
        "transposed": base.t(),
        "permuted": torch.randn(5, 6, 7).permute(2, 0, 1),
        "columns": base[:, 3:9],
        "expanded": torch.randn(6, 1).expand(6, 20),
        "every second": torch.arange(50)[::2],
        "one": torch.randn(1, 40, 1, 30).permute(3, 2, 1, 0),
    }
    save_shards(state, tmp_path / "stock", {})
    for dtype in (None, "bf16"):
        export(tmp_path / "stock", tmp_path / f"out{dtype}", dtype=dtype)
        found = load_file(tmp_path / f"out{dtype}/model.safetensors")
        expected = {
            name: each.to(torch.bfloat16) if dtype and name[:5] != "every" else each for name, each in state.items()
        }
        assert same({name: found[name] for name in expected}, expected)
