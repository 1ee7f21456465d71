"""The sending end.

For each bucket, in this order:

    source                                      receivers
    fill it, and take its checksum              load the one before the last
    wait until the one before is sent           wait until the last has come
    collect how everybody is             <----  say how it is
    tell what the bucket is              ---->  hear it
    begin to send it                     ====>  begin to receive it

so while bucket k is under way, k+1 is filled and k-1 is loaded, and two buffers are enough on either side. A receiver
that shares the source's buffers loads bucket k at once. After the last one, two more rounds: that there are no more,
and that all is loaded everywhere; only then does the call return.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch.distributed as dist
from xxhash import xxh3_128_hexdigest

from asyncckpt.weights.buckets import Bucket, Buffers, Given, checksum, describe, entries, fill
from asyncckpt.weights.channel import Channel, Message, pack, unpack
from asyncckpt.weights.shared_buffers import SharedBuffers, host_identity
from asyncckpt.weights.turns import Broadcast, Seconds, ToldError
from asyncckpt.weights.wire import DeviceWire, HostWire, Wire, device_pair, has_device_wire

# Of descriptions of buckets that the receivers remember: those of some 150,000 tensors.
_MOST_TOLD_BYTES = 16 << 20


@dataclass(frozen=True, kw_only=True)
class Terms:
    """What the caller of the source wants."""

    bucket_bytes: int
    local: bool
    version: int | None
    epoch: int | None
    retained: bool


class Sender:
    """The source's end of a channel, of the ranks of ``group``, if they are one."""

    def __init__(self, channel: Channel, group: dist.ProcessGroup | None) -> None:
        self._channel = channel
        self._global_ranks = range(channel.world_size) if group is None else dist.get_process_group_ranks(group)
        self._group = group if group is not None and has_device_wire(group) else None
        self._known: object = None
        """With whom, and how, it was set up."""
        self._is_heard = False
        """Whether the others have said how they are, and wait for a word."""
        self._setups = 0
        self._wire: Wire | None = None
        self._buffers: Buffers | None = None
        self._told: dict[str, int] = {}

    def send(self, weights: Given, terms: Terms) -> Broadcast:
        """Send ``weights`` to all receivers. Returns when they have loaded it."""
        seconds = Seconds()
        flight: dist.Work | None = None
        try:
            answers = self._agree({})
            gathers = [
                rank for rank, each in zip(self._channel.others, answers, strict=True) if each["role"] == "gather"
            ]
            loads = [rank for rank, each in zip(self._channel.others, answers, strict=True) if each["role"] == "load"]
            sources = [self._global_ranks[rank] for rank in (self._channel.rank, *gathers)]
            # After a failure all is new: who knows what of it the others have heard.
            # Apart from the message, which has no room for thousands of ranks.
            who_gathers = dict.fromkeys(gathers, json.dumps(sources).encode())
            known, self._known = self._set_up(answers, terms, who_gathers), None
            seconds.add("meet")
            nbytes = count = 0
            borrow = not gathers and not isinstance(self._buffers, SharedBuffers)
            bucket: Bucket | None = None
            for following in fill(entries(weights, sources), terms.bucket_bytes, self._buffers, borrow=borrow):
                data = following.data if self._wire is None else self._wire.stage(following.data)
                seconds.add("fill")
                digest = checksum(data)
                seconds.add("checksum")
                self._land(flight)
                flight = None
                # Only now may the memory of the one before be somebody else's.
                bucket = following
                self._agree(*self._announce(bucket, digest, loads))
                if self._wire is not None and data.numel():
                    flight = self._wire.post(data)
                seconds.add("transfer")
                nbytes += sum(item.nbytes for item in bucket.items)
                count += 1
            seconds.add("fill")
            self._land(flight)
            flight = None
            del bucket
            if self._wire is not None:
                self._wire.finish()
            self._agree({"kind": "end", "nbytes": nbytes})
            self._agree({"kind": "done"})
            seconds.add("transfer")
        except ToldError as told:
            raise told.error from None
        except Exception as error:
            if not self._channel.usable:
                raise
            self._land(flight)
            if not self._is_heard:
                self._channel.collect()
            packed = pack(error, self._channel.rank)
            self._tell({"error": packed})
            raise unpack(packed) from error
        except BaseException as error:
            self._channel.leave(error)
            raise
        self._known = known
        return Broadcast(
            version=terms.version,
            epoch=terms.epoch,
            nbytes=nbytes,
            buckets=count,
            retained=terms.retained,
            seconds=seconds.all(),
        )

    def close(self) -> None:
        """Give the buffers back."""
        if isinstance(self._buffers, SharedBuffers):
            self._buffers.close()
        self._buffers = self._wire = None

    def _land(self, flight: dist.Work | None) -> None:
        if flight is not None and self._wire is not None:
            self._wire.land(flight)

    def _agree(self, word: Message | Sequence[Message], blobs: Mapping[int, bytes] | None = None) -> list[Message]:
        """A round. Without a ``word`` the others go on waiting for it. Raises ``ToldError``."""
        answers = self._channel.collect()
        self._is_heard = True
        for answer in answers:
            if "error" in answer:
                self._tell({"error": answer["error"]})
                raise ToldError(unpack(answer["error"]))
        if word:
            self._tell(word, blobs)
        return answers

    def _tell(self, word: Message | Sequence[Message], blobs: Mapping[int, bytes] | None = None) -> None:
        self._is_heard = False
        self._channel.tell(word, blobs)

    def _announce(self, bucket: Bucket, digest: int, loads: Sequence[int]) -> tuple[Message, dict[int, bytes]]:
        """What the receivers hear of it. How it is described they remember from one broadcast to the next."""
        description = describe(bucket.items)
        name = xxh3_128_hexdigest(description)
        forget = sum(self._told.values()) > _MOST_TOLD_BYTES
        if forget:
            self._told.clear()
        word = {
            "kind": "bucket",
            "bytes": bucket.data.numel(),
            "skew": bucket.skew,
            "buffer": bucket.buffer,
            "checksum": digest,
            "description": name,
            "description_bytes": 0 if name in self._told else len(description),
            "forget": forget,
        }
        blobs = {} if name in self._told else dict.fromkeys(loads, description)
        self._told[name] = len(description)
        return word, blobs

    def _set_up(self, answers: Sequence[Message], terms: Terms, sources: Mapping[int, bytes]) -> object:
        """Say on what terms; and, where something is new, find out who can share memory, and connect the rest.

        ``sources``: the ranks of the job that gather, for each that does. Returns what all that depends on.
        """
        known = [answers, terms.bucket_bytes, terms.local]
        is_new = known != self._known
        word = {
            "version": terms.version,
            "epoch": terms.epoch,
            "retained": terms.retained,
            "bucket_bytes": terms.bucket_bytes,
            "sources_bytes": max(map(len, sources.values()), default=0),
            "set_up": is_new,
        }
        if not is_new:
            self._tell(word, sources)
            return known
        self.close()
        self._told.clear()
        here = host_identity()
        near = [
            terms.local and self._group is None and answer["role"] == "load" and answer["host"] == here
            for answer in answers
        ]
        shared = SharedBuffers(terms.bucket_bytes) if any(near) else None
        self._buffers = shared
        self._tell([word | ({"offer": shared.offer()} if shared and each else {}) for each in near], sources)
        found = self._agree({})
        remote = [
            rank
            for rank, answer, attached in zip(self._channel.others, answers, found, strict=True)
            if answer["role"] == "load" and not attached["attached"]
        ]
        if shared is not None and not any(each["attached"] for each in found):
            self.close()
            shared = None
        self._setups += 1
        name = str(self._setups)
        place = {rank: number for number, rank in enumerate(remote, 1)}
        # NCCL sends to all of a group, so those that gather take part, too.
        how, everybody = ("device", True) if self._group is not None else ("host", False)
        self._tell(
            [
                {"wire": [how, name, place.get(rank, 0), 1 + len(remote)] if everybody or rank in place else None}
                for rank in self._channel.others
            ]
        )
        if self._group is not None:
            self._buffers = Buffers(device_pair(terms.bucket_bytes))
            self._wire = DeviceWire(self._channel, self._group, terms.bucket_bytes)
        else:
            self._buffers = shared or Buffers.of_host(terms.bucket_bytes)
            self._wire = HostWire(self._channel, name, 0, 1 + len(remote)) if remote else None
        return known
