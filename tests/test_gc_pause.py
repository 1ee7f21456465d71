"""Test which calls pause the garbage collector."""

from __future__ import annotations

import gc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from support.interrupts import interrupted_everywhere
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner

from asyncckpt import UnsavableStateError, async_save
from asyncckpt.threads import without_gc


@without_gc
def _within(then: Callable[[], object] = lambda: None) -> bool:
    then()
    return gc.isenabled()


def _interrupt() -> None:
    raise KeyboardInterrupt


def test_it_ends_however_it_ends() -> None:
    assert not _within()
    assert gc.isenabled()
    assert not _within(_within)
    assert gc.isenabled()
    with pytest.raises(KeyboardInterrupt):
        _within(_interrupt)
    assert gc.isenabled()


def test_it_ends_wherever_it_is_interrupted() -> None:
    for _ in interrupted_everywhere(_within, "threads.py"):
        assert gc.isenabled()


def test_who_has_switched_it_off_has_it_off() -> None:
    gc.disable()
    try:
        _within()
        assert not gc.isenabled()
    finally:
        gc.enable()


class _Looking(DefaultSavePlanner):
    """Notes in each planning step whether the garbage collector is on."""

    def __init__(self) -> None:
        super().__init__()
        self.found: dict[str, bool] = {}

    def set_up_planner(self, *args: Any, **named: Any) -> None:
        self.found["set_up_planner"] = gc.isenabled()
        super().set_up_planner(*args, **named)

    def create_global_plan(self, *args: Any) -> Any:
        self.found["create_global_plan"] = gc.isenabled()
        return super().create_global_plan(*args)

    def finish_plan(self, *args: Any) -> Any:
        self.found["finish_plan"] = gc.isenabled()
        return super().finish_plan(*args)


def test_planning_collects_nothing_and_then_it_is_on(root: Path) -> None:
    planner = _Looking()
    async_save({"w": torch.ones(3)}, checkpoint_id=root / "1", planner=planner).result()
    assert gc.isenabled()
    with pytest.raises(UnsavableStateError):
        async_save({"w": torch.ones(3, device="meta")}, checkpoint_id=root / "2", planner=planner)
    assert gc.isenabled()
    assert planner.found == dict.fromkeys(("set_up_planner", "create_global_plan", "finish_plan"), False)
