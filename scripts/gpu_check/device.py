"""The device that is looked at: a real one, or the simulated one of the tests, on which all of this is tried."""

from __future__ import annotations

import importlib
import os
import time
from collections.abc import Callable
from typing import Any

import torch

from asyncckpt.devices import kinds
from asyncckpt.devices.kinds import DeviceKind
from asyncckpt.devices.pinners import Pinner


class Device:
    """One device, with what torch and staging know of it."""

    def __init__(self, name: str) -> None:
        """``name``: as torch has it, ``cuda`` or ``cuda:1``; or ``simulated``."""
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
        """What pins memory for it."""
        return self.kind.pinner

    def synchronize(self) -> None:
        """Wait for all that it was given."""
        self.module.synchronize()

    def time(self, work: Callable[[], object], rounds: int = 3) -> float:
        """The least seconds that ``work`` takes, until the device has done it."""
        found = []
        for _ in range(rounds + 1):  # the first is for warming up
            self.synchronize()
            begun = time.perf_counter()
            work()
            self.synchronize()
            found.append(time.perf_counter() - begun)
        return min(found[1:])
