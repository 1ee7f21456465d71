"""Weights to other hosts: ``broadcast_weights``, which all ranks of a ``torch.distributed`` group call.

    broadcast_weights(model.state_dict(), version=step)      # the rank that has them
    broadcast_weights(load=engine.load_weights)              # every other: called with one bucket after the other

Between the two is a channel (``channel.py``), which the first call for a group makes, with the buffers, and keeps for
the next ones, until ``close_broadcasts`` or the end of the process.
"""

from __future__ import annotations

import atexit
import weakref
from collections.abc import Callable

import torch.distributed as dist

from asyncckpt.errors import RankFailedError
from asyncckpt.weights.broadcast.buckets import Given, Named
from asyncckpt.weights.broadcast.channel import Channel
from asyncckpt.weights.broadcast.endpoints import BroadcastEndpoints
from asyncckpt.weights.broadcast.protocol import Broadcast, give_up
from asyncckpt.weights.broadcast.receiver import Receipt

BUCKET_BYTES = 64 << 20
TIMEOUT_S = 300.0

Load = Callable[[list[Named]], object]

_open: weakref.WeakKeyDictionary[dist.ProcessGroup, dict[int, BroadcastEndpoints]] = weakref.WeakKeyDictionary()


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
    """Bring the weights of one rank to all ranks of ``group``, which all call this.

    Returns when all ranks have loaded all. What any rank raises, all raise, and may go on to the next call. If a rank
    died, they cannot go on with this group. With a group of NCCL, buckets travel from device to device.

    Args:
        weights: On ``src``: a publication (``Weights``), a mapping, or an iterable of names and tensors, which may use
            the same memory for one tensor after the other. Sharded tensors (``DTensor``) are gathered one by one: all
            ranks that hold shards give their ``weights``, the same in the same order.
        load: On every other rank: called with the tensors of one bucket after the other, all whole, in the order of the
            source. They are good until it returns. They may be memory that the source shares: do not write to them.
        src: The rank in the job that has the weights.
        group: None: all ranks of the job.
        bucket_bytes: The size of a bucket; every rank takes memory for two. The source's counts.
        timeout: Seconds that a wait for a rank may last, and so a ``load``, and a source's next tensor.
        version: What the ``Broadcast`` says; None: that of the publication, if it is one. The source's counts.
        bypass_cpu: The weights come straight from where they are computed with, and are no publication: such a version
            is not ``retained``, it cannot be taken later. The source's counts.
        local: Share memory with the ranks on the source's host. The source's counts.

    Raises:
        RankFailedError: A rank raised, died, did not come or did not answer; ``rank`` is its number in the group.
        DamagedCheckpointError: A bucket did not arrive as it was sent.
        UnsavableStateError: Something among the weights cannot be sent.
    """
    endpoints = _endpoints(src, group, timeout)
    channel = endpoints.channel
    if channel.is_source:
        given = weights if load is None else None
        return endpoints.sender.send(
            given, bucket_bytes=bucket_bytes, version=version, bypass_cpu=bypass_cpu, local=local
        )
    if weights is not None and load is None:
        return endpoints.receiver.gather(weights)
    if load is None or weights is not None:
        error = ValueError("a rank other than the source gives either the weights of which it has shards, or a load")
        raise give_up(channel, error) from error
    return _load_all(endpoints.receiver.receive(), load)


def receive_weights(*, src: int = 0, group: dist.ProcessGroup | None = None, timeout: float = TIMEOUT_S) -> Receipt:
    """As ``broadcast_weights`` with a ``load``, but as a generator; nothing happens before it is asked for a bucket.

    Args:
        src: As for ``broadcast_weights``, as are the others.
        group: None: all ranks of the job.
        timeout: Seconds that a wait for a rank may last.

    Returns:
        Yields the tensors of one bucket after the other, good until the next is asked for; its value is the
        ``Broadcast``. To close it early fails the broadcast on all ranks.
    """
    endpoints = _endpoints(src, group, timeout)
    return (yield from endpoints.receiver.receive())


def close_broadcasts() -> None:
    """Drop the connections and buffers of this process. The next call makes new ones, if all ranks do this."""
    for of_group in list(_open.values()):
        for endpoints in of_group.values():
            endpoints.close()
    _open.clear()


def _endpoints(src: int, group: dist.ProcessGroup | None, timeout: float) -> BroadcastEndpoints:
    """Those of a group and source; a collective if they have to be made."""
    which = dist.group.WORLD if group is None else group
    if which is None:
        raise RankFailedError("there is no process group: call torch.distributed.init_process_group first")
    if not _open:
        atexit.register(close_broadcasts)
    for of_group in list(
        _open.values()
    ):  # drop those that are broken, also of groups that are given up because of that
        for broken in [each for each, endpoints in of_group.items() if not endpoints.channel.usable]:
            of_group.pop(broken).close()
    of_group = _open.setdefault(which, {})
    endpoints = of_group.get(src)
    if endpoints is None:
        channel = Channel.of(which, dist.get_group_rank(which, src), timeout)
        endpoints = of_group[src] = BroadcastEndpoints(channel, which)
    endpoints.channel.timeout = timeout
    return endpoints


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
