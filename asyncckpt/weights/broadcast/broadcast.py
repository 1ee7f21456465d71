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
from torch.distributed.distributed_c10d import PrefixStore, _get_default_store

from asyncckpt.errors import RankFailedError
from asyncckpt.weights.broadcast.buckets import Given, Named
from asyncckpt.weights.broadcast.channel import Channel
from asyncckpt.weights.broadcast.membership import Membership
from asyncckpt.weights.broadcast.receiver import Receipt, Receiver
from asyncckpt.weights.broadcast.sender import Broadcast, Sender

BUCKET_BYTES = 64 << 20
TIMEOUT_S = 300.0

Load = Callable[[list[Named]], object]

# By group and source.
_open: weakref.WeakKeyDictionary[dist.ProcessGroup, dict[int, Sender | Receiver]] = weakref.WeakKeyDictionary()
_channels_made: weakref.WeakKeyDictionary[dist.ProcessGroup, int] = weakref.WeakKeyDictionary()


def broadcast_weights(
    weights: Given | None = None,
    *,
    load: Load | None = None,
    src: int = 0,
    group: dist.ProcessGroup | None = None,
    bucket_bytes: int = BUCKET_BYTES,
    timeout: float = TIMEOUT_S,
    version: int | None = None,
) -> Broadcast:
    """Bring the weights of one rank to all ranks of ``group``, which all call this.

    Returns when all ranks have loaded all. What any rank raises, all raise, and may go on to the next call. If a rank
    died, they cannot go on with this group. With a group of NCCL, buckets travel from device to device.

    Args:
        weights: On ``src``: a publication (``Weights``), a mapping, or an iterable of names and tensors, which may use
            the same memory for one tensor after the other: a generator of ``full_tensor()`` where they are sharded.
        load: On every other rank: called with the tensors of one bucket after the other, all whole, in the order of the
            source. They are good until it returns.
        src: The rank in the job that has the weights.
        group: None: all ranks of the job.
        bucket_bytes: The size of a bucket; every rank takes memory for two. The source's counts.
        timeout: Seconds that a wait for a rank may last, and so a ``load``, and a source's next tensor.
        version: What the ``Broadcast`` says; None: that of the publication, if it is one. The source's counts.

    Raises:
        RankFailedError: A rank raised, died, did not come or did not answer; ``rank`` is its number in the group.
        DamagedCheckpointError: A bucket did not arrive as it was sent.
        UnsavableStateError: Something among the weights cannot be sent.
    """
    end = _end(src, group, timeout)
    if isinstance(end, Sender):
        return end.send(weights if load is None else None, bucket_bytes=bucket_bytes, version=version)
    if load is None or weights is not None:
        error = ValueError("a rank other than the source gives a load, and no weights")
        raise end.channel.give_up(error) from error
    return _load_all(end.receive(), load)


def receive_weights(*, src: int = 0, group: dist.ProcessGroup | None = None, timeout: float = TIMEOUT_S) -> Receipt:
    """As ``broadcast_weights`` with a ``load``, but as a generator; nothing happens before it is asked for a bucket.

    Yields the tensors of one bucket after the other, good until the next is asked for; its value is the
    ``Broadcast``. To close it early fails the broadcast on all ranks.

    Args:
        src: As for ``broadcast_weights``.
        group: None: all ranks of the job.
        timeout: Seconds that a wait for a rank may last.
    """
    end = _end(src, group, timeout)
    if isinstance(end, Sender):
        return end.send(None, bucket_bytes=BUCKET_BYTES)
    return (yield from end.receive())


def close_broadcasts() -> None:
    """Drop the connections and buffers of this process. The next call makes new ones, if all ranks do this."""
    for of_group in list(_open.values()):
        for end in of_group.values():
            end.close()
    _open.clear()


def _end(src: int, group: dist.ProcessGroup | None, timeout: float) -> Sender | Receiver:
    """This rank's end of the channel of a group and source; a collective if that has to be made."""
    which = dist.group.WORLD if group is None else group
    if which is None:
        raise RankFailedError("there is no process group: call torch.distributed.init_process_group first")
    if not _open:
        atexit.register(close_broadcasts)
    for of_group in list(_open.values()):  # drop what is broken, also of groups that are given up because of that
        for broken in [each for each, end in of_group.items() if not end.channel.usable]:
            of_group.pop(broken).close()
    of_group = _open.setdefault(which, {})
    if src not in of_group:
        channel = _connect(which, dist.get_group_rank(which, src), timeout)
        of_group[src] = Sender(channel, which) if channel.is_source else Receiver(channel, which)
    end = of_group[src]
    end.channel.timeout = timeout
    return end


def _connect(group: dist.ProcessGroup, src: int, timeout: float) -> Channel:
    number = _channels_made.get(group, 0) + 1
    # The store of the job, and not the group's own: that has no public name.
    store = PrefixStore(f"asyncckpt-weights/{group.group_name}/{number}", _get_default_store())
    membership = Membership(group.rank(), group.size(), store)
    membership.wait_for_all(timeout)
    # Not before: where a rank has not come, one that comes late comes to the same store as those that try again.
    _channels_made[group] = number
    return Channel(membership, src, timeout)


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
