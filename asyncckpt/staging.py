"""From the trainer's tensors into a slot: the one copy that training waits for.

Contiguous CPU tensors are moved by ``memmove``, which on these sizes runs at the speed of memory where a tensor copy
adds microseconds each. Everything else goes through ``Tensor.copy_``, which knows every layout; from a CUDA device the
copies run on a side stream into memory that the driver knows as pinned, after what the compute stream has been given.
"""

from __future__ import annotations

import ctypes
import logging
import os
from collections import deque
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import compress
from operator import attrgetter
from typing import Any

import torch

from asyncckpt.image import Image
from asyncckpt.shm.segment import PAGE, Segment

logger = logging.getLogger(__name__)

# From this size on a copy is cut into pieces for several threads; below, handing it to one costs more than it saves.
_PIECE_BYTES = 4 << 20
_COPY_THREADS = max(1, min(4, (os.cpu_count() or 1)))
# One registration of 512 GiB and more fails on some drivers.
_PINNED_PIECE_BYTES = 64 << 30
_PORTABLE = 1  # pinned for every device, not only the current one
_CUDA_SUCCESS, _CUDA_ALREADY_REGISTERED = 0, 712

_is_contiguous, _is_neg, _is_conj, _data_ptr = (
    torch.Tensor.is_contiguous,
    torch.Tensor.is_neg,
    torch.Tensor.is_conj,
    torch.Tensor.data_ptr,
)
_is_cpu = attrgetter("is_cpu")
_move = ctypes.memmove  # which lets other threads run


Ready = dict[torch.device, torch.cuda.Event]
"""For each CUDA device: when what its current stream had been given by the time of the save is done."""


def ready_events(tensors: Sequence[torch.Tensor]) -> Ready:
    """To be called on the caller's own thread, whose current streams are meant."""
    devices = {tensor.device for tensor in tensors if tensor.is_cuda} if torch.cuda.is_initialized() else set()
    return {device: torch.cuda.current_stream(device).record_event() for device in devices}


class SlotStager:
    """Copies the tensors of one plan into one slot. Which tensors is new on every call; where to is not."""

    def __init__(self, image: Image, segment: Segment, offset: int) -> None:
        """The slot is the ``image.nbytes`` at ``offset`` of ``segment``."""
        # Of tensors that share their bytes the first is copied for all.
        self._own = [spec.alias is None and place.payload_bytes > 0 for spec, place in zip(image.specs, image.tensors)]
        specs = list(compress(image.specs, self._own))
        places = list(compress(image.tensors, self._own))
        begin = segment.address + offset
        self._targets = [begin + place.payload_at for place in places]
        self._sizes = [place.payload_bytes for place in places]
        self._view = segment.view
        self._slot = offset
        self._specs = specs
        self._places = places
        self._tensors: dict[int, torch.Tensor] = {}
        large = [number for number, nbytes in enumerate(self._sizes) if nbytes >= 2 * _PIECE_BYTES]
        self._large = large if _COPY_THREADS > 1 else []
        taken = set(self._large)
        self._small = [number not in taken for number in range(len(places))]
        self._small_targets = list(compress(self._targets, self._small))
        self._small_sizes = list(compress(self._sizes, self._small))

    def copy(self, tensors: Sequence[torch.Tensor], ready: Ready, pool: ThreadPoolExecutor | None) -> None:
        """Copy ``tensors`` (all of the plan, in its order) into the slot, and return when that is done.

        Until then they must stay as they are. Copies from a CUDA device wait for what ``ready`` says the tensors wait
        for. With a ``pool`` large CPU tensors are copied by its threads too.
        """
        mine = list(compress(tensors, self._own))
        plain = self._is_plain(mine)
        if plain is not True:
            self._copy_mixed(mine, plain, ready)
            return
        sources = list(map(_data_ptr, mine))
        tasks = []
        for number in self._large if pool else ():
            target, source, nbytes = self._targets[number], sources[number], self._sizes[number]
            tasks += [
                pool.submit(_move, target + begin, source + begin, min(_PIECE_BYTES, nbytes - begin))
                for begin in range(0, nbytes, _PIECE_BYTES)
            ]
        if pool:
            deque(map(_move, self._small_targets, compress(sources, self._small), self._small_sizes), maxlen=0)
        else:
            deque(map(_move, self._targets, sources, self._sizes), maxlen=0)
        for task in tasks:
            task.result()

    @staticmethod
    def _is_plain(tensors: Sequence[torch.Tensor]) -> bool | list[bool]:
        """True if all are bytes in a row in the memory of this process, else which of them are."""
        passes: list[Any] = [map(_is_cpu, tensors), map(_is_contiguous, tensors)]
        if all(map(all, passes)) and not any(map(_is_neg, tensors)) and not any(map(_is_conj, tensors)):
            return True
        return [
            tensor.is_cpu and tensor.is_contiguous() and not tensor.is_neg() and not tensor.is_conj()
            for tensor in tensors
        ]

    def _copy_mixed(self, tensors: Sequence[torch.Tensor], plain: list[bool], ready: Ready) -> None:
        by_device: dict[torch.device, list[int]] = {}
        for number, tensor in enumerate(tensors):
            if tensor.is_cuda:
                by_device.setdefault(tensor.device, []).append(number)
        with torch.no_grad():
            # The devices' copies are queued first and run while the host does its own.
            copied = [self._queue(device, ready, tensors, numbers) for device, numbers in by_device.items()]
            for number, (tensor, is_plain) in enumerate(zip(tensors, plain, strict=True)):
                if is_plain:
                    _move(self._targets[number], tensor.data_ptr(), self._sizes[number])
                elif not tensor.is_cuda:
                    self._target(number).copy_(tensor)
        for event in copied:
            event.synchronize()

    def _queue(
        self, device: torch.device, ready: Ready, tensors: Sequence[torch.Tensor], numbers: Sequence[int]
    ) -> torch.cuda.Event:
        """Queue the copies from one device; the event is that of the last."""
        stream = _side_stream(device)
        stream.wait_event(ready[device])
        with torch.cuda.device(device), torch.cuda.stream(stream):
            for number in numbers:
                self._target(number).copy_(tensors[number], non_blocking=True)
            event = torch.cuda.Event()
            event.record(stream)
        return event

    def _target(self, number: int) -> torch.Tensor:
        """The place of a tensor in the slot, as a tensor."""
        target = self._tensors.get(number)
        if target is None:
            spec, place = self._specs[number], self._places[number]
            begin = self._slot + place.payload_at
            raw = torch.frombuffer(self._view[begin : begin + place.payload_bytes], dtype=torch.uint8)
            target = self._tensors[number] = raw.view(spec.dtype).view(spec.shape)
        return target


def copy_pool() -> ThreadPoolExecutor | None:
    """Threads to help with large CPU copies; None where there is one core."""
    return ThreadPoolExecutor(_COPY_THREADS, thread_name_prefix="asyncckpt-copy") if _COPY_THREADS > 1 else None


_side_streams: dict[torch.device, torch.cuda.Stream] = {}


def _side_stream(device: torch.device) -> torch.cuda.Stream:
    """One stream a device for all copies of this process."""
    if device not in _side_streams:
        _side_streams[device] = torch.cuda.Stream(device)
    return _side_streams[device]


class PinnedMemory:
    """A segment made known to the CUDA driver as pinned, so that devices copy into it directly.

    In pieces, which no tensor crosses: a copy into two registrations at once is refused. What cannot be registered is
    copied through the driver's own buffers, slower but right; that is logged.
    """

    def __init__(self, segment: Segment, cuts: Sequence[int]) -> None:
        """Register ``segment``; ``cuts`` are the page offsets between which a piece may end."""
        self._runtime = torch.cuda.cudart()
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
