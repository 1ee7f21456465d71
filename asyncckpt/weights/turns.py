"""What the ends of a broadcast have in common: the turns they take, the time that takes, and what comes of it."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass

from asyncckpt.errors import CheckpointError
from asyncckpt.weights.channel import Channel, Message, pack, unpack


@dataclass(frozen=True, kw_only=True)
class Broadcast:
    """What was broadcast: the same on all ranks, but for the seconds."""

    version: int | None
    epoch: int | None
    """Of the publication that it was, if it was one."""
    nbytes: int
    """Of all tensors."""
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

    def all(self) -> dict[str, float]:
        return self._phases | {"total": time.perf_counter() - self._begun}


class ToldError(Exception):
    """All ranks have been told that it is over, and raise this ``error``."""

    def __init__(self, error: CheckpointError) -> None:
        super().__init__(error)
        self.error = error


def take_turn(channel: Channel, status: Message) -> Message:
    """A round, on any rank but the source: say how it is, and hear what comes. Raises ``ToldError``."""
    channel.say(status)
    word = channel.hear()
    if "error" in word:
        raise ToldError(unpack(word["error"]))
    return word


def give_up(channel: Channel, error: BaseException) -> CheckpointError:
    """The same because of ``error``; returns what all ranks raise."""
    channel.say({"error": pack(error, channel.rank)})
    return unpack(channel.hear()["error"])


def made_of(terms: Message, last: Message, count: int, seconds: Seconds) -> Broadcast:
    """The result, on a rank that was told ``terms`` first and ``last`` last."""
    return Broadcast(
        version=terms["version"],
        epoch=terms["epoch"],
        nbytes=last["nbytes"],
        buckets=count,
        retained=terms["retained"],
        seconds=seconds.all(),
    )
