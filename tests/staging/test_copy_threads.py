"""Threads that copy: no tensor is read once the caller has it back, however the copy ends."""

from __future__ import annotations

import gc
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import closing
from typing import Any

import pytest
import torch
from support.interrupts import interrupted_everywhere

from asyncckpt.staging import host_copy
from asyncckpt.staging.copy_threads import CopyThreads
from asyncckpt.staging.host_copy import copy_units


@pytest.fixture
def threads() -> Iterator[CopyThreads]:
    with closing(CopyThreads(2, "test-copy")) as made:
        yield made


class _Unit:
    """Takes a moment; with ``fails`` it raises on a thread that is not the caller's."""

    begin = 0

    def __init__(self, fails: bool = False) -> None:
        self.caller, self.fails = threading.get_ident(), fails
        self.under_way = self.copied = 0

    def copy(self, tensors: Sequence[torch.Tensor]) -> None:
        self.under_way += 1
        try:
            time.sleep(0.001)
            if self.fails and threading.get_ident() != self.caller:
                raise ValueError("no room")
            self.copied += 1
        finally:
            self.under_way -= 1


def _nothing(_: object) -> None:
    pass


def test_nobody_copies_once_an_interrupt_has_ended_a_copy(
    threads: CopyThreads, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(host_copy, "_THREADS", 3)
    units: list[Any] = []

    def copy() -> None:
        units[:] = [_Unit() for _ in range(6)]
        copy_units(units, [], threads, _nothing)

    rounds = 0
    for _ in interrupted_everywhere(copy, "asyncckpt/staging/"):
        assert not any(unit.under_way for unit in units), rounds
        rounds += 1
    assert rounds > 100 and all(unit.copied == 1 for unit in units)
    copy()
    assert all(unit.copied == 1 for unit in units)


def test_what_fails_on_another_thread_is_raised(threads: CopyThreads, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host_copy, "_THREADS", 3)
    units: list[Any] = [_Unit(fails=True) for _ in range(50)]
    with pytest.raises(ValueError, match="no room"):
        copy_units(units, [], threads, _nothing)
    assert not any(unit.under_way for unit in units)


def test_calls_are_made_in_order_and_failures_end_no_thread(caplog: pytest.LogCaptureFixture) -> None:
    made: list[int] = []
    one = CopyThreads(1, "test-copy")
    one.run(lambda: 1 // 0)
    for number in range(100):
        one.run(lambda number=number: made.append(number))  # type: ignore[misc]
    one.close()
    one.close()
    assert made == list(range(100)) and "nobody was told" in caplog.text


def test_threads_end_with_what_they_belong_to() -> None:
    before = threading.active_count()
    forgotten = CopyThreads(3, "test-copy")
    assert threading.active_count() == before + 3
    del forgotten
    gc.collect()
    deadline = time.monotonic() + 10
    while threading.active_count() > before and time.monotonic() < deadline:
        time.sleep(0.01)
    assert threading.active_count() == before
