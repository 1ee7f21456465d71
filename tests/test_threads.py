"""Test threads and the tasks of pools."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from queue import Empty
from typing import Any

import pytest

from asyncckpt.threads import Flag, Mailbox, settle


class _NoMemory:
    """A task's lock that raises ``MemoryError``."""

    def acquire(self) -> None:
        raise MemoryError

    __enter__ = acquire

    def __exit__(self, *_: object) -> None:
        pass


def test_an_exception_while_tasks_are_settled_keeps_no_lock() -> None:
    """The thread of another task can end that task."""
    tasks: list[Future[int]] = sorted((Future() for _ in range(2)), key=id)
    running, broken = tasks
    running.set_running_or_notify_cancel()
    lock: Any = _NoMemory()
    broken._condition = lock
    with pytest.raises(MemoryError):
        settle(tasks)
    ending = threading.Thread(target=running.set_result, args=[1], daemon=True)
    ending.start()
    ending.join(10)
    assert not ending.is_alive() and running.result(0) == 1


@pytest.mark.parametrize("waits", [lambda seconds: Flag().wait(seconds), lambda seconds: _is_there(Mailbox(), seconds)])
def test_a_wait_ends_although_a_signal_handler_runs_past_its_timeout(waits: Callable[[float], bool]) -> None:
    before = signal.signal(signal.SIGUSR1, lambda *_: time.sleep(0.3))
    sender = threading.Timer(0.05, os.kill, [os.getpid(), signal.SIGUSR1])
    try:
        sender.start()
        assert not waits(0.2)
    finally:
        sender.join()
        signal.signal(signal.SIGUSR1, before)


def _is_there(mailbox: Mailbox[int], timeout: float) -> bool:
    try:
        mailbox.get(timeout)
    except Empty:
        return False
    return True


def test_a_mailbox_gives_each_item_once() -> None:
    mailbox: Mailbox[int] = Mailbox()

    def send() -> None:
        for number in range(1000):
            mailbox.put(number)

    sender = threading.Thread(target=send)
    sender.start()
    assert [mailbox.get(10.0) for _ in range(1000)] == [*range(1000)]
    sender.join()
    assert not _is_there(mailbox, 0.0)
