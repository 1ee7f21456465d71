"""The protocol of a broadcast: what the ranks do in which order, and the result.

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

import time
from collections.abc import Mapping
from dataclasses import dataclass

from asyncckpt.weights.broadcast.channel import Message


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
