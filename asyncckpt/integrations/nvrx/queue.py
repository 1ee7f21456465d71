"""nvrx's queues: requests of what to do in the background, and in the trainer after it; and calls of ``torch.save``.

Two kinds of requests go through ``AsyncCallsQueue``. Those that ``FileSystemWriterAsync`` makes are under way already,
in our worker. Any other function is run by a helper process, see ``helper.py``.
"""

from __future__ import annotations

import logging
import weakref
from collections import deque
from collections.abc import Callable
from concurrent import futures
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple, TypeVar

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.api import CheckpointException

from asyncckpt.config import Config
from asyncckpt.errors import RankFailedError
from asyncckpt.extension import Save, extremes, gather, give_up
from asyncckpt.integrations.nvrx.filesystem import (
    StagedWrite,
    engine,
    engines,
    prioritize,
    record_spans,
    write_exception,
)
from asyncckpt.integrations.nvrx.helper import Helper
from asyncckpt.integrations.torch_file import save_by

logger = logging.getLogger(__name__)


class AsyncRequest(NamedTuple):
    """Something to be done in the background: ``async_fn`` (None: nothing), with these arguments.

    ``finalize_fns`` are called in the trainer when it is done on all ranks. ``preload_fn`` is called before, in the
    trainer, and what it returns takes the place of the second argument. ``call_idx`` is its number in its queue. Once
    ``is_frozen``, no finalize function can be added.
    """

    async_fn: Callable[..., Any] | None
    async_fn_args: tuple[Any, ...] | list[Any]
    finalize_fns: list[Callable[[], Any]]
    async_fn_kwargs: dict[str, Any] | None = None
    preload_fn: Callable[[], Any] | None = None
    is_frozen: bool = False
    call_idx: int = 0

    def add_finalize_fn(self, fn: Callable[[], Any]) -> None:
        """Have ``fn`` called after the finalize functions there are."""
        if self.is_frozen:
            raise RuntimeError("this request is scheduled; its finalize functions have to be added before that")
        self.finalize_fns.append(fn)

    def arguments(self) -> list[Any]:
        """The positional arguments; calls ``preload_fn``."""
        arguments = list(self.async_fn_args)
        if self.preload_fn is not None:
            arguments[1] = self.preload_fn()
        return arguments

    def execute_sync(self) -> None:
        """Do all of it now, on all ranks."""
        if self.async_fn is not None:
            self.async_fn(*self.arguments(), **(self.async_fn_kwargs or {}))
        if dist.is_initialized():
            dist.barrier()
        self.execute_finalize_fns()

    def freeze(self) -> AsyncRequest:
        """A copy to which nothing can be added."""
        return self._replace(is_frozen=True)

    def execute_finalize_fns(self, validate_matching_call_idx: bool = True) -> int:
        """Call the finalize functions. Returns ``call_idx``, which the queue has compared between the ranks, whatever
        ``validate_matching_call_idx`` says.
        """
        for finalize in self.finalize_fns:
            finalize()
        return self.call_idx


@dataclass(eq=False)
class AsyncCall:
    """A scheduled request. ``future`` ends with it on this rank, well or badly; a save ends on all ranks alike.

    ``finalize_error``: what one of its finalize functions has raised.
    """

    request: AsyncRequest
    future: Future[Any]
    is_save: bool = False
    process_group: dist.ProcessGroup | None = None
    generation: int = 0
    finalize_error: Exception | None = None

    def failures(self) -> dict[int, BaseException] | None:
        """How it failed, by rank, as far as this rank knows; None if it has not ended here yet."""
        if not self.future.done():
            return None
        error = self.future.exception()
        if error is None:
            return {}
        if self.is_save:
            return {getattr(error, "rank", None) or 0: error}
        return {dist.get_rank() if dist.is_initialized() else 0: error}

    def failures_of_all(self) -> dict[int, BaseException] | None:
        """How it failed on each rank where it failed; None if it has not ended on all of them yet.

        Raises ``RankFailedError``.
        """
        mine = self.failures()
        values = [self.request.call_idx, int(mine is not None), len(mine or ())]
        least, most = extremes(values, self.process_group, Config().timeout)
        if least[0] != most[0]:
            raise RankFailedError(
                f"the ranks have scheduled different requests: one finalizes call {least[0]}, another {most[0]}",
                rank=dist.get_rank(),
            )
        if not least[1]:
            return None
        if self.is_save or not most[2]:
            return mine
        return {rank: error for each in gather(mine or {}) for rank, error in each.items()}


class AsyncCallsQueue:
    """Requests under way, finalized in the order in which they were scheduled. All ranks make the same calls."""

    # By their ids: all of them can be looked at in one step, while others come and go in other threads.
    _instances: weakref.WeakValueDictionary[int, AsyncCallsQueue] = weakref.WeakValueDictionary()

    def __init__(
        self,
        persistent: bool = True,
        is_daemon: bool = True,
        cpu_priority: int = 10,
        io_priority: int | None = None,
        sigterm_timeout: float = 30.0,
        cpu_shm_mode: bool = False,
        otel_bootstrap: dict[str, Any] | None = None,
    ) -> None:
        """Set the priorities of workers; they are started by the first save, or by ``warmup_persistent_caller``.

        Args:
            persistent, is_daemon, sigterm_timeout: Change nothing: the worker always stays for the next request, and
                ends with the trainer, without a signal, when it has written what is staged.
            cpu_priority, io_priority: As of ``prioritize``.
            cpu_shm_mode: Changes nothing: tensors are always staged in CPU shared memory.
            otel_bootstrap: As of ``record_spans``.
        """
        prioritize(cpu_priority, io_priority)
        record_spans(otel_bootstrap)
        self.async_calls: deque[AsyncCall] = deque()
        self.call_idx = -1
        self._helper: Helper | None = None
        # How often all was given up: so far, and when the calls were last looked at.
        self._generation = self._looked_at = 0
        self._instances[id(self)] = self

    @classmethod
    def warmup_persistent_caller(
        cls,
        rank: int,
        is_daemon: bool = True,
        cpu_priority: int = 10,
        io_priority: int | None = None,
        sigterm_timeout: float = 30.0,
        cpu_shm_mode: bool = False,
        otel_bootstrap: dict[str, Any] | None = None,
    ) -> None:
        """Start this rank's worker, which takes a tenth of a second, before the first save needs it.

        Args:
            rank: Changes nothing.
            is_daemon, cpu_priority, io_priority, sigterm_timeout, cpu_shm_mode, otel_bootstrap: As for a queue.
        """
        prioritize(cpu_priority, io_priority)
        record_spans(otel_bootstrap)
        engine().start(alone=True)

    @classmethod
    def get_instances(cls) -> list[AsyncCallsQueue]:
        """All queues of this process."""
        return [queue for ref in cls._instances.valuerefs() if (queue := ref()) is not None]

    def schedule_async_request(self, async_request: AsyncRequest) -> int:
        """Begin ``async_request`` (of this class, nvrx's or Megatron-LM's), and return its number.

        When this returns, the caller may change tensors among its arguments. Raises as ``Helper`` and its ``submit``.
        """
        self._forget_given_up()
        given, generation = async_request, self._generation
        work = (given.async_fn, given.async_fn_args, given.finalize_fns, given.async_fn_kwargs, given.preload_fn)
        request = AsyncRequest(*work, is_frozen=True, call_idx=self.call_idx + 1)
        if isinstance(staged := request.async_fn, StagedWrite):
            group = staged.process_group
            call = AsyncCall(request, staged.save.future, is_save=True, process_group=group, generation=generation)
        else:
            call = AsyncCall(request, self._submit(request), generation=generation)
        self.call_idx = request.call_idx
        self.async_calls.append(call)
        return self.call_idx

    def add_save(self, save: Save) -> None:
        """Have ``save``, which this rank makes alone, finalized in its turn."""
        self._forget_given_up()
        save.mark_reported()
        self.call_idx += 1
        request = AsyncRequest(None, (), [], is_frozen=True, call_idx=self.call_idx)
        self.async_calls.append(AsyncCall(request, save.future, generation=self._generation))

    def maybe_finalize_async_calls(self, blocking: bool = False, no_dist: bool = False) -> list[int]:
        """Finalize the requests that are done on all ranks (``no_dist``: on this one), and return their numbers.

        ``blocking``: wait for all of them. Raises DCP's ``CheckpointException`` (which is no ``Exception``) of the
        first that has failed, when the others are finalized; on all ranks the same, unless ``no_dist``. Finalize
        functions of what has failed are not called. Raises ``RankFailedError`` where the ranks have scheduled different
        requests, or one of them is gone.
        """
        self._forget_given_up()
        finalized = []
        failed: list[CheckpointException] = []
        while self.async_calls:
            call = self.async_calls[0]
            if blocking:
                futures.wait([call.future])
            failures = call.failures() if no_dist else call.failures_of_all()
            if failures is None:
                break
            self.async_calls.popleft()
            if failures:
                logger.error("call %d has failed: %s", call.request.call_idx, str(next(iter(failures.values()))))
                failed.append(write_exception(failures))
            else:
                try:
                    finalized.append(call.request.execute_finalize_fns())
                except Exception as error:
                    call.finalize_error = error
                    raise
        if failed:
            raise failed[0]
        return finalized

    def get_num_unfinalized_calls(self) -> int:
        """How many requests are not finalized yet."""
        self._forget_given_up()
        return len(self.async_calls)

    def close(self, abort: bool = False) -> None:
        """Finalize all requests, end the workers and give their memory back; another request starts them anew.

        ``abort``: at once, and nothing is finalized: what is under way is lost, in other queues too, as they share the
        worker. Another rank may still commit what all had written; what else is left is removed by a later save.
        """
        try:
            if abort:
                engines.abort()
            else:
                self.maybe_finalize_async_calls(blocking=True)
        finally:
            self.async_calls.clear()
            self.call_idx = -1
            if self._helper is not None:
                self._helper.close(abort=abort)
                self._helper = None
            if not any(queue.async_calls for queue in self.get_instances()):
                engines.close()

    def give_up(self) -> None:
        """Finalize nothing of what was scheduled so far, and end the helper at once. Any thread may call."""
        self._generation += 1
        if (helper := self._helper) is not None:
            helper.kill()

    def _forget_given_up(self) -> None:
        """Here, and not as it is given up: a call in another thread may be about to schedule something."""
        if self._looked_at != self._generation:
            self._looked_at = self._generation
            self.async_calls = deque(call for call in self.async_calls if call.generation == self._generation)
            self.call_idx = -1
            if self._helper is not None:
                self._helper.close(abort=True)
                self._helper = None

    def __del__(self) -> None:
        """What is under way goes on: no queue is needed for that."""

    def _get_async_caller(self) -> AsyncCallsQueue:
        """For code that looks into nvrx: what has the process."""
        return self

    def _debug_is_async_process_running(self) -> bool:
        """For code that looks into nvrx: whether there is a worker, which the queues share, or a helper."""
        return engines.has_worker() or (self._helper is not None and self._helper.death is None)

    def _submit(self, request: AsyncRequest) -> Future[None]:
        if request.async_fn is None:
            nothing = Future[None]()
            nothing.set_result(None)
            return nothing
        if self._helper is None or self._helper.death is not None or self._helper.is_leaving:
            self._helper = Helper()
        return self._helper.submit(request.async_fn, request.arguments(), request.async_fn_kwargs or {})


class TorchAsyncCheckpoint:
    """Calls of ``torch_save``, finalized by a queue. Each process saves for itself."""

    def __init__(self, persistent_queue: bool = True) -> None:
        self.save = torch.save
        self._queue = AsyncCallsQueue(persistent=persistent_queue)

    def async_save(self, state_dict: Any, *args: Any, **kwargs: Any) -> Save:
        """Save ``state_dict`` with the arguments of ``torch.save``. The caller may then change the tensors."""
        save = save_by(partial(engine, alone=True), state_dict, *args, **kwargs)
        self._queue.add_save(save)
        save.synchronize_staging(engine(alone=True).config.timeout)  # with ``Config.overlap``
        return save

    def finalize_async_save(self, blocking: bool = False, no_dist: bool = True, terminate: bool = False) -> None:
        """Look for saves that have ended. Raises DCP's ``CheckpointException`` if one has failed.

        Args:
            blocking: Wait for all saves.
            no_dist: Ask no other rank.
            terminate: Close in the end.
        """
        self._queue.maybe_finalize_async_calls(blocking, no_dist=no_dist)
        if terminate:
            self.close()

    def close(self, abort: bool = False) -> None:
        """As ``AsyncCallsQueue.close``, with ``abort`` as there, but no other rank is asked."""
        if not abort:
            self._queue.maybe_finalize_async_calls(blocking=True, no_dist=True)
        self._queue.close(abort=abort)

    def _get_async_calls_queue(self) -> AsyncCallsQueue:
        """For code that looks into nvrx."""
        return self._queue


def abort_nvrx_checkpoint() -> None:
    """Give up all that is under way in all queues, at once; the next request starts anew."""
    for queue in AsyncCallsQueue.get_instances():
        queue.close(abort=True)


T = TypeVar("T")


class AbortAsyncckpt:
    """For ``inprocess.Wrapper(abort=inprocess.Compose(AbortTorchDistributed(), AbortAsyncckpt()))``.

    What this process has of checkpointers, of calls such as ``async_save``, and of the queues here, is given up: waits
    for saves and for other ranks end with an error at once, in the main thread, too; with ``Config.overlap`` one for a
    copy ends with that. Workers stay, with their memory, for the next iteration: a save that all ranks had staged is
    finished, any other is withdrawn on all of them.
    """

    def __new__(cls, *args: object, **options: object) -> AbortAsyncckpt:
        """Where nvrx's in-process restart is installed, the instance is an ``Abort`` of it, as ``Wrapper`` asks."""
        try:
            from nvidia_resiliency_ext.inprocess.abort import Abort
        except ImportError:  # not installed, or not what that needs, or a release without
            return super().__new__(cls)
        made: AbortAsyncckpt = object.__new__(cls if issubclass(cls, Abort) else type(cls.__name__, (cls, Abort), {}))
        return made

    def __init__(self, timeout: float = 10.0) -> None:
        """``timeout``: seconds that a call may take; as a rule it takes some milliseconds."""
        self._timeout = timeout

    def __call__(self, state: T) -> T:
        """Give up; any thread may call, at any moment. Returns nvrx's ``state``."""
        give_up(self._timeout)
        for queue in AsyncCallsQueue.get_instances():
            queue.give_up()
        return state
