"""Copies from a CUDA device into a slot: queued on side streams, behind what the compute stream was given before.

Two streams a device. All that goes to the host goes through the first: small tensors, then large ones, both in the
order of the image. The second gathers small tensors into mirrors on the device (see ``gather.py``), up to two ahead:

    gathers   fetch, gather 0 | fetch, gather 1 | wait until mirror 0 is free, fetch, gather 2 | ...
    copies    wait for 0, bring it over | wait for 1, bring it over | ... | large | large | ...

The small ones come first so that no gathering waits for a large copy. Where all streams share one queue of the hardware
(``CUDA_DEVICE_MAX_CONNECTIONS=1``, as Megatron-LM has it) the training, too, would wait for what a gathering waits for.

Nobody waits on the host until all is queued, and then for events only, asleep (``blocking``), never for the device.

The tensors must not be given back to the allocator while a side stream reads them: whoever queues holds on to them
until the events are past. So ``Tensor.record_stream`` is not needed, which would keep their memory for longer. Memory
that is taken here is taken on the stream that uses it; the allocator orders it there.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from operator import attrgetter

import torch

from asyncckpt.gather import Run, allocate_mirrors, stretches
from asyncckpt.host_copy import Chunk, Many
from asyncckpt.targets import Targets

_device = attrgetter("device")

# What is reported as arrived at once: 1 to 3 ms on the link, so that an event (some us) does not count, and the
# worker's writes, far slower, begin early.
_CHUNK_BYTES = 64 << 20
# A call of torch lets go of Python's lock once for all of these.
_CHUNK_TENSORS = 1000

Ready = dict[torch.device, torch.cuda.Event]
"""For each CUDA device: when what its current stream had been given by the time of the save is done."""

Fence = Callable[[], None]
"""Has the current stream of a device wait, from here on, until the tensors there are copied. The host goes on."""


def ready_events(tensors: Sequence[torch.Tensor]) -> Ready:
    """To be called on the caller's own thread, whose current streams are meant."""
    if not torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        return {}
    devices = {device for device in set(map(_device, tensors)) if device.type == "cuda"}
    return {device: torch.cuda.current_stream(device).record_event() for device in devices}


class DeviceCopy:
    """The copies of those tensors of a plan that are on one device.

    Whatever thread calls: it may never have used a device, and would open a context on device 0 if it were not told
    which one is meant.
    """

    def __init__(self, device: torch.device, numbers: Sequence[int], targets: Targets) -> None:
        self._device = device
        self._side = _side_of(device)
        gathers = any(gathered for gathered, _ in stretches(numbers, targets))
        self.chunks: list[Chunk] = device_chunks(numbers, targets, self._side.mirrors_for(device) if gathers else [])

    def queue(self, tensors: Sequence[torch.Tensor], ready: Ready) -> list[torch.cuda.Event]:
        """Queue the copies; the events are when each of the ``chunks`` is there. If this raises, none is left."""
        side = self._side
        arrived: list[torch.cuda.Event] = []
        with torch.cuda.device(self._device), torch.cuda.stream(side.copies):
            try:
                side.copies.wait_event(ready[self._device])
                side.gathers.wait_event(ready[self._device])
                for chunk in self.chunks:
                    if isinstance(chunk, Run):
                        arrived.append(side.bring(chunk, tensors))
                    else:
                        chunk.copy(tensors)
                        arrived.append(_record(side.copies))
            except BaseException:
                _record(side.gathers).synchronize()
                _record(side.copies).synchronize()
                raise
        return arrived

    def wait(self, arrived: Sequence[torch.cuda.Event], done: Callable[[Chunk], object]) -> None:
        """Wait for what ``queue`` returned, and tell ``done`` of each chunk."""
        with torch.cuda.device(self._device):
            for chunk, event in zip(self.chunks, arrived, strict=True):
                event.synchronize()
                done(chunk)

    def fence(self, arrived: Sequence[torch.cuda.Event]) -> Fence:
        """For what ``queue`` returned: the last copy is behind all others."""
        return partial(_hold_back, self._device, arrived[-1])


class Part:
    """Some elements of a tensor that is too large for one chunk."""

    def __init__(self, number: int, first: int, elements: int, targets: Targets) -> None:
        place, spec = targets.places[number], targets.specs[number]
        self.begin = place.payload_at + first * spec.dtype.itemsize
        self._number, self._first, self._elements = number, first, elements
        self._whole = targets.tensor(number)
        self._into = self._whole.view(-1)[first : first + elements]

    def copy(self, tensors: Sequence[torch.Tensor]) -> None:
        tensor = tensors[self._number]
        with torch.inference_mode():
            # A conjugate that is only a flag is not left to copy_: it would carry it out on the host, at once, on
            # bytes that are still to come. (torch._foreach_copy_ is never given one, by torch's dispatcher.)
            if tensor.is_contiguous() and not tensor.is_conj() and not tensor.is_neg():
                self._into.copy_(tensor.view(-1)[self._first : self._first + self._elements], non_blocking=True)
            elif self._first == 0:  # all of it, for the other parts too; each some rows, whose copy is short-lived
                rows = max(1, tensor.size(0) * self._elements // tensor.numel())
                for into, some in zip(torch.split(self._whole, rows), torch.split(tensor, rows), strict=True):
                    into.copy_(some.resolve_conj().resolve_neg().contiguous(), non_blocking=True)


def device_chunks(numbers: Sequence[int], targets: Targets, mirrors: Sequence[torch.Tensor]) -> list[Chunk]:
    """The chunks of the tensors of these ``numbers``: runs (with no ``mirrors``, none), then all others."""
    runs: list[Chunk] = []
    chunks: list[Chunk] = []
    some: list[int] = []
    nbytes = 0

    def cut() -> None:
        nonlocal some, nbytes
        if some:
            chunks.append(Many(some, targets, non_blocking=True))
            some, nbytes = [], 0

    for gathered, stretch in stretches(numbers, targets):
        if gathered and mirrors:
            runs.append(Run(stretch, targets, mirrors, turn=len(runs)))
            continue
        for number in stretch:
            its = targets.places[number].payload_bytes
            if nbytes + its > _CHUNK_BYTES or len(some) == _CHUNK_TENSORS:
                cut()
            if its <= _CHUNK_BYTES:
                some.append(number)
                nbytes += its
                continue
            itemsize = targets.specs[number].dtype.itemsize
            total, step = its // itemsize, _CHUNK_BYTES // itemsize
            chunks += [Part(number, first, min(step, total - first), targets) for first in range(0, total, step)]
    cut()
    return runs + chunks


@dataclass
class _Side:
    """The streams and the mirrors of one device, which all copies of this process share."""

    copies: torch.cuda.Stream
    gathers: torch.cuda.Stream
    mirrors: list[torch.Tensor] | None = None
    freed: dict[int, torch.cuda.Event] = field(default_factory=dict)
    """For each mirror: when what was last in it had been brought over."""
    lock: threading.Lock = field(default_factory=threading.Lock)

    def mirrors_for(self, device: torch.device) -> list[torch.Tensor]:
        """The mirrors, now that somebody needs them; none where the device has no memory left."""
        with self.lock, torch.cuda.device(device), torch.cuda.stream(self.gathers):
            if self.mirrors is None:
                self.mirrors = allocate_mirrors(device)
            return self.mirrors

    def bring(self, run: Run, tensors: Sequence[torch.Tensor]) -> torch.cuda.Event:
        """Queue it; the event is when it is there. ``copies`` is the current stream."""
        with self.lock:
            if run.mirror in self.freed:
                self.gathers.wait_event(self.freed[run.mirror])
            with torch.cuda.stream(self.gathers):
                run.gather(tensors)
            self.copies.wait_event(self.gathers.record_event())
            run.bring()
            event = self.freed[run.mirror] = _record(self.copies)
            return event


_sides: weakref.WeakValueDictionary[torch.device, _Side] = weakref.WeakValueDictionary()
_sides_lock = threading.Lock()


def _side_of(device: torch.device) -> _Side:
    with _sides_lock:
        side = _sides.get(device)
        if side is None:
            with torch.cuda.device(device):
                side = _Side(torch.cuda.Stream(device), torch.cuda.Stream(device))  # type: ignore[no-untyped-call]
            _sides[device] = side
        return side


def _record(stream: torch.cuda.Stream) -> torch.cuda.Event:
    """When the stream has come to here. Who waits for it sleeps, and does not spin."""
    event = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]
    event.record(stream)
    return event


def _hold_back(device: torch.device, event: torch.cuda.Event) -> None:
    torch.cuda.current_stream(device).wait_event(event)
