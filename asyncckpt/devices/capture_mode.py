"""The capture mode of a thread: what CUDA lets it do while another thread captures a graph.

By default a capture forbids every thread what could wait for, or change, what is captured: an event that is waited
for, memory that is taken or pinned. Such a call fails, and ends the capture. What is done here has to do with no
graph, and a thread can say so. Untested on a device: written from the documentation of
``cudaThreadExchangeStreamCaptureMode``.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import os
from collections.abc import Callable, Iterator

import torch

_RELAXED = 2  # cudaStreamCaptureModeRelaxed, and hipStreamCaptureModeRelaxed


@contextlib.contextmanager
def relaxed() -> Iterator[None]:
    """In this, the calling thread disturbs no capture of other threads; nothing, where the runtime is not found."""
    exchange, mode = _exchange(), ctypes.c_int(_RELAXED)
    if exchange is None or exchange(ctypes.byref(mode)) != 0:
        yield
        return
    try:
        yield
    finally:
        exchange(ctypes.byref(mode))  # it holds what was there before


@functools.cache
def _exchange() -> Callable[..., int] | None:
    """The call of the runtime that torch has loaded."""
    if torch.version.cuda is not None:
        library, name = f"libcudart.so.{torch.version.cuda.partition('.')[0]}", "cudaThreadExchangeStreamCaptureMode"
    elif torch.version.hip is not None:
        library, name = "libamdhip64.so", "hipThreadExchangeStreamCaptureMode"
    else:
        return None
    try:
        call: Callable[..., int] = getattr(ctypes.CDLL(library, mode=os.RTLD_NOLOAD | os.RTLD_NOW), name)
    except (OSError, AttributeError):
        return None
    return call
