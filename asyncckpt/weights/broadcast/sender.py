"""The sender, the source of a broadcast; and the protocol, that is, what the ranks do in which order.

The source sends, all others are receivers, and load. All they tell each other are rounds over the channel
(``channel.py``, also for how all end when one fails): the source collects the status of every receiver, and tells all a
notice. First come the terms; where they are new, a new wire. Then, for each bucket:

    source                                      receivers
    fill it, and take its checksum              load the one before the last
    wait until the one before is sent           wait until the last has come
    collect the status of everybody      <----  say how it is
    tell what the bucket is              ---->  hear it
    begin to send it                     ====>  begin to receive it

so while bucket k is under way, k+1 is filled and k-1 is loaded, and two buffers are enough on either side. After the
last one, two more rounds: that there are no more, and that all is loaded everywhere; only then does the call return.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import torch.distributed as dist

from asyncckpt.weights.broadcast.buckets import Bucket, Given, checksum, describe, fill, tensors_of
from asyncckpt.weights.broadcast.channel import Channel, Message
from asyncckpt.weights.broadcast.transport import ALIGNMENT, Wire, device_group, open_wire
from asyncckpt.weights.weights import Weights

# Bytes of the descriptions that the receivers remember: those of some 150,000 tensors.
_MOST_DESCRIBED_BYTES = 16 << 20


@dataclass(frozen=True, kw_only=True)
class Broadcast:
    """What was broadcast: the same on all ranks, but for the seconds."""

    version: int | None
    epoch: int | None
    """That of the publication, if it was one."""
    nbytes: int
    """All tensors together, in bytes."""
    buckets: int
    seconds: Mapping[str, float]
    """By phase, exactly 0.0 for one that did not take place: ``meet`` (waiting for all ranks to come), ``fill``
    (asking for tensors, and copying them into buckets), ``checksum``, ``transfer`` (waiting for the wire, and for other
    ranks), ``load``, and ``total``."""


class Seconds:
    """A stopwatch with phases."""

    def __init__(self) -> None:
        self._begun = self._last = time.perf_counter()
        self._phases = dict.fromkeys(("meet", "fill", "checksum", "transfer", "load"), 0.0)

    def add(self, phase: str) -> None:
        """All since the last call was ``phase``."""
        now = time.perf_counter()
        self._phases[phase] += now - self._last
        self._last = now

    def result(self, terms: Message, end: Message) -> Broadcast:
        """The broadcast on these ``terms``, which has come to this ``end``."""
        seconds = self._phases | {"total": time.perf_counter() - self._begun}
        told = {name: terms[name] for name in ("version", "epoch")}
        return Broadcast(**told, nbytes=end["nbytes"], buckets=end["buckets"], seconds=seconds)


class Sender:
    """The source's part of a channel, of the ranks of ``group``, if they are one."""

    def __init__(self, channel: Channel, group: dist.ProcessGroup | None = None) -> None:
        self.channel = channel
        self._group = device_group(group)
        self._known: int | None = None
        """The size of the buckets that the wire is for."""
        self._wires = 0
        self._wire = Wire(channel)
        self._described: dict[bytes, int] = {}
        """The descriptions that the receivers remember, and their numbers."""

    def send(self, weights: Given | None, *, bucket_bytes: int, version: int | None = None) -> Broadcast:
        """Send to all receivers. Returns when they have loaded all. The errors are those of ``broadcast_weights``.

        Args:
            weights: As there; None where the caller has given none, which fails on all ranks.
            bucket_bytes: As there.
            version: None: that of the publication, if it is one.
        """
        publication = weights if isinstance(weights, Weights) else None
        terms: Message = {
            "version": publication.version if publication is not None and version is None else version,
            "epoch": None if publication is None else publication.epoch,
            "bucket_bytes": bucket_bytes,
        }
        seconds = Seconds()
        # After a failure all is new: nobody knows what of it the others have heard.
        known, self._known = self._known, None
        with self.channel.failing_together(lambda: self._wire.land()):
            self.channel.collect()
            weights = _checked(weights, bucket_bytes)
            is_new = bucket_bytes != known
            self._wires += is_new
            self.channel.tell(terms | {"wire": self._wires if is_new else None})
            if is_new:
                self._drop_wire()
                self._wire = open_wire(self.channel, bucket_bytes, str(self._wires), self._group)
            seconds.add("meet")
            end = self._send_all(fill(tensors_of(weights), bucket_bytes, self._wire.buffers), seconds)
        self._known = bucket_bytes
        return seconds.result(terms, end)

    def close(self) -> None:
        """Drop the connections, and give the buffers back."""
        self.channel.close()
        self._drop_wire()

    def _drop_wire(self) -> None:
        self._wire = Wire(self.channel)
        self._described.clear()

    def _send_all(self, buckets: Iterable[Bucket], seconds: Seconds) -> Message:
        """Send the buckets, and wait until all receivers have loaded them; returns the last notice but one."""
        nbytes = count = 0
        for bucket in buckets:
            data = self._wire.stage(bucket.data)
            seconds.add("fill")
            digest = checksum(data)
            seconds.add("checksum")
            self._wire.land()
            self.channel.collect()
            self._announce(bucket, count, digest)
            self._wire.post(data, bucket)
            seconds.add("transfer")
            nbytes += sum(item.nbytes for item in bucket.items)
            count += 1
        seconds.add("fill")
        self._wire.land()
        self._wire.finish()
        end = {"kind": "end", "nbytes": nbytes, "buckets": count}
        for notice in (end, {"kind": "done"}):
            self.channel.collect()
            self.channel.tell(notice)
        seconds.add("transfer")
        return end

    def _announce(self, bucket: Bucket, number: int, digest: int) -> None:
        """Tell what the bucket is. The receivers remember from one broadcast to the next how it is described."""
        forget = sum(map(len, self._described)) > _MOST_DESCRIBED_BYTES
        if forget:
            self._described.clear()
        description = describe(bucket.items)
        is_new = description not in self._described
        notice = {
            "kind": "bucket",
            "number": number,
            "bytes": bucket.data.numel(),
            "skew": bucket.skew,
            "checksum": digest,
            "description": self._described.setdefault(description, len(self._described)),
            "forget": forget,
        }
        self.channel.tell(notice, dict.fromkeys(self.channel.others, description) if is_new else None)


def _checked(weights: Given | None, bucket_bytes: int) -> Given:
    if weights is None:
        raise ValueError("the source gives weights, and no load")
    if bucket_bytes < ALIGNMENT:
        raise ValueError(f"buckets of {bucket_bytes} bytes are too small")
    return weights
