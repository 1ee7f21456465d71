"""Copies of tensors that come one by one, and may be gone, or have become others, when the next one is asked for.

What is on a device is copied there first, which takes a small part of the time that its link takes. From that copy it
goes to the host on a side stream, while the next tensor is made: where ranks gather each together and take turns in
copying (see ``shards.py``), a rank that is still copying must not keep the others waiting.
"""

from __future__ import annotations

from collections import deque

import torch

from asyncckpt.devices.kinds import DeviceEvent, DeviceKind, DeviceStream, kind_of

# The most memory of a device that copies take, but for a tensor that is larger.
_MOST_BYTES = 256 << 20


class StreamedCopies:
    """Copies that are under way within a ``with`` block; at its end all are done, also where something is raised."""

    def __init__(self) -> None:
        self._streams: dict[torch.device, DeviceStream] = {}
        self._under_way: deque[tuple[DeviceKind, DeviceEvent, torch.Tensor]] = deque()

    def copy(self, tensor: torch.Tensor, into: torch.Tensor) -> None:
        """Copy ``tensor``, which may be changed when this returns, to the host's memory, converted if need be."""
        device = tensor.device
        kind = kind_of(device)
        staged = None if kind is None else self._staged(tensor, into.dtype)
        if kind is None or staged is None:
            into.copy_(on_device(tensor, into.dtype))
            return
        with kind.use(device):
            # Whoever changes the tensor then may do so on any stream.
            kind.record(kind.current_stream(device)).synchronize()
        if device not in self._streams:
            self._streams[device] = kind.new_stream(device)
        with kind.use(device, self._streams[device]):
            into.copy_(staged, non_blocking=True)
            self._under_way.append((kind, kind.record(self._streams[device]), staged))

    def __enter__(self) -> StreamedCopies:
        return self

    def __exit__(self, *_: object) -> None:
        try:
            self._wait(0)
        finally:  # an exception out of a signal handler may have cut that short, or come before a copy was noted
            for device, stream in self._streams.items():
                kind = kind_of(device)
                if kind is not None:
                    with kind.use(device):
                        kind.record(stream).synchronize()

    def _staged(self, tensor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor | None:
        """A copy of ``tensor`` on its device, in ``dtype``; None where that has no room for it."""
        self._wait(_MOST_BYTES - tensor.numel() * dtype.itemsize)
        try:
            # A conjugate that is only a flag would be carried out on the host, on bytes that are still to come.
            plain = tensor.resolve_conj().resolve_neg()
            return plain.to(dtype, copy=True, memory_format=torch.contiguous_format)
        except torch.OutOfMemoryError:
            self._wait(0)
            return None

    def _wait(self, nbytes: int) -> None:
        """Wait until no more than so many bytes are under way, or nothing is."""
        left = sum(staged.nbytes for *_, staged in self._under_way)
        while self._under_way and left > nbytes:
            kind, event, staged = self._under_way[0]
            with kind.use(staged.device):
                event.synchronize()
            # Not before: the memory goes to whoever asks next, and is still read until then.
            self._under_way.popleft()
            left -= staged.nbytes


def on_device(tensor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """``tensor`` in ``dtype``, if it is on a device that has room: a copy that converts does that on the host."""
    try:
        return tensor if tensor.is_cpu else tensor.to(dtype)
    except torch.OutOfMemoryError:
        return tensor
