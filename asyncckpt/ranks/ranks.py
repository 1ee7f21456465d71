"""The ranks of a job outside of a save: they make the same calls in the same order, and ask each other.

``ranks_of`` returns the ranks of a process group of ``torch.distributed``. The values are sent from host memory. If the
group sends only device memory, its ``cpu_group`` sends them.
"""

from __future__ import annotations

import contextlib
import pickle
import struct
import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from typing import Any, Literal, TypeVar

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup

from asyncckpt.errors import CheckpointError, RankFailedError, located, unless_interrupt
from asyncckpt.ranks.rounds import Call, check_same_call

T = TypeVar("T")

# Timeout for a rank to reach a collective, as in gloo's own groups. The rank may be reading a large checkpoint.
COLLECTIVE_S = 1800.0
# Values up to this size, in bytes, take one round. torch's own collectives for objects ask for the lengths first.
_SHORT = 248
_LENGTH = struct.Struct("<q")
# The CPU groups made for each group, by timeout.
_cpu_groups: weakref.WeakKeyDictionary[ProcessGroup, dict[float, ProcessGroup]] = weakref.WeakKeyDictionary()


class Ranks(ABC):
    """Ranks that make the same calls in the same order. This process is ``rank`` of ``size``.

    All methods raise ``RankFailedError`` if a rank is gone or silent.
    """

    rank: int
    size: int

    @abstractmethod
    def gather(self, value: T) -> list[T]:
        """Return the ``value`` of each rank, in the order of the ranks."""

    def gather_to_first(self, value: T) -> list[T]:
        """Return the ``value`` of each rank on the first rank, and an empty list on all others."""
        values = self.gather(value)
        return values if self.rank == 0 else []

    def from_first(self, do: Callable[[], T]) -> T:
        """Return what ``do`` returns on the first rank, on all ranks; or raise its error, on all ranks."""
        if self.size == 1:
            return do()
        answer: Any = None
        failure: Exception | None = None
        if self.rank == 0:
            try:
                answer = do()
            except Exception as error:  # the other ranks wait for an answer
                failure = error
                answer = located(error, rank=0)
        answer = self._of_first(answer)
        if isinstance(answer, CheckpointError):
            raise answer from failure
        found: T = answer
        return found

    def on_all(self, do: Callable[[], T]) -> T:
        """Return what ``do`` returns on this rank. If it raises on any rank, all ranks raise the first rank's error."""
        if self.size == 1:
            return do()
        failure: CheckpointError | None = None
        try:
            result = do()
        except Exception as error:
            failure = located(error, rank=self.rank)
        for found in self.gather(failure):
            if found is not None:
                raise found from failure
        return result

    def check_same(self, call: Call) -> None:
        """Raise ``RankFailedError``, on all ranks, unless all ranks make the same ``call``."""
        if self.size > 1:
            check_same_call(self.gather(call))

    def extremes(self, values: Sequence[int]) -> tuple[list[int], list[int]]:
        """Return the least and the greatest of each of ``values`` among the ranks."""
        columns = list(zip(*self.gather(values), strict=True))
        return list(map(min, columns)), list(map(max, columns))

    def _of_first(self, value: T) -> T:
        return self.gather(value)[0]


class OneRank(Ranks):
    """This process alone."""

    rank = 0
    size = 1

    def gather(self, value: T) -> list[T]:
        return [value]


class ProcessGroupRanks(Ranks):
    """The ranks of a process group; see ``ranks_of``."""

    def __init__(self, process_group: ProcessGroup | None, timeout: float, first_s: float, lost: str) -> None:
        self.rank = dist.get_rank(process_group)
        self.size = dist.get_world_size(process_group)
        self._process_group, self._timeout = process_group, timeout
        self._first_s, self._lost = first_s, lost

    def gather(self, value: T) -> list[T]:
        mine = pickle.dumps(value)
        with self._asking() as group:
            told = _gathered(mine, group)
        return [pickle.loads(each) for each in told]

    def gather_to_first(self, value: T) -> list[T]:
        mine = pickle.dumps(value)
        told: list[Any] = [None] * self.size if self.rank == 0 else []
        with self._asking() as group:
            dist.gather_object(mine, told or None, dst=dist.get_global_rank(group, 0), group=group)
        return [pickle.loads(each) for each in told]

    def extremes(self, values: Sequence[int]) -> tuple[list[int], list[int]]:
        """Return the same as ``Ranks.extremes``, by one small collective."""
        both = torch.tensor([*values, *(-value for value in values)], dtype=torch.int64, device="cpu")
        with self._asking() as group:
            dist.all_reduce(both, op=dist.ReduceOp.MAX, group=group)
        return (-both[len(values) :]).tolist(), both[: len(values)].tolist()

    def _of_first(self, value: T) -> T:
        mine = pickle.dumps(value)
        limit = timedelta(seconds=self._timeout + self._first_s)
        with self._asking() as group:
            told = _broadcast(mine, group, limit)
        found: T = pickle.loads(told)
        return found

    @contextlib.contextmanager
    def _asking(self) -> Iterator[ProcessGroup]:
        try:
            yield cpu_group(self._process_group, self._timeout)
        except unless_interrupt(RuntimeError) as error:
            reason = str(error).partition("\n")[0] or type(error).__name__
            raise RankFailedError(self._lost.format(reason)) from error


def ranks_of(
    process_group: ProcessGroup | Literal[False] | None = None,
    timeout: float = COLLECTIVE_S,
    *,
    first_s: float = 0.0,
    lost: str = "asking the other ranks failed: {}; one of them may have died",
) -> Ranks:
    """Return the ranks of a process group. If this process is not in the group, it is alone.

    Args:
        process_group: The ranks; None: the whole job, as it is now; False: this process alone.
        timeout: Seconds for a rank to make the same call.
        first_s: Seconds that ``from_first`` waits in addition, for the work of the first rank.
        lost: The text of the error if a rank does not make the same call; ``{}`` stands for torch's reason.
    """
    return ProcessGroupRanks(process_group or None, timeout, first_s, lost) if many(process_group) else OneRank()


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


def many(process_group: ProcessGroup | Literal[False] | None) -> bool:
    """Return whether there is more than one rank. ``process_group``: see ``ranks_of``."""
    if process_group is False or not (dist.is_available() and dist.is_initialized()):
        return False
    return dist.get_world_size(process_group) > 1


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
