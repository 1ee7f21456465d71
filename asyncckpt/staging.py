"""From the trainer's tensors into a slot: the one copy that training waits for.

On the CPU small tensors are copied in groups, one call of torch for thousands, and large ones by ``memcpy``, both on
a few threads; what is not contiguous goes through ``Tensor.copy_``, which knows every layout. From a CUDA device the
copies run on a side stream into memory that the driver knows as pinned, after what the compute stream has been given.
"""

from __future__ import annotations

import ctypes
import logging
import math
import os
from collections import deque
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from itertools import compress
from operator import attrgetter, itemgetter

import torch

from asyncckpt.image import Image, TensorSpec
from asyncckpt.memcpy import memcpy, memcpy_holding
from asyncckpt.shm.segment import PAGE, Segment

logger = logging.getLogger(__name__)

# Tensors of fewer elements are copied in groups, 0.6 us a tensor. From here on each copy would start threads of torch's
# own (at::internal::GRAIN_SIZE), ours and those would fight, and a call of memcpy is the cheaper anyway.
_GRAIN = 32768
# Those dtypes that Tensor.copy_ has always known; the bytes of others are moved by memcpy.
_COPYABLE = frozenset(
    {
        *(torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.complex64, torch.complex128),
        *(torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.bool),
    }
)
# A large tensor is cut into pieces, so that several threads take part.
_PIECE_BYTES = 4 << 20
_COPY_THREADS = max(1, min(4, os.cpu_count() or 1))
# One registration of 512 GiB and more fails on some drivers.
_PINNED_PIECE_BYTES = 64 << 30
_PORTABLE = 1  # pinned for every device, not only the current one
_CUDA_SUCCESS, _CUDA_ALREADY_REGISTERED = 0, 712

_device = attrgetter("device")
_is_contiguous, _is_neg, _is_conj = torch.Tensor.is_contiguous, torch.Tensor.is_neg, torch.Tensor.is_conj
# Small copies in a row that hold Python's lock: some tens of milliseconds at the most.
_HOLDING_COPIES = 512


Ready = dict[torch.device, torch.cuda.Event]
"""For each CUDA device: when what its current stream had been given by the time of the save is done."""


def ready_events(tensors: Sequence[torch.Tensor]) -> Ready:
    """To be called on the caller's own thread, whose current streams are meant."""
    if not torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        return {}
    devices = {device for device in set(map(_device, tensors)) if device.type == "cuda"}
    return {device: torch.cuda.current_stream(device).record_event() for device in devices}


class _Group:
    """Tensors copied by one call, and their places in the slot."""

    def __init__(self, numbers: Sequence[int], targets: list[torch.Tensor]) -> None:
        self._pick = itemgetter(*numbers) if len(numbers) > 1 else itemgetter(slice(numbers[0], numbers[0] + 1))
        self._targets = targets
        self._addresses = list(map(torch.Tensor.data_ptr, targets))
        self._sizes = [target.nbytes for target in targets]

    def move(self, tensors: Sequence[torch.Tensor]) -> None:
        """As ``copy``, by memcpy where that will do: on the thread that holds Python's lock anyway it is the faster."""
        mine = self._pick(tensors)
        plain = all(map(_is_contiguous, mine)) and not any(map(_is_neg, mine)) and not any(map(_is_conj, mine))
        if not plain:
            self.copy(tensors)
            return
        addresses, sources, sizes = self._addresses, list(map(torch.Tensor.data_ptr, mine)), self._sizes
        for begin in range(0, len(sources), _HOLDING_COPIES):
            memcpy(addresses[begin], sources[begin], sizes[begin])  # whoever waits for the lock gets it here
            rest = slice(begin + 1, begin + _HOLDING_COPIES)
            deque(map(memcpy_holding, addresses[rest], sources[rest], sizes[rest]), maxlen=0)

    def copy(self, tensors: Sequence[torch.Tensor], non_blocking: bool = False) -> None:
        """Copy those of ``tensors`` that are of this group."""
        with torch.no_grad():
            torch._foreach_copy_(self._targets, self._pick(tensors), non_blocking=non_blocking)


class SlotStager:
    """Copies the tensors of one plan into one slot. Which tensors is new on every call; where to is not."""

    def __init__(self, image: Image, segment: Segment, offset: int) -> None:
        """The slot is the ``image.nbytes`` at ``offset`` of ``segment``."""
        # Of tensors that share their bytes the first is copied for all.
        self._own = [
            spec.alias is None and place.payload_bytes > 0
            for spec, place in zip(image.specs, image.tensors, strict=True)
        ]
        self._all_own = all(self._own)
        self._specs = list(compress(image.specs, self._own))
        self._places = list(compress(image.tensors, self._own))
        self._view = segment.view
        self._address = segment.address + offset
        self._offset = offset
        # How the work is divided depends on which devices the tensors are on, and is kept as long as they stay there.
        self._devices: list[torch.device] = []
        self._device_groups: dict[torch.device, _Group] = {}
        self._host_groups: list[_Group] = []
        self._host_single: list[int] = []

    def copy(
        self, tensors: Sequence[torch.Tensor], ready: Ready, pool: ThreadPoolExecutor, *, busy: bool = False
    ) -> None:
        """Copy ``tensors`` (all of the plan, in its order) into the slot, and return when that is done.

        Until then they must stay as they are. Copies from a CUDA device wait for what ``ready`` says the tensors wait
        for. The threads of ``pool`` take part. ``busy``: training goes on meanwhile, and wants Python's lock.
        """
        mine = tensors if self._all_own else list(compress(tensors, self._own))
        devices = list(map(_device, mine))
        if devices != self._devices:
            self._divide(devices)
        # The devices' copies are queued first and run while the host does its own.
        copied = [self._queue(device, group, ready, mine) for device, group in self._device_groups.items()]
        self._copy_host(mine, pool, busy)
        for event in copied:
            if event is not None:
                event.synchronize()

    def close(self) -> None:
        """Let go of the memory, whoever still holds on to this (the traceback of an error does)."""
        self._devices, self._device_groups, self._host_groups = [], {}, []

    def _divide(self, devices: list[torch.device]) -> None:
        numbers: dict[torch.device, list[int]] = {}
        for number, device in enumerate(devices):
            numbers.setdefault(device, []).append(number)
        host = numbers.pop(torch.device("cpu"), [])
        grouped = [number for number in host if _is_grouped(self._specs[number])]
        self._host_groups = [self._group(part) for part in _split(grouped, _COPY_THREADS)]
        self._host_single = [number for number in host if not _is_grouped(self._specs[number])]
        self._device_groups = {device: self._group(its) for device, its in numbers.items()}
        self._devices = devices

    def _copy_host(self, tensors: Sequence[torch.Tensor], pool: ThreadPoolExecutor, busy: bool) -> None:
        own, others = (self._host_groups[:1], self._host_groups[1:]) if not busy else ([], self._host_groups)
        tasks = [pool.submit(group.copy, tensors) for group in others]
        try:
            moves: list[tuple[int, int, int]] = []
            for number in self._host_single:
                tensor = tensors[number]
                if not tensor.is_contiguous() or tensor.is_neg() or tensor.is_conj():
                    tasks.append(pool.submit(self._group([number]).copy, tensors))
                    continue
                place = self._places[number]
                target, source = self._address + place.payload_at, tensor.data_ptr()
                for begin in range(0, place.payload_bytes, _PIECE_BYTES):
                    moves.append((target + begin, source + begin, min(_PIECE_BYTES, place.payload_bytes - begin)))
            tasks += [
                pool.submit(_move, moves[first::_COPY_THREADS]) for first in range(min(_COPY_THREADS, len(moves)))
            ]
            for group in own:
                group.move(tensors)
        finally:
            wait(tasks)  # nobody may be left copying from tensors that are the caller's again
        for task in tasks:
            task.result()

    @staticmethod
    def _queue(
        device: torch.device, group: _Group, ready: Ready, tensors: Sequence[torch.Tensor]
    ) -> torch.cuda.Event | None:
        """Queue the copies from one device; the event is that of the last."""
        if device.type != "cuda":
            group.copy(tensors)
            return None
        stream = _side_stream(device)
        stream.wait_event(ready[device])
        with torch.cuda.device(device), torch.cuda.stream(stream):
            group.copy(tensors, non_blocking=True)
            copied: torch.cuda.Event = stream.record_event()
            return copied

    def _group(self, numbers: Sequence[int]) -> _Group:
        return _Group(numbers, [self._target(number) for number in numbers])

    def _target(self, number: int) -> torch.Tensor:
        """The place of a tensor in the slot, as a tensor."""
        spec, place = self._specs[number], self._places[number]
        begin = self._offset + place.payload_at
        raw = torch.frombuffer(self._view[begin : begin + place.payload_bytes], dtype=torch.uint8)
        return raw.view(spec.dtype).view(spec.shape)


def _move(moves: Sequence[tuple[int, int, int]]) -> None:
    """Copy bytes: each move is (to, from, how many)."""
    for target, source, nbytes in moves:
        memcpy(target, source, nbytes)


def _is_grouped(spec: TensorSpec) -> bool:
    return math.prod(spec.shape) < _GRAIN and spec.dtype in _COPYABLE


def _split(numbers: list[int], parts: int) -> list[list[int]]:
    """``numbers`` in ``parts`` runs of about the same length; in one if they are few."""
    if len(numbers) < 16 * parts:
        return [numbers] if numbers else []
    size = -(-len(numbers) // parts)
    return [numbers[begin : begin + size] for begin in range(0, len(numbers), size)]


def copy_pool() -> ThreadPoolExecutor:
    """The threads that copy."""
    return ThreadPoolExecutor(_COPY_THREADS, thread_name_prefix="asyncckpt-copy")


_side_streams: dict[torch.device, torch.cuda.Stream] = {}


def _side_stream(device: torch.device) -> torch.cuda.Stream:
    """One stream a device for all copies of this process."""
    if device not in _side_streams:
        _side_streams[device] = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
    return _side_streams[device]


class PinnedMemory:
    """A segment made known to the CUDA driver as pinned, so that devices copy into it directly.

    In pieces, which no tensor crosses: a copy into two registrations at once is refused. What cannot be registered is
    copied through the driver's own buffers, slower but right; that is logged.
    """

    def __init__(self, segment: Segment, cuts: Sequence[int]) -> None:
        """Register ``segment``; ``cuts`` are the page offsets between which a piece may end."""
        self._runtime = torch.cuda.cudart()  # type: ignore[no-untyped-call]
        self._registered: list[int] = []
        base = segment.address
        begin = 0
        for end in _pieces(cuts, segment.nbytes):
            code = int(self._runtime.cudaHostRegister(base + begin, end - begin, _PORTABLE))
            if code == _CUDA_SUCCESS:
                self._registered.append(base + begin)
            elif code != _CUDA_ALREADY_REGISTERED:
                _clear_cuda_error()
                logger.warning("pinning %d bytes of staging memory failed with CUDA error %d", end - begin, code)
            begin = end

    def close(self) -> None:
        """Take the registrations back; before the segment is unmapped."""
        for address in self._registered:
            self._runtime.cudaHostUnregister(address)
        self._registered.clear()


def _clear_cuda_error() -> None:
    """Forget the runtime's last error, which would else be raised by the next, innocent kernel launch."""
    major = (torch.version.cuda or "").partition(".")[0]
    try:
        ctypes.CDLL(f"libcudart.so.{major}").cudaGetLastError()
    except (OSError, AttributeError):
        pass  # linked in some other way: the launch will say so


def _pieces(cuts: Sequence[int], nbytes: int) -> list[int]:
    """Ends of pieces of at most ``_PINNED_PIECE_BYTES`` where ``cuts`` allow, in whole pages, up to ``nbytes``."""
    ends: list[int] = []
    begin = last = 0
    for cut in [*sorted(cut // PAGE * PAGE for cut in cuts), nbytes]:
        if cut - begin > _PINNED_PIECE_BYTES and last > begin:
            ends.append(last)
            begin = last
        last = cut
    return [*ends, nbytes]
