"""Writing a checkpoint's folder as nvrx has it, around one call of our engines; and DCP's reader with a cache."""

from __future__ import annotations

import functools
import importlib.util
import os
import shutil
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any, ClassVar, Literal

import torch.distributed as dist
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner
from torch.distributed.checkpoint.utils import _DistWrapper

from asyncckpt.config import Config
from asyncckpt.errors import CheckpointError, StorageError
from asyncckpt.events import Event
from asyncckpt.extension import METADATA_NAME, CheckpointReader, Engine, Engines, Save

PlannedSave = tuple["FileSystemWriterAsync", Metadata | None, _DistWrapper]
"""The arguments of ``save_state_dict_async_finalize``."""


engines = Engines()
"""Behind all calls of nvrx's names."""
_config: Config | None = None
_priorities: dict[str, Any] = {}
_listeners: list[Callable[[Event], object]] = []


def configure(config: Config | None) -> None:
    """Make engines with ``config`` from now on; None: with what the environment says."""
    global _config
    _config = config
    _priorities.clear()
    _listeners.clear()


def prioritize(cpu_priority: int | None, io_priority: int | None) -> None:
    """Set the priorities, in nvrx's terms, of the workers that are started from now on; None leaves one as it is.

    ``cpu_priority`` is a niceness, 0 to 19. ``io_priority`` is a class of ionice: 0 leaves it as it is; 3 is idle; 2 is
    best-effort, of which ours is the lowest level, and so is 1, because real time would delay the trainer's own I/O.
    """
    if cpu_priority is not None:
        _priorities["nice"] = cpu_priority
    if io_priority is not None:
        if io_priority not in range(4):
            raise ValueError(f"io_priority is a class of ionice, 0 to 3, not {io_priority!r}")
        _priorities["io_class"] = ("none", "best-effort", "best-effort", "idle")[io_priority]


def record_spans(otel_bootstrap: Mapping[str, Any] | None) -> None:
    """Have spans recorded by the names of nvrx's worker, where OpenTelemetry is installed, and Megatron-LM says so.

    They are recorded in this process, by the tracer that it has, as the worker's phases are known here.
    ``otel_bootstrap`` is what nvrx would set a worker up by; here it counts that it is given, and not what it says.
    """
    if otel_bootstrap is not None and importlib.util.find_spec("opentelemetry") is not None:
        _listeners[:] = [_spans()]


@functools.cache
def _spans() -> Callable[[Event], object]:
    from asyncckpt.telemetry.otel import NVRX_SPANS, OpenTelemetry  # which is there only where it is wanted

    return OpenTelemetry(spans=NVRX_SPANS)


def engine(process_group: dist.ProcessGroup | None = None, *, alone: bool = False) -> Engine:
    """The engine for the ranks of ``process_group`` (None: of the whole job); ``alone``: of this process."""
    config = _config or Config.from_env()
    config = replace(config, on_event=(*config.listeners, *_listeners), **_priorities)
    return engines.get(process_group, alone=alone, config=config)


class StagedWrite:
    """The function of a request whose work is under way already. Calling it waits for the end."""

    def __init__(self, save: Save, process_group: dist.ProcessGroup | None) -> None:
        self.save = save
        save.mark_reported()  # a failure is for whoever finalizes, not for the next save
        self.process_group = process_group

    def __call__(self, *args: Any, **kwargs: Any) -> None:
        self.save.result()


class FileSystemWriterAsync(FileSystemWriter):
    """Where a checkpoint is to be written: the argument of ``save_state_dict_async_plan``.

    When all ranks have written their files, hidden in a folder next to ``path``, these are moved into ``path`` beside
    what is there, ``.metadata`` after all others.
    """

    # For code that clears nvrx's caches. Here the engine keeps what there is to keep.
    _cached_identifiers: ClassVar[set[str]] = set()
    _cached_tensor_data_ptrs: ClassVar[dict[str, Any]] = {}
    _shm_tensor_cache: ClassVar[dict[str, Any]] = {}

    def __init__(
        self,
        path: str | os.PathLike[str],
        *args: Any,
        separation_hint: str | None = None,
        use_msc: bool = False,
        is_multiproc_io: bool = False,
        use_cached_data_structure: bool = False,
        use_cpu_shm_for_gpu_tensors: bool = False,
        open_file: Callable[..., Any] = open,
        **kwargs: Any,
    ) -> None:
        """Each rank writes one file, or two, with ``Config.io_threads`` threads, whatever ``thread_count`` says.

        Args:
            path, args, kwargs: As of DCP's ``FileSystemWriter``.
            separation_hint: Values whose names begin with it go to a second file of each rank, whose name begins with
                it, too.
            use_msc: Whether paths mean what multi-storage-client says. Refused with ``ValueError`` where it says
                that ``path`` is in no mounted file system.
            open_file: Refused, unless it is ``open``.
            is_multiproc_io, use_cached_data_structure, use_cpu_shm_for_gpu_tensors: Change nothing: all tensors are
                staged in CPU shared memory, which is kept for the next save.
        """
        if separation_hint and (not {"/", "\0"}.isdisjoint(separation_hint) or len(os.fsencode(separation_hint)) > 200):
            raise ValueError(
                f"separation_hint {separation_hint!r} cannot begin the name of a file: give a short prefix"
            )
        if use_msc and not _is_in_a_file_system(path):
            raise ValueError(
                f"use_msc: {os.fspath(path)} is in a storage of multi-storage-client's, and asyncckpt writes to mounted"
                " file systems only; save to a path in one"
            )
        if open_file is not open:
            raise ValueError(
                "open_file cannot be had with asyncckpt, whose worker opens its files itself; leave it out"
            )
        super().__init__(path, *args, **kwargs)
        self.separation_hint = separation_hint
        self.staged: StagedWrite | None = None

    def get_save_function_and_args(self) -> tuple[Callable[..., None] | None, None, list[Any]]:
        """What an ``AsyncRequest`` is made of: its function, its ``preload_fn``, and its arguments."""
        return self.staged, None, []

    def retrieve_write_results(self) -> list[Any]:
        """Wait until the checkpoint is committed. Raises ``CheckpointError``. There are no results to gather."""
        if self.staged is not None:
            self.staged()
        return []


def _is_in_a_file_system(path: str | os.PathLike[str]) -> bool:
    """Whether multi-storage-client takes ``path`` for one in a file system. Its configuration may map any elsewhere."""
    name = os.fspath(path)
    if name.startswith("msc:/"):  # with one slash, if it has been through pathlib
        return False
    try:
        import multistorageclient
    except ModuleNotFoundError:  # there is nobody to map it
        return True
    client, _ = multistorageclient.resolve_storage_client(os.path.abspath(name))
    return bool(client.is_default_profile())


class CheckpointMetadataCache:
    """Holds nothing that is needed: the engine keeps its plans by itself."""

    def __init__(self) -> None:
        self.cached_global_metadata: Metadata | None = None

    def set_cached_global_metadata(self, cached_global_metadata: Metadata | None) -> None:
        """Keep ``cached_global_metadata``, for code that asks for it."""
        self.cached_global_metadata = cached_global_metadata


def save_state_dict_async_plan(
    state_dict: Mapping[str, Any],
    storage_writer: FileSystemWriterAsync,
    process_group: dist.ProcessGroup | None = None,
    coordinator_rank: int = 0,
    planner: SavePlanner | None = None,
    enable_cache: bool = False,
    metadata_cache: CheckpointMetadataCache | None = None,
    reuse_metadata_obj: Metadata | None = None,
) -> PlannedSave:
    """Plan and stage ``state_dict``. Errors are raised when the save is finalized, so that all ranks schedule alike.

    Args:
        state_dict: The caller may change its tensors when this returns.
        storage_writer: Where to write.
        process_group, planner: As of ``dcp.async_save``.
        coordinator_rank: Changes nothing: the first rank of the group coordinates.
        enable_cache: Whether a planner that is not DCP's has ``.metadata`` hold the ranks' own plans: by them stock
            code knows, in a resumed job, that it can be used again. The plan itself is always kept, as long as all
            ranks still have that structure.
        metadata_cache, reuse_metadata_obj: Change nothing.

    Returns:
        The arguments of ``save_state_dict_async_finalize``; the metadata is None.
    """
    path = os.path.realpath(os.fspath(storage_writer.path))
    exists = not storage_writer.overwrite and os.path.exists(os.path.join(path, METADATA_NAME))
    existing: Literal["refuse", "join"] = "refuse" if exists else "join"
    if enable_cache and planner is not None:
        _keep_local_plans(planner)
    try:
        by, separate = engine(process_group), storage_writer.separation_hint or ""
        save = by.save(path, state_dict, existing=existing, planner=planner, separate=separate)
    except CheckpointError as error:
        save = Save.finished(path, error)
    else:
        save.synchronize_staging(by.config.timeout)  # with ``Config.overlap``, of which nvrx's callers know nothing
    storage_writer.staged = StagedWrite(save, process_group)
    return storage_writer, None, _DistWrapper(process_group, dist.is_initialized(), coordinator_rank)


def _keep_local_plans(planner: SavePlanner) -> None:
    """Have ``planner`` put all ranks' own plans into the metadata that it makes on the first rank."""
    create = planner.create_global_plan

    def create_and_keep(all_plans: list[SavePlan]) -> tuple[list[SavePlan], Metadata]:
        own = list(all_plans)
        plans, metadata = create(all_plans)
        metadata.all_local_plans = own  # type: ignore[attr-defined]
        return plans, metadata

    planner.create_global_plan = create_and_keep  # type: ignore[method-assign]


def save_state_dict_async_finalize(
    storage_writer: FileSystemWriterAsync,
    global_metadata: Metadata | None,
    dist_wrapper: _DistWrapper,
    reuse_metadata_obj: Metadata | None = None,
    create_metadata_path: str | None = None,
) -> Metadata | None:
    """Wait until the checkpoint is committed by all ranks' workers, ``.metadata`` and all.

    Args:
        storage_writer, global_metadata, dist_wrapper: What ``save_state_dict_async_plan`` has returned.
        reuse_metadata_obj: Changes nothing: no save gathers what is in it, and ``.metadata`` is the save's own.
        create_metadata_path: A file for the metadata, beside the checkpoint's own; the first rank makes it.

    Returns:
        DCP's metadata, if there is a ``create_metadata_path``.

    Raises:
        CheckpointException: It failed on any rank; DCP's, on all ranks.
        ValueError: Metadata is to be used again, and to be made.
    """
    if reuse_metadata_obj is not None and create_metadata_path is not None:
        raise ValueError("metadata is used again, or made for that, but not both: leave out one of the two")
    try:
        storage_writer.retrieve_write_results()
        if create_metadata_path is None:
            return None
        metadata = CheckpointReader(storage_writer.path).read_metadata()
        if dist_wrapper.is_coordinator:
            _copy_file(os.path.join(storage_writer.path, METADATA_NAME), create_metadata_path)
        return metadata
    except CheckpointError as error:
        raise write_exception({error.rank or 0: error}) from error


def _copy_file(path: str, to: str) -> None:
    """Copy a small file, in one step. Raises ``StorageError``."""
    partial = f"{to}.{os.getpid()}.tmp"
    try:
        os.makedirs(os.path.dirname(to) or ".", exist_ok=True)
        shutil.copyfile(path, partial)
        os.replace(partial, to)
    except OSError as error:
        raise StorageError(f"copying the metadata failed: {error.strerror or error}", path=to) from error


def write_exception(errors: Mapping[int, BaseException]) -> CheckpointException:
    """What DCP and nvrx raise when writing has failed on the ranks ``errors``."""
    return CheckpointException("write", {rank: (error, None) for rank, error in errors.items()})  # type: ignore[misc]


def get_write_results_queue(mp_mode: str = "spawn") -> None:
    """There is none, whatever ``mp_mode``, and so no process that serves it: workers report to each other."""


class CachedMetadataFileSystemReader(FileSystemReader):
    """DCP's reader. All readers of a folder share what is in ``.metadata``, as long as that file is the same."""

    _cache: ClassVar[dict[str, tuple[tuple[int, int, int], Metadata]]] = {}

    def __init__(self, path: str | os.PathLike[str], cache_metadata: bool = True) -> None:
        super().__init__(path=path)
        self._cached = cache_metadata

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        if not self._cached:
            return super().read_metadata(*args, **kwargs)
        key = os.path.abspath(os.fspath(self.path))
        stat = os.stat(os.path.join(key, METADATA_NAME))
        version = (stat.st_ino, stat.st_size, stat.st_mtime_ns)
        if key not in self._cache or self._cache[key][0] != version:
            self._cache[key] = version, super().read_metadata(*args, **kwargs)
        return self._cache[key][1]

    @classmethod
    def clear_metadata_cache(cls, path: str | os.PathLike[str] | None = None) -> None:
        """Forget the metadata of the checkpoint ``path``; None: of all."""
        if path is None:
            cls._cache.clear()
        else:
            cls._cache.pop(os.path.abspath(os.fspath(path)), None)
