"""Offload a module's parameters from the device to the host and back, for a device shared with inference.

    parameters = OffloadedParameters(model, "cuda")  # once; moves nothing yet
    parameters.offload()  # to the host
    parameters.load()  # back to the device

Only the memory behind the tensors (their storages) moves: no parameter is replaced, and no ``.data`` is set.
Optimizers, tied parameters, views, FSDP2's shards, flat buffers and DDP's hooks stay valid. The training continues bit
for bit as without offloading. Copy this file, and change it; ``offload_sync.py`` uses it.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import chain
from typing import NoReturn, TypeVar

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from asyncckpt.devices.kinds import kind_of, synchronize_used, use
from asyncckpt.devices.pinned import PinnedMemory
from asyncckpt.errors import CheckpointError
from asyncckpt.shm import budget
from asyncckpt.shm.segment import PAGE, Segment, round_up
from asyncckpt.staging.slot_copy import wait_for_copies

_ALIGNMENT = 64
_COPY_LIMIT_S = 600.0

_T = TypeVar("_T")
_State = tuple[StorageWeakRef, tuple[int, ...]]
"""Identify the contents of a storage, without keeping its memory alive."""


@dataclass(frozen=True)
class _Part:
    """A storage, and the number of changes that torch has seen of each tensor in it."""

    storage: torch.UntypedStorage
    versions: tuple[int, ...]

    @property
    def state(self) -> _State:
        return StorageWeakRef(self.storage), self.versions  # type: ignore[no-untyped-call]


class OffloadedError(CheckpointError):
    """The module was called while its parameters were offloaded. Load them first."""


class OffloadedParameters:
    """Move the parameters and buffers of a module on ``device`` to the host and back.

    Storages are emptied and filled; no tensor is replaced or moved. All references to the tensors stay valid:
    optimizers, views, tied parameters, the flat buffers of FSDP and Megatron-LM (after a change of ``.data`` they would
    keep the old memory), and the hooks of DDP (autograd drops them if a tensor changes device). A ``DTensor`` is
    offloaded as its local shard. Gradients stay on the device.

    An offloaded tensor still reports the device, but has no memory there. Computing with it would crash the process.
    A call of the module, of a submodule, or of ``state_dict`` therefore raises ``OffloadedError``. An optimizer step,
    and code that reads a tensor directly, are not checked. Offload between two steps: a pending backward must not need
    the parameters.

    The first ``offload`` allocates the host's memory. Later calls reuse it while the storages keep their sizes. The
    memory is freed with this object. An offloaded module keeps this object alive.
    """

    def __init__(self, module: nn.Module, device: torch.device | str, *, threads: int = 4) -> None:
        """Set the module. Nothing is moved yet.

        Args:
            module: The module with the parameters and buffers.
            device: Their device. Without an index: any device of this kind.
            threads: Number of copying threads.
        """
        self.loaded = True
        """Whether the parameters are on the device."""
        self._module = module
        self._device = torch.device(device)
        self._threads = threads
        self._memory: _HostMemory | None = None
        self._offloaded: list[_Part] = []  # in the order of the memory's places
        self._known: Sequence[_State | None] = []  # contents of the places while the parameters are loaded
        self._guards = contextlib.ExitStack()

    def offload(self, *, unchanged: bool = False) -> int:
        """Copy the parameters to the host, unless the host has them already, and free their memory on the device.

        Wait for saves that still copy (``Config.overlap``). The memory goes to torch's allocator;
        ``torch.cuda.empty_cache()`` then frees it for other processes. If this call raises, all parameters are on the
        device.

        Args:
            unchanged: True if nothing has changed the parameters since ``load``, as in a sync that only reads them.
                Then the copies on the host are reused. torch does not see changes through ``.data``, or by kernels and
                collectives of other libraries, so the caller must promise this. Changes that torch sees are copied in
                any case.

        Returns:
            The number of copied bytes.
        """
        if not self.loaded:
            return 0
        wait_for_copies(_COPY_LIMIT_S)  # a save with overlap may still read this memory
        parts = self._parts()
        for part in parts:
            if not part.storage.resizable():
                raise CheckpointError("some parameters are in memory that torch cannot give back, such as numpy's")
        known: Sequence[_State | None] = self._known if unchanged else []
        self._known = []  # unknown until all are copied
        sizes = [part.storage.nbytes() for part in parts]
        if self._memory is None or self._memory.sizes != sizes:
            known = []
            self._memory = None  # free the old memory before the new allocation
            self._memory = _HostMemory(sizes, parts[0].storage.device if parts else None)
        copied = self._in_parallel(_to_host, parts, self._memory.places, known or [None] * len(parts))
        self._offloaded = parts
        self.loaded = False
        self._guard()
        self._empty()
        return sum(copied)

    def load(self) -> int:
        """Copy the parameters to the device, unless it has them already. Return the number of copied bytes.

        If this raises, for example because the device lacks memory, all parameters are still offloaded.
        """
        if self.loaded or self._memory is None:
            return 0
        try:
            # torch's allocator uses the current stream, so allocate on the caller's thread.
            for part, nbytes in zip(self._offloaded, self._memory.sizes, strict=True):
                part.storage.resize_(nbytes)
            copied = self._in_parallel(_to_device, self._offloaded, self._memory.places)
        except BaseException:
            self._empty()
            raise
        self._guards.close()
        self._known = [part.state for part in self._offloaded]
        self.loaded = True
        self._offloaded = []
        return sum(copied)

    def _empty(self) -> None:
        for part in self._offloaded:
            part.storage.resize_(0)

    def _parts(self) -> list[_Part]:
        """Return each storage once, in the order of the module."""
        for module in self._module.modules():
            if isinstance(module, FSDPModule):
                module.reshard()  # a forward without a backward leaves full parameters instead of shards
        found: dict[int, tuple[torch.UntypedStorage, list[int]]] = {}
        for tensor in chain(self._module.parameters(), self._module.buffers()):
            for plain in _plain(tensor):
                storage = plain.untyped_storage()
                if _is_on(self._device, plain) and storage.nbytes():
                    _, versions = found.setdefault(storage._cdata, (storage, []))
                    versions += (0 if each.is_inference() else each._version for each in (tensor, plain))
        return [_Part(storage, tuple(versions)) for storage, versions in found.values()]

    def _guard(self) -> None:
        """Make calls of the module raise before other hooks run, such as FSDP's, which gather its parameters."""
        for module in self._module.modules():
            self._guards.enter_context(module.register_forward_pre_hook(self._refuse, prepend=True))
            self._guards.enter_context(module.register_state_dict_pre_hook(self._refuse))  # type: ignore[no-untyped-call]

    def _refuse(self, *_: object) -> NoReturn:
        raise OffloadedError("the parameters of this module are offloaded: load them first")

    def _in_parallel(self, task: Callable[..., _T], *arguments: Iterable[object]) -> list[_T]:
        """Run the task in threads. Return the results in order. No copy runs any more when this returns or raises."""
        synchronize_used()  # the streams of the threads do not wait for the caller's streams
        try:
            with ThreadPoolExecutor(self._threads, thread_name_prefix="asyncckpt-offload") as pool:
                return list(pool.map(task, *arguments))
        finally:
            synchronize_used()


class _HostMemory:
    """One piece of host memory with a place for each storage. The memory is freed with this object.

    torch's own pinned memory would be rounded up to the next power of two: 33 GiB would take 64 GiB.
    """

    def __init__(self, sizes: Sequence[int], device: torch.device | None) -> None:
        """Allocate the places. ``sizes`` are in bytes, and not 0. Raise ``OutOfMemoryError`` if memory is short."""
        self.sizes = list(sizes)
        offsets: list[int] = []
        end = 0
        for nbytes in sizes:
            offsets.append(round_up(end, PAGE if nbytes >= PAGE else _ALIGNMENT))
            end = offsets[-1] + nbytes
        budget.require(end, "offloading parameters", "leave them on the device, or have other things give memory back")
        segment = Segment.create("asyncckpt-offload", max(end, PAGE))
        try:
            segment.touch()
            cuts = [offset for offset, nbytes in zip(offsets, sizes, strict=True) if nbytes >= PAGE]
            pinned = PinnedMemory(segment, cuts, device) if device is not None and kind_of(device) is not None else None
        except BaseException:
            segment.close()
            raise
        self._give_back = weakref.finalize(self, _give_back, pinned, segment)
        self._give_back.atexit = False  # at exit, the driver may have been unloaded already
        self.places = [
            torch.frombuffer(segment.view[offset : offset + nbytes], dtype=torch.uint8)
            for offset, nbytes in zip(offsets, sizes, strict=True)
        ]
        """The places as tensors of bytes, in the order of ``sizes``."""


def _give_back(pinned: PinnedMemory | None, segment: Segment) -> None:
    if pinned is not None:
        pinned.close()
    segment.close()


def _to_host(part: _Part, place: torch.Tensor, known: _State | None) -> int:
    """Copy the part to its place, unless ``known`` says that the place has it. Return the number of copied bytes."""
    if part.state == known:
        return 0
    with use(part.storage.device), torch.inference_mode():
        return place.copy_(_bytes(part.storage), non_blocking=True).nbytes


def _to_device(part: _Part, place: torch.Tensor) -> int:
    with use(part.storage.device), torch.inference_mode():
        return _bytes(part.storage).copy_(place, non_blocking=True).nbytes


def _bytes(storage: torch.UntypedStorage) -> torch.Tensor:
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)


def _is_on(device: torch.device, tensor: torch.Tensor) -> bool:
    return tensor.device.type == device.type and device.index in (None, tensor.device.index)


def _plain(tensor: object) -> Iterator[torch.Tensor]:
    """Yield the plain tensors in a ``DTensor`` or another wrapper. Yield a plain tensor itself."""
    if is_traceable_wrapper_subclass(tensor):
        names, _ = tensor.__tensor_flatten__()
        for name in names:  # in newer torch, one is a device mesh
            yield from _plain(getattr(tensor, name))
    elif isinstance(tensor, torch.Tensor):
        yield tensor
