"""The end of a rank that has no part in a broadcast but this: it holds shards of what the source sends."""

from __future__ import annotations

import json
from collections.abc import Sequence

import torch
import torch.distributed as dist

from asyncckpt.errors import RankFailedError
from asyncckpt.weights.buckets import Given, entries, fill
from asyncckpt.weights.channel import Channel, Message
from asyncckpt.weights.turns import Broadcast, Seconds, ToldError, give_up, made_of, take_turn
from asyncckpt.weights.wire import DeviceWire, Wire, device_pair


class Gatherer:
    """It gathers in step with the source, and keeps nothing."""

    def __init__(self, channel: Channel, group: dist.ProcessGroup) -> None:
        self._channel = channel
        self._group = group
        self._wire: Wire | None = None
        self._ignored: Sequence[torch.Tensor] = []
        """What goes over a wire that this rank is on goes here."""

    def gather(self, weights: Given) -> Broadcast:
        """Go through ``weights`` as the source does."""
        seconds = Seconds()
        count = 0
        try:
            terms = self._next({"role": "gather", "host": ""})
            sources = json.loads(self._channel.hear_blob(terms["sources_bytes"]))
            if terms["set_up"]:
                self._set_up(terms)
            seconds.add("meet")
            flight: dist.Work | None = None
            for _ in fill(entries(weights, sources), terms["bucket_bytes"], None, borrow=False):
                seconds.add("fill")
                if flight is not None and self._wire is not None:
                    self._wire.land(flight)
                word = self._next({})
                if word["kind"] == "bucket":
                    flight = self._take(word)
                else:
                    raise RankFailedError(
                        "this rank gives more weights than the one that sends", rank=self._channel.rank
                    )
                seconds.add("transfer")
                count += 1
            seconds.add("fill")
            last = self._next({})
            if last["kind"] != "end":
                self._take(last)
                raise RankFailedError("this rank gives fewer weights than the one that sends", rank=self._channel.rank)
            self._next({})
            seconds.add("transfer")
        except ToldError as told:
            raise told.error from None
        except Exception as error:
            if not self._channel.usable:
                raise
            raise give_up(self._channel, error) from error
        except BaseException as error:
            self._channel.leave(error)
            raise
        return made_of(terms, last, count, seconds)

    def close(self) -> None:
        """Give the buffers back."""
        self._wire, self._ignored = None, []

    def _set_up(self, terms: Message) -> None:
        self.close()
        if self._next({"attached": False})["wire"] is not None:
            self._wire = DeviceWire(self._channel, self._group, terms["bucket_bytes"])
            self._ignored = device_pair(terms["bucket_bytes"])

    def _take(self, word: Message) -> dist.Work | None:
        """Begin to receive a bucket, if this rank has to."""
        if self._wire is None or not word["bytes"]:
            return None
        return self._wire.post(self._ignored[0][: word["bytes"]])

    def _next(self, status: Message) -> Message:
        return take_turn(self._channel, status)
