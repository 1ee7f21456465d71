"""Test threads and the tasks of pools."""

from __future__ import annotations

import threading
from concurrent.futures import Future
from typing import Any

import pytest

from asyncckpt.threads import settle


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
