"""The handle of a save that ``wrap_save`` has made of a call of Megatron-LM's own."""

from __future__ import annotations

from torch.distributed.checkpoint.api import CheckpointException

from asyncckpt.integrations import nvrx
from asyncckpt.integrations.nvrx.filesystem import write_exception


class MegatronSave:
    """The handle of a save for which Megatron-LM has made a request. All ranks make the same calls."""

    def __init__(self, queue: nvrx.AsyncCallsQueue, request: nvrx.AsyncRequest) -> None:
        queue.schedule_async_request(request)
        self._queue = queue
        self._call = queue.async_calls[-1]

    def done(self) -> bool:
        """Whether it has ended on all ranks; if so it is finalized. The same answer on all ranks."""
        self._finalize(blocking=False)
        return self._call not in self._queue.async_calls

    def result(self) -> None:
        """Wait until the checkpoint is durable and finalized. Raises DCP's ``CheckpointException``, or what one of its
        finalize functions has raised.
        """
        self._finalize(blocking=True)
        if failures := self._call.failures():
            raise write_exception(failures)
        if self._call.finalize_error is not None:
            raise self._call.finalize_error

    def _finalize(self, *, blocking: bool) -> None:
        """What one save fails with, this or another, is for its own handle to raise."""
        while calls := list(self._queue.async_calls):
            try:
                self._queue.maybe_finalize_async_calls(blocking=blocking)
            except CheckpointException:
                pass
            except Exception as error:
                if all(call.finalize_error is not error for call in calls):
                    raise
                continue  # those behind it are not finalized yet
            return
