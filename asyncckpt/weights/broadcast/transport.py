"""The transport of buckets from the source to its receivers."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from functools import cached_property

import torch
import torch.distributed as dist

from asyncckpt.shm.huge import huge_buffer
from asyncckpt.shm.segment import round_up
from asyncckpt.weights.broadcast.channel import Channel, Gloo

ALIGNMENT = 256
"""Bytes, of each tensor in a bucket, unless the bucket is where they lie anyway. Enough for every dtype and device."""


def buffer_bytes(bucket_bytes: int) -> int:
    """What a buffer needs for any bucket: it may begin with up to ``ALIGNMENT`` bytes of nothing."""
    return round_up(bucket_bytes + ALIGNMENT)


class Buffers:
    """Two buffers for buckets, of which one is filled, or loaded from, while the other is under way."""

    def __init__(self, pair: Sequence[torch.Tensor]) -> None:
        self.pair = pair
        self._current = 0

    @classmethod
    def of_device(cls, bucket_bytes: int, device: str) -> Buffers:
        """On a device."""
        return cls([torch.empty(buffer_bytes(bucket_bytes), dtype=torch.uint8, device=device) for _ in range(2)])

    @classmethod
    def of_host(cls, bucket_bytes: int) -> Buffers:
        """In memory of this process alone."""
        nbytes = buffer_bytes(bucket_bytes)
        return cls([torch.frombuffer(huge_buffer(nbytes), dtype=torch.uint8) for _ in range(2)])

    def next(self) -> int:
        """The number of the one that comes next: they alternate."""
        self._current = 1 - self._current
        return self._current


class Wire:
    """A broadcast among the source and its receivers. All of them post the same buckets, in the same order.

    Through ``gloo``, out of and into the host's memory. Without that there are no receivers, and it does nothing.
    """

    def __init__(self, channel: Channel, bucket_bytes: int = 0, gloo: Gloo | None = None) -> None:
        self._channel = channel
        self._bucket_bytes = bucket_bytes
        self._gloo = gloo
        self._under_way: tuple[dist.Work, object] | None = None

    @cached_property
    def buffers(self) -> Buffers:
        """Where what comes goes, and where what is sent is put together."""
        return self._new_buffers()

    def _new_buffers(self) -> Buffers:
        return Buffers.of_host(self._bucket_bytes)

    @property
    def has_receivers(self) -> bool:
        """Whether anything travels over it."""
        return self._gloo is not None

    def stage(self, data: torch.Tensor) -> torch.Tensor:
        """On the source: where the bytes of ``data`` can be posted from."""
        return data

    def post(self, data: torch.Tensor, keep: object = None) -> None:
        """Begin to send, or to receive into, ``data``, whose memory is that of ``keep``; one at a time."""
        if self.has_receivers and data.numel():
            self._under_way = self._begin(data), (data, keep)

    def skip(self, nbytes: int) -> None:
        """Begin to receive what others on the wire need, and this rank does not."""
        if self.has_receivers and nbytes:
            self.post(self.buffers.pair[0][:nbytes])

    def land(self) -> None:
        """Wait for what was posted, if anything is under way. On a device, the current stream waits."""
        posted, self._under_way = self._under_way, None
        if posted is not None:
            self._channel.attempt(posted[0].wait, "a bucket")

    def finish(self) -> None:
        """Wait for all that was posted, also on a device."""

    def _begin(self, data: torch.Tensor) -> dist.Work:
        options = dist.BroadcastOptions()
        options.rootRank = options.rootTensor = 0
        options.timeout = timedelta(seconds=self._channel.timeout)
        gloo: Gloo = self._gloo
        work: dist.Work = gloo.broadcast([data], options)
        return work


class DeviceWire(Wire):
    """Through the caller's own NCCL group, out of and into the memory of its current device."""

    def __init__(self, channel: Channel, bucket_bytes: int, group: dist.ProcessGroup) -> None:
        """All ranks of ``group`` are on it."""
        super().__init__(channel, bucket_bytes)
        self._group = group
        self._src = dist.get_global_rank(group, channel.src)

    @cached_property
    def _staging(self) -> Buffers:
        return self._new_buffers()

    def _new_buffers(self) -> Buffers:
        return Buffers.of_device(self._bucket_bytes, "cuda")

    @property
    def has_receivers(self) -> bool:
        return True

    def stage(self, data: torch.Tensor) -> torch.Tensor:
        if not data.is_cpu:
            return data
        staged = self._staging.pair[self._staging.next()][: data.numel()]
        return staged.copy_(data)

    def finish(self) -> None:
        self._channel.attempt(torch.cuda.current_stream().synchronize, "the last bucket")

    def _begin(self, data: torch.Tensor) -> dist.Work:
        work: dist.Work = dist.broadcast(data, self._src, group=self._group, async_op=True)
        return work


def device_group(group: dist.ProcessGroup | None) -> dist.ProcessGroup | None:
    """``group``, if it sends what is on a device by NCCL."""
    return group if group is not None and "nccl" in str(dist.get_backend_config(group)) else None


def open_wire(channel: Channel, bucket_bytes: int, name: str, group: dist.ProcessGroup | None) -> Wire:
    """The wire that all ranks of ``channel`` are on; a collective of them.

    Args:
        channel: Theirs.
        bucket_bytes: The most bytes of a bucket.
        name: Another one each time.
        group: The group of NCCL, if there is one.
    """
    if group is not None:
        return DeviceWire(channel, bucket_bytes, group)
    if not channel.others:
        return Wire(channel, bucket_bytes)
    number = 0 if channel.is_source else 1 + channel.others.index(channel.rank)
    return Wire(channel, bucket_bytes, channel.part(name, number, 1 + len(channel.others)))
