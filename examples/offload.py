"""Offloaded parameters: those of a module, off their device and back, for trainers that share it with inference.

What is moved is the memory behind the tensors (their storages): no parameter is replaced, no ``.data`` is set. So
optimizers, tied parameters, views, FSDP2's shards, flat buffers and DDP's hooks stay as they are, and training goes on
bit for bit as if nothing had been offloaded. Take this file, and change it as you like; ``offload_sync.py`` uses it.
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
"""Tells what a storage had in it from anything that any has in it later, and does not hold on to its memory."""


@dataclass(frozen=True)
class _Part:
    """A storage, and how often torch has seen each tensor in it change."""

    storage: torch.UntypedStorage
    versions: tuple[int, ...]

    @property
    def state(self) -> _State:
        return StorageWeakRef(self.storage), self.versions  # type: ignore[no-untyped-call]


class OffloadedError(CheckpointError):
    """Parameters were needed while they were offloaded: load them first."""


class OffloadedParameters:
    """The parameters and buffers of a module that are on ``device``, which can be brought to the host and back.

    It is the storages that are emptied and filled; no tensor is replaced or moved. Whatever has them still has them:
    optimizers, views, tied parameters, the flat buffers of FSDP and Megatron-LM (which would keep a tensor's old
    memory if it were given other ``.data``), the hooks of DDP (which autograd drops when a tensor changes device).
    A ``DTensor`` is offloaded as its local shard. Gradients stay where they are.

    While they are offloaded, a tensor says that it is on the device, and has no memory there. To compute with it would
    end the process: a call of the module, of one in it, or of ``state_dict`` raises ``OffloadedError``; the step of an
    optimizer does not, nor what reads a tensor by itself. No graph of autograd that is yet to go backward may need
    them: offload between two steps.

    The host's memory is taken by the first ``offload`` and used again by later ones, as long as the storages keep
    their sizes; it is given back with this object. An offloaded module keeps this object.
    """

    def __init__(self, module: nn.Module, device: torch.device | str, *, threads: int = 4) -> None:
        """Moves nothing yet.

        Args:
            module: Whose parameters and buffers they are.
            device: Where they are; without an index, any device of its kind.
            threads: How many copy.
        """
        self.loaded = True
        """Whether they are on the device."""
        self._module = module
        self._device = torch.device(device)
        self._threads = threads
        self._memory: _HostMemory | None = None
        self._offloaded: list[_Part] = []  # in the places of the memory
        self._known: Sequence[_State | None] = []  # what is in the places of the memory, while they are loaded
        self._guards = contextlib.ExitStack()

    def offload(self, *, unchanged: bool = False) -> int:
        """Bring them to the host, unless they are there, and give the memory of the device back to torch's allocator.

        It waits for saves that still copy (``Config.overlap``). Returns bytes copied. If this raises, they all are on
        the device. After it, ``torch.cuda.empty_cache()`` gives the memory to other processes.

        ``unchanged``: nothing has changed them since ``load``, as in a sync that only reads them; what is at the host
        already is not copied again. It has to be said, because torch counts only changes that it sees: not those
        through ``.data``, nor those by kernels and collectives of others. Those it sees are copied in any case.
        """
        if not self.loaded:
            return 0
        wait_for_copies(_COPY_LIMIT_S)  # of a save that overlaps: their memory is about to go
        parts = self._parts()
        for part in parts:
            if not part.storage.resizable():
                raise CheckpointError("some parameters are in memory that torch cannot give back, such as numpy's")
        known: Sequence[_State | None] = self._known if unchanged else []
        self._known = []  # until all are copied, nothing is
        sizes = [part.storage.nbytes() for part in parts]
        if self._memory is None or self._memory.sizes != sizes:
            known = []
            self._memory = None  # before more is taken
            self._memory = _HostMemory(sizes, parts[0].storage.device if parts else None)
        copied = self._in_parallel(_to_host, parts, self._memory.places, known or [None] * len(parts))
        self._offloaded = parts
        self.loaded = False
        self._guard()
        self._empty()
        return sum(copied)

    def load(self) -> int:
        """Bring them back to the device, unless they are there. Returns bytes copied.

        If this raises, as when memory is short there, they all are offloaded still.
        """
        if self.loaded or self._memory is None:
            return 0
        try:
            # On the caller's thread: torch's allocator gives memory to its current stream.
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
        """Each storage once, in the order of the module."""
        for module in self._module.modules():
            if isinstance(module, FSDPModule):
                module.reshard()  # a forward with no backward leaves whole parameters in the place of shards
        found: dict[int, tuple[torch.UntypedStorage, list[int]]] = {}
        for tensor in chain(self._module.parameters(), self._module.buffers()):
            for plain in _plain(tensor):
                storage = plain.untyped_storage()
                if _is_on(self._device, plain) and storage.nbytes():
                    _, versions = found.setdefault(storage._cdata, (storage, []))
                    versions += (0 if each.is_inference() else each._version for each in (tensor, plain))
        return [_Part(storage, tuple(versions)) for storage, versions in found.values()]

    def _guard(self) -> None:
        """Have calls of the module raise, before hooks of others, such as FSDP's, that gather its parameters."""
        for module in self._module.modules():
            self._guards.enter_context(module.register_forward_pre_hook(self._refuse, prepend=True))
            self._guards.enter_context(module.register_state_dict_pre_hook(self._refuse))  # type: ignore[no-untyped-call]

    def _refuse(self, *_: object) -> NoReturn:
        raise OffloadedError("the parameters of this module are offloaded: load them first")

    def _in_parallel(self, task: Callable[..., _T], *arguments: Iterable[object]) -> list[_T]:
        """What each task returned, in their order. No copy is under way when this ends, however it ends."""
        synchronize_used()  # the threads have streams of their own, which wait for none that the caller uses
        try:
            with ThreadPoolExecutor(self._threads, thread_name_prefix="asyncckpt-offload") as pool:
                return list(pool.map(task, *arguments))
        finally:
            synchronize_used()


class _HostMemory:
    """A place for each of some tensors' bytes, in one piece of memory, which is given back with this object.

    Not torch's pinned memory, which is rounded up to the next power of two: 33 GiB would take 64.
    """

    def __init__(self, sizes: Sequence[int], device: torch.device | None) -> None:
        """``sizes`` in bytes, none of them 0. Raises ``OutOfMemoryError``."""
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
        self._give_back.atexit = False  # the process ends, and the driver may be gone already
        self.places = [
            torch.frombuffer(segment.view[offset : offset + nbytes], dtype=torch.uint8)
            for offset, nbytes in zip(offsets, sizes, strict=True)
        ]
        """As bytes, in the order of the sizes."""


def _give_back(pinned: PinnedMemory | None, segment: Segment) -> None:
    if pinned is not None:
        pinned.close()
    segment.close()


def _to_host(part: _Part, place: torch.Tensor, known: _State | None) -> int:
    """Bytes copied: none if ``known``, which is in ``place`` and to be relied on, is what ``part`` has."""
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
    """The tensors that a ``DTensor``, or another wrapper, has its data in; any other is one itself."""
    if is_traceable_wrapper_subclass(tensor):
        names, _ = tensor.__tensor_flatten__()
        for name in names:  # a device mesh is among them, in newer torch
            yield from _plain(getattr(tensor, name))
    elif isinstance(tensor, torch.Tensor):
        yield tensor
