"""Planning and finalizing as nvrx has them, around one call of our engine."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import torch.distributed as dist
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import SavePlanner
from torch.distributed.checkpoint.utils import _DistWrapper

from asyncckpt.errors import CheckpointError
from asyncckpt.handle import Save
from asyncckpt.nvrx import runtime
from asyncckpt.plan import StateDict
from asyncckpt.worker.manifest import METADATA_NAME
from asyncckpt.worker.messages import Existing

Plan = tuple["FileSystemWriterAsync", Metadata | None, _DistWrapper]


class StagedWrite:
    """The function of a request whose work is under way already. Calling it waits for the end."""

    def __init__(self, save: Save, process_group: dist.ProcessGroup | None) -> None:
        self.save = save
        save._reported = True  # a failure is for who finalizes, not for the next save
        self.process_group = process_group

    def __call__(self, *args: Any, **kwargs: Any) -> None:
        self.save.result()


class FileSystemWriterAsync(FileSystemWriter):
    """Where a checkpoint is to be written: the argument of ``save_state_dict_async_plan``.

    When all ranks have written their files, hidden in a folder next to ``path``, these are moved into it beside what is
    there, ``.metadata`` after all others.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        *args: Any,
        separation_hint: str | None = None,
        use_msc: bool = False,
        is_multiproc_io: bool = False,
        use_cached_data_structure: bool = False,
        use_cpu_shm_for_gpu_tensors: bool = False,
        **kwargs: Any,
    ) -> None:
        """``args`` and ``kwargs`` are those of DCP's ``FileSystemWriter``.

        All tensors are staged in CPU shared memory that is kept for the next save, whether or not
        ``use_cpu_shm_for_gpu_tensors`` and ``use_cached_data_structure`` ask for it; each rank writes one file, with
        ``Config.io_threads`` threads, whatever ``thread_count`` and ``is_multiproc_io`` say. Raises ``ValueError`` for
        ``separation_hint`` and ``use_msc``, which cannot be had.
        """
        if separation_hint is not None:
            raise ValueError("separation_hint cannot be had with asyncckpt: each rank writes one file; leave it out")
        if use_msc:
            raise ValueError("use_msc cannot be had with asyncckpt, which writes to mounted file systems only")
        super().__init__(path, *args, **kwargs)
        self.staged: StagedWrite | None = None

    def get_save_function_and_args(self) -> tuple[Callable[..., None] | None, None, list[Any]]:
        """What an ``AsyncRequest`` is made of: the function, no function to preload with, no arguments."""
        return self.staged, None, []

    def retrieve_write_results(self) -> list[Any]:
        """Wait until the checkpoint is committed. Raises ``CheckpointError``. There are no results to gather."""
        if self.staged is not None:
            self.staged()
        return []


class CheckpointMetadataCache:
    """Holds nothing that is needed: the engine keeps its plans by itself. Here so that callers need not change."""

    def __init__(self) -> None:
        self.cached_global_metadata: Metadata | None = None

    def set_cached_global_metadata(self, cached_global_metadata: Metadata | None) -> None:
        self.cached_global_metadata = cached_global_metadata


def save_state_dict_async_plan(
    state_dict: StateDict,
    storage_writer: FileSystemWriterAsync,
    process_group: dist.ProcessGroup | None = None,
    coordinator_rank: int = 0,
    planner: SavePlanner | None = None,
    enable_cache: bool = False,
    metadata_cache: CheckpointMetadataCache | None = None,
) -> Plan:
    """Plan and stage ``state_dict``; when this returns, the caller may change the tensors.

    The plan is kept and used again for as long as all ranks still have that structure, whatever ``enable_cache`` says;
    the first rank of the group coordinates, whatever ``coordinator_rank`` says. What is returned is for
    ``save_state_dict_async_finalize``, the metadata in it None. What goes wrong here is told by finalizing, so that all
    ranks schedule alike, and learn of it alike.
    """
    path = os.path.realpath(os.fspath(storage_writer.path))
    taken = not storage_writer.overwrite and os.path.exists(os.path.join(path, METADATA_NAME))
    existing: Existing = "refuse" if taken else "join"
    try:
        save = runtime.engine(process_group).save(path, state_dict, existing=existing, planner=planner)
    except CheckpointError as error:
        save = Save(path, None)
        save._end(error, None)
    storage_writer.staged = StagedWrite(save, process_group)
    return storage_writer, None, _DistWrapper(process_group, dist.is_initialized(), coordinator_rank)


def save_state_dict_async_finalize(
    storage_writer: FileSystemWriterAsync, global_metadata: Metadata | None, dist_wrapper: _DistWrapper
) -> None:
    """Wait until the checkpoint is committed by all ranks' workers, ``.metadata`` and all.

    Raises DCP's ``CheckpointException`` on all ranks if it failed on any.
    """
    try:
        storage_writer.retrieve_write_results()
    except CheckpointError as error:
        raise write_exception({error.rank or 0: error}) from error


def write_exception(errors: dict[int, Exception]) -> CheckpointException:
    """What DCP and nvrx raise when writing has failed on the ranks ``errors``."""
    return CheckpointException("write", {rank: (error, None) for rank, error in errors.items()})  # type: ignore[misc]


def get_write_results_queue(mp_mode: str = "spawn") -> None:
    """There is none, and so no process that would serve it: workers report to each other."""
