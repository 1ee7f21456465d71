"""The device interface: streams, events and pinned host memory of each kind of device.

``kind_of`` finds the kind of a device by its type. One class serves all kinds, because torch has a similar module for
each type of device. Differences between the types are arguments of the class, for example the calls that pin memory
(``pinners.py``). Tensors on a device without a kind are staged by synchronous copies, after all work of the device is
done.

No other module of the package uses ``torch.cuda``, except for NCCL. ``torch.accelerator`` and ``torch.Event`` are no
replacement: they know one type of device in a process, and a wait for such an event spins.
"""

from __future__ import annotations

import contextlib
import functools
import logging
from array import array
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from itertools import chain
from operator import attrgetter
from types import MappingProxyType
from typing import Any, Protocol

import torch

from asyncckpt.devices.capture_mode import relaxed
from asyncckpt.devices.pinners import AscendPinner, CudaPinner, Pinner
from asyncckpt.devices.runtime import CopyMany, cuda_copy_many

logger = logging.getLogger(__name__)

_device = attrgetter("device")


class DeviceEvent(Protocol):
    """A point in the work of a stream."""

    def synchronize(self) -> None:
        """Block the calling thread, asleep, until the stream has reached this point."""


class DeviceStream(Protocol):
    """A queue of work that a device does in order."""

    def wait_event(self, event: Any) -> None:
        """Let work that is queued from here on wait for ``event``. The host does not wait."""


class DeviceKind(Protocol):
    """The operations on one kind of device. Any thread may call, even one that has never used a device."""

    pinner: Pinner | None

    def is_initialized(self) -> bool:
        """Return whether this process uses devices of the kind. The call itself initializes no device."""

    def used(self) -> Sequence[torch.device] | None:
        """Return the devices of the kind that this process uses; None: unknown."""

    def current_stream(self, device: torch.device) -> DeviceStream:
        """Return the stream for the calling thread's work on ``device``."""

    def new_stream(self, device: torch.device) -> DeviceStream:
        """Return a new stream of ``device``."""

    def use(self, device: torch.device, stream: DeviceStream | None = None) -> AbstractContextManager[None]:
        """Make ``device``, and ``stream`` if given, current for the calling thread.

        The thread's calls then disturb no capture of another thread. A thread that does not select a device may open a
        context on the first device.
        """

    def record(self, stream: DeviceStream) -> DeviceEvent:
        """Return an event for the completion of all work that is queued on ``stream`` so far."""

    def synchronize(self) -> None:
        """Block the host until all work is done on all devices of the kind that this process uses."""

    def is_capturing(self) -> bool:
        """Return whether the calling thread's current stream, on its current device, is being captured in a graph."""

    def copies_many(self, device: torch.device) -> bool:
        """Return whether ``copy_many`` works on ``device``. The call itself initializes no device."""

    def copy_many(
        self, device: torch.device, stream: DeviceStream, to: array[int], source: array[int], sizes: array[int]
    ) -> bool:
        """Queue copies by one call, each of ``sizes[i]`` bytes from address ``source[i]`` to ``to[i]``.

        Call this inside ``use``. Returns False if the driver refuses. Then queue all copies in another way, because
        from then on ``copies_many`` is False.
        """


ReadyEvents = dict[torch.device, DeviceEvent]
"""For each device with a kind, an event for the completion of the current stream's work at the time of the save."""


class TorchDevices:
    """Devices of a type that has a module in torch."""

    def __init__(
        self,
        device_type: str,
        pinner: Pinner | None,
        is_used: Callable[[int], bool] | None = None,
        event: Mapping[str, Any] = MappingProxyType({}),
        relaxed: Callable[[], AbstractContextManager[None]] = contextlib.nullcontext,
        copy_many: Callable[[int], CopyMany | None] = lambda index: None,
    ) -> None:
        """Look up nothing yet, because the module of torch may be loaded later, or never.

        Args:
            device_type: The name of the type in torch.
            pinner: Pins host memory for the devices; None: pinning is impossible, so copies go through the driver's own
                buffers.
            is_used: Returns whether this process uses the device with an index; None: torch does not tell. A wait for
                an unused device would open a context of some hundred MB there.
            event: Arguments for an event for which the host waits asleep.
            relaxed: Returns a context in which the thread disturbs no capture of another thread.
            copy_many: Returns the call for many copies to and from the device with an index; None: there is none.
        """
        self.pinner = pinner
        self._type = device_type
        self._is_used = is_used
        self._event = dict(event)
        self._relaxed = relaxed
        self._find_copy_many = copy_many
        self._copy_many: dict[int, CopyMany | None] = {}

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

    def copies_many(self, device: torch.device) -> bool:
        if device.index not in self._copy_many:
            self._copy_many[device.index] = self._find_copy_many(device.index)
        return self._copy_many[device.index] is not None

    def copy_many(
        self, device: torch.device, stream: Any, to: array[int], source: array[int], sizes: array[int]
    ) -> bool:
        call = self._copy_many.get(device.index)
        if call is None:
            return False
        code = call(stream.cuda_stream, to, source, sizes)
        if code != 0:
            logger.warning(
                "%s copies tensors one by one from now on, because a call for %d copies failed with error %d",
                *(device, len(to), code),
            )
            self._copy_many[device.index] = None
        return code == 0


def _has_cuda_context(index: int) -> bool:
    return torch._C._cuda_hasPrimaryContext(index)  # type: ignore[attr-defined, no-any-return]


_ASLEEP = MappingProxyType({"blocking": True})

KINDS: dict[str, DeviceKind] = {
    # torch presents ROCm as CUDA, but its answers about contexts are unreliable there (pytorch #59750)
    "cuda": TorchDevices(
        *("cuda", CudaPinner(), None if torch.version.hip else _has_cuda_context, _ASLEEP, relaxed, cuda_copy_many)
    ),
    "xpu": TorchDevices("xpu", None),  # Intel; SYCL has no call that pins existing memory
    "npu": TorchDevices("npu", AscendPinner(), event=_ASLEEP),  # Ascend, by torch_npu
}
"""The kinds of devices, by ``torch.device.type``."""


def kind_of(device: torch.device) -> DeviceKind | None:
    """Return the kind of ``device``; None for the host, and for devices of unknown kind."""
    return KINDS.get(device.type)


def use(device: torch.device) -> AbstractContextManager[None]:
    """Return the context of ``DeviceKind.use``, or an empty context if the device has no kind."""
    kind = kind_of(device)
    return contextlib.nullcontext() if kind is None else kind.use(device)


def ready_events(tensors: Sequence[torch.Tensor]) -> ReadyEvents:
    """Record events on the calling thread's current streams, for the devices of ``tensors`` and perhaps other devices.

    Call this on the thread of the user's call, because current streams differ between threads. If a device has no kind,
    wait until all its work is done.
    """
    unknown = _module_of_unknown()
    used = [kind.used() for kind in KINDS.values() if kind.is_initialized()]
    devices: Iterable[torch.device]
    if unknown is None and None not in used:
        devices = chain.from_iterable(each or () for each in used)  # faster than the device of each tensor, 0.2 us each
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
    """Return the device of the first tensor on a ``ready`` device; None if there is no such tensor."""
    return next((device for device in map(_device, tensors) if device in ready), None) if ready else None


def wait_for(device: torch.device) -> None:
    """Wait until ``device`` has done all its work."""
    if (kind := kind_of(device)) is not None:
        with kind.use(device):
            kind.synchronize()
    elif device.type not in ("cpu", "meta"):
        torch.get_device_module(device.type).synchronize()


def synchronize_used() -> None:
    """Wait until all accelerators that this process uses have done their work. Initializes no accelerator.

    If the accelerator has no kind, wait only for its current device.
    """
    for kind in KINDS.values():
        if kind.is_initialized():
            kind.synchronize()
    unknown = _module_of_unknown()
    if unknown is not None:
        unknown.synchronize()


def is_unknown_used() -> bool:
    """Return whether this process uses an accelerator without a kind."""
    return _module_of_unknown() is not None


def used_module() -> Any:
    """Return torch's module of the accelerator that this process uses, such as ``torch.cuda``; None: it uses none."""
    used = (getattr(torch, device_type) for device_type, kind in KINDS.items() if kind.is_initialized())
    return next(used, None) or _module_of_unknown()


def _module_of_unknown() -> Any:
    """Return torch's module of this machine's accelerator, if the accelerator is used and has no kind; else None."""
    try:
        accelerator = torch.accelerator.current_accelerator()
    except RuntimeError:  # torch 2.6 raises this if there is none
        return None
    if accelerator is None or accelerator.type == "cpu" or accelerator.type in KINDS:
        return None
    module = getattr(torch, accelerator.type, None)
    is_used = module is not None and (not hasattr(module, "is_initialized") or module.is_initialized())
    return module if is_used else None


@functools.cache
def _warn_of_unknown(device_type: str) -> None:
    logger.warning(
        "tensors on devices of type %r are copied one by one, while the host and the device wait: asyncckpt does not"
        " know this type",
        device_type,
    )
