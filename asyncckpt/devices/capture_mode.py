"""The capture mode of a thread: the calls that CUDA allows it while another thread captures a graph.

By default a capture forbids all threads to make calls that could wait for, or change, the captured work. Examples are
waiting for an event, and allocating or pinning memory. A forbidden call fails, and ends the capture. The calls of this
library concern no graph, and a thread can declare that by ``cudaThreadExchangeStreamCaptureMode``. This module is
untested on a device, and written from the documentation of that call.
"""

from __future__ import annotations

import contextlib
import ctypes
from collections.abc import Iterator

from asyncckpt.devices.runtime import runtime_call

_RELAXED = 2  # cudaStreamCaptureModeRelaxed, and hipStreamCaptureModeRelaxed


@contextlib.contextmanager
def relaxed() -> Iterator[None]:
    """Let the calling thread make calls without disturbing captures of other threads. No effect without the runtime."""
    exchange, mode = runtime_call("ThreadExchangeStreamCaptureMode"), ctypes.c_int(_RELAXED)
    if exchange is None or exchange(ctypes.byref(mode)) != 0:
        yield
        return
    try:
        yield
    finally:
        exchange(ctypes.byref(mode))  # ``mode`` now holds the previous mode
