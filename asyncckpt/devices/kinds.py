"""The device seam: streams, events and pinned host memory, behind one small interface for each kind of device.

``kind_of`` finds the kind of a device by its type. One class serves all kinds: torch has a module for each type of
device, and these are alike. What differs is given to it, first of all how memory is pinned (``pinners.py``). What is on
a device without a kind is staged by plain, synchronous copies, when all is done that the device was given.

Nothing else in the package says ``torch.cuda``, but what speaks NCCL. (Not ``torch.accelerator`` and ``torch.Event``:
they know one type of device in a process, and waits for such an event spin.)
"""

from __future__ import annotations

import contextlib
import functools
import logging
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from itertools import chain
from operator import attrgetter
from types import MappingProxyType
from typing import Any, Protocol

import torch

from asyncckpt.devices.capture_mode import relaxed
from asyncckpt.devices.pinners import AscendPinner, CudaPinner, Pinner

logger = logging.getLogger(__name__)

_device = attrgetter("device")


class DeviceEvent(Protocol):
    """A point in the work of a stream."""

    def synchronize(self) -> None:
        """Have the host wait, asleep, until the stream has come to this point."""


class DeviceStream(Protocol):
    """A queue of work, which a device does in order."""

    def wait_event(self, event: Any) -> None:
        """Have what is queued from here on wait for ``event``. The host goes on."""


class DeviceKind(Protocol):
    """What is needed of one kind of device. Any thread may call, also one that has never used a device."""

    pinner: Pinner | None

    def is_initialized(self) -> bool:
        """Whether this process uses devices of the kind; asking starts none."""

    def used(self) -> Sequence[torch.device] | None:
        """The devices of the kind that this process uses; None: nobody can say."""

    def current_stream(self, device: torch.device) -> DeviceStream:
        """The stream that the calling thread's work on ``device`` goes to."""

    def new_stream(self, device: torch.device) -> DeviceStream:
        """A stream beside all others of ``device``."""

    def use(self, device: torch.device, stream: DeviceStream | None = None) -> AbstractContextManager[None]:
        """Make ``device`` and, if given, its ``stream`` the calling thread's current ones. What the thread does then
        disturbs no capture of another.

        A thread that does not say which device it means may open a context on the first one.
        """

    def record(self, stream: DeviceStream) -> DeviceEvent:
        """The point at which all work is done that ``stream`` has been given so far."""

    def synchronize(self) -> None:
        """Have the host wait for all work of all devices of the kind that this process uses."""

    def is_capturing(self) -> bool:
        """Whether the calling thread's current stream, on its current device, is being captured in a graph."""


ReadyEvents = dict[torch.device, DeviceEvent]
"""For devices that have a kind: when what the current stream had been given by the time of the save is done."""


class TorchDevices:
    """Devices of a type that torch has a module for."""

    def __init__(
        self,
        device_type: str,
        pinner: Pinner | None,
        is_used: Callable[[int], bool] | None = None,
        event: Mapping[str, Any] = MappingProxyType({}),
        relaxed: Callable[[], AbstractContextManager[None]] = contextlib.nullcontext,
    ) -> None:
        """Ask for nothing yet: the module may come later, or never.

        Args:
            device_type: As torch calls them.
            pinner: Pins memory for them; None: nobody can, and copies go by way of the driver's own buffers.
            is_used: Whether this process uses the device of that index. To have one wait that it does not use would
                open a context there, of some hundred MB. None: torch does not say.
            event: What an event has to be given, so that the host waits for it asleep.
            relaxed: In what it returns, the thread disturbs no graph that another one captures.
        """
        self.pinner = pinner
        self._type = device_type
        self._is_used = is_used
        self._event = dict(event)
        self._relaxed = relaxed

    @property
    def _module(self) -> Any:
        return torch.get_device_module(self._type)

    def is_initialized(self) -> bool:
        module = getattr(torch, self._type, None)
        return module is not None and bool(module.is_initialized())

    def used(self) -> Sequence[torch.device] | None:
        if self._is_used is None:
            return None
        return [torch.device(self._type, index) for index in filter(self._is_used, range(self._module.device_count()))]

    def current_stream(self, device: torch.device) -> DeviceStream:
        stream: DeviceStream = self._module.current_stream(device)
        return stream

    def new_stream(self, device: torch.device) -> DeviceStream:
        with self._module.device(device):
            stream: DeviceStream = self._module.Stream(device)
            return stream

    @contextlib.contextmanager
    def use(self, device: torch.device, stream: Any = None) -> Iterator[None]:
        with self._module.device(device), self._module.stream(stream), self._relaxed():
            yield

    def record(self, stream: Any) -> DeviceEvent:
        event = self._module.Event(**self._event)
        event.record(stream)
        made: DeviceEvent = event
        return made

    def synchronize(self) -> None:
        used = self.used()
        for device in [self._module.current_device()] if used is None else used:
            self._module.synchronize(device)

    def is_capturing(self) -> bool:
        asks = getattr(self._module, "is_current_stream_capturing", None)
        return asks is not None and bool(asks())


def _has_cuda_context(index: int) -> bool:
    return torch._C._cuda_hasPrimaryContext(index)  # type: ignore[attr-defined, no-any-return]


_ASLEEP = MappingProxyType({"blocking": True})

KINDS: dict[str, DeviceKind] = {
    # ROCm is CUDA to torch; what it says of contexts is not to be relied on (pytorch #59750).
    "cuda": TorchDevices("cuda", CudaPinner(), None if torch.version.hip else _has_cuda_context, _ASLEEP, relaxed),
    "xpu": TorchDevices("xpu", None),  # Intel's; SYCL has no call that pins memory of others
    "npu": TorchDevices("npu", AscendPinner(), event=_ASLEEP),  # Ascend's, by torch_npu
}
"""The kinds of devices, by ``torch.device.type``."""


def kind_of(device: torch.device) -> DeviceKind | None:
    """The kind of ``device``; None for the host, and for devices of which nothing is known here."""
    return KINDS.get(device.type)


def use(device: torch.device) -> AbstractContextManager[None]:
    """``DeviceKind.use``; nothing, where there is no kind."""
    kind = kind_of(device)
    return contextlib.nullcontext() if kind is None else kind.use(device)


def ready_events(tensors: Sequence[torch.Tensor]) -> ReadyEvents:
    """The events of the devices that ``tensors`` are on, perhaps of others too; of the streams of the calling thread,
    which has to be the caller's own.

    For those on a device without a kind this waits, until it has done all that it was given.
    """
    unknown = _module_of_unknown()
    used = [kind.used() for kind in KINDS.values() if kind.is_initialized()]
    devices: Iterable[torch.device]
    if unknown is None and None not in used:
        devices = chain.from_iterable(each or () for each in used)  # to ask each tensor takes 0.2 us
    else:
        devices = set(map(_device, tensors))
    events: ReadyEvents = {}
    for device in devices:
        kind = kind_of(device)
        if kind is not None:
            events[device] = kind.record(kind.current_stream(device))
        elif unknown is not None and device.type not in ("cpu", "meta"):
            _warn_of_unknown(device.type)
            unknown.synchronize(device)
    return events


def first_device(tensors: Sequence[torch.Tensor], ready: ReadyEvents) -> torch.device | None:
    """Of the devices that are ``ready``, the one of the first of ``tensors`` that is on any; None: none is."""
    return next((device for device in map(_device, tensors) if device in ready), None) if ready else None


def wait_for(device: torch.device) -> None:
    """Wait until ``device`` has done all that it was given."""
    if (kind := kind_of(device)) is not None:
        with kind.use(device):
            kind.synchronize()
    elif device.type not in ("cpu", "meta"):
        torch.get_device_module(device.type).synchronize()


def synchronize_used() -> None:
    """Wait until the accelerators that this process uses have done all they were given; starts none that it does not.

    Of an accelerator without a kind, the current device.
    """
    for kind in KINDS.values():
        if kind.is_initialized():
            kind.synchronize()
    unknown = _module_of_unknown()
    if unknown is not None:
        unknown.synchronize()


def is_unknown_used() -> bool:
    """Whether this process uses an accelerator without a kind."""
    return _module_of_unknown() is not None


def _module_of_unknown() -> Any:
    """The module of torch for this machine's accelerator, if that has no kind, and is used; else None."""
    try:
        accelerator = torch.accelerator.current_accelerator()
    except RuntimeError:  # so torch 2.6 says that there is none
        return None
    if accelerator is None or accelerator.type == "cpu" or accelerator.type in KINDS:
        return None
    module = getattr(torch, accelerator.type, None)
    is_used = module is not None and (not hasattr(module, "is_initialized") or module.is_initialized())
    return module if is_used else None


@functools.cache
def _warn_of_unknown(device_type: str) -> None:
    logger.warning(
        "nothing is known here of devices of type %r: their tensors are copied one by one, while the host and the"
        " device wait",
        device_type,
    )
