"""A simulated accelerator, which makes of each missing wait, early reuse and host access an error that tests see.

A device of torch's own backend for others (PrivateUse1), registered as ``torch.simulated``; two of them. What is like
on a GPU, and on no host:

- A stream is a thread, which does its work in order, after random delays (``streams.cpp``). Whoever reads without
  waiting finds what was there before.
- Memory that is freed is poisoned, in the order of the stream that it was taken on, and taken again there at once
  (``memory.cpp``): a side stream that still reads finds poison, or what came after.
- The host cannot touch the device's memory: tensors carry addresses that nobody may use, kernels have others.
- The driver knows of memory of the host what is registered, and answers as CUDA's does. It copies to the pages that
  were there when it was told, and refuses copies across two registrations. Copies from and to other memory block.
- A call that fails leaves an error behind, which the next launch of that thread finds.
- Work can be captured, and replayed.

It says nothing about speed. The computing is done by torch's kernels for the CPU (``ops.cpp``).
"""

from __future__ import annotations

import functools

import torch
from torch.utils.backend_registration import rename_privateuse1_backend

from support.simulated_device.build import build, compiler
from support.simulated_device.module import TYPE, fill, register

__all__ = ["TYPE", "claim_name", "load", "why_not"]


def why_not() -> str | None:
    """Why there is no simulated device here; None: there is one."""
    return None if compiler() is not None else "there is no g++ to build the simulated device with"


def claim_name() -> None:
    """Have torch call its backend for others as it will be called when it is loaded. There is no such device yet."""
    rename_privateuse1_backend(TYPE)
    register()


@functools.cache
def load() -> None:
    """Build it, if need be, and make it known to torch; for the rest of this process."""
    claim_name()
    torch.ops.load_library(build())  # type: ignore[no-untyped-call]
    fill()
