"""Pinners: how the drivers of several kinds of devices are told of memory of the host."""

from __future__ import annotations

import contextlib
import ctypes
from functools import cached_property
from typing import Any, Protocol

import torch

_PORTABLE = 1  # cudaHostRegisterPortable: pinned for every device, not only the current one


class Pinner(Protocol):
    """Makes memory of the host known to a driver, so that devices copy into it directly.

    Both calls return an error code of the driver, 0 for success, and leave no error behind. They are made inside
    ``DeviceKind.use``.
    """

    limit: int
    """The most bytes that one call registers."""
    already_registered: int
    """The code for memory of which the driver knows a part already."""

    def register(self, address: int, nbytes: int) -> int:
        """Pin ``nbytes`` at ``address``, both whole pages."""

    def unregister(self, address: int) -> int:
        """Take back the registration that begins at ``address``."""


class CudaPinner:
    """``cudaHostRegister``, of the runtime that the module of torch for a type of device speaks to."""

    # One registration of 512 GiB and more fails on some drivers. And while one is under way the driver lets nobody else
    # launch anything: in an overlapped first save, ranges of this size let the training through. On an H200, 256 MiB
    # took 11 ms, and 64 MiB 2.7 ms; the time for each GiB, 42 ms, was the same.
    limit = 64 << 20
    already_registered = 712  # cudaErrorHostMemoryAlreadyRegistered

    def __init__(self, device_type: str = "cuda") -> None:
        """``device_type``: as torch calls the devices."""
        self._type = device_type

    def register(self, address: int, nbytes: int) -> int:
        return self._checked(self._runtime().cudaHostRegister(address, nbytes, _PORTABLE))

    def unregister(self, address: int) -> int:
        return self._checked(self._runtime().cudaHostUnregister(address))

    def _runtime(self) -> Any:
        return torch.get_device_module(self._type).cudart()

    def _checked(self, code: Any) -> int:
        """Take the runtime's last error, which this thread would else find after its next, innocent kernel launch.

        torch has no call for cudaGetLastError, but asks for it after each launch of its own, and raises what it finds.
        (An error that lasts, of a device that is lost, is found by the next call again.)
        """
        if int(code) != 0:
            with contextlib.suppress(RuntimeError):
                torch.ones((), device=self._type)
        return int(code)


_NO_LIBRARY = -2


class AscendPinner:
    """``aclrtHostRegister`` of Ascend's runtime. Untested: written from its documentation, and run on no device yet."""

    limit = 256 << 20  # one call takes some 200 GB; ranges of this size let others through
    already_registered = -1  # no code of its own is documented

    def register(self, address: int, nbytes: int) -> int:
        on_device = ctypes.c_void_p()
        mapped = 0  # ACL_HOST_REGISTER_MAPPED
        try:
            call = self._runtime.aclrtHostRegister
        except (OSError, AttributeError):  # no such library here, or none that can
            return _NO_LIBRARY
        return int(
            call(ctypes.c_void_p(address), ctypes.c_uint64(nbytes), ctypes.c_int(mapped), ctypes.byref(on_device))
        )

    def unregister(self, address: int) -> int:
        return int(self._runtime.aclrtHostUnregister(ctypes.c_void_p(address)))

    @cached_property
    def _runtime(self) -> ctypes.CDLL:
        return ctypes.CDLL("libascendcl.so")  # loaded already, by whoever uses such a device
