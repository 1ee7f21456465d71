"""Pinned buffers for loading tensors to devices. While one buffer is sent, the next ones are filled.

The driver copies memory that is not pinned through its own memory, piece by piece, and occupies a thread meanwhile.
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

# Alignment of tensors in a buffer, in bytes; enough for every dtype.
ALIGNMENT = 64
# Minimum size of a buffer, in bytes: the driver pins whole pages, and each call has a cost.
_LEAST_BYTES = 1 << 20
BUFFERS = 4
"""Maximum number of buffers of each load."""


class DeviceBuffer:
    """Pinned memory that is divided among tensors and then sent."""

    def __init__(self, device: torch.device, nbytes: int) -> None:
        """Allocate and pin ``nbytes``, a power of two, for all devices of the kind of ``device``."""
        self._memory = HostMemory.take(nbytes)
        self._sent: ReadyEvents = {}
        self.nbytes = nbytes
        self.views: list[memoryview] = []
        """The memory of each tensor."""
        self._pinned = PinnedMemory(self._memory, (), device)

    def divide(self, sizes: Sequence[int]) -> None:
        """Divide the memory among tensors of these ``sizes``, in bytes. Wait first until earlier copies are done."""
        self._wait()
        self.views, at = [], 0
        for size in sizes:
            self.views.append(self._memory.view[at : at + size])
            at += round_up(size, ALIGNMENT)

    def send(self, tensors: Sequence[torch.Tensor]) -> None:
        """Queue the copies of ``views`` to ``tensors``, each on the current stream of its device.

        The tensors have one dimension, and are on devices with a known kind.
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
        """Wait until all copies are done, and free the memory."""
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
    """The buffers of one load, for use by the loading thread. Each buffer is allocated when it is first needed."""

    def __init__(self) -> None:
        self._buffers: list[DeviceBuffer] = []  # the next one to reuse is first

    def take(self, device: torch.device, sizes: Sequence[int]) -> DeviceBuffer:
        """Return a buffer, divided for tensors of these ``sizes``, in bytes.

        The buffer belongs to the caller until ``BUFFERS`` calls later. Raises ``OutOfMemoryError`` if the host has no
        memory for the buffer.
        """
        total = sum(round_up(size, ALIGNMENT) for size in sizes)
        buffer = self._buffers.pop(0) if len(self._buffers) == BUFFERS else None
        if buffer is not None and buffer.nbytes < total:
            buffer.close()
            buffer = None
        if buffer is None:  # the size is rounded up to a power of two, so that few buffers become too small
            buffer = DeviceBuffer(device, max(_LEAST_BYTES, 1 << (total - 1).bit_length()))
        self._buffers.append(buffer)
        buffer.divide(sizes)
        return buffer

    def close(self) -> None:
        """Wait until all copies are done, and free the memory."""
        with contextlib.ExitStack() as all_of_them:
            while self._buffers:
                all_of_them.callback(self._buffers.pop().close)

    def __enter__(self) -> DeviceBuffers:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
