"""Succession: how a new worker takes the place of one whose trainer is gone, or of one that has died."""

from __future__ import annotations

import time
from collections.abc import Callable

from asyncckpt.errors import JobTakenError
from asyncckpt.worker.client import WorkerClient, WorkerOptions, deserted
from asyncckpt.worker.visit import Visit


def start_worker(
    options: WorkerOptions, visit: Visit | None, hand_over: Callable[[WorkerClient], object], timeout: float
) -> WorkerClient:
    """A worker that has its door, and what ``hand_over`` gives it of its predecessor's memory.

    ``visit``: at the predecessor, if it is still there: it leaves. ``timeout``: seconds that each step may take. Raises
    ``WorkerDiedError``, ``JobTakenError``, ``SaveTimeoutError``; then there is no new worker.
    """
    client = WorkerClient(options)
    try:
        # First the memory: until this one has it, the worker before it must stay.
        hand_over(client)
        if visit is not None:
            visit.retire(timeout)
        _open_door(client, options.door, timeout)
    except BaseException:
        client.close(timeout)
        raise
    return client


def _open_door(client: WorkerClient, door: str | None, timeout: float) -> None:
    """Have the worker take its door, which may be that of one whose trainer died while it took over."""
    deadline = time.monotonic() + timeout
    while True:
        try:
            client.open(timeout)
            return
        except JobTakenError:
            if door is None or time.monotonic() > deadline:
                raise
        if (visit := Visit.pay(door, timeout, deserted())) is not None:
            with visit:
                visit.retire(timeout)
