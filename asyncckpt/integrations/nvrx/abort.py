"""What nvrx's ``inprocess.Wrapper`` does about checkpoints before it calls its function again in the same process."""

from __future__ import annotations

from typing import TypeVar

from asyncckpt.extension import give_up
from asyncckpt.integrations.nvrx.queue import AsyncCallsQueue

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
