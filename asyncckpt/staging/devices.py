"""The device seam: streams, events and pinned host memory, behind one small interface for each kind of device.

``kind_of`` finds the kind of a device by its type. CUDA is the only one so far; ROCm is CUDA to torch. What is on a
device without a kind is staged by plain, synchronous copies. Nothing else in the package says ``torch.cuda``, but what
speaks NCCL.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager
from operator import attrgetter
from typing import Any, Protocol

import torch

_device = attrgetter("device")

_PORTABLE = 1  # cudaHostRegisterPortable: pinned for every device, not only the current one


class DeviceEvent(Protocol):
    """A point in the work of a stream."""

    def synchronize(self) -> None:
        """Have the host wait, asleep, until the stream has come to this point."""


class DeviceStream(Protocol):
    """A queue of work, which a device does in order."""

    def wait_event(self, event: Any) -> None:
        """Have what is queued from here on wait for ``event``. The host goes on."""


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


class DeviceKind(Protocol):
    """What staging needs of one kind of device. Any thread may call, also one that has never used a device."""

    pinner: Pinner | None

    def is_initialized(self) -> bool:
        """Whether this process uses devices of the kind; asking starts none."""

    def current_stream(self, device: torch.device) -> DeviceStream:
        """The stream that the calling thread's work on ``device`` goes to."""

    def new_stream(self, device: torch.device) -> DeviceStream:
        """A stream beside all others of ``device``."""

    def use(self, device: torch.device, stream: DeviceStream | None = None) -> AbstractContextManager[None]:
        """Make ``device`` and, if given, its ``stream`` the calling thread's current ones.

        A thread that does not say which device it means may open a context on the first one.
        """

    def record(self, stream: DeviceStream) -> DeviceEvent:
        """The point at which all work is done that ``stream`` has been given so far."""

    def synchronize(self) -> None:
        """Have the host wait for all work of all devices of the kind that this process uses."""


ReadyEvents = dict[torch.device, DeviceEvent]
"""For each device that has a kind: when what its current stream had been given by the time of the save is done."""


class CudaPinner:
    """``cudaHostRegister``."""

    # One registration of 512 GiB and more fails on some drivers. And while one is under way, the driver lets nobody
    # else launch anything: in an overlapped first save, ranges of this size let the training through now and then.
    limit = 4 << 30
    already_registered = 712  # cudaErrorHostMemoryAlreadyRegistered

    def register(self, address: int, nbytes: int) -> int:
        return self._checked(torch.cuda.cudart().cudaHostRegister(address, nbytes, _PORTABLE))  # type: ignore[no-untyped-call]

    def unregister(self, address: int) -> int:
        return self._checked(torch.cuda.cudart().cudaHostUnregister(address))  # type: ignore[no-untyped-call]

    def _checked(self, code: Any) -> int:
        """Take the runtime's last error, which this thread would else find after its next, innocent kernel launch.

        torch has no call for cudaGetLastError, but asks for it after each launch of its own, and raises what it finds.
        (An error that lasts, of a device that is lost, is found by the next call again.)
        """
        if int(code) != 0:
            with contextlib.suppress(RuntimeError):
                torch.ones((), device="cuda")
        return int(code)


class CudaDevices:
    """CUDA, and ROCm."""

    pinner: Pinner | None = CudaPinner()

    def is_initialized(self) -> bool:
        return torch.cuda.is_initialized()  # type: ignore[no-untyped-call, no-any-return]

    def current_stream(self, device: torch.device) -> DeviceStream:
        return torch.cuda.current_stream(device)

    def new_stream(self, device: torch.device) -> DeviceStream:
        with torch.cuda.device(device):
            return torch.cuda.Stream(device)  # type: ignore[no-untyped-call]

    @contextlib.contextmanager
    def use(self, device: torch.device, stream: Any = None) -> Iterator[None]:
        with torch.cuda.device(device), torch.cuda.stream(stream):
            yield

    def record(self, stream: Any) -> DeviceEvent:
        event = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]
        event.record(stream)
        return event

    def synchronize(self) -> None:
        for index in range(torch.cuda.device_count()):
            # To have a device wait that is not used would open a context there, of some hundred MB.
            if torch._C._cuda_hasPrimaryContext(index):  # type: ignore[attr-defined]
                torch.cuda.synchronize(index)


KINDS: dict[str, DeviceKind] = {"cuda": CudaDevices()}
"""The kinds of devices, by ``torch.device.type``."""


def kind_of(device: torch.device) -> DeviceKind | None:
    """The kind of ``device``; None for the host, and for devices of which nothing is known here."""
    return KINDS.get(device.type)


def use(device: torch.device) -> AbstractContextManager[None]:
    """``DeviceKind.use``; nothing, where there is no kind."""
    kind = kind_of(device)
    return contextlib.nullcontext() if kind is None else kind.use(device)


def ready_events(tensors: Sequence[torch.Tensor]) -> ReadyEvents:
    """The events of the devices that ``tensors`` are on; called on the caller's own thread, whose streams are meant."""
    if not any(kind.is_initialized() for kind in KINDS.values()):
        return {}
    kinds = {device: kind_of(device) for device in set(map(_device, tensors))}
    return {device: kind.record(kind.current_stream(device)) for device, kind in kinds.items() if kind is not None}


def synchronize_used() -> None:
    """Wait until the accelerators that this process uses have done all they were given; starts none that it does not.

    Of an accelerator without a kind, the current device.
    """
    for kind in KINDS.values():
        if kind.is_initialized():
            kind.synchronize()
    accelerator = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    if accelerator is not None and kind_of(accelerator) is None:
        module = torch.get_device_module(accelerator)
        if not hasattr(module, "is_initialized") or module.is_initialized():
            module.synchronize()
