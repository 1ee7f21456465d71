"""The device that the device tests run on: a GPU if there is one, else the simulated device."""

from __future__ import annotations

import os
from typing import Any

import pytest
import torch

from asyncckpt.devices import kinds
from asyncckpt.devices.kinds import TorchDevices
from asyncckpt.devices.pinners import CudaPinner
from asyncckpt.staging.device_copy import copy_stream
from support import simulated_device

CHOICE = os.environ.get("ASYNCCKPT_TEST_DEVICE") or ("cuda" if torch.cuda.is_available() else simulated_device.TYPE)
"""The type of the device."""

if CHOICE == simulated_device.TYPE:
    # Before any test uses the old name. From then on torch 2.6 asks the device itself whether host memory is pinned.
    if tuple(map(int, torch.__version__.split(".")[:2])) >= (2, 7):
        simulated_device.claim_name()
    elif simulated_device.why_not() is None:
        simulated_device.load()


def load() -> str:
    """Load the device for the rest of this process, and register its kind for staging. Return its type.

    Skip the test if the device cannot be loaded.
    """
    if CHOICE == simulated_device.TYPE and CHOICE not in kinds.KINDS:
        if (why_not := simulated_device.why_not()) is not None:
            pytest.skip(why_not)
        simulated_device.load()
        kind = TorchDevices(
            CHOICE, CudaPinner(CHOICE), module().is_used, {"blocking": True}, copy_many=lambda index: module().copy_many
        )
        kinds.KINDS[CHOICE] = kind
    return CHOICE


def module() -> Any:
    """Return torch's module for the device."""
    return torch.get_device_module(CHOICE)


def busy(seconds: float) -> None:
    """Occupy the device's current stream for about ``seconds``."""
    if CHOICE == "cuda":
        torch.cuda._sleep(int(seconds * 1.5e9))  # type: ignore[no-untyped-call]  # in cycles
    else:
        module().sleep(seconds)


def copy_stream_of(device: torch.device) -> Any:
    """Return the stream on which saves copy from a device."""
    kind = kinds.kind_of(device)
    assert kind is not None
    return copy_stream(device, kind)


def registrations() -> int:
    """Return the number of ranges of host memory that are registered with the simulated device."""
    simulated: Any = getattr(torch, simulated_device.TYPE, None)
    return int(simulated.registrations()) if hasattr(simulated, "registrations") else 0
