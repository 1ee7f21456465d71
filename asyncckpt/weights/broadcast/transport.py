"""The transport of buckets from the source to its receivers: over a wire, or through buffers that both have mapped."""

from __future__ import annotations

import ctypes
import os
import secrets
from collections.abc import Mapping, Sequence
from datetime import timedelta
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from asyncckpt.shm.descriptor import Descriptor
from asyncckpt.shm.huge import huge_buffer
from asyncckpt.shm.segment import PAGE, Segment, round_up
from asyncckpt.weights.broadcast.channel import Channel, Gloo
from asyncckpt.weights.lease import readable_memory

ALIGNMENT = 256
"""Bytes, of each tensor in a bucket, unless the bucket is where they lie anyway. Enough for every dtype and device."""

WirePlace = tuple[str, int, int]
"""In the group of those on a wire: its name, this one's rank in it, and its world size."""

_TOKEN_BYTES = 16
_MADV_POPULATE_READ = 22

_libc = ctypes.CDLL(None, use_errno=True)


def buffer_bytes(bucket_bytes: int) -> int:
    """What a buffer needs for any bucket: it may begin with up to ``ALIGNMENT`` bytes of nothing."""
    return round_up(bucket_bytes + ALIGNMENT)


def host_identity() -> str:
    """The same for two processes if, and only if, they run under one kernel."""
    return Path("/proc/sys/kernel/random/boot_id").read_text().strip()


class Buffers:
    """Two buffers for buckets, of which one is filled, or loaded from, while the other is under way."""

    def __init__(self, pair: Sequence[torch.Tensor], segment: Segment | None = None) -> None:
        """``segment``: where they are, if receivers may map them; a token stands before them."""
        self.pair = pair
        self._segment = segment
        self._current = 0

    @classmethod
    def of_device(cls, bucket_bytes: int, device: str) -> Buffers:
        """On a device, or on none ("meta"): there buckets are only counted."""
        return cls([torch.empty(buffer_bytes(bucket_bytes), dtype=torch.uint8, device=device) for _ in range(2)])

    @classmethod
    def of_host(cls, bucket_bytes: int) -> Buffers:
        """In memory of this process alone."""
        nbytes = buffer_bytes(bucket_bytes)
        return cls([torch.frombuffer(huge_buffer(nbytes), dtype=torch.uint8) for _ in range(2)])

    @classmethod
    def shared(cls, bucket_bytes: int) -> Buffers:
        """In a segment, behind a page with a token, by which a receiver knows that it has found the right memory."""
        nbytes = buffer_bytes(bucket_bytes)
        segment = Segment.create("asyncckpt-weights", PAGE + 2 * nbytes, touch=True)
        segment.view[:_TOKEN_BYTES] = secrets.token_bytes(_TOKEN_BYTES)
        whole = torch.frombuffer(segment.view, dtype=torch.uint8)
        return cls([whole[PAGE + number * nbytes :][:nbytes] for number in range(2)], segment)

    @classmethod
    def attach(cls, offer: Mapping[str, Any], bucket_bytes: int) -> Buffers | None:
        """Those of the source, as read-only memory: writing into it ends the process.

        None if this process cannot have them: another user's, or a process id that means another process here.
        """
        nbytes = buffer_bytes(bucket_bytes)
        try:
            # Another process may have anything by that number: a pipe without a writer, say, to wait for.
            flags = os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK
            file = Descriptor.of(os.open, f"/proc/{offer['pid']}/fd/{offer['fd']}", flags)
            segment = Segment.attach(file, writable=False)
        except (OSError, ValueError):
            return None
        with segment:  # what is mapped stays as long as the tensors
            if segment.nbytes != PAGE + 2 * nbytes or bytes(segment.view[:_TOKEN_BYTES]).hex() != offer["token"]:
                return None
            return cls([_populated(segment, range(PAGE + nbytes * at, PAGE + nbytes * (at + 1))) for at in range(2)])

    def offer(self) -> dict[str, Any]:
        """What a receiver has to know to ``attach`` shared ones."""
        if self._segment is None:
            return {}
        token = bytes(self._segment.view[:_TOKEN_BYTES]).hex()
        return {"pid": os.getpid(), "fd": self._segment.fileno(), "token": token}

    def next(self) -> int:
        """The number of the one that comes next: they alternate."""
        self._current = 1 - self._current
        return self._current

    def close(self) -> None:
        """Give the memory back; a receiver's mapping lasts."""
        self.pair = []
        if self._segment is not None:
            self._segment.close()


def _populated(segment: Segment, span: range) -> torch.Tensor:
    memory = readable_memory(segment.view, span)
    # The pages are there: have them in this process's table, too, before somebody waits for that.
    _libc.madvise(ctypes.byref(memory), ctypes.c_size_t(len(span)), _MADV_POPULATE_READ)
    return torch.frombuffer(memory, dtype=torch.uint8)


class Wire:
    """A broadcast among the source and some receivers. All of them post the same buckets, in the same order.

    Through gloo, out of and into the host's memory. Without a ``place`` there are no receivers, and it does nothing.
    """

    def __init__(self, channel: Channel, bucket_bytes: int = 0, place: WirePlace | None = None) -> None:
        """Connect those on the wire; a collective of them. Args: those of ``open_wire``."""
        self.shared: Buffers | None = None
        """The source's buffers, if receivers have them mapped; a receiver that has them is on no wire."""
        self._channel = channel
        self._bucket_bytes = bucket_bytes
        self._gloo: Gloo = None if place is None else channel.part(*place)
        self._under_way: tuple[dist.Work, object] | None = None

    @property
    def buffers(self) -> Buffers:
        """Where what comes goes, and where what is sent is put together."""
        return self.shared or self._own

    @cached_property
    def _own(self) -> Buffers:
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

    def close(self) -> None:
        """Give the buffers back."""
        if self.shared is not None:
            self.shared.close()

    def _begin(self, data: torch.Tensor) -> dist.Work:
        options = dist.BroadcastOptions()
        options.rootRank = options.rootTensor = 0
        options.timeout = timedelta(seconds=self._channel.timeout)
        work: dist.Work = self._gloo.broadcast([data], options)
        return work


class DeviceWire(Wire):
    """Through the caller's own NCCL group, out of and into the memory of its current device."""

    def __init__(self, channel: Channel, bucket_bytes: int, group: dist.ProcessGroup) -> None:
        """Args: those of ``open_wire``; all ranks of ``group`` are on it."""
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


def open_wire(channel: Channel, bucket_bytes: int, on: dist.ProcessGroup | WirePlace | None) -> Wire:
    """The wire that this rank is on.

    Args:
        channel: That of all ranks.
        bucket_bytes: The most bytes of a bucket.
        on: The group of NCCL, if there is one: all ranks are on its wire. Or this rank's place on one of the host.
    """
    if isinstance(on, dist.ProcessGroup):
        return DeviceWire(channel, bucket_bytes, on)
    return Wire(channel, bucket_bytes, on)
