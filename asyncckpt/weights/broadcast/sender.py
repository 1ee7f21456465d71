"""The sender: the source of a broadcast. ``protocol.py`` has the order of things."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence

import torch.distributed as dist
from xxhash import xxh3_128_hexdigest

from asyncckpt.errors import CheckpointError
from asyncckpt.weights.broadcast.buckets import Bucket, Given, checksum, describe, fill, tensors_of
from asyncckpt.weights.broadcast.buffers import ALIGNMENT, Buffers, host_identity
from asyncckpt.weights.broadcast.channel import Channel, Message, pack, unpack
from asyncckpt.weights.broadcast.protocol import Broadcast, Seconds, ToldError, failing_together
from asyncckpt.weights.broadcast.transport import Wire, device_group, open_wire
from asyncckpt.weights.weights import Weights

# Bytes of the descriptions that the receivers remember: those of some 150,000 tensors.
_MOST_DESCRIBED_BYTES = 16 << 20


class Sender:
    """The source's part of a channel, of the ranks of ``group``, if they are one."""

    def __init__(self, channel: Channel, group: dist.ProcessGroup | None) -> None:
        self._channel = channel
        self._global_ranks = range(channel.world_size) if group is None else dist.get_process_group_ranks(group)
        self._group = device_group(group)
        self._known: object = None
        """With whom, and how, it was set up."""
        self._is_heard = False
        """Whether the others have told their status, and wait for a notice."""
        self._setups = 0
        self._wire = Wire(channel)
        self._buffers = Buffers([])
        self._described: dict[str, int] = {}
        """The descriptions that the receivers remember, and their sizes in bytes."""

    def send(
        self,
        weights: Given | None,
        *,
        bucket_bytes: int,
        version: int | None = None,
        bypass_cpu: bool = False,
        local: bool = True,
    ) -> Broadcast:
        """Send to all receivers. Returns when they have loaded all.

        Args and errors: those of ``broadcast_weights``.
        """
        publication = weights if isinstance(weights, Weights) else None
        terms = {
            "version": publication.version if publication is not None and version is None else version,
            "epoch": None if publication is None else publication.epoch,
            "retained": publication is not None,
            "bucket_bytes": bucket_bytes,
        }
        return self._send(weights, terms, local, bypass_cpu)

    def _send(self, weights: Given | None, terms: Message, local: bool, bypass_cpu: bool) -> Broadcast:
        seconds = Seconds()
        nbytes = count = 0
        # After a failure all is new: nobody knows what of it the others have heard.
        known, self._known = self._known, None
        with failing_together(self._channel, self._give_up):
            roles = dict(zip(self._channel.others, self._collect(), strict=True))
            weights = _checked(weights, terms, bypass_cpu)
            gathers = [rank for rank, each in roles.items() if each["role"] == "gather"]
            receivers = [rank for rank in roles if rank not in gathers]
            sources = [self._global_ranks[rank] for rank in (self._channel.rank, *gathers)]
            known = self._set_up(known, roles, terms, local, dict.fromkeys(gathers, json.dumps(sources).encode()))
            seconds.add("meet")
            borrow = not gathers and not self._buffers.are_shared
            for bucket in fill(tensors_of(weights, sources), terms["bucket_bytes"], self._buffers, borrow=borrow):
                data = self._wire.stage(bucket.data)
                seconds.add("fill")
                digest = checksum(data)
                seconds.add("checksum")
                self._wire.land()
                self._collect()
                self._announce(bucket, digest, receivers)
                self._wire.post(data, bucket)
                seconds.add("transfer")
                nbytes += sum(item.nbytes for item in bucket.items)
                count += 1
            seconds.add("fill")
            self._wire.land()
            self._wire.finish()
            for notice in ({"kind": "end", "nbytes": nbytes}, {"kind": "done"}):
                self._collect()
                self._tell(notice)
            seconds.add("transfer")
        self._known = known
        return seconds.broadcast(terms, nbytes, count)

    def close(self) -> None:
        """Give the buffers back."""
        self._buffers.close()
        self._wire, self._buffers = Wire(self._channel), Buffers([])

    def _give_up(self, error: Exception | GeneratorExit) -> CheckpointError:
        self._wire.land()
        if not self._is_heard:
            self._channel.collect()
        packed = pack(error, self._channel.rank)
        self._tell({"error": packed})
        return unpack(packed)

    def _collect(self) -> list[Message]:
        """The status of all others, who then wait for a notice. Raises ``ToldError``."""
        answers = self._channel.collect()
        self._is_heard = True
        for answer in answers:
            if "error" in answer:
                self._tell({"error": answer["error"]})
                raise ToldError(unpack(answer["error"]))
        return answers

    def _tell(self, notice: Message | Sequence[Message], blobs: Mapping[int, bytes] | None = None) -> None:
        self._is_heard = False
        self._channel.tell(notice, blobs)

    def _announce(self, bucket: Bucket, digest: int, receivers: Sequence[int]) -> None:
        """Tell what the bucket is. The receivers remember from one broadcast to the next how it is described."""
        description = describe(bucket.items)
        name = xxh3_128_hexdigest(description)
        forget = sum(self._described.values()) > _MOST_DESCRIBED_BYTES
        if forget:
            self._described.clear()
        is_new = name not in self._described
        self._described[name] = len(description)
        notice = {
            "kind": "bucket",
            "bytes": bucket.data.numel(),
            "skew": bucket.skew,
            "buffer": bucket.buffer,
            "checksum": digest,
            "description": name,
            "forget": forget,
        }
        self._tell(notice, dict.fromkeys(receivers, description) if is_new else None)

    def _set_up(
        self,
        known: object,
        roles: Mapping[int, Message],
        terms: Message,
        local: bool,
        sources: Mapping[int, bytes],
    ) -> object:
        """Tell the terms; and, where something is new, find out who can share memory, and connect the rest.

        Args:
            known: What this returned the last time.
            roles: The first status of each of the others.
            terms: What they are told.
            local: Share memory with receivers on this host.
            sources: The ranks of the job that gather, for each that does; apart from the notice, in which thousands of
                ranks have no space.

        Returns:
            All that the set-up depends on.
        """
        needed = [roles, terms["bucket_bytes"], local]
        notice = terms | {"set_up": needed != known}
        if needed == known:
            self._tell(notice, sources)
            return known
        self.close()
        self._described.clear()
        host = host_identity() if local and self._group is None else None
        near = [each["role"] == "load" and each["host"] == host for each in roles.values()]
        if any(near):
            self._buffers = Buffers.shared(terms["bucket_bytes"])
        self._tell([notice | ({"offer": self._buffers.offer()} if each else {}) for each in near], sources)
        attached = [each["attached"] for each in self._collect()]
        remote = [
            rank
            for (rank, each), shares in zip(roles.items(), attached, strict=True)
            if each["role"] == "load" and not shares
        ]
        self._setups += 1
        places = {rank: (str(self._setups), number, 1 + len(remote)) for number, rank in enumerate(remote, 1)}
        self._tell([{"wire": places.get(rank)} for rank in roles])
        place = (str(self._setups), 0, 1 + len(remote)) if remote else None
        self._wire = open_wire(self._channel, terms["bucket_bytes"], self._group or place)
        if not any(attached):
            self._buffers.close()
            self._buffers = self._wire.new_buffers()
        return needed


def _checked(weights: Given | None, terms: Message, bypass_cpu: bool) -> Given:
    if weights is None:
        raise ValueError("the source gives weights, and no load")
    if terms["bucket_bytes"] < ALIGNMENT:
        raise ValueError(f"buckets of {terms['bucket_bytes']} bytes are too small")
    if bypass_cpu and terms["retained"]:
        raise ValueError("a publication is on the CPU already: bypass_cpu is for weights that are not published")
    return weights
