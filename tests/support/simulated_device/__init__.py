"""A simulated accelerator that turns missing waits, early reuse of memory and host access into errors that tests see.

The device uses torch's backend for other devices (PrivateUse1), and is registered as ``torch.simulated``. There are
two of them. They behave like a GPU, and unlike a host:

- A stream is a thread that does its work in order, after random delays (``streams.cpp``). A read without a wait sees
  old values.
- Freed memory is poisoned in the order of the stream that allocated it, and the stream reuses it at once
  (``memory.cpp``). A side stream that still reads sees poison or newer values.
- The host cannot access the device's memory. Tensors have addresses that cannot be used, and kernels have others.
- The driver tracks registered host memory, and answers as CUDA's does. It copies to the pages that existed at the
  registration, and refuses copies across two registrations. Copies from and to other memory block.
- A failed call leaves an error behind, and the next launch of its thread reports the error.
- Work can be captured and replayed.

The simulation says nothing about speed. Torch's CPU kernels do the computing (``ops.cpp``).
"""

from __future__ import annotations

import functools

import torch
from torch.utils.backend_registration import rename_privateuse1_backend

from support.simulated_device.build import build, compiler
from support.simulated_device.module import TYPE, fill, register

__all__ = ["TYPE", "claim_name", "load", "why_not"]


def why_not() -> str | None:
    """Return the reason why there is no simulated device here, or None if there is one."""
    return None if compiler() is not None else "there is no g++ to build the simulated device with"


def claim_name() -> None:
    """Give torch's backend for other devices its final name, before the device itself is loaded."""
    rename_privateuse1_backend(TYPE)
    register()


@functools.cache
def load() -> None:
    """Build the device if needed, and register it with torch for the rest of this process."""
    claim_name()
    torch.ops.load_library(build())  # type: ignore[no-untyped-call]
    fill()
