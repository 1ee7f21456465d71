"""The wire: how buckets come from the source to the receivers that do not share its memory."""

from __future__ import annotations

from datetime import timedelta

import torch
import torch.distributed as dist

from asyncckpt.weights.broadcast.buffers import Buffers, buffer_bytes
from asyncckpt.weights.broadcast.channel import Channel, Gloo, WirePlace


class Wire:
    """A broadcast among the source and some receivers. All of them post the same buckets, in the same order.

    Through gloo, out of and into the host's memory. Without a ``place`` there are no receivers, and it does nothing.
    """

    def __init__(self, channel: Channel, bucket_bytes: int = 0, place: WirePlace | None = None) -> None:
        """Connect those on the wire; a collective of them. ``place``: this one's, see ``Channel.part``."""
        self._channel = channel
        self._bucket_bytes = bucket_bytes
        self._gloo: Gloo = None if place is None else channel.part(*place)
        self._under_way: tuple[dist.Work, object] | None = None

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

    def land(self) -> None:
        """Wait for what was posted, if anything is under way. On a device, the current stream waits."""
        posted, self._under_way = self._under_way, None
        if posted is not None:
            self._channel.attempt(posted[0].wait, "a bucket")

    def finish(self) -> None:
        """Wait for all that was posted, also on a device."""

    def new_buffers(self) -> Buffers:
        """Where what comes over the wire goes."""
        return Buffers.of_host(self._bucket_bytes)

    def _begin(self, data: torch.Tensor) -> dist.Work:
        options = dist.BroadcastOptions()
        options.rootRank = options.rootTensor = 0
        options.timeout = timedelta(seconds=self._channel.timeout)
        work: dist.Work = self._gloo.broadcast([data], options)
        return work


class DeviceWire(Wire):
    """Through the caller's own NCCL group, out of and into the memory of its current device."""

    def __init__(self, channel: Channel, bucket_bytes: int, group: dist.ProcessGroup) -> None:
        super().__init__(channel, bucket_bytes)
        self._group = group
        self._src = dist.get_global_rank(group, channel.src)
        self._staging: Buffers | None = None

    @property
    def has_receivers(self) -> bool:
        return True

    def stage(self, data: torch.Tensor) -> torch.Tensor:
        if not data.is_cpu:
            return data
        if self._staging is None:
            self._staging = self.new_buffers()
        staged = self._staging.pair[self._staging.next()][: data.numel()]
        return staged.copy_(data)

    def finish(self) -> None:
        self._channel.attempt(torch.cuda.current_stream().synchronize, "the last bucket")

    def new_buffers(self) -> Buffers:
        nbytes = buffer_bytes(self._bucket_bytes)
        return Buffers([torch.empty(nbytes, dtype=torch.uint8, device="cuda") for _ in range(2)])

    def _begin(self, data: torch.Tensor) -> dist.Work:
        work: dist.Work = dist.broadcast(data, self._src, group=self._group, async_op=True)
        return work


def open_wire(channel: Channel, bucket_bytes: int, on: dist.ProcessGroup | WirePlace | None) -> Wire:
    """The wire that this rank is on.

    Args:
        channel: That of all ranks.
        bucket_bytes: The size of a bucket in bytes.
        on: The group of NCCL, if there is one: all ranks are on its wire. Or this rank's place on one of the host; None
            if it is on none.
    """
    if isinstance(on, dist.ProcessGroup):
        return DeviceWire(channel, bucket_bytes, on)
    return Wire(channel, bucket_bytes, on)


def device_group(group: dist.ProcessGroup | None) -> dist.ProcessGroup | None:
    """``group``, if it sends what is on a device by NCCL."""
    return group if group is not None and "nccl" in str(dist.get_backend_config(group)) else None
