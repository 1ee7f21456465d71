"""``torch.simulated``: the counterpart of ``torch.cuda``, as far as the tests and torch use it."""

from __future__ import annotations

import atexit
import contextlib
from array import array
from collections.abc import Iterator
from types import ModuleType
from typing import Any

import torch

TYPE = "simulated"
_library = torch.ops.simulated_device


class Stream(torch.Stream):
    """A stream of a device, from a pool."""

    def __new__(cls, device: Any = None, **given: Any) -> Stream:
        if given:
            return super().__new__(cls, **given)
        index = _index(device)
        return _stream(_library.new_stream(index), index)

    @property
    def cuda_stream(self) -> int:
        """The driver's handle, as in CUDA's streams."""
        return int(self.stream_id)

    def record_event(self, event: Any = None) -> Any:
        event = event or Event()
        event.record(self)
        return event


class Event(torch.Event):
    """An event. ``blocking`` exists as in CUDA, but all of these events block."""

    def __new__(cls, enable_timing: bool = False, blocking: bool = False) -> Event:
        return super().__new__(cls, TYPE)

    def record(self, stream: Any = None) -> None:
        super().record(stream or current_stream())


class Graph:
    """The captured work of a stream, for replay."""

    def __init__(self) -> None:
        self._number = -1

    @contextlib.contextmanager
    def capture(self) -> Iterator[None]:
        """Capture the work that is queued on the current stream in the block, instead of running it."""
        stream = current_stream()
        _library.begin_capture()
        try:
            yield
        finally:
            with use_stream(stream):
                self._number = _library.end_capture()

    def replay(self) -> None:
        _library.replay(self._number)


class device:
    """Makes a device the current device of the calling thread."""

    def __init__(self, which: Any) -> None:
        self._index = _index(which)

    def __enter__(self) -> None:
        self._before = _library.exchange_device(self._index)

    def __exit__(self, *_: object) -> None:
        _library.exchange_device(self._before)


@contextlib.contextmanager
def use_stream(stream: Stream | None) -> Iterator[None]:
    """Make ``stream`` the calling thread's current stream of its device, and the device the current device."""
    if stream is None:
        yield
        return
    with device(stream.device):
        before = _library.exchange_stream(stream.device.index, stream.stream_id)
        try:
            yield
        finally:
            _library.exchange_stream(stream.device.index, before)


def current_stream(which: Any = None) -> Stream:
    index = _index(which)
    return _stream(_library.current_stream(index), index)


def default_stream(which: Any = None) -> Stream:
    return _stream(0, _index(which))


def synchronize(which: Any = None) -> None:
    _library.synchronize(_index(which))


def empty_cache() -> None:
    for index in filter(is_used, range(device_count())):
        _library.empty_cache(index)


def mem_get_info(which: Any = None) -> tuple[int, int]:
    """Return the free bytes and the total bytes of the device."""
    total = _library.memory_limit(_index(which))
    return total - memory_reserved(which), total


def memory_reserved(which: Any = None) -> int:
    """Return the bytes of the device that this process holds."""
    return int(_library.memory_reserved(_index(which)))


def set_device(which: Any) -> None:
    _library.exchange_device(_index(which))


def device_count() -> int:
    return 2


def is_used(index: int) -> bool:
    """Return whether this process has used the device, so that CUDA would have a context."""
    return bool(_library.is_used(index))


def is_initialized() -> bool:
    return any(map(is_used, range(device_count())))


def is_available() -> bool:
    """Return False, so that torch never chooses the device by default in other tests of the same process."""
    return False


def copy_many(stream: int, to: array[int], source: array[int], sizes: array[int]) -> int:
    """Copy as ``cudaMemcpyBatchAsync`` does, on a stream of the current device."""
    with use_stream(_stream(stream, _index(None))):
        return int(_library.copy_many(*(each.buffer_info()[0] for each in (to, source, sizes)), len(to)))


class Runtime:
    """The counterpart of ``torch.cuda.cudart()``."""

    def __init__(self) -> None:
        self.cudaHostRegister = _library.host_register
        self.cudaHostUnregister = _library.host_unregister


def _nothing(*_: object) -> None:
    pass


_made = ModuleType(f"torch.{TYPE}")


def register() -> None:
    """Register the module with torch. Until the library is loaded, the module reports that there is no device."""
    if not hasattr(torch, TYPE):
        namespace: Any = _made
        namespace.is_available, namespace.device_count = is_available, lambda: 0
        namespace.is_initialized = lambda: False
        namespace._is_in_bad_fork, namespace.manual_seed_all = lambda: False, _nothing
        torch._register_device_module(TYPE, _made)  # type: ignore[no-untyped-call]


def fill() -> None:
    """Fill the module with its functions. The library has to be loaded."""
    made = _made
    calls = (default_stream, synchronize, empty_cache, mem_get_info, memory_reserved)
    for each in (Stream, Event, Graph, device, current_stream, copy_many, *calls):
        setattr(made, each.__name__, each)
    for call in (set_device, device_count, is_used, is_initialized):
        setattr(made, call.__name__, call)
    namespace: Any = made
    namespace.stream = use_stream
    namespace.current_device = _library.current_device
    namespace.is_current_stream_capturing = _library.is_capturing
    namespace.cudart, namespace.registrations = Runtime, _library.registrations
    namespace.set_memory_limit, namespace.set_longest_delay = _library.set_memory_limit, _library.set_longest_delay
    namespace.sleep = _library.sleep
    generator = torch.arange(16, dtype=torch.uint8)
    namespace.get_rng_state, namespace.set_rng_state = generator.clone, generator.copy_
    _library.init()
    # Stop the streams before torch's kernels are torn down, because a stream's thread may be inside a kernel.
    atexit.register(_library.stop_all)


def _index(which: Any) -> int:
    if which is None:
        return int(_library.current_device())
    if isinstance(which, int):
        return which
    index = torch.device(which).index
    return int(_library.current_device()) if index is None else index


def _stream(number: int, index: int) -> Stream:
    kind = torch._C._autograd.DeviceType.PrivateUse1.value
    return Stream(stream_id=number, device_index=index, device_type=kind)
