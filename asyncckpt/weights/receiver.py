"""The receiving end. The order of things is told in ``sender.py``."""

from __future__ import annotations

from collections.abc import Generator
from typing import NamedTuple

import torch
import torch.distributed as dist

from asyncckpt.errors import DamagedCheckpointError, RankFailedError
from asyncckpt.shm.memcpy import memcpy
from asyncckpt.weights.buckets import Buffers, Item, Named, checksum, read_description, view, views
from asyncckpt.weights.channel import Channel, Message
from asyncckpt.weights.shared_buffers import attach, host_identity
from asyncckpt.weights.turns import Broadcast, Seconds, ToldError, give_up, made_of, take_turn
from asyncckpt.weights.wire import DeviceWire, HostWire, Wire, device_pair

Receipt = Generator[list[Named], None, Broadcast]


class _Arrival(NamedTuple):
    """A bucket that has come, or is about to."""

    number: int
    items: list[Item]
    data: torch.Tensor
    checksum: int
    key: tuple[str, int | None]
    """Of its description, and which buffer it is in."""


class Receiver:
    """A receiver's end of a channel."""

    def __init__(self, channel: Channel, group: dist.ProcessGroup | None) -> None:
        self._channel = channel
        self._group = group
        self._wire: Wire | None = None
        self._buffers: Buffers | None = None
        self._descriptions: dict[str, list[Item]] = {}
        self._views: dict[tuple[str, int | None], list[Named]] = {}
        self._merged = torch.empty(0, dtype=torch.uint8)

    def receive(self) -> Receipt:
        """The tensors of one bucket after the other, good until the next one is asked for.

        Whatever is thrown in here, or raised by the one who uses this as a generator should, is raised by all ranks.
        """
        seconds = Seconds()
        flight: dist.Work | None = None
        owed = 0  # bytes of a bucket that the source is sending, and this rank has not begun to receive
        try:
            terms = take_turn(self._channel, {"role": "load", "host": host_identity()})
            if terms["set_up"]:
                self._set_up(terms)
            seconds.add("meet")
            count = 0
            last: _Arrival | None = None
            while (word := take_turn(self._channel, {}))["kind"] == "bucket":
                owed = word["bytes"]
                self._learn(word)
                if self._wire is None:
                    seconds.add("transfer")
                    yield from self._give(self._find(word, count), seconds)
                else:
                    if last is not None and self._begins_tensor(word):
                        # What the former pieces were merged in is needed again.
                        seconds.add("transfer")
                        yield from self._give(last, seconds)
                        last = None
                    arrival = self._find(word, count)
                    if owed:
                        flight, owed = self._wire.post(arrival.data), 0
                    seconds.add("transfer")
                    if last is not None:
                        yield from self._give(last, seconds)
                    if flight is not None:
                        landing, flight = flight, None
                        self._wire.land(landing)
                    last = arrival
                    seconds.add("transfer")
                count += 1
            seconds.add("transfer")
            if last is not None:
                yield from self._give(last, seconds)
            take_turn(self._channel, {})
            seconds.add("transfer")
        except ToldError as told:
            raise told.error from None
        except (Exception, GeneratorExit) as error:
            if not self._channel.usable:
                raise
            if self._wire is not None and self._buffers is not None:
                if owed:
                    flight = self._wire.post(self._buffers.pair[0][:owed])
                if flight is not None:
                    self._wire.land(flight)
            stopped = RankFailedError("it stopped taking weights before all had come", rank=self._channel.rank)
            told_to_all = give_up(self._channel, stopped if isinstance(error, GeneratorExit) else error)
            if isinstance(error, GeneratorExit):
                raise
            raise told_to_all from error
        except BaseException as error:
            self._channel.leave(error)
            raise
        return made_of(terms, word, count, seconds)

    def close(self) -> None:
        """Give the buffers back."""
        self._views.clear()
        self._buffers = self._wire = None
        self._merged = torch.empty(0, dtype=torch.uint8)

    def _set_up(self, terms: Message) -> None:
        self.close()
        self._descriptions.clear()
        bucket_bytes = terms["bucket_bytes"]
        mapped = attach(terms["offer"], bucket_bytes) if "offer" in terms else None
        wire = take_turn(self._channel, {"attached": mapped is not None})["wire"]
        if wire is None:
            self._buffers = mapped
            return
        how, name, rank, world_size = wire
        if how == "device" and self._group is not None:
            self._buffers = Buffers(device_pair(bucket_bytes))
            self._wire = DeviceWire(self._channel, self._group, bucket_bytes)
        else:
            self._buffers = Buffers.of_host(bucket_bytes)
            self._wire = HostWire(self._channel, name, rank, world_size)

    def _learn(self, word: Message) -> None:
        """Hear how the bucket is described, if that is not known yet."""
        if word["forget"]:
            self._descriptions.clear()
            self._views.clear()
        if word["description_bytes"]:
            description = self._channel.hear_blob(word["description_bytes"])
            self._descriptions[word["description"]] = read_description(description)

    def _begins_tensor(self, word: Message) -> bool:
        first = self._descriptions[word["description"]][0]
        return first.is_piece and first.begin == 0

    def _find(self, word: Message, number: int) -> _Arrival:
        """Where the bucket is, or is to go."""
        if self._buffers is None:
            raise RankFailedError("the ranks were not set up to share weights: please report this")
        items = self._descriptions[word["description"]]
        first, nbytes = items[0], word["bytes"]
        turn = self._buffers.next() if self._wire is not None else word["buffer"] or 0
        skew = word["skew"]
        data = self._buffers.pair[turn][skew : skew + nbytes]
        if first.is_piece:
            if first.begin == 0 and self._merged.numel() < first.total:
                self._merged = torch.empty(first.total, dtype=torch.uint8, device=data.device)
            if self._wire is not None:
                data = self._merged[first.begin : first.begin + nbytes]
        return _Arrival(number, items, data, word["checksum"], (word["description"], turn))

    def _give(self, arrival: _Arrival, seconds: Seconds) -> Generator[list[Named], None, None]:
        """Check a bucket, and hand over what is complete with it."""
        if checksum(arrival.data) != arrival.checksum:
            names = [repr(item.name) for item in arrival.items]
            told = ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")
            raise DamagedCheckpointError(
                f"bucket {arrival.number} did not arrive as rank {self._channel.src} sent it: {told}",
                rank=self._channel.rank,
            )
        first = arrival.items[0]
        if first.is_piece and self._wire is None:
            memcpy(self._merged.data_ptr() + first.begin, arrival.data.data_ptr(), first.nbytes)
        seconds.add("checksum")
        if first.is_piece:
            if first.is_last_piece:
                yield [(first.name, view(first, self._merged[: first.total]))]
        else:
            if arrival.key not in self._views and self._buffers is not None:
                self._views[arrival.key] = views(arrival.items, self._buffers.pair[arrival.key[1] or 0])
            yield list(self._views[arrival.key])
        seconds.add("load")
