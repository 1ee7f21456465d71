"""Test copy threads: no thread reads a tensor after the copy has returned, however the copy ends."""

from __future__ import annotations

import gc
import os
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import torch
from support.interrupts import interrupted_everywhere
from support.ranks import alone

from asyncckpt import Checkpointer, Config
from asyncckpt.staging import host_copy
from asyncckpt.staging.host_copy import CopyThreads, copy_units


@pytest.fixture
def threads() -> Iterator[CopyThreads]:
    with closing(CopyThreads(2, "test-copy")) as made:
        yield made


class _Unit:
    """A slow unit. With ``failed``, it raises on any thread except the caller's, which waits for this."""

    begin = 0

    def __init__(self, failed: threading.Event | None = None) -> None:
        self.caller, self.failed = threading.get_ident(), failed
        self.under_way = self.copied = 0

    def copy(self, tensors: Sequence[torch.Tensor]) -> None:
        self.under_way += 1
        try:
            time.sleep(0.001)
            if self.failed is not None:
                if threading.get_ident() != self.caller:
                    self.failed.set()
                    raise ValueError("no room")
                assert self.failed.wait(30), "no other thread copies"
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
    failed = threading.Event()
    units: list[Any] = [_Unit(failed) for _ in range(50)]
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
    assert made == list(range(100)) and "a call in the background failed" in caplog.text


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


def test_what_is_given_to_threads_that_have_ended_is_done_at_once() -> None:
    """A save at the end of the process, or in a fork, has no such threads."""
    made: list[int] = []
    ended = CopyThreads(1, "test-copy")
    ended.close()
    ended.run(lambda: made.append(1))
    ended.wait()
    assert made == [1]
    threads = CopyThreads(1, "test-copy")
    pid = os.fork()
    if pid == 0:
        threads.run(lambda: made.append(2))
        threads.wait()
        os._exit(len(made))
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 2
    threads.close()


def _overlap_and_end(root: str) -> None:
    """Save as a trainer in a process of ``multiprocessing`` that closes nothing."""
    checkpointer = Checkpointer(root, Config(overlap=True))
    checkpointer.prepare(state := {f"w{number}": torch.full((1 << 20,), 1.0) for number in range(40)})
    checkpointer.save(1, state)


@pytest.mark.usefixtures("forkserver")
def test_a_copy_is_finished_as_a_process_ends(tmp_path: Path) -> None:
    assert alone(_overlap_and_end, str(tmp_path))[0] == 0
    with Checkpointer(tmp_path) as checkpointer:
        assert checkpointer.load({"w39": torch.zeros(1 << 20)}) == 1
