"""Queue requests as nvrx does: functions that run in the background, and finalize functions in the trainer.

Two kinds of requests go through ``AsyncCallsQueue``. A request of ``FileSystemWriterAsync`` is already under way in our
worker. A helper process runs any other function (see ``helper.py``). ``TorchAsyncCheckpoint`` queues calls of
``torch.save``. nvrx's ``inprocess.Wrapper`` calls ``AbortAsyncckpt`` before it calls its function again.
"""

from __future__ import annotations

import contextlib
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
from asyncckpt.extension import Save, give_up, ranks_of
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
    """A request to call ``async_fn`` (None: nothing) in the background, with these arguments.

    ``finalize_fns`` are called in the trainer when the request is done on all ranks. ``preload_fn`` is called in the
    trainer before the request, and its result replaces the second argument. ``call_idx`` is the request's number in its
    queue. Once ``is_frozen``, no finalize function can be added.
    """

    async_fn: Callable[..., Any] | None
    async_fn_args: tuple[Any, ...] | list[Any]
    finalize_fns: list[Callable[[], Any]]
    async_fn_kwargs: dict[str, Any] | None = None
    preload_fn: Callable[[], Any] | None = None
    is_frozen: bool = False
    call_idx: int = 0

    def add_finalize_fn(self, fn: Callable[[], Any]) -> None:
        """Add ``fn`` after the present finalize functions."""
        if self.is_frozen:
            raise RuntimeError("this request is scheduled; its finalize functions have to be added before that")
        self.finalize_fns.append(fn)

    def arguments(self) -> list[Any]:
        """Call ``preload_fn``, and return the positional arguments."""
        arguments = list(self.async_fn_args)
        if self.preload_fn is not None:
            arguments[1] = self.preload_fn()
        return arguments

    def execute_sync(self) -> None:
        """Run and finalize the request now, on all ranks."""
        if self.async_fn is not None:
            self.async_fn(*self.arguments(), **(self.async_fn_kwargs or {}))
        if dist.is_initialized():
            dist.barrier()
        self.execute_finalize_fns()

    def freeze(self) -> AsyncRequest:
        """Return a copy to which no finalize function can be added."""
        return self._replace(is_frozen=True)

    def execute_finalize_fns(self, validate_matching_call_idx: bool = True) -> int:
        """Call the finalize functions. Return ``call_idx``.

        ``validate_matching_call_idx`` is ignored, because the queue has compared ``call_idx`` between the ranks.
        """
        for finalize in self.finalize_fns:
            finalize()
        return self.call_idx


@dataclass(eq=False)
class AsyncCall:
    """A scheduled request. ``future`` ends when the request ends on this rank. A save has one outcome on all ranks.

    ``finalize_error``: the error of a finalize function.
    """

    request: AsyncRequest
    future: Future[Any]
    is_save: bool = False
    process_group: dist.ProcessGroup | None = None
    generation: int = 0
    finalize_error: Exception | None = None

    def failures(self) -> dict[int, BaseException] | None:
        """Return the failures by rank, as far as this rank knows; None if the request has not ended here yet."""
        if not self.future.done():
            return None
        error = self.future.exception()
        if error is None:
            return {}
        if self.is_save:
            return {getattr(error, "rank", None) or 0: error}
        return {dist.get_rank() if dist.is_initialized() else 0: error}

    def failures_of_all(self) -> dict[int, BaseException] | None:
        """Return the failures by rank; None if the request has not ended on all ranks yet.

        Raises ``RankFailedError``.
        """
        mine = self.failures()
        values = [self.request.call_idx, int(mine is not None), len(mine or ())]
        least, most = ranks_of(self.process_group, Config().timeout).extremes(values)
        if least[0] != most[0]:
            raise RankFailedError(
                f"the ranks have scheduled different requests: one finalizes call {least[0]}, another {most[0]}",
                rank=dist.get_rank(),
            )
        if not least[1]:
            return None
        if self.is_save or not most[2]:
            return mine
        return {rank: error for each in ranks_of().gather(mine or {}) for rank, error in each.items()}


class AsyncCallsQueue:
    """A queue of requests under way, which finalizes them in the order of scheduling. All ranks make the same calls."""

    # Keys are ids, so that all queues are listed in one step while other threads add and remove queues.
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
        """Set the priorities of workers. The first save, or ``warmup_persistent_caller``, starts the workers.

        Args:
            persistent, is_daemon, sigterm_timeout: Ignored. The worker always stays for the next request. After the
                trainer's end the worker writes all staged tensors, and then ends without a signal.
            cpu_priority, io_priority: As for ``prioritize``.
            cpu_shm_mode: Ignored: tensors are always staged in CPU shared memory.
            otel_bootstrap: As for ``record_spans``.
        """
        prioritize(cpu_priority, io_priority)
        record_spans(otel_bootstrap)
        self.async_calls: deque[AsyncCall] = deque()
        self.call_idx = -1
        self._helper: Helper | None = None
        # Number of calls of give_up: so far, and at the last check of the requests.
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
        """Start this rank's worker before the first save needs it. Starting takes a tenth of a second.

        Args:
            rank: Ignored.
            is_daemon, cpu_priority, io_priority, sigterm_timeout, cpu_shm_mode, otel_bootstrap: As for a queue.
        """
        prioritize(cpu_priority, io_priority)
        record_spans(otel_bootstrap)
        engine().start(alone=True)

    @classmethod
    def get_instances(cls) -> list[AsyncCallsQueue]:
        """Return all queues of this process."""
        return [queue for ref in cls._instances.valuerefs() if (queue := ref()) is not None]

    def schedule_async_request(self, async_request: AsyncRequest) -> int:
        """Begin ``async_request`` (of our class, nvrx's or Megatron-LM's), and return its number.

        The caller may change tensors among the request's arguments when this returns. Raises as ``Helper`` and
        ``Helper.submit``.
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
        """Add a ``save`` of this rank alone, to finalize it in order."""
        self._forget_given_up()
        save.mark_reported()
        self.call_idx += 1
        request = AsyncRequest(None, (), [], is_frozen=True, call_idx=self.call_idx)
        self.async_calls.append(AsyncCall(request, save.future, generation=self._generation))

    def maybe_finalize_async_calls(self, blocking: bool = False, no_dist: bool = False) -> list[int]:
        """Finalize the requests that are done on all ranks, and return their numbers.

        Finalize functions of failed requests are not called.

        Args:
            blocking: Wait for all requests.
            no_dist: Finalize requests that are done on this rank, without asking the others.

        Raises:
            CheckpointException: DCP's error (no subclass of ``Exception``) for the first failed request, raised after
                the others are finalized. All ranks raise the same error, unless ``no_dist``.
            RankFailedError: The ranks have scheduled different requests, or a rank is gone.
        """
        self._forget_given_up()
        finalized = []
        failed: list[CheckpointException] = []
        while self.async_calls:
            call = self.async_calls[0]
            if blocking:
                with contextlib.suppress(futures.CancelledError):
                    call.future.exception()
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
        """Return the number of requests that are not finalized yet."""
        self._forget_given_up()
        return len(self.async_calls)

    def close(self, abort: bool = False) -> None:
        """Finalize all requests, end the workers and free their memory. The next request starts new workers.

        With ``abort``, end the workers at once and finalize nothing. Unfinished requests of all queues are lost,
        because all queues share the worker. Another rank may still commit a save that all ranks have written. A later
        save removes the remains of other saves.
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
        """Drop all requests scheduled so far, and end the helper at once. Any thread may call."""
        self._generation += 1
        if (helper := self._helper) is not None:
            helper.kill()

    def _forget_given_up(self) -> None:
        """Remove the requests that ``give_up`` has dropped.

        ``give_up`` does not remove them itself, because another thread may be about to schedule a request.
        """
        if self._looked_at != self._generation:
            self._looked_at = self._generation
            self.async_calls = deque(call for call in self.async_calls if call.generation == self._generation)
            self.call_idx = -1
            if self._helper is not None:
                self._helper.close(abort=True)
                self._helper = None

    def __del__(self) -> None:
        """Do nothing: requests under way go on without the queue."""

    def _get_async_caller(self) -> AsyncCallsQueue:
        """Return this queue, for code that uses nvrx's internals."""
        return self

    def _debug_is_async_process_running(self) -> bool:
        """Return whether there is a shared worker or a helper, for code that uses nvrx's internals."""
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
    """Saves by ``torch_save``, and finalizes the saves by a queue. Each process saves for itself."""

    def __init__(self, persistent_queue: bool = True) -> None:
        self.save = torch.save
        self._queue = AsyncCallsQueue(persistent=persistent_queue)

    def async_save(self, state_dict: Any, *args: Any, **kwargs: Any) -> Save:
        """Save ``state_dict`` with the arguments of ``torch.save``. The caller may then change the tensors."""
        save = save_by(partial(engine, alone=True), state_dict, *args, **kwargs)
        self._queue.add_save(save)
        save.synchronize_staging(engine(alone=True).config.timeout)  # waits only with Config.overlap
        return save

    def finalize_async_save(self, blocking: bool = False, no_dist: bool = True, terminate: bool = False) -> None:
        """Finalize saves that have ended. Raises DCP's ``CheckpointException`` if a save has failed.

        Args:
            blocking: Wait for all saves.
            no_dist: Finalize without asking other ranks.
            terminate: Close at the end.
        """
        self._queue.maybe_finalize_async_calls(blocking, no_dist=no_dist)
        if terminate:
            self.close()

    def close(self, abort: bool = False) -> None:
        """Close as ``AsyncCallsQueue.close`` does, but without asking other ranks. ``abort``: see there."""
        if not abort:
            self._queue.maybe_finalize_async_calls(blocking=True, no_dist=True)
        self._queue.close(abort=abort)

    def _get_async_calls_queue(self) -> AsyncCallsQueue:
        """Return the queue, for code that uses nvrx's internals."""
        return self._queue


def abort_nvrx_checkpoint() -> None:
    """Abort the unfinished requests of all queues at once. The next request starts new workers."""
    for queue in AsyncCallsQueue.get_instances():
        queue.close(abort=True)


T = TypeVar("T")


class AbortAsyncckpt:
    """Abort for ``inprocess.Wrapper(abort=inprocess.Compose(AbortTorchDistributed(), AbortAsyncckpt()))``.

    This process gives up its checkpointers, its calls such as ``async_save``, and its queues. Waits for saves and for
    other ranks raise an error at once, also in the main thread. With ``Config.overlap`` a wait for a copy ends when the
    copy ends. Workers and their memory stay for the next iteration. A save that all ranks have staged is finished. Any
    other save is withdrawn on all ranks.
    """

    def __new__(cls, *args: object, **options: object) -> AbortAsyncckpt:
        """Make an instance of nvrx's ``Abort`` as ``Wrapper`` requires, if nvrx's in-process restart is installed."""
        try:
            from nvidia_resiliency_ext.inprocess.abort import Abort
        except ImportError:  # not installed, or without a dependency, or too old a release
            return super().__new__(cls)
        made: AbortAsyncckpt = object.__new__(cls if issubclass(cls, Abort) else type(cls.__name__, (cls, Abort), {}))
        return made

    def __init__(self, timeout: float = 10.0) -> None:
        """Keep ``timeout``: seconds that a call may take. A call usually takes some milliseconds."""
        self._timeout = timeout

    def __call__(self, state: T) -> T:
        """Give up the saves of this process. Any thread may call this at any time. Returns nvrx's ``state``."""
        give_up(self._timeout)
        for queue in AsyncCallsQueue.get_instances():
            queue.give_up()
        return state
