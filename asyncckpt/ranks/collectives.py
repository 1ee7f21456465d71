"""Collectives of ``torch.distributed``, for questions among the ranks of a job outside of a save.

In all functions ``process_group`` is None for the whole job, and False for this process alone. The values are sent from
host memory. If the group sends only device memory, its ``cpu_group`` sends them.
"""

from __future__ import annotations

import pickle
import struct
import weakref
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup

from asyncckpt.errors import CheckpointError, RankFailedError, located
from asyncckpt.ranks.rounds import Call, check_same_call

T = TypeVar("T")

# Timeout for a rank to reach a collective, as in gloo's own groups. The rank may be reading a large checkpoint.
COLLECTIVE_S = 1800.0
# Values up to this size, in bytes, take one round. torch's own collectives for objects ask for the lengths first.
_SHORT = 248
_LENGTH = struct.Struct("<q")
# The CPU groups made for each group, by timeout.
_cpu_groups: weakref.WeakKeyDictionary[ProcessGroup, dict[float, ProcessGroup]] = weakref.WeakKeyDictionary()


def on_all(do: Callable[[], T], process_group: Any = None) -> T:
    """Return what ``do`` returns on this rank. If it raises on any rank, all ranks raise the first rank's error.

    ``process_group``: the ranks; None: the whole job; False: this process alone.
    """
    if not many(process_group):
        return do()
    failure: CheckpointError | None = None
    try:
        result = do()
    except Exception as error:
        failure = located(error, rank=dist.get_rank(process_group))
    for found in gather(failure, process_group):
        if found is not None:
            raise found from failure
    return result


def from_first(
    do: Callable[[], T], process_group: Any = None, timeout: float = COLLECTIVE_S, start_timeout: float = 0.0
) -> T:
    """Return what ``do`` returns on the first rank, on all ranks; or raise its error, on all ranks.

    ``process_group``: see ``on_all``. Raises torch's ``RuntimeError`` if a rank does not arrive within ``timeout`` plus
    ``start_timeout`` seconds. ``start_timeout`` is the extra time for ``do`` on the first rank.
    """
    if not many(process_group):
        return do()
    answer: Any = None
    failure: Exception | None = None
    group = cpu_group(process_group, timeout)
    if dist.get_rank(group) == 0:
        try:
            answer = do()
        except Exception as error:  # the other ranks wait for an answer
            answer, failure = located(error, rank=0), error
    answer = pickle.loads(_broadcast(pickle.dumps(answer), group, timedelta(seconds=timeout + start_timeout)))
    if isinstance(answer, CheckpointError):
        raise answer from failure
    found: T = answer
    return found


def gather(value: T, process_group: Any = None) -> list[T]:
    """Return the ``value`` of each rank, in the order of the ranks. ``process_group``: see ``on_all``."""
    if not many(process_group):
        return [value]
    return [pickle.loads(each) for each in _gathered(pickle.dumps(value), cpu_group(process_group))]


def extremes(
    values: Sequence[int], process_group: Any = None, timeout: float = COLLECTIVE_S
) -> tuple[list[int], list[int]]:
    """Return the least and the greatest of each of ``values`` among the ranks, by one small collective.

    ``process_group``: see ``on_all``. Raises ``RankFailedError`` if a rank does not arrive within ``timeout`` seconds.
    """
    if not many(process_group):
        return list(values), list(values)
    both = torch.tensor([*values, *(-value for value in values)], dtype=torch.int64, device="cpu")
    try:
        dist.all_reduce(both, op=dist.ReduceOp.MAX, group=cpu_group(process_group, timeout))
    except RuntimeError as error:
        raise RankFailedError(
            f"asking the other ranks failed: {str(error).splitlines()[0]}; one of them may have died",
            rank=dist.get_rank(),
        ) from error
    return (-both[len(values) :]).tolist(), both[: len(values)].tolist()


def gather_to_first(value: T, process_group: Any = None) -> list[T]:
    """Return the values of all ranks, in the order of the ranks, on the first rank; an empty list on all others."""
    if not many(process_group):
        return [value]
    group = cpu_group(process_group)
    is_first = dist.get_rank(group) == 0
    values: list[Any] = [None] * dist.get_world_size(group) if is_first else []
    dist.gather_object(value, values if is_first else None, dst=dist.get_global_rank(group, 0), group=group)
    return values


def _gathered(mine: bytes, group: ProcessGroup) -> list[bytes]:
    rows = _rows(_LENGTH.pack(len(mine)) + mine[:_SHORT], _LENGTH.size + _SHORT, group)
    lengths = [int(_LENGTH.unpack_from(row)[0]) for row in rows]
    if max(lengths) > _SHORT:
        return [row[:length] for row, length in zip(_rows(mine, max(lengths), group), lengths, strict=True)]
    return [row[_LENGTH.size :][:length] for row, length in zip(rows, lengths, strict=True)]


def _rows(mine: bytes, nbytes: int, group: ProcessGroup) -> list[bytes]:
    """Gather ``nbytes`` bytes from each rank."""
    found = torch.empty(dist.get_world_size(group), nbytes, dtype=torch.uint8, device="cpu")
    dist.all_gather(list(found), _tensor(mine, nbytes), group=group)
    return [row.tobytes() for row in found.numpy()]


def _broadcast(mine: bytes, group: ProcessGroup, timeout: timedelta) -> bytes:
    """Return the bytes of the first rank."""
    first = dist.get_global_rank(group, 0)
    head = _tensor(_LENGTH.pack(len(mine)) + mine[:_SHORT], _LENGTH.size + _SHORT)
    _wait(dist.broadcast(head, first, group=group, async_op=True), timeout)
    (length,) = _LENGTH.unpack_from(text := head.numpy().tobytes())
    if length <= _SHORT:
        return text[_LENGTH.size :][:length]
    whole = _tensor(mine[:length], length)
    _wait(dist.broadcast(whole, first, group=group, async_op=True), timeout)
    return whole.numpy().tobytes()


def _wait(work: dist.Work | None, timeout: timedelta) -> None:
    """Wait with ``timeout``, because the caller's group has its own timeout, normally half an hour."""
    if work is not None:  # None: this process is not in the group
        work.wait(timeout)


def _tensor(data: bytes, nbytes: int) -> torch.Tensor:
    return torch.frombuffer(bytearray(data.ljust(nbytes, b"\0")), dtype=torch.uint8)


def check_same(call: Call, process_group: Any = None) -> None:
    """Raise ``RankFailedError``, on all ranks, unless all ranks make the same ``call``."""
    if many(process_group):
        check_same_call(gather(call, process_group))


def many(process_group: Any) -> bool:
    """Return whether there is more than one rank."""
    if process_group is False or not (dist.is_available() and dist.is_initialized()):
        return False
    return dist.get_world_size(process_group) > 1


def is_first(process_group: Any) -> bool:
    """Return whether this is the first rank, or the only rank."""
    return rank_of(process_group) == 0


def rank_of(process_group: Any) -> int:
    """Return the rank of this process in the group."""
    return dist.get_rank(process_group) if many(process_group) else 0


def cpu_group(process_group: ProcessGroup | None, timeout: float = COLLECTIVE_S) -> ProcessGroup:
    """Return ``process_group``, or a gloo group of the same ranks if ``process_group`` sends only device memory.

    A collective through a device would make the host wait for all earlier work of the device, and would take device
    memory. All ranks together make the gloo group when it is first needed. The gloo group is kept as long as
    ``process_group``. A second gloo group could have the same name in torch's store, and would find the addresses of
    the first group there.

    Args:
        process_group: The ranks.
        timeout: Timeout of the gloo group's collectives, in seconds.

    Raises:
        RuntimeError: A rank does not arrive. The error is torch's.
    """
    given = process_group or dist.group.WORLD
    if given is None:
        raise RuntimeError("torch.distributed is not initialised any more")
    if has_cpu_backend(given):
        return given
    made = _cpu_groups.setdefault(given, {})
    if timeout not in made:
        limit = timedelta(seconds=timeout)
        if given is dist.group.WORLD:
            made[timeout] = dist.new_group(timeout=limit, backend="gloo")
        else:  # made by its own ranks alone: torch names the group by the number of groups that each rank has
            ranks = dist.get_process_group_ranks(given)
            made[timeout] = dist.new_group(ranks, limit, backend="gloo", use_local_synchronization=True)
    return made[timeout]


def has_cpu_backend(process_group: ProcessGroup | None) -> bool:
    """Return whether the group can send host memory. torch tells this only as a text ("cpu:gloo,...")."""
    return "cpu" in str(dist.get_backend_config(process_group))
