"""Pinners: registration of host memory with the drivers of several kinds of devices."""

from __future__ import annotations

import contextlib
import ctypes
from functools import cached_property
from typing import Any, Protocol

import torch

_PORTABLE = 1  # cudaHostRegisterPortable: pinned for every device, not only the current one


class Pinner(Protocol):
    """Registration of host memory with a driver, so that devices copy into it directly.

    Both calls return an error code of the driver, 0 for success, and clear the driver's last error. Call them inside
    ``DeviceKind.use``.
    """

    limit: int
    """Maximum bytes of one registration."""
    already_registered: int
    """The error code for memory that overlaps memory that is registered already."""

    def register(self, address: int, nbytes: int) -> int:
        """Pin ``nbytes`` bytes at ``address``. Both are multiples of the page."""

    def unregister(self, address: int) -> int:
        """Undo the registration that begins at ``address``."""


class CudaPinner:
    """Pinner by ``cudaHostRegister``, in the runtime of torch's module for a type of device."""

    # A registration of 512 GiB and more fails on some drivers. During a registration the driver blocks all kernel
    # launches. With ranges of this size, the training can launch between two registrations of an overlapped first save.
    # On an H200, 256 MiB took 11 ms, and 64 MiB took 2.7 ms. The time for each GiB was the same, 42 ms.
    limit = 64 << 20
    already_registered = 712  # cudaErrorHostMemoryAlreadyRegistered

    def __init__(self, device_type: str = "cuda") -> None:
        """Make a pinner. ``device_type``: the name of the type in torch."""
        self._type = device_type

    def register(self, address: int, nbytes: int) -> int:
        return self._checked(self._runtime().cudaHostRegister(address, nbytes, _PORTABLE))

    def unregister(self, address: int) -> int:
        return self._checked(self._runtime().cudaHostUnregister(address))

    def _runtime(self) -> Any:
        return torch.get_device_module(self._type).cudart()

    def _checked(self, code: Any) -> int:
        """Clear the runtime's last error, and return ``code``. Otherwise this thread's next kernel launch would fail.

        torch has no call for cudaGetLastError, but after each launch torch gets the last error and raises it. So this
        launches a kernel. A lasting error, as of a lost device, is found again by the next call.
        """
        if int(code) != 0:
            with contextlib.suppress(RuntimeError):
                torch.ones((), device=self._type)
        return int(code)


_NO_LIBRARY = -2


class AscendPinner:
    """Pinner by ``aclrtHostRegister`` of Ascend's runtime.

    Untested: written from its documentation, run on no device.
    """

    limit = 256 << 20  # one call can register some 200 GB, but other threads can make calls between smaller ranges
    already_registered = -1  # its documentation has no such code

    def register(self, address: int, nbytes: int) -> int:
        on_device = ctypes.c_void_p()
        mapped = 0  # ACL_HOST_REGISTER_MAPPED
        try:
            call = self._runtime.aclrtHostRegister
        except (OSError, AttributeError):  # the library is missing, or lacks the call
            return _NO_LIBRARY
        return int(
            call(ctypes.c_void_p(address), ctypes.c_uint64(nbytes), ctypes.c_int(mapped), ctypes.byref(on_device))
        )

    def unregister(self, address: int) -> int:
        return int(self._runtime.aclrtHostUnregister(ctypes.c_void_p(address)))

    @cached_property
    def _runtime(self) -> ctypes.CDLL:
        return ctypes.CDLL("libascendcl.so")  # loaded already, because the process uses such a device
