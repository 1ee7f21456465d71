"""A made-up kind of device. Its streams run queued work later, in any order that their events allow."""

from __future__ import annotations

import random
import threading
from array import array
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import pytest
import torch

from asyncckpt.devices import kinds
from asyncckpt.devices.pinners import Pinner
from asyncckpt.shm.memcpy import copy_many
from asyncckpt.staging.device_copy import ChunkCopy
from asyncckpt.staging.host_copy import BatchCopy

TYPE = torch.device("privateuseone").type
"""Torch's type of a device from outside: the default one, or the name that ``simulated_device`` has given it."""
CPU = torch.device("cpu")


class Work:
    """Queued work. It may have to wait for work of another stream."""

    def __init__(self, run: Callable[[], None], after: Work | None = None) -> None:
        self._run, self._after, self.done = run, after, False

    def can_run(self) -> bool:
        return self._after is None or self._after.done

    def run(self) -> None:
        self._run()
        self.done = True


class MadeUpStream:
    def __init__(self, kind: MadeUpDevices) -> None:
        self.queue: list[Work] = []
        self.kind = kind
        kind.streams.append(self)

    def add(self, run: Callable[[], None], after: Work | None = None) -> Work:
        with self.kind.lock:
            self.queue.append(Work(run, after))
            return self.queue[-1]

    def wait_event(self, event: MadeUpEvent) -> None:
        self.add(lambda: None, event.work)


class MadeUpEvent:
    def __init__(self, stream: MadeUpStream) -> None:
        self.work, self.kind = stream.add(lambda: None), stream.kind

    def synchronize(self) -> None:
        with self.kind.lock:
            while not self.work.done:
                assert self.kind.step(), "streams wait for each other"


class MadeUpDevices:
    """All devices of the kind. Queued work runs as late as possible: when a caller waits for an event.

    ``copies_by_address``: the driver takes many copies in one call.
    """

    def __init__(self, seed: int = 0, copies_by_address: bool = False) -> None:
        self._copies_by_address = copies_by_address
        self.pinner: Pinner | None = None
        self.chance = random.Random(seed)
        self.streams: list[MadeUpStream] = []
        self.current: list[Any] = []
        self.lock = threading.RLock()

    def step(self) -> bool:
        """Run one piece of work that can run. Return False if there was none."""
        able = [stream for stream in self.streams if stream.queue and stream.queue[0].can_run()]
        if able:
            self.chance.choice(able).queue.pop(0).run()
        return bool(able)

    def is_initialized(self) -> bool:
        return True

    def used(self) -> None:
        return None

    def current_stream(self, device: torch.device) -> Any:
        return self.current[-1] if self.current else MadeUpStream(self)

    def new_stream(self, device: torch.device) -> Any:
        return MadeUpStream(self)

    @contextmanager
    def use(self, device: torch.device, stream: Any = None) -> Iterator[None]:
        self.current += [stream] if stream else []
        try:
            yield
        finally:
            if stream:
                self.current.pop()

    def record(self, stream: Any) -> MadeUpEvent:
        return MadeUpEvent(stream)

    def synchronize(self) -> None:
        while self.step():
            pass

    def is_capturing(self) -> bool:
        return False

    def copies_many(self, device: torch.device) -> bool:
        return self._copies_by_address

    def copy_many(
        self, device: torch.device, stream: Any, to: array[int], source: array[int], sizes: array[int]
    ) -> bool:
        assert stream is self.current[-1]
        if self.chance.random() < 0.2:
            return False
        stream.add(partial(copy_many, *(each[:] for each in (to, source, sizes))))
        return True

    def install(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Make this the kind of devices of type ``TYPE``. They use host memory. Copies on a stream are queued."""
        monkeypatch.setitem(kinds.KINDS, TYPE, self)

        def queued(method: Callable[..., None]) -> Callable[..., None]:
            def queue(unit: Any, *args: Any) -> None:
                if self.current:
                    self.current[-1].add(lambda: method(unit, *args))
                else:
                    method(unit, *args)

            return queue

        for owner, name in [(ChunkCopy, "copy"), (BatchCopy, "copy")]:
            monkeypatch.setattr(owner, name, queued(getattr(owner, name)))
