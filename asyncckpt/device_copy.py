"""Copies from a CUDA device into a slot: queued on a side stream, behind what the compute stream was given before."""

from __future__ import annotations

from collections.abc import Sequence
from operator import attrgetter

import torch

from asyncckpt.host_copy import Chunk, many_chunks
from asyncckpt.targets import Targets

_device = attrgetter("device")

Ready = dict[torch.device, torch.cuda.Event]
"""For each CUDA device: when what its current stream had been given by the time of the save is done."""


def ready_events(tensors: Sequence[torch.Tensor]) -> Ready:
    """To be called on the caller's own thread, whose current streams are meant."""
    if not torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        return {}
    devices = {device for device in set(map(_device, tensors)) if device.type == "cuda"}
    return {device: torch.cuda.current_stream(device).record_event() for device in devices}


class DeviceCopy:
    """The copies of those tensors of a plan that are on one device."""

    def __init__(self, device: torch.device, numbers: Sequence[int], targets: Targets) -> None:
        self._device = device
        self.chunks: list[Chunk] = many_chunks(numbers, targets, non_blocking=True)

    def queue(self, tensors: Sequence[torch.Tensor], ready: Ready) -> list[torch.cuda.Event]:
        """Queue the copies; the events are when each of the ``chunks`` is there."""
        stream = _side_stream(self._device)
        stream.wait_event(ready[self._device])
        arrived: list[torch.cuda.Event] = []
        with torch.cuda.device(self._device), torch.cuda.stream(stream):
            for chunk in self.chunks:
                chunk.copy(tensors)
                arrived.append(stream.record_event())
        return arrived


_side_streams: dict[torch.device, torch.cuda.Stream] = {}


def _side_stream(device: torch.device) -> torch.cuda.Stream:
    """One stream a device for all copies of this process."""
    if device not in _side_streams:
        _side_streams[device] = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
    return _side_streams[device]
