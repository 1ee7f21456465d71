"""States of which most does not change, and what their checkpoints have of their own."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from support.checkpoints import verify
from support.states import same, stock_load, zeros_like

ELEMENTS = 1 << 18
"""Of a tensor: a mebibyte."""


def state_of(tensors: int = 4) -> dict[str, Any]:
    """A frozen base, and what is trained beside it, in turns."""
    state: dict[str, Any] = {}
    for number in range(tensors):
        state[f"base.{number}"] = torch.randn(ELEMENTS)
        state[f"adapter.{number}"] = torch.randn(100 + number)
    return {**state, "optimizer": {"step": torch.tensor(0.0), "lr": 0.1}, "name": "one"}


def train(state: dict[str, Any], *names: str) -> None:
    """Change the adapters, and what is named."""
    for name, value in state.items():
        if name.startswith("adapter") or name in names:
            value += 1
    state["optimizer"]["step"] += 1
    state["optimizer"]["lr"] /= 2


def written(path: str | Path) -> int:
    """The bytes of data files that no other checkpoint has."""
    files = [each.stat() for each in Path(path).rglob("*") if each.suffix in (".distcp", ".safetensors", ".pt")]
    return sum(facts.st_size for facts in files if facts.st_nlink == 1)


def check(path: str | Path, state: dict[str, Any]) -> None:
    """That it is a checkpoint of that state, for us and for stock DCP."""
    assert not verify(str(path)).damages
    stock_load(loaded := zeros_like(state), path)
    assert same(loaded, state)
