"""Weights to other hosts: ``broadcast_weights``, which all ranks of a ``torch.distributed`` group call.

    broadcast_weights(model.state_dict(), version=step)      # the rank that has them
    broadcast_weights(load=engine.load_weights)              # every other: called with one bucket after the other

Between the two is a channel (``channel.py``), which the first call for a group makes, with the buffers, and keeps for
the next ones until ``close_broadcasts`` or the end of the process.
"""

from __future__ import annotations

import atexit
import weakref
from collections.abc import Callable

import torch.distributed as dist

from asyncckpt.errors import RankFailedError
from asyncckpt.weights.buckets import ALIGNMENT, Given, Named
from asyncckpt.weights.channel import Channel
from asyncckpt.weights.gatherer import Gatherer
from asyncckpt.weights.receiver import Receipt, Receiver
from asyncckpt.weights.sender import Sender, Terms
from asyncckpt.weights.turns import Broadcast as Broadcast
from asyncckpt.weights.turns import give_up
from asyncckpt.weights.weights import Weights

BUCKET_BYTES = 64 << 20
TIMEOUT_S = 300.0

Load = Callable[[list[Named]], object]


class Ends:
    """All that this process has of a channel: what it takes to broadcast again and again.

    ``broadcast_weights`` keeps those of a group. Ranks that are no group of ``torch.distributed``, in which each may be
    in a job of its own, make theirs of a ``Channel`` over a store that they have in common; they gather no shards.
    """

    def __init__(self, channel: Channel, group: dist.ProcessGroup | None = None) -> None:
        self.channel = channel
        self._sender = Sender(channel, group)
        self._gatherer = None if group is None else Gatherer(channel, group)
        self._receiver = Receiver(channel, group)

    def send(
        self,
        weights: Given | None,
        *,
        bucket_bytes: int,
        version: int | None = None,
        bypass_cpu: bool = False,
        local: bool = True,
    ) -> Broadcast:
        """On the source: as ``broadcast_weights``."""
        publication = weights if isinstance(weights, Weights) else None
        terms = Terms(
            bucket_bytes=bucket_bytes,
            local=local,
            version=publication.version if publication is not None and version is None else version,
            epoch=publication.epoch if publication is not None else None,
            retained=publication is not None,
        )
        return self._sender.send(_checked(weights, terms, bypass_cpu), terms)

    def gather(self, weights: Given) -> Broadcast:
        """On a rank that has shards: as ``broadcast_weights``."""
        if self._gatherer is None:
            error = ValueError("shards are gathered in a group of torch.distributed, and these ranks are none")
            raise give_up(self.channel, error) from error
        return self._gatherer.gather(weights)

    def receive(self) -> Receipt:
        """On the others: as ``receive_weights``."""
        return self._receiver.receive()

    def close(self) -> None:
        """Drop the connections, and give the buffers back."""
        self.channel.close()
        self._sender.close()
        self._receiver.close()
        if self._gatherer is not None:
            self._gatherer.close()


_open: weakref.WeakKeyDictionary[dist.ProcessGroup, dict[int, Ends]] = weakref.WeakKeyDictionary()


def broadcast_weights(
    weights: Given | None = None,
    *,
    load: Load | None = None,
    src: int = 0,
    group: dist.ProcessGroup | None = None,
    bucket_bytes: int = BUCKET_BYTES,
    timeout: float = TIMEOUT_S,
    version: int | None = None,
    bypass_cpu: bool = False,
    local: bool = True,
) -> Broadcast:
    """Bring the weights of rank ``src`` (of the job, as in ``torch.distributed.broadcast``) to all ranks of ``group``.

    On ``src``, ``weights`` is a publication (``Weights``), a mapping, or an iterable of names and tensors, which may
    use the same memory for one tensor after the other. Sharded tensors (``DTensor``) are gathered one by one: all ranks
    that hold shards give their ``weights``, the same in the same order. On every other rank ``load`` is called with
    the tensors of one bucket after the other, all of them whole, in the order of the source. They are good until it
    returns, and are not to be written to: on the source's host they are memory that it shares, unless ``local`` is off.

    Returns when all ranks have loaded all. What any rank raises, all raise, and may go on to the next call. If a rank
    died, the others raise too; they cannot go on with this group then. No wait for a rank lasts longer than ``timeout``
    seconds, so a ``load`` may not either, nor a source's next tensor.

    ``bucket_bytes`` (of the source; two buckets of memory on every rank), ``version`` (that of a publication, if it is
    one), ``bypass_cpu`` and ``local`` are the source's to say. With ``bypass_cpu`` the weights come straight from where
    they are computed with, so they must not be a publication; such a version is not ``retained``, it cannot be taken
    later. With a group of NCCL buckets travel from device to device, and ``load`` is given tensors of the current one.

    Raises ``RankFailedError`` (``rank`` says which, by its number in the group: it raised, died, did not come or did
    not answer), ``DamagedCheckpointError`` (a bucket did not arrive as it was sent), ``UnsavableStateError``.
    """
    ends = _ends(src, group, timeout)
    channel = ends.channel
    if channel.is_source:
        given = weights if load is None else None
        return ends.send(given, bucket_bytes=bucket_bytes, version=version, bypass_cpu=bypass_cpu, local=local)
    if weights is not None and load is None:
        return ends.gather(weights)
    if load is None or weights is not None:
        error = ValueError("a rank other than the source gives either the weights of which it has shards, or a load")
        raise give_up(channel, error) from error
    return _load_all(ends.receive(), load)


def receive_weights(*, src: int = 0, group: dist.ProcessGroup | None = None, timeout: float = TIMEOUT_S) -> Receipt:
    """What ``broadcast_weights`` does with a ``load``, for one who would rather ask: yields the tensors of one bucket
    after the other, good until the next is asked for. The value of the generator is the ``Broadcast``.

    Closing the generator early fails the broadcast on all ranks. Nothing happens before the first bucket is asked for.
    """
    ends = _ends(src, group, timeout)
    return (yield from ends.receive())


def close_broadcasts() -> None:
    """Drop the connections and buffers of this process. The next call makes new ones, if all ranks do this."""
    for of_group in list(_open.values()):
        for ends in of_group.values():
            ends.close()
    _open.clear()


def _ends(src: int, group: dist.ProcessGroup | None, timeout: float) -> Ends:
    """Those of this group and source; a collective if they have to be made."""
    which = dist.group.WORLD if group is None else group
    if which is None:
        raise RankFailedError("there is no process group: call torch.distributed.init_process_group first")
    if not _open:
        atexit.register(close_broadcasts)
    _drop_broken()  # also those of groups that are given up because of that
    of_group = _open.setdefault(which, {})
    ends = of_group.get(src)
    if ends is None:
        channel = Channel.of(which, dist.get_group_rank(which, src), timeout)
        ends = of_group[src] = Ends(channel, which)
    ends.channel.timeout = timeout
    return ends


def _drop_broken() -> None:
    for of_group in list(_open.values()):
        for src in [src for src, ends in of_group.items() if not ends.channel.usable]:
            of_group.pop(src).close()


def _checked(weights: Given | None, terms: Terms, bypass_cpu: bool) -> Given:
    """``weights``; if the source's arguments are wrong, something that raises when the first tensor is asked for: so
    all ranks hear of it."""
    wrong = None
    if weights is None:
        wrong = "the source gives weights, and no load"
    elif terms.bucket_bytes < ALIGNMENT:
        wrong = f"buckets of {terms.bucket_bytes} bytes are too small"
    elif bypass_cpu and terms.retained:
        wrong = "a publication is on the CPU already: bypass_cpu is for weights that are not published"
    return weights if wrong is None and weights is not None else map(_refuse, [wrong])


def _refuse(why: str | None) -> Named:
    raise ValueError(why)


def _load_all(receipt: Receipt, load: Load) -> Broadcast:
    try:
        bucket = next(receipt)
        while True:
            try:
                load(bucket)
            except BaseException as error:
                receipt.throw(error)
            bucket = next(receipt)
    except StopIteration as end:
        broadcast: Broadcast = end.value
        return broadcast
