"""What needs a GPU."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from conftest import same, zeros_like

from asyncckpt.checkpointer import Checkpointer
from asyncckpt.config import Config

pytestmark = pytest.mark.cuda


def _state() -> dict[str, torch.Tensor]:
    return {
        **{f"small {number}": torch.randn(33, 7, device="cuda") for number in range(200)},
        "large": torch.randn(8 << 20, device="cuda"),
        "half": torch.randn(1000, 300, device="cuda").bfloat16(),
        "strided": torch.randn(300, 500, device="cuda").t(),
        "on the host": torch.randn(1000),
    }


@pytest.mark.parametrize("overlap", [False, True])
def test_saved_as_of_the_call(root: Path, overlap: bool) -> None:
    """The compute stream is busy before the call, and changes everything after it."""
    state = _state()
    with Checkpointer(root, Config(overlap=overlap)) as checkpointer:
        checkpointer.prepare(state)
        for step in range(1, 6):
            torch.cuda._sleep(50_000_000)  # type: ignore[no-untyped-call]  # what comes now is queued behind this
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


def test_the_staging_memory_is_pinned(root: Path) -> None:
    with Checkpointer(root) as checkpointer:
        checkpointer.prepare(state := _state())
        home = checkpointer._engine._homes.known[0].home
        assert home is not None and home._pinned is not None and home._pinned._registered
        target = torch.frombuffer(home.segment.view, dtype=torch.uint8)
        assert target.is_pinned()
        del target
        checkpointer.save(1, state).result(60)
        checkpointer.load(into := zeros_like(state))
        assert same({name: tensor.cpu() for name, tensor in into.items()}, {n: t.cpu() for n, t in state.items()})
