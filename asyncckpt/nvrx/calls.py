"""Requests and their queue, as nvrx has them: what is to be done in the background, and what in the trainer after it.

Two kinds of requests go through it. Those that ``FileSystemWriterAsync`` makes are under way already, in our worker;
the queue waits for their handles. Any other function is run by a helper process, see ``helper.py``.
"""

from __future__ import annotations

import logging
import weakref
from collections import deque
from collections.abc import Callable
from concurrent import futures
from typing import Any, NamedTuple, Protocol

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.api import CheckpointException

from asyncckpt.errors import CheckpointError, RankFailedError
from asyncckpt.nvrx import runtime
from asyncckpt.nvrx.helper import Helper, Task
from asyncckpt.nvrx.writer import StagedWrite, write_exception

logger = logging.getLogger(__name__)


class AsyncRequest(NamedTuple):
    """Something to be done in the background: ``async_fn`` (None: nothing), with these arguments.

    ``finalize_fns`` are called in the trainer, one after the other, when it is done on all ranks. ``preload_fn`` is
    called before, in the trainer, and what it returns takes the place of the second argument. ``call_idx`` is its
    number in its queue. Once ``is_frozen``, no finalize function can be added.
    """

    async_fn: Callable[..., Any] | None
    async_fn_args: tuple[Any, ...] | list[Any]
    finalize_fns: list[Callable[[], Any]]
    async_fn_kwargs: dict[str, Any] | None = None
    preload_fn: Callable[[], Any] | None = None
    is_frozen: bool = False
    call_idx: int = 0

    def add_finalize_fn(self, fn: Callable[[], Any]) -> None:
        """Have ``fn`` called after the finalize functions there are. Raises ``RuntimeError`` once it is frozen."""
        if self.is_frozen:
            raise RuntimeError("this request is scheduled; its finalize functions have to be added before that")
        self.finalize_fns.append(fn)

    def execute_sync(self) -> None:
        """Do all of it now, on all ranks."""
        if self.async_fn is not None:
            self.async_fn(*_arguments(self), **(self.async_fn_kwargs or {}))
        if dist.is_initialized():
            dist.barrier()
        for finalize in self.finalize_fns:
            finalize()

    def freeze(self) -> AsyncRequest:
        """The same request, to which nothing can be added."""
        return self._replace(is_frozen=True)

    def execute_finalize_fns(self, validate_matching_call_idx: bool = True) -> int:
        """Call the finalize functions, and return ``call_idx``. The queue has seen that it is the same on all ranks."""
        for finalize in self.finalize_fns:
            finalize()
        return self.call_idx


class AsyncCallsQueue:
    """Requests under way, finalized in the order in which they were scheduled.

    All ranks make the same calls. Signatures are those of nvrx 0.7.0.
    """

    _instances: weakref.WeakSet[AsyncCallsQueue] = weakref.WeakSet()

    def __init__(
        self,
        persistent: bool = True,
        is_daemon: bool = True,
        cpu_priority: int = 10,
        io_priority: int | None = None,
        sigterm_timeout: float = 30.0,
        cpu_shm_mode: bool = False,
    ) -> None:
        """``cpu_priority`` (a niceness) and ``io_priority`` (a class of ionice, 0 to 3) are the workers'.

        Tensors are always staged in CPU shared memory, as ``cpu_shm_mode`` asks; the workers always stay for the next
        request, as ``persistent`` asks, and end with the trainer (``is_daemon``), when they have written what is
        staged; no signal is needed for that (``sigterm_timeout``).
        """
        runtime.prioritise(cpu_priority, io_priority)
        self.async_calls: deque[tuple[AsyncRequest, _Call]] = deque()
        self.call_idx = -1
        self._helper: Helper | None = None
        self._instances.add(self)

    @classmethod
    def warmup_persistent_caller(
        cls,
        rank: int,
        is_daemon: bool = True,
        cpu_priority: int = 10,
        io_priority: int | None = None,
        sigterm_timeout: float = 30.0,
        cpu_shm_mode: bool = False,
    ) -> None:
        """Start this rank's worker, which takes a tenth of a second, before the first save needs it."""
        runtime.prioritise(cpu_priority, io_priority)
        runtime.engine().warm_up()

    @classmethod
    def get_instances(cls) -> list[AsyncCallsQueue]:
        """All queues of this process."""
        return list(cls._instances)

    def schedule_async_request(self, async_request: AsyncRequest) -> int:
        """Begin ``async_request`` (of this class, nvrx's or Megatron-LM's), and return its number.

        When this returns, the caller may change tensors among its arguments. Raises ``UnsavableStateError`` for what
        cannot be pickled, ``WorkerDiedError`` where the helper process cannot be started.
        """
        request = AsyncRequest(
            async_request.async_fn,
            async_request.async_fn_args,
            async_request.finalize_fns,
            async_request.async_fn_kwargs,
            async_request.preload_fn,
            is_frozen=True,
            call_idx=self.call_idx + 1,
        )
        call: _Call
        if isinstance(request.async_fn, StagedWrite):
            call = _SaveCall(request.async_fn)
        else:
            call = _TaskCall(None if request.async_fn is None else self._submit(request.async_fn, request))
        self.call_idx = request.call_idx
        self.async_calls.append((request, call))
        return self.call_idx

    def maybe_finalize_async_calls(self, blocking: bool = False, no_dist: bool = False) -> list[int]:
        """Finalize the requests that are done on all ranks (``no_dist``: on this one), and return their numbers.

        ``blocking``: wait for all of them. Raises DCP's ``CheckpointException`` (which is no ``Exception``) if what was
        to be done has failed, of several the first, when the others are finalized; on all ranks the same, unless
        ``no_dist``. The finalize functions of what has failed are not called. Raises ``RankFailedError`` where the
        ranks have scheduled different requests, or one of them is gone.
        """
        finalized, failed = self.finalize(blocking=blocking, alone=no_dist)
        for error in failed.values():
            raise error
        return finalized

    def finalize(
        self, *, blocking: bool = False, alone: bool = False
    ) -> tuple[list[int], dict[int, CheckpointException]]:
        """The same, but what has failed is returned too: the errors, by the numbers of the requests."""
        finalized = []
        failed: dict[int, CheckpointException] = {}
        while self.async_calls:
            request, call = self.async_calls[0]
            if blocking:
                call.wait()
            if not _is_done(request.call_idx, call, alone=alone):
                break
            self.async_calls.popleft()
            if failures := call.failures(alone=alone):
                logger.error("call %d has failed: %s", request.call_idx, str(next(iter(failures.values()))))
                failed[request.call_idx] = write_exception(failures)
            else:
                finalized.append(request.execute_finalize_fns())
        return finalized, failed

    def get_num_unfinalized_calls(self) -> int:
        """How many requests are not finalized yet."""
        return len(self.async_calls)

    def close(self, abort: bool = False) -> None:
        """Finalize all requests, end the workers and give their memory back; another request starts them anew.

        ``abort``: at once, and nothing is finalized: what is under way is lost, in other queues too, as they share the
        worker. Another rank may still publish what all had written; what else is left is removed by a later save.
        """
        try:
            if abort:
                runtime.abort()
            else:
                self.maybe_finalize_async_calls(blocking=True)
        finally:
            self.async_calls.clear()
            self.call_idx = -1
            if self._helper is not None:
                self._helper.close(abort=abort)
                self._helper = None
            if not any(queue.async_calls for queue in self._instances):
                runtime.close()

    def _submit(self, function: Callable[..., Any], request: AsyncRequest) -> Task:
        if self._helper is None or not self._helper.alive:
            self._helper = Helper()
        return self._helper.submit(function, _arguments(request), request.async_fn_kwargs or {})


class _Call(Protocol):
    """A request under way."""

    group: dist.ProcessGroup | None
    """The ranks it is of."""

    def wait(self) -> None:
        """Wait until it has ended on this rank, well or badly."""

    def done(self) -> bool:
        """Whether it has."""

    def failures(self, *, alone: bool) -> dict[int, Exception]:
        """By their ranks, how it failed."""


class _SaveCall:
    """A checkpoint: it ends on all ranks alike."""

    def __init__(self, write: StagedWrite) -> None:
        self._save = write.save
        self.group = write.process_group

    def wait(self) -> None:
        futures.wait([self._save.future])

    def done(self) -> bool:
        return self._save.done()

    def failures(self, *, alone: bool) -> dict[int, Exception]:
        try:
            self._save.result()
        except CheckpointError as error:
            return {error.rank or 0: error}
        return {}


class _TaskCall:
    """A function in the helper, on each rank its own; None: nothing on this one."""

    def __init__(self, task: Task | None) -> None:
        self._task = task
        self.group: dist.ProcessGroup | None = None

    def wait(self) -> None:
        if self._task is not None:
            self._task.wait()

    def done(self) -> bool:
        return self._task is None or self._task.done()

    def failures(self, *, alone: bool) -> dict[int, Exception]:
        error = self._task.error if self._task is not None else None
        rank = dist.get_rank() if dist.is_initialized() else 0
        mine = {} if error is None else {rank: error}
        if alone or _world_size(None) == 1 or not _extremes([int(bool(mine))], None)[1][0]:
            return mine
        everywhere: list[Any] = [None] * _world_size(None)
        dist.all_gather_object(everywhere, mine)
        return {rank: error for failures in everywhere for rank, error in failures.items()}


def abort_nvrx_checkpoint() -> None:
    """Give up all that is under way in all queues, at once; the next request starts anew."""
    for queue in AsyncCallsQueue.get_instances():
        queue.close(abort=True)


def _arguments(request: AsyncRequest) -> list[Any]:
    arguments = list(request.async_fn_args)
    if request.preload_fn is not None:
        arguments[1] = request.preload_fn()
    return arguments


def _is_done(number: int, call: _Call, *, alone: bool) -> bool:
    """Whether call ``number`` has ended on all ranks (``alone``: on this one)."""
    if alone or _world_size(call.group) == 1:
        return call.done()
    least, most = _extremes([number, int(call.done())], call.group)
    if least[0] != most[0]:
        raise RankFailedError(
            f"the ranks have scheduled different requests: one finalizes call {least[0]}, another {most[0]}",
            rank=dist.get_rank(),
        )
    return bool(least[1])


def _world_size(group: dist.ProcessGroup | None) -> int:
    return dist.get_world_size(group) if dist.is_initialized() else 1


def _extremes(values: list[int], group: dist.ProcessGroup | None) -> tuple[list[int], list[int]]:
    """The least and the greatest of each of ``values`` among the ranks, by one collective, on the CPU if possible."""
    on_cpu = "cpu" in str(dist.get_backend_config(group))
    device = torch.device("cpu") if on_cpu else torch.device("cuda", torch.cuda.current_device())
    both = torch.tensor([*values, *(-value for value in values)], dtype=torch.int64, device=device)
    try:
        dist.all_reduce(both, op=dist.ReduceOp.MAX, group=group)
    except RuntimeError as error:
        raise RankFailedError(
            f"asking the other ranks failed: {str(error).splitlines()[0]}; one of them may have died",
            rank=dist.get_rank(),
        ) from error
    most, least = both[: len(values)].tolist(), (-both[len(values) :]).tolist()
    return least, most
