"""The receiver: a rank that loads what the source sends, or only helps to gather it; see ``protocol.py``."""

from __future__ import annotations

import json
from collections.abc import Generator
from functools import partial
from typing import NamedTuple

import torch
import torch.distributed as dist

from asyncckpt.errors import CheckpointError, DamagedCheckpointError, RankFailedError
from asyncckpt.shm.memcpy import memcpy
from asyncckpt.weights.broadcast.buckets import (
    BucketItem,
    Given,
    Named,
    checksum,
    fill,
    read_description,
    tensors_of,
    view,
    views,
)
from asyncckpt.weights.broadcast.buffers import Buffers, host_identity
from asyncckpt.weights.broadcast.channel import Channel, Message
from asyncckpt.weights.broadcast.protocol import Broadcast, Seconds, exchange, failing_together, give_up
from asyncckpt.weights.broadcast.transport import Wire, device_group, open_wire

Receipt = Generator[list[Named], None, Broadcast]


class _ReceivedBucket(NamedTuple):
    """A bucket that has come, or is about to."""

    number: int
    items: list[BucketItem]
    data: torch.Tensor
    checksum: int
    key: tuple[str, int]
    """The name of its description, and which buffer it is in."""


class Receiver:
    """The part of any rank but the source: in each broadcast it either loads or gathers."""

    def __init__(self, channel: Channel, group: dist.ProcessGroup | None) -> None:
        self._channel = channel
        self._has_group = group is not None
        self._group = device_group(group)
        self._shares = False
        """Whether the buffers are the source's, and nothing comes over a wire."""
        self._wire = Wire(channel)
        self._buffers = Buffers([])
        self._unposted = 0
        """Bytes of a bucket that the source is sending, and this rank has not begun to receive."""
        self._descriptions: dict[str, list[BucketItem]] = {}
        self._views: dict[tuple[str, int], list[Named]] = {}
        self._merged = torch.empty(0, dtype=torch.uint8)

    def receive(self) -> Receipt:
        """The tensors of one bucket after the other, good until the next one is asked for.

        What is thrown in here, or raised while this is open, is raised by all ranks.
        """
        seconds = Seconds()
        count = 0
        last: _ReceivedBucket | None = None
        self._unposted = 0
        with failing_together(self._channel, self._give_up):
            terms = exchange(self._channel, {"role": "load", "host": host_identity()})
            if terms["set_up"]:
                self._set_up(terms)
            seconds.add("meet")
            while (notice := exchange(self._channel, {}))["kind"] == "bucket":
                self._unposted = 0 if self._shares else notice["bytes"]
                self._learn(notice)
                if last is not None and self._begins_tensor(notice):
                    # What the pieces before it were merged in is needed again.
                    yield from self._give(last, seconds)
                    last = None
                bucket = self._find(notice, count)
                if not self._shares:
                    self._wire.post(bucket.data)
                    self._unposted = 0
                if last is not None:
                    yield from self._give(last, seconds)
                self._wire.land()
                last = bucket
                if self._shares:
                    yield from self._give(bucket, seconds)
                    last = None
                count += 1
            if last is not None:
                yield from self._give(last, seconds)
            exchange(self._channel, {})
            seconds.add("transfer")
        return seconds.broadcast(terms, notice["nbytes"], count)

    def gather(self, weights: Given) -> Broadcast:
        """Go through ``weights``, of which this rank has shards, in step with the source, and keep nothing."""
        seconds = Seconds()
        count = 0
        rank = self._channel.rank
        with failing_together(self._channel, partial(give_up, self._channel)):
            if not self._has_group:
                raise ValueError("shards are gathered in a group of torch.distributed, and these ranks are none")
            terms = exchange(self._channel, {"role": "gather", "host": ""})
            sources = json.loads(terms["blob"])
            if terms["set_up"]:
                self._set_up(terms)
            seconds.add("meet")
            for _ in fill(tensors_of(weights, sources), terms["bucket_bytes"], None, borrow=False):
                seconds.add("fill")
                self._wire.land()
                notice = exchange(self._channel, {})
                if notice["kind"] != "bucket":
                    raise RankFailedError("this rank gives more weights than the one that sends", rank=rank)
                self._ignore(notice["bytes"])
                seconds.add("transfer")
                count += 1
            seconds.add("fill")
            last = exchange(self._channel, {})
            if last["kind"] != "end":
                self._ignore(last["bytes"])
                raise RankFailedError("this rank gives fewer weights than the one that sends", rank=rank)
            exchange(self._channel, {})
            seconds.add("transfer")
        return seconds.broadcast(terms, last["nbytes"], count)

    def close(self) -> None:
        """Give the buffers back."""
        self._views.clear()
        self._wire, self._buffers = Wire(self._channel), Buffers([])
        self._merged = torch.empty(0, dtype=torch.uint8)

    def _give_up(self, error: Exception | GeneratorExit) -> CheckpointError:
        self._ignore(self._unposted)
        self._wire.land()
        if isinstance(error, GeneratorExit):
            return give_up(self._channel, RankFailedError("it stopped taking weights before all had come"))
        return give_up(self._channel, error)

    def _ignore(self, nbytes: int) -> None:
        """Begin to receive what others on the wire need, and this rank does not."""
        if nbytes and self._buffers.pair:
            self._wire.post(self._buffers.pair[0][:nbytes])

    def _set_up(self, terms: Message) -> None:
        self.close()
        self._descriptions.clear()
        mapped = Buffers.attach(terms["offer"], terms["bucket_bytes"]) if "offer" in terms else None
        place = exchange(self._channel, {"attached": mapped is not None})["wire"]
        self._shares = mapped is not None
        self._wire = open_wire(self._channel, terms["bucket_bytes"], self._group or place)
        if mapped is not None:
            self._buffers = mapped
        elif self._wire.has_receivers:
            self._buffers = self._wire.new_buffers()

    def _learn(self, notice: Message) -> None:
        """Hear how the bucket is described, if that is not known yet."""
        if notice["forget"]:
            self._descriptions.clear()
            self._views.clear()
        if notice["blob"]:
            self._descriptions[notice["description"]] = read_description(notice["blob"])

    def _begins_tensor(self, notice: Message) -> bool:
        first = self._descriptions[notice["description"]][0]
        return first.is_piece and first.begin == 0

    def _find(self, notice: Message, number: int) -> _ReceivedBucket:
        """Where the bucket is, or is to go."""
        items = self._descriptions[notice["description"]]
        first, nbytes, skew = items[0], notice["bytes"], notice["skew"]
        buffer = (notice["buffer"] or 0) if self._shares else self._buffers.next()
        data = self._buffers.pair[buffer][skew : skew + nbytes]
        if first.is_piece:
            if first.begin == 0 and self._merged.numel() < first.total:
                self._merged = torch.empty(first.total, dtype=torch.uint8, device=data.device)
            if not self._shares:
                data = self._merged[first.begin : first.begin + nbytes]
        return _ReceivedBucket(number, items, data, notice["checksum"], (notice["description"], buffer))

    def _give(self, bucket: _ReceivedBucket, seconds: Seconds) -> Generator[list[Named], None, None]:
        """Check a bucket, and hand over what is complete with it."""
        seconds.add("transfer")
        if checksum(bucket.data) != bucket.checksum:
            names = [repr(item.name) for item in bucket.items]
            which = ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")
            raise DamagedCheckpointError(
                f"bucket {bucket.number} did not arrive as rank {self._channel.src} sent it: {which}",
                rank=self._channel.rank,
            )
        first = bucket.items[0]
        if first.is_piece and self._shares:
            memcpy(self._merged.data_ptr() + first.begin, bucket.data.data_ptr(), first.nbytes)
        seconds.add("checksum")
        if first.is_piece:
            if first.is_last_piece:
                yield [(first.name, view(first, self._merged[: first.total]))]
        else:
            if bucket.key not in self._views:
                self._views[bucket.key] = views(bucket.items, self._buffers.pair[bucket.key[1]])
            yield list(self._views[bucket.key])
        seconds.add("load")
