"""The worker's memory: how it is taken beside that of other workers."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from asyncckpt.shm import budget
from asyncckpt.shm.segment import PAGE, Segment
from asyncckpt.worker import segment_store
from asyncckpt.worker.endpoint import host_lock
from asyncckpt.worker.segment_store import SegmentStore


@pytest.fixture(name="store")
def _store() -> Any:
    store = SegmentStore()
    yield store
    store.close()


def test_one_worker_at_a_time_looks_what_there_is_and_takes_it(
    runtime: Path, monkeypatch: pytest.MonkeyPatch, store: SegmentStore
) -> None:
    """Ranks of one host ask at the same moment, and what is there for one of them is not there for each."""
    others_may: list[bool] = []

    def seen(call: Callable[..., Any]) -> Callable[..., Any]:
        def wrapper(*args: Any, **options: Any) -> Any:
            with host_lock(0) as alone:
                others_may.append(alone)
            return call(*args, **options)

        return wrapper

    monkeypatch.setattr(budget, "require", seen(budget.require))
    monkeypatch.setattr(Segment, "touch", seen(Segment.touch))
    store.allocate(PAGE)
    assert others_may == [False, False]
    with host_lock(0) as alone:
        assert alone


def test_a_worker_that_is_stopped_meanwhile_does_not_keep_the_others(
    runtime: Path, monkeypatch: pytest.MonkeyPatch, store: SegmentStore, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(segment_store, "_TURN_S", 0.05)
    with host_lock(0):
        _, segment = store.allocate(PAGE)
    assert segment.nbytes == PAGE and "without looking" in caplog.text
