"""The wire: how buckets come from the source to the receivers that do not share its memory."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from typing import Protocol

import torch
import torch.distributed as dist

from asyncckpt.weights.buckets import Buffers, buffer_bytes
from asyncckpt.weights.channel import Channel


class Wire(Protocol):
    """A broadcast among the source and those receivers. All of them post the same buckets, in the same order."""

    def stage(self, data: torch.Tensor) -> torch.Tensor:
        """On the source: where the bytes of ``data`` can be posted from."""

    def post(self, data: torch.Tensor) -> dist.Work:
        """Begin to send, or to receive into, ``data``."""

    def land(self, work: dist.Work) -> None:
        """Wait for it. On a device, the current stream waits."""

    def finish(self) -> None:
        """Wait for all that was posted, also on a device."""


class HostWire:
    """Through gloo, out of and into the host's memory."""

    def __init__(self, channel: Channel, name: str, rank: int, world_size: int) -> None:
        """``rank``: this one's number among those on the wire; the source's is 0."""
        self._channel = channel
        self._gloo = channel.part(name, rank, world_size)

    def stage(self, data: torch.Tensor) -> torch.Tensor:
        return data

    def post(self, data: torch.Tensor) -> dist.Work:
        options = dist.BroadcastOptions()
        options.rootRank = options.rootTensor = 0
        options.timeout = timedelta(seconds=self._channel.timeout)
        work: dist.Work = self._gloo.broadcast([data], options)
        return work

    def land(self, work: dist.Work) -> None:
        self._channel.attempt(work.wait, "a bucket")

    def finish(self) -> None:
        return


class DeviceWire:
    """Through the caller's own NCCL group, out of and into the memory of its current device."""

    def __init__(self, channel: Channel, group: dist.ProcessGroup, bucket_bytes: int) -> None:
        self._channel = channel
        self._group = group
        self._src = dist.get_global_rank(group, channel.src)
        self._bucket_bytes = bucket_bytes
        self._staging: Buffers | None = None

    def stage(self, data: torch.Tensor) -> torch.Tensor:
        if not data.is_cpu:
            return data
        if self._staging is None:
            self._staging = Buffers(device_pair(self._bucket_bytes))
        staged = self._staging.pair[self._staging.next()][: data.numel()]
        return staged.copy_(data)

    def post(self, data: torch.Tensor) -> dist.Work:
        work: dist.Work = dist.broadcast(data, self._src, group=self._group, async_op=True)
        return work

    def land(self, work: dist.Work) -> None:
        self._channel.attempt(work.wait, "a bucket")

    def finish(self) -> None:
        self._channel.attempt(torch.cuda.current_stream().synchronize, "the last bucket")


def device_pair(bucket_bytes: int) -> Sequence[torch.Tensor]:
    """Two buffers on the current device."""
    nbytes = buffer_bytes(bucket_bytes)
    return [torch.empty(nbytes, dtype=torch.uint8, device="cuda") for _ in range(2)]


def has_device_wire(group: dist.ProcessGroup) -> bool:
    """Whether ``group`` sends what is on a device by NCCL."""
    return "nccl" in str(dist.get_backend_config(group))
