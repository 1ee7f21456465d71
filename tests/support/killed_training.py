"""A training in two processes. The first is killed, and the second goes on from the memory that the first has left."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import torch

from asyncckpt import Checkpointer, Config
from asyncckpt.integrations.torch_file import torch_save
from asyncckpt.weights import WeightPublisher, WeightSubscriber
from support.checkpoints import complete_steps, step_folder, verify
from support.states import stock_load
from support.weights import model, version_in

_CONFIG = Config(timeout=20, commit_timeout=20, linger=30, slots=2)
_NUMBERS = 1 << 20  # 4 MiB: a large tensor, on two huge pages


def _state(step: int) -> dict[str, Any]:
    return {"w": torch.arange(_NUMBERS, dtype=torch.int32) + step, "bias": torch.full((3,), float(step)), "step": step}


def same(one: dict[str, Any], step: int) -> bool:
    """Return whether a state is that of ``step``, to the bit."""
    other = _state(step)
    return all(torch.equal(one[name], other[name]) for name in ("w", "bias")) and one["step"] == other["step"]


def begin(root: str, *, publishes: bool = True) -> None:
    """Save steps 1 and 2, twice one file of ``torch.save``, and publish weights, which are read and changed. Die."""
    checkpointer = Checkpointer(root, _CONFIG)
    for step in (1, 2):
        checkpointer.save(step, _state(step)).result(20)
        torch_save(_state(step), f"{root}.pt").result(20)
    if publishes:
        _publish()
    os.kill(os.getpid(), signal.SIGKILL)


def _publish() -> None:
    with WeightPublisher("policy") as publisher, WeightSubscriber("policy") as subscriber:
        for version in (1, 2, 3):
            publisher.publish(model(version), version)
            for readonly in (True, False, False):
                with subscriber.acquire(version, timeout=20, readonly=readonly) as weights:
                    assert version_in(weights) == version
                    if not readonly:
                        weights["embed.weight"].fill_(99.0)


def go_on(root: str) -> str:
    """Load step 2, save step 3, replan and save step 4, and load it from storage. Return the source of the first."""
    with Checkpointer(root, _CONFIG) as checkpointer:
        assert checkpointer.load(into := _state(0)) == 2 and same(into, 2)
        assert checkpointer.loaded is not None
        source = checkpointer.loaded.source
        checkpointer.save(3, _state(3)).result(20)
        checkpointer.save(4, {**_state(4), "more": torch.ones(1 << 20)}).result(20)
        assert checkpointer.load(into, memory=False, step=4) == 4 and same(into, 4)
    return source


def judge(root: Path) -> None:
    """Raise unless the checkpoints and the file have the values that were saved, for stock torch, too."""
    assert complete_steps(str(root)) == [1, 2, 3, 4]
    for step in (1, 2, 3, 4):
        assert not verify(step_folder(str(root), step)).damages
        stock_load(into := _state(0), step_folder(str(root), step))
        assert same(into, step)
    assert same(torch.load(f"{root}.pt"), 2)
