"""The device that is measured: a real one, or the simulated one of the tests, on which all of this is tried."""

from __future__ import annotations

import importlib
import os
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from typing import Any

import torch

from asyncckpt.devices import kinds
from asyncckpt.devices.kinds import DeviceKind
from asyncckpt.devices.pinned import PinnedMemory
from asyncckpt.devices.pinners import Pinner
from asyncckpt.shm.segment import Segment


class Device:
    """One device, as torch and staging see it."""

    def __init__(self, name: str) -> None:
        """Make the device ready.

        Args:
            name: As torch names it, ``cuda`` or ``cuda:1``; or ``simulated``.

        Raises:
            ValueError: asyncckpt does not know this kind of device.
        """
        if name == "simulated":
            os.environ["ASYNCCKPT_TEST_DEVICE"] = importlib.import_module("support.simulated_device").TYPE
            name = importlib.import_module("support.accelerators").load()
        self.is_real = name.startswith(("cuda", "xpu", "npu"))
        self.type = name.partition(":")[0]
        self.module: Any = torch.get_device_module(self.type)
        index = int(name.partition(":")[2] or 0)
        self.device = torch.device(self.type, index)
        self.module.set_device(index)
        kind = kinds.kind_of(self.device)
        if kind is None:
            raise ValueError(f"asyncckpt knows no devices of the kind {self.type}")
        self.kind: DeviceKind = kind

    @property
    def pinner(self) -> Pinner | None:
        """Return what pins memory for the device."""
        return self.kind.pinner

    @property
    def of_peers(self) -> str:
        """Return where tensors are that peers save: they do not know the simulated device, so there on the host."""
        return str(self.device) if self.is_real else "cpu"

    def synchronize(self) -> None:
        """Wait for all work that the device was given."""
        self.module.synchronize()

    def empty_cache(self) -> None:
        """Give the memory of dropped tensors back to the device."""
        self.module.empty_cache()

    def time(self, work: Callable[[], object], rounds: int = 3) -> float:
        """Return the least seconds that ``work`` takes, until the device has done it."""
        found = []
        for _ in range(rounds + 1):  # the first is for warming up
            self.synchronize()
            begun = time.perf_counter()
            work()
            self.synchronize()
            found.append(time.perf_counter() - begun)
        return min(found[1:])

    @contextmanager
    def pinned(self, nbytes: int) -> Iterator[torch.Tensor]:
        """Return pinned memory of the host: torch's own, or a registered segment for the simulated device."""
        if self.is_real:
            yield torch.empty(nbytes, dtype=torch.uint8, pin_memory=True)
            return
        with self.segment(nbytes) as (segment, tensor):
            pinned = PinnedMemory(segment, [], self.device)
            yield tensor
            pinned.close()

    @contextmanager
    def segment(self, nbytes: int) -> Iterator[tuple[Segment, torch.Tensor]]:
        """Return shared memory as slots have it, touched and not registered, and a tensor over it."""
        with closing(Segment.create("asyncckpt-gpu-check", nbytes)) as segment:
            segment.touch()
            tensor = torch.frombuffer(segment.view, dtype=torch.uint8, count=nbytes)
            yield segment, tensor

    def link_seconds(self, nbytes: int) -> tuple[float, float]:
        """Return the seconds that one copy of ``nbytes`` takes to pinned memory of the host, and from it."""
        source = torch.ones(nbytes, dtype=torch.uint8, device=self.device)
        with self.pinned(nbytes) as target:
            to_host = self.time(lambda: target.copy_(source, non_blocking=True))
            from_host = self.time(lambda: source.copy_(target, non_blocking=True))
        return to_host, from_host
