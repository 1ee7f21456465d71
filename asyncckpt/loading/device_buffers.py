"""Pinned buffers by way of which tensors on devices are loaded: while the bytes of one are on their way, the others are
read into.

From memory that its driver does not know, a device is given some bytes at a time, by a thread that copies them to the
driver's own memory, and that nobody else can use meanwhile.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence

import torch

from asyncckpt.devices import kinds
from asyncckpt.devices.kinds import ReadyEvents
from asyncckpt.devices.pinned import PinnedMemory
from asyncckpt.shm.huge import HostMemory
from asyncckpt.shm.segment import round_up

# Tensors begin at a multiple of this in a buffer, as every dtype asks.
ALIGNMENT = 64
# The least that is pinned: the driver takes whole pages, and a call has a price of its own.
_LEAST_BYTES = 1 << 20
BUFFERS = 4
"""Of each load, at most."""


class DeviceBuffer:
    """Pinned memory, of which some is given to tensors that are then sent."""

    def __init__(self, device: torch.device, nbytes: int) -> None:
        """Take and pin ``nbytes``, a power of two, for all devices of the kind of ``device``."""
        self._memory = HostMemory.take(nbytes)
        self._sent: ReadyEvents = {}
        self.nbytes = nbytes
        self.views: list[memoryview] = []
        """The memory of each tensor."""
        self._pinned = PinnedMemory(self._memory, (), device)

    def divide(self, sizes: Sequence[int]) -> None:
        """Give memory to tensors of these ``sizes``, in bytes, when nobody reads any more of what was sent."""
        self._wait()
        self.views, at = [], 0
        for size in sizes:
            self.views.append(self._memory.view[at : at + size])
            at += round_up(size, ALIGNMENT)

    def send(self, tensors: Sequence[torch.Tensor]) -> None:
        """Queue the copies of ``views`` to ``tensors``, each on the current stream of its device.

        The tensors are of one dimension, and on devices that have a kind.
        """
        stored = [
            torch.frombuffer(view, dtype=torch.uint8).view(tensor.dtype)
            for tensor, view in zip(tensors, self.views, strict=True)
        ]
        try:
            with torch.no_grad():
                torch._foreach_copy_(list(tensors), stored, non_blocking=True)
        finally:
            for device in {tensor.device for tensor in tensors}:
                if (kind := kinds.kind_of(device)) is not None:
                    self._sent[device] = kind.record(kind.current_stream(device))

    def close(self) -> None:
        """Wait until all is sent, and give the memory back."""
        with contextlib.ExitStack() as all_of_them:
            all_of_them.callback(self._pinned.close)
            all_of_them.callback(self.views.clear)
            self._wait()

    def _wait(self) -> None:
        with contextlib.ExitStack() as all_of_them:
            for device, event in self._sent.items():
                all_of_them.enter_context(kinds.use(device))
                all_of_them.callback(event.synchronize)
        self._sent = {}


class DeviceBuffers:
    """The buffers of one load, in the thread that loads; taken when they are first needed."""

    def __init__(self) -> None:
        self._buffers: list[DeviceBuffer] = []  # the one whose turn it is first

    def take(self, device: torch.device, sizes: Sequence[int]) -> DeviceBuffer:
        """A buffer, divided for tensors of these ``sizes``, in bytes. It is the caller's until ``BUFFERS`` calls later.

        Raises ``OutOfMemoryError`` where the host has no memory for the buffer.
        """
        total = sum(round_up(size, ALIGNMENT) for size in sizes)
        buffer = self._buffers.pop(0) if len(self._buffers) == BUFFERS else None
        if buffer is not None and buffer.nbytes < total:
            buffer.close()
            buffer = None
        if buffer is None:  # to a power of two, so that few are outgrown
            buffer = DeviceBuffer(device, max(_LEAST_BYTES, 1 << (total - 1).bit_length()))
        self._buffers.append(buffer)
        buffer.divide(sizes)
        return buffer

    def close(self) -> None:
        """Wait until all is sent, and give the memory back."""
        with contextlib.ExitStack() as all_of_them:
            while self._buffers:
                all_of_them.callback(self._buffers.pop().close)

    def __enter__(self) -> DeviceBuffers:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
