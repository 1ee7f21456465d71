"""States to save, to load into, and to compare, and their comparison."""

from __future__ import annotations

import enum
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint import state_dict_loader


def small_state() -> dict[str, Any]:
    """Return a few tensors of several dtypes, and other values."""
    return {
        "model": {"weight": torch.randn(64, 32), "bias": torch.zeros(32, dtype=torch.bfloat16)},
        "optimizer": {"state": [{"exp_avg": torch.randn(64, 32), "step": torch.tensor(3.0)}], "lr": 1e-3},
        "step": 7,
    }


def zeros_like(state: Any) -> Any:
    """Return a state of the same structure with other values, to load into."""
    if isinstance(state, dict):
        return {key: zeros_like(value) for key, value in state.items()}
    if isinstance(state, list):
        return [zeros_like(value) for value in state]
    if isinstance(state, torch.Tensor):
        plain = state.layout == torch.strided and not state.is_quantized
        return torch.zeros_like(state) if plain else state.clone()
    return None


def same(one: Any, other: Any) -> bool:
    """Return whether two states are equal to the bit, with the values, dtypes and shapes of tensors."""
    if isinstance(one, dict):
        return isinstance(other, dict) and list(one) == list(other) and all(same(one[key], other[key]) for key in one)
    if isinstance(one, (list, tuple)):
        return type(one) is type(other) and len(one) == len(other) and all(map(same, one, other))
    if isinstance(one, torch.Tensor):
        if one.dtype != other.dtype or one.shape != other.shape:
            return False
        if one.layout != torch.strided:
            return bool(torch.equal(one.to_dense(), other.to_dense()))
        if one.is_quantized:
            return bool(torch.equal(one.dequantize(), other.dequantize()))
        return _raw(one) == _raw(other)
    return type(one) is type(other) and repr(one) == repr(other)


def _raw(tensor: torch.Tensor) -> bytes:
    flat = tensor.detach().resolve_conj().resolve_neg().contiguous().reshape(-1)
    return bytes(flat.view(torch.uint8).numpy().data) if flat.numel() else b""


def replicas(seed: int = 0, count: int = 24) -> dict[str, Any]:
    """Return a state that is equal on all ranks."""
    generator = torch.Generator().manual_seed(seed)
    tensors = {f"w{number}": torch.randn(64, 16 + number, generator=generator) for number in range(count)}
    return {"model": tensors, "step": seed}


def equal(one: dict[str, Any], other: dict[str, Any]) -> bool:
    return one["step"] == other["step"] and all(
        torch.equal(value, other["model"][name]) for name, value in one["model"].items()
    )


def stock_load(state: dict[str, Any], path: str | Path) -> None:
    """Load with stock DCP, on all ranks together or in the test alone."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is (disabled|unavailable)", category=UserWarning)
        state_dict_loader.load(state, checkpoint_id=path)


def pickle_enums_as_early_3_11(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pickle members of enums as Python 3.11.0 to 3.11.3 does."""
    monkeypatch.setattr(enum.Enum, "__reduce_ex__", lambda self, protocol: (getattr, (type(self), self.name)))
