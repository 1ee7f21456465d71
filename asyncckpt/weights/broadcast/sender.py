"""The sender, the source of a broadcast; and the protocol, that is, what the ranks do in which order.

Every rank has a role: the source sends, a receiver loads, a gatherer only helps to gather shards. All they tell each
other are rounds over the channel (``channel.py``, also for how all end when one fails): the source collects the status
of every other rank, and tells all a notice. First come the terms; where they are new, what memory can be shared, and
the wire. Then, for each bucket:

    source                                      receivers
    fill it, and take its checksum              load the one before the last
    wait until the one before is sent           wait until the last has come
    collect the status of everybody      <----  say how it is
    tell what the bucket is              ---->  hear it
    begin to send it                     ====>  begin to receive it

so while bucket k is under way, k+1 is filled and k-1 is loaded, and two buffers are enough on either side. A receiver
that shares the source's buffers loads bucket k at once. After the last one, two more rounds: that there are no more,
and that all is loaded everywhere; only then does the call return.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch.distributed as dist

from asyncckpt.weights.broadcast.buckets import Bucket, Given, checksum, describe, fill, tensors_of
from asyncckpt.weights.broadcast.channel import Channel, Message
from asyncckpt.weights.broadcast.transport import ALIGNMENT, Buffers, Wire, device_group, host_identity, open_wire
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
    retained: bool
    """Whether this version can be taken again: only if it is a publication. Weights that come straight out of a model
    are gone with its next step."""
    seconds: Mapping[str, float]
    """By phase, exactly 0.0 for one that did not take place: ``meet`` (waiting for all ranks to come), ``fill``
    (gathering and copying into buckets), ``checksum``, ``transfer`` (waiting for the wire, and for other ranks),
    ``load``, and ``total``."""


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
        told = {name: terms[name] for name in ("version", "epoch", "retained")}
        return Broadcast(**told, nbytes=end["nbytes"], buckets=end["buckets"], seconds=seconds)


class Sender:
    """The source's part of a channel, of the ranks of ``group``, if they are one."""

    def __init__(self, channel: Channel, group: dist.ProcessGroup | None = None) -> None:
        self.channel = channel
        everyone = range(len(channel.others) + 1)
        self._global_ranks = everyone if group is None else dist.get_process_group_ranks(group)
        self._group = device_group(group)
        self._known: object = None
        """With whom, and how, it was set up."""
        self._setups = 0
        self._wire = Wire(channel)
        self._described: dict[bytes, int] = {}
        """The descriptions that the receivers remember, and their numbers."""

    def send(
        self,
        weights: Given | None,
        *,
        bucket_bytes: int,
        version: int | None = None,
        bypass_cpu: bool = False,
        local: bool = True,
    ) -> Broadcast:
        """Send to all receivers. Returns when they have loaded all. The errors are those of ``broadcast_weights``.

        Args:
            weights: As there; None where the caller has given none, which fails on all ranks.
            bucket_bytes: As there, as are the others.
            version: None: that of the publication, if it is one.
            bypass_cpu: The weights are no publication.
            local: Share memory with the ranks on this host.
        """
        publication = weights if isinstance(weights, Weights) else None
        terms: Message = {
            "version": publication.version if publication is not None and version is None else version,
            "epoch": None if publication is None else publication.epoch,
            "retained": publication is not None,
            "bucket_bytes": bucket_bytes,
        }
        seconds = Seconds()
        # After a failure all is new: nobody knows what of it the others have heard.
        known, self._known = self._known, None
        with self.channel.failing_together(lambda: self._wire.land()):
            roles = dict(zip(self.channel.others, self.channel.collect(), strict=True))
            weights = _checked(weights, terms, bypass_cpu)
            needed = [roles, bucket_bytes, local]
            gathers = [rank for rank, each in roles.items() if each["role"] == "gather"]
            sources = [self._global_ranks[rank] for rank in (self.channel.rank, *gathers)]
            terms["set_up"] = needed != known
            self._set_up(terms, roles, local, dict.fromkeys(gathers, json.dumps(sources).encode()))
            seconds.add("meet")
            tensors = tensors_of(weights, sources, borrow=not gathers and self._wire.shared is None)
            buckets = fill(tensors, bucket_bytes, self._wire.buffers)
            end = self._send_all(buckets, [rank for rank in roles if rank not in gathers], seconds)
        self._known = needed
        return seconds.result(terms, end)

    def close(self) -> None:
        """Drop the connections, and give the buffers back."""
        self.channel.close()
        self._drop_wire()

    def _drop_wire(self) -> None:
        self._wire.close()
        self._wire = Wire(self.channel)
        self._described.clear()

    def _send_all(self, buckets: Iterable[Bucket], receivers: Sequence[int], seconds: Seconds) -> Message:
        """Send the buckets, and wait until all receivers have loaded them; returns the last notice but one."""
        nbytes = count = 0
        for bucket in buckets:
            data = self._wire.stage(bucket.data)
            seconds.add("fill")
            digest = checksum(data)
            seconds.add("checksum")
            self._wire.land()
            self.channel.collect()
            self._announce(bucket, count, digest, receivers)
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

    def _announce(self, bucket: Bucket, number: int, digest: int, receivers: Sequence[int]) -> None:
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
            "buffer": bucket.buffer,
            "checksum": digest,
            "description": self._described.setdefault(description, len(self._described)),
            "forget": forget,
        }
        self.channel.tell(notice, dict.fromkeys(receivers, description) if is_new else None)

    def _set_up(self, terms: Message, roles: Mapping[int, Message], local: bool, sources: Mapping[int, bytes]) -> None:
        """Tell the terms; and, where something is new, find out who can share memory, and connect the rest.

        ``roles`` are the first status of each of the others; ``sources`` the ranks of the job that gather, for each
        that does. They are told apart from the notice, in which thousands of ranks have no space.
        """
        if not terms["set_up"]:
            self.channel.tell(terms, sources)
            return
        self._drop_wire()
        host = host_identity() if local and self._group is None else None
        near = [each["host"] == host for each in roles.values()]
        if any(near):
            self._wire.shared = Buffers.shared(terms["bucket_bytes"])
        shared = self._wire.shared
        offer = {} if shared is None else {"offer": shared.offer()}
        self.channel.tell([terms | (offer if each else {}) for each in near], sources)
        attached = [each["attached"] for each in self.channel.collect()]
        remote = [
            rank for rank, shares in zip(roles, attached, strict=True) if roles[rank]["role"] == "load" and not shares
        ]
        self._setups += 1
        places = {rank: (str(self._setups), number, 1 + len(remote)) for number, rank in enumerate(remote, 1)}
        self.channel.tell([{"wire": places.get(rank)} for rank in roles])
        place = (str(self._setups), 0, 1 + len(remote)) if remote else None
        wire = open_wire(self.channel, terms["bucket_bytes"], self._group or place)
        if any(attached):
            wire.shared = shared
        else:
            self._wire.close()
        self._wire = wire


def _checked(weights: Given | None, terms: Message, bypass_cpu: bool) -> Given:
    if weights is None:
        raise ValueError("the source gives weights, and no load")
    if terms["bucket_bytes"] < ALIGNMENT:
        raise ValueError(f"buckets of {terms['bucket_bytes']} bytes are too small")
    if bypass_cpu and terms["retained"]:
        raise ValueError("a publication is on the CPU already: bypass_cpu is for weights that are not published")
    return weights
