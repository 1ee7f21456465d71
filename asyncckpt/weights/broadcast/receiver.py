"""The receiver: a rank that loads what the source sends; see ``sender.py``."""

from __future__ import annotations

from collections.abc import Generator
from typing import NamedTuple

import torch
import torch.distributed as dist

from asyncckpt.errors import DamagedCheckpointError
from asyncckpt.weights.broadcast.buckets import BucketItem, Named, checksum, read_description, view, views
from asyncckpt.weights.broadcast.channel import Channel, Message
from asyncckpt.weights.broadcast.sender import Broadcast, Seconds
from asyncckpt.weights.broadcast.transport import Wire, device_group, open_wire

Receipt = Generator[list[Named], None, Broadcast]


class _ReceivedBucket(NamedTuple):
    """A bucket that has come, or is about to: the ``data`` of ``items``, in one of the two buffers."""

    notice: Message
    items: list[BucketItem]
    buffer: int
    data: torch.Tensor


class Receiver:
    """The part of any rank but the source."""

    def __init__(self, channel: Channel, group: dist.ProcessGroup | None = None) -> None:
        self.channel = channel
        self._group = device_group(group)
        self._wire = Wire(channel)
        self._unposted = 0
        """Bytes of a bucket that the source is sending, and this rank has not begun to receive."""
        self._descriptions: dict[int, list[BucketItem]] = {}
        self._views: dict[tuple[int, int], list[Named]] = {}
        """By the number of the description, and the buffer."""
        self._merged = torch.empty(0, dtype=torch.uint8, device="cpu")

    def receive(self) -> Receipt:
        """The tensors of one bucket after the other, good until the next one is asked for.

        What is thrown in here, or raised while this is open, is raised by all ranks.
        """
        seconds = Seconds()
        last: _ReceivedBucket | None = None
        with self.channel.failing_together(self._settle):
            terms = self._begin()
            seconds.add("meet")
            while (notice := self.channel.exchange({}))["kind"] == "bucket":
                self._unposted = notice["bytes"]
                items = self._items(notice)
                if last is not None and items[0].is_piece and items[0].begin == 0:
                    # What the pieces before it were merged in is needed again.
                    yield from self._give(last, seconds)
                    last = None
                bucket = self._find(notice, items)
                self._wire.post(bucket.data)
                self._unposted = 0
                if last is not None:
                    yield from self._give(last, seconds)
                self._wire.land()
                last = bucket
            if last is not None:
                yield from self._give(last, seconds)
            self.channel.exchange({})
            seconds.add("transfer")
        return seconds.result(terms, notice)

    def close(self) -> None:
        """Drop the connections, and give the buffers back."""
        self.channel.close()
        self._drop_wire()

    def _drop_wire(self) -> None:
        self._views.clear()
        self._descriptions.clear()
        self._wire = Wire(self.channel)
        self._merged = torch.empty(0, dtype=torch.uint8, device="cpu")

    def _settle(self) -> None:
        """End what is under way, for those on the wire who cannot go on without this rank."""
        unposted, self._unposted = self._unposted, 0
        self._wire.skip(unposted)
        self._wire.land()

    def _begin(self) -> Message:
        """Hear the terms; and, where they are new, connect."""
        terms = self.channel.exchange({})
        if terms["wire"] is not None:
            self._drop_wire()
            self._wire = open_wire(self.channel, terms["bucket_bytes"], str(terms["wire"]), self._group)
        return terms

    def _items(self, notice: Message) -> list[BucketItem]:
        """What the bucket has, which is told where it is not known yet."""
        if notice["forget"]:
            self._descriptions.clear()
            self._views.clear()
        if notice["blob"]:
            self._descriptions[notice["description"]] = read_description(notice["blob"])
        return self._descriptions[notice["description"]]

    def _find(self, notice: Message, items: list[BucketItem]) -> _ReceivedBucket:
        """Where the bucket is, or is to go."""
        first, nbytes, skew = items[0], notice["bytes"], notice["skew"]
        buffer = self._wire.buffers.next()
        data = self._wire.buffers.pair[buffer][skew : skew + nbytes]
        if first.is_piece:
            if first.begin == 0 and self._merged.numel() < first.total:
                self._merged = torch.empty(first.total, dtype=torch.uint8, device=data.device)
            data = self._merged[first.begin : first.begin + nbytes]
        return _ReceivedBucket(notice, items, buffer, data)

    def _give(self, bucket: _ReceivedBucket, seconds: Seconds) -> Generator[list[Named], None, None]:
        """Check a bucket, and hand over what is complete with it."""
        seconds.add("transfer")
        if checksum(bucket.data) != bucket.notice["checksum"]:
            names = [repr(item.name) for item in bucket.items]
            which = ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")
            raise DamagedCheckpointError(
                f"bucket {bucket.notice['number']} did not arrive as rank {self.channel.src} sent it: {which}",
                rank=self.channel.rank,
            )
        first = bucket.items[0]
        seconds.add("checksum")
        if not first.is_piece:
            key = bucket.notice["description"], bucket.buffer
            if key not in self._views:
                self._views[key] = views(bucket.items, self._wire.buffers.pair[bucket.buffer])
            yield list(self._views[key])
        elif first.is_last_piece:
            yield [(first.name, view(first, self._merged[: first.total]))]
        seconds.add("load")
