"""torch.distributed.checkpoint with fast settings: the caller keeps the stager, and plans are cached."""

from __future__ import annotations

import os
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.checkpoint import state_dict_loader
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.state_dict_saver import async_save, save

from bench.contestants.contestant import LIMIT_S, Contestant, Pending, be_a_job
from bench.states import State


class _Dcp(Contestant):
    def where(self, number: int) -> dict[str, Any]:
        """Return the arguments that tell DCP where to write checkpoint ``number``."""
        return {"storage_writer": FileSystemWriter(self.path(number))}

    def load(self, number: int, state: State) -> State:
        return load(self.path(number), state)


def load(path: str, state: State) -> State:
    """Load by DCP's ``load``."""
    with quiet():
        state_dict_loader.load(state, checkpoint_id=path)
    return state


@contextmanager
def quiet() -> Iterator[None]:
    """Silence DCP's warning about a missing process group."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is", category=UserWarning)
        yield


class ThreadPlanner(DefaultSavePlanner):
    """A planner with its own name, because DCP caches plans by class name. Contestants must not share plans."""


class ProcessPlanner(DefaultSavePlanner):
    """A planner with its own name, as ``ThreadPlanner``."""


class DcpAsync(_Dcp):
    """``async_save`` by a thread or a process."""

    def __init__(self, root: str, process: bool) -> None:
        from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions
        from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType

        super().__init__(root)
        self._type = AsyncCheckpointerType.PROCESS if process else AsyncCheckpointerType.THREAD
        cuda = torch.cuda.is_available()
        self._stager = DefaultStager(
            StagingOptions(
                use_pinned_memory=cuda,
                use_shared_memory=process,
                use_async_staging=False,
                use_non_blocking_copy=cuda,
            )
        )
        # The stager of torch 2.11 drops its buffers after each save, and then raises in the next save. This keeps the
        # buffers, as earlier and later versions do.
        kept: Any = self._stager._state_dict_stager
        self._drop_buffers, kept.close = kept.close, lambda: None
        self._planner: type[DefaultSavePlanner] = ProcessPlanner if process else ThreadPlanner
        self.shares_each = process
        if process:
            os.environ.setdefault("LOCAL_RANK", "0")
            be_a_job()

    @classmethod
    def thread(cls, root: str) -> DcpAsync:
        return cls(root, process=False)

    @classmethod
    def process(cls, root: str) -> DcpAsync:
        return cls(root, process=True)

    def save(self, number: int, state: State) -> Pending:
        answer: Any = async_save(
            state,
            **self.where(number),
            planner=self._planner(enable_plan_caching=True),
            async_checkpointer_type=self._type,
            async_stager=self._stager,
            no_dist=not dist.is_initialized(),
        )
        written = getattr(answer, "upload_completion", answer)

        def poll() -> bool:
            if written.done():
                written.result()
            return bool(written.done())

        return Pending(wait=lambda: written.result(LIMIT_S), poll=poll)

    def close(self) -> None:
        self._stager.close()
        self._drop_buffers()


class DcpSave(_Dcp):
    """The synchronous ``save``."""

    blocks = True

    def save(self, number: int, state: State) -> Pending:
        with quiet():
            save(state, **self.where(number))
        return Pending()
