"""The worker's memory, allocated beside that of other workers."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from support.attempts import checkpoint_attempt
from support.checkpoints import PAGE, checksum

from asyncckpt.link import segment_store
from asyncckpt.link.endpoint import announced_bytes, host_lock
from asyncckpt.link.segment_store import SegmentStore
from asyncckpt.shm import budget
from asyncckpt.shm.segment import Segment
from asyncckpt.shm.slots import State


@pytest.fixture(name="store")
def _store() -> Any:
    store = SegmentStore()
    yield store
    store.close()


def test_one_worker_at_a_time_looks_what_there_is(
    runtime: Path, monkeypatch: pytest.MonkeyPatch, store: SegmentStore
) -> None:
    """Ranks of one host allocate at the same time. Memory that suffices for one rank may not suffice for all."""
    seen_by_others: list[tuple[bool, int]] = []

    def seen(call: Callable[..., Any]) -> Callable[..., Any]:
        def wrapper(*args: Any, **options: Any) -> Any:
            with host_lock(0) as alone:
                seen_by_others.append((alone, announced_bytes()))
            return call(*args, **options)

        return wrapper

    monkeypatch.setattr(budget, "require", seen(budget.require))
    monkeypatch.setattr(Segment, "touch", seen(Segment.touch))
    store.allocate(3 * PAGE)
    # No other worker may check the free memory at the same time. Others may check during the allocation, and subtract
    # the announced bytes.
    assert seen_by_others == [(False, 0), (True, 3 * PAGE)]
    assert announced_bytes() == 0


def test_what_a_killed_worker_was_taking_counts_no_more(runtime: Path) -> None:
    runtime.mkdir(mode=0o700)
    (runtime / f"{os.getpid()}-0.memory").touch()
    assert announced_bytes() == 0 and not list(runtime.iterdir())


_TAKES_MEMORY_AND_ENDS = """
import threading
from asyncckpt.link.endpoint import announce_memory

begun = threading.Event()

def take():
    with announce_memory(0, 1):
        begun.set()
        threading.Event().wait()

threading.Thread(target=take, daemon=True).start()
assert begun.wait(60)
"""


def test_a_worker_that_ends_while_it_takes_memory_leaves_nothing(runtime: Path) -> None:
    subprocess.run([sys.executable, "-c", _TAKES_MEMORY_AND_ENDS], check=True, timeout=60)
    assert runtime.is_dir() and not list(runtime.iterdir())


def test_a_worker_that_is_stopped_meanwhile_does_not_keep_the_others(
    runtime: Path, monkeypatch: pytest.MonkeyPatch, store: SegmentStore, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(segment_store, "_TURN_S", 0.05)
    with host_lock(0):
        _, segment = store.allocate(PAGE)
    assert segment.nbytes == PAGE and "without the lock of this host" in caplog.text


def test_two_that_ask_at_once_are_told_the_same(
    tmp_path: Path, store: SegmentStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The second request arrives while the first one computes the checksums of an unwritten image."""
    number = store._add(segment := Segment.create("test", 4 * PAGE))
    attempt = checkpoint_attempt(tmp_path, segment)
    attempt.discard()
    store.hosted(number).describe(attempt.layout)
    store.hosted(number).slots.take(0, attempt.request.save_id)
    store.hosted(number).slots.set(0, State.STAGED)
    store.image_staged(replace(attempt.request, segment=number))
    answers = []

    def ask_meanwhile(data: memoryview) -> int:
        monkeypatch.setattr(segment_store, "checksum", checksum)
        answers.append(pool.submit(store.held_images).result(60))
        return checksum(data)

    monkeypatch.setattr(segment_store, "checksum", ask_meanwhile)
    with ThreadPoolExecutor(1) as pool:
        mine = store.held_images()
    assert mine[0].checksums and answers == [mine]
