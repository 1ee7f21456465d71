"""States with many unchanged tensors, and the bytes that their checkpoints write anew."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from support.checkpoints import verify
from support.states import same, stock_load, zeros_like

ELEMENTS = 1 << 18
"""The elements of a base tensor: 1 MiB."""


def state_of(tensors: int = 4) -> dict[str, Any]:
    """Return a state in which frozen base tensors and trained adapters alternate."""
    state: dict[str, Any] = {}
    for number in range(tensors):
        state[f"base.{number}"] = torch.randn(ELEMENTS)
        state[f"adapter.{number}"] = torch.randn(100 + number)
    return {**state, "optimizer": {"step": torch.tensor(0.0), "lr": 0.1}, "name": "one"}


def train(state: dict[str, Any], *names: str) -> None:
    """Change the adapters, the optimizer, and the tensors in ``names``."""
    for name, value in state.items():
        if name.startswith("adapter") or name in names:
            value += 1
    state["optimizer"]["step"] += 1
    state["optimizer"]["lr"] /= 2


def written(path: str | Path) -> int:
    """Return the bytes of data files that are not shared with other checkpoints."""
    files = [each.stat() for each in Path(path).rglob("*") if each.suffix in (".distcp", ".safetensors", ".pt")]
    return sum(facts.st_size for facts in files if facts.st_nlink == 1)


def check(path: str | Path, state: dict[str, Any]) -> None:
    """Assert that a checkpoint is undamaged, and that stock DCP loads ``state`` from it."""
    assert not verify(str(path)).damages
    stock_load(loaded := zeros_like(state), path)
    assert same(loaded, state)
