"""From the trainer's tensors into a slot: the one copy that training waits for."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from itertools import compress
from operator import attrgetter

import torch

from asyncckpt.device_copy import DeviceCopy, Fence, Ready
from asyncckpt.host_copy import Chunk, copy_chunks, host_chunks, many_chunks
from asyncckpt.image import Image
from asyncckpt.shm.segment import Segment
from asyncckpt.targets import Targets

_device = attrgetter("device")


class SlotStager:
    """Copies the tensors of one plan into one slot. Which tensors is new on every call; where to is not."""

    def __init__(self, image: Image, segment: Segment, offset: int, converted: Sequence[bool] = ()) -> None:
        """The slot is the ``image.nbytes`` at ``offset`` of ``segment``.

        ``converted``: which tensors come in another dtype than they are stored in, from the host; none, if empty.
        """
        # Of tensors that share their bytes the first is copied for all.
        self._own = [
            spec.alias is None and place.payload_bytes > 0
            for spec, place in zip(image.specs, image.tensors, strict=True)
        ]
        self._all_own = all(self._own)
        specs, places = list(compress(image.specs, self._own)), list(compress(image.tensors, self._own))
        self._targets: Targets | None = Targets(specs, places, segment, offset)
        self._converted = list(compress(converted, self._own)) or [False] * len(specs)
        self._nbytes = image.nbytes
        # How the work is divided depends on which devices the tensors are on, and is kept as long as they stay there.
        self._devices: list[torch.device] = []
        self._host: list[Chunk] = []
        self._device_copies: list[DeviceCopy] = []

    def copy(
        self,
        tensors: Sequence[torch.Tensor],
        ready: Ready,
        pool: ThreadPoolExecutor,
        arrived: Callable[[int], None],
        queued: Callable[[Sequence[Fence]], None],
    ) -> None:
        """Copy ``tensors`` (all of the plan, in its order) into the slot, and return when that is done.

        Until then they must stay as they are, also if this raises. Copies from a CUDA device wait for what ``ready``
        says the tensors wait for. The threads of ``pool`` take part. ``arrived`` is told, ever again and by any thread,
        how many bytes of the image, from its first on, are there; but not if all are the host's: who writes those
        meanwhile wants the same cores, and the copy took 15% longer for being durable 10% sooner. ``queued`` is told
        when the host's tensors are copied, and those of each device need no more than its fence.
        """
        mine = tensors if self._all_own else list(compress(tensors, self._own))
        if ready or self._device_copies or not self._devices:  # else all were on the host, and are
            self._divide(list(map(_device, mine)))
        done: Callable[[Chunk], object] = _ignore
        if self._device_copies:
            chunks = [*self._host, *(chunk for each in self._device_copies for chunk in each.chunks)]
            done = _Arrivals(chunks, self._nbytes, arrived).add
        # The devices' copies are queued first and run while the host does its own.
        under_way: list[tuple[DeviceCopy, list[torch.cuda.Event]]] = []
        try:
            for each in self._device_copies:
                under_way.append((each, each.queue(mine, ready)))
            copy_chunks(self._host, mine, pool, done)
            queued([each.fence(events) for each, events in under_way])
        finally:
            with ExitStack() as all_of_them:
                for each, events in under_way:
                    all_of_them.callback(each.wait, events, done)

    def close(self) -> None:
        """Let go of the memory, whoever still holds on to this (the traceback of an error does)."""
        self._targets, self._devices, self._host, self._device_copies = None, [], [], []

    def _divide(self, devices: list[torch.device]) -> None:
        if devices == self._devices or self._targets is None:
            return
        numbers: dict[torch.device, list[int]] = {}
        for number, device in enumerate(devices):
            numbers.setdefault(device, []).append(number)
        self._host, self._device_copies = [], []
        for device, its in numbers.items():
            if device.type == "cuda":
                self._device_copies.append(DeviceCopy(device, its, self._targets))
            else:
                plain = [number for number in its if device.type == "cpu" and not self._converted[number]]
                others = [number for number in its if device.type != "cpu" or self._converted[number]]
                self._host += host_chunks(plain, self._targets) + many_chunks(others, self._targets)
        self._host.sort(key=_begin)
        self._devices = devices


class _Arrivals:
    """How much of an image is there: all of it up to the first byte of the first chunk that is not."""

    def __init__(self, chunks: Sequence[Chunk], nbytes: int, tell: Callable[[int], None]) -> None:
        ordered = sorted(chunks, key=_begin)
        self._number = {chunk: number for number, chunk in enumerate(ordered)}
        self._begins = [*map(_begin, ordered), nbytes]
        self._missing = [True] * len(ordered)
        self._first = 0
        self._tell = tell
        self._lock = threading.Lock()

    def add(self, chunk: Chunk) -> None:
        """``chunk`` is there."""
        with self._lock:
            self._missing[self._number[chunk]] = False
            while self._first < len(self._missing) and not self._missing[self._first]:
                self._first += 1
            self._tell(self._begins[self._first])


def _ignore(_: Chunk) -> None:
    pass


def _begin(chunk: Chunk) -> int:
    return chunk.begin
