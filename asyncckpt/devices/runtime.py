"""Calls of the CUDA or ROCm runtime that torch has loaded, if torch itself has no Python function for the call."""

from __future__ import annotations

import contextlib
import ctypes
import functools
import os
from array import array
from collections.abc import Callable

import torch


@functools.cache
def _library() -> ctypes.CDLL | None:
    """Return the runtime of CUDA or ROCm that torch has loaded; None if there is none."""
    if torch.version.cuda is not None:
        name = f"libcudart.so.{torch.version.cuda.partition('.')[0]}"
    elif torch.version.hip is not None:
        name = "libamdhip64.so"
    else:
        return None
    with contextlib.suppress(OSError):
        return ctypes.CDLL(name, mode=os.RTLD_NOLOAD | os.RTLD_NOW)
    return None


@functools.cache
def runtime_call(name: str) -> Callable[..., int] | None:
    """Return a call of the runtime by its name without the prefix; None if the runtime lacks the call."""
    prefix = "hip" if torch.version.cuda is None else "cuda"
    call: Callable[..., int] | None = getattr(_library(), prefix + name, None)
    return call


CopyMany = Callable[[int, "array[int]", "array[int]", "array[int]"], int]
"""Queues copies of ``sizes[i]`` bytes from ``source[i]`` to ``to[i]`` on a stream, by one call.

Arguments: the handle of the stream, ``to``, ``source``, ``sizes``. The arrays have type "Q". Returns an error code of
the driver, 0 for success. After an error some of the copies may be queued.
"""


class _Location(ctypes.Structure):
    _fields_ = [("type", ctypes.c_int), ("id", ctypes.c_int)]


class _Attributes(ctypes.Structure):
    _fields_ = [("order", ctypes.c_int), ("source", _Location), ("to", _Location), ("flags", ctypes.c_uint)]


_STREAM_ORDER = 1  # cudaMemcpySrcAccessOrderStream


_OFF = "ASYNC_CKPT_COPY_MANY"
_LEAST_VERSION = 12080  # older drivers refuse the call
_CAN_USE_HOST_POINTER = 91  # cudaDevAttrCanUseHostPointerForRegisteredMem; for example 0 under WSL


def cuda_copy_many(index: int) -> CopyMany | None:
    """Return ``CopyMany`` by ``cudaMemcpyBatchAsync`` for the device ``index``. This initializes no device.

    On an H200, 2,000 copies of 2 MB took as long as one copy of all bytes, and 1 to 3 ms on the host. Copied one by one
    by torch, they took 40 ms on the host, and 2 us more for each copy on the device.

    Returns:
        The call. If the runtime or the driver is older than CUDA 12.8, if the device has other addresses for registered
        memory, or if the environment variable ``ASYNC_CKPT_COPY_MANY`` is 0, the result is None.
    """
    version = torch.version.cuda
    call, last_error = runtime_call("MemcpyBatchAsync"), runtime_call("GetLastError")
    if version is None or call is None or last_error is None or os.environ.get(_OFF) == "0":
        return None
    if _number("DriverGetVersion") < _LEAST_VERSION or _number("DeviceGetAttribute", _CAN_USE_HOST_POINTER, index) != 1:
        return None
    has_failed_index = version.startswith("12.")  # CUDA 13 has dropped this argument
    attributes = (_Attributes * 1)(_Attributes(order=_STREAM_ORDER))
    index_of_first = (ctypes.c_size_t * 1)(0)  # all copies have the same attributes

    def copy_many(stream: int, to: array[int], source: array[int], sizes: array[int]) -> int:
        arrays = [ctypes.c_void_p(each.buffer_info()[0]) for each in (to, source, sizes)]
        failed = [ctypes.byref(ctypes.c_size_t())] if has_failed_index else []
        code = call(
            *(*arrays, ctypes.c_size_t(len(to)), attributes, index_of_first, ctypes.c_size_t(1)),
            *(*failed, ctypes.c_void_p(stream)),
        )
        if code != 0:
            last_error()  # clear the error, which the next kernel launch of this thread would raise otherwise
        return code

    return copy_many


def _number(name: str, *given: int) -> int:
    """Return the number that a call of the runtime writes to its first argument; -1 if the call fails."""
    call, found = runtime_call(name), ctypes.c_int(-1)
    if call is None or call(ctypes.byref(found), *map(ctypes.c_int, given)) != 0:
        return -1
    return found.value
