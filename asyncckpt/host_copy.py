"""Copies out of the host's memory into a slot, cut into chunks that a few threads take one after the other.

Small tensors are copied many at a time, by one call of torch that lets go of Python's lock; large ones by ``memcpy``,
in pieces. What is not contiguous goes through ``Tensor.copy_``, which knows every layout.
"""

from __future__ import annotations

import math
import os
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from typing import Protocol

import torch

from asyncckpt.image import TensorSpec
from asyncckpt.shm.memcpy import memcpy
from asyncckpt.structure import picker
from asyncckpt.targets import Targets

# Tensors of fewer elements are copied many at a time, 0.6 us each. From here on each copy would start threads of
# torch's own (at::internal::GRAIN_SIZE), ours and those would fight, and a call of memcpy is the cheaper anyway.
_GRAIN = 32768
# Those dtypes that Tensor.copy_ has always known; the bytes of others are moved by memcpy.
_COPYABLE = frozenset(
    {
        *(torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.complex64, torch.complex128),
        *(torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.bool),
    }
)
# Small tensors that are copied by one call: so few that the threads end together, so many that the call is no matter.
_MANY_TENSORS = 1000
_MANY_BYTES = 16 << 20
_PIECE_BYTES = 4 << 20
_THREADS = max(1, min(4, os.cpu_count() or 1))


class Chunk(Protocol):
    """A part of what is to be copied."""

    begin: int
    """It lies from this byte of the image on."""

    def copy(self, tensors: Sequence[torch.Tensor]) -> None:
        """Copy it out of ``tensors``, those of the plan, which may be others on every call."""


class Piece:
    """Some bytes of a large tensor."""

    def __init__(self, number: int, offset: int, targets: Targets) -> None:
        """From byte ``offset`` on of the tensor of that ``number``."""
        place = targets.places[number]
        self.begin = place.payload_at + offset
        self._number, self._offset, self._targets = number, offset, targets
        self._nbytes = min(_PIECE_BYTES, place.payload_bytes - offset)
        self._address = targets.address(number) + offset

    def copy(self, tensors: Sequence[torch.Tensor]) -> None:
        tensor = tensors[self._number]
        if tensor.is_cpu and tensor.is_contiguous() and not tensor.is_neg() and not tensor.is_conj():
            memcpy(self._address, tensor.data_ptr() + self._offset, self._nbytes)
        elif self._offset == 0:  # all of it, for the other pieces too
            with torch.inference_mode():
                self._targets.tensor(self._number).copy_(tensor)


class Many:
    """Tensors that are copied by one call."""

    def __init__(self, numbers: Sequence[int], targets: Targets, non_blocking: bool = False) -> None:
        """``non_blocking``: the copies are only queued, on the current stream of the device the tensors are on."""
        self.begin = targets.places[numbers[0]].payload_at
        self._non_blocking = non_blocking
        self._pick = picker(numbers)
        self._targets = list(map(targets.tensor, numbers))

    def copy(self, tensors: Sequence[torch.Tensor]) -> None:
        with torch.inference_mode():  # which spares each copy the way through autograd
            torch._foreach_copy_(self._targets, self._pick(tensors), non_blocking=self._non_blocking)


def host_chunks(numbers: Sequence[int], targets: Targets) -> list[Chunk]:
    """The chunks of the tensors of these ``numbers``, which are on the CPU."""
    small = [number for number in numbers if _is_small(targets.specs[number])]
    large = [number for number in numbers if not _is_small(targets.specs[number])]
    pieces: list[Chunk] = [
        Piece(number, offset, targets)
        for number in large
        for offset in range(0, targets.places[number].payload_bytes, _PIECE_BYTES)
    ]
    return pieces + many_chunks(small, targets)


def many_chunks(numbers: Sequence[int], targets: Targets, non_blocking: bool = False) -> list[Chunk]:
    """Chunks that go through torch, whatever device the tensors are on. ``non_blocking``: see ``Many``."""
    parts: list[list[int]] = []
    nbytes = _MANY_BYTES
    for number in numbers:
        if nbytes >= _MANY_BYTES or len(parts[-1]) == _MANY_TENSORS:
            parts.append([])
            nbytes = 0
        parts[-1].append(number)
        nbytes += targets.places[number].payload_bytes
    return [Many(part, targets, non_blocking) for part in parts]


def copy_chunks(
    chunks: Sequence[Chunk], tensors: Sequence[torch.Tensor], pool: ThreadPoolExecutor, done: Callable[[Chunk], object]
) -> None:
    """Copy the ``chunks``, on this thread and on those of ``pool``, in about their order; ``done`` is told of each."""
    left = deque(chunks)

    def work() -> None:
        while True:
            try:
                chunk = left.popleft()
            except IndexError:
                return
            chunk.copy(tensors)
            done(chunk)

    others: list[Future[None]] = []
    try:
        others += (pool.submit(work) for _ in range(min(_THREADS, len(chunks)) - 1))
        work()
    finally:
        left.clear()
        wait(others)  # nobody may be left copying from tensors that are the caller's again
    for other in others:
        other.result()


def copy_pool() -> ThreadPoolExecutor:
    """The threads that copy beside the caller's own."""
    return ThreadPoolExecutor(max(1, _THREADS - 1), thread_name_prefix="asyncckpt-copy")


def _is_small(spec: TensorSpec) -> bool:
    return math.prod(spec.shape) < _GRAIN and spec.dtype in _COPYABLE
