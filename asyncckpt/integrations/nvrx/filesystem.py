"""Provide nvrx's calls that save a checkpoint's folder, on our engine, and DCP's reader with a metadata cache."""

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
"""The engines that serve all calls of nvrx's names."""
_config: Config | None = None
_priorities: dict[str, Any] = {}
_listeners: list[Callable[[Event], object]] = []


def configure(config: Config | None) -> None:
    """Make engines with ``config`` from now on; None: from the environment."""
    global _config
    _config = config
    _priorities.clear()
    _listeners.clear()


def prioritize(cpu_priority: int | None, io_priority: int | None) -> None:
    """Set the priorities, in nvrx's terms, of the workers that are started from now on; None changes nothing.

    ``cpu_priority`` is a niceness, 0 to 19. ``io_priority`` is a class of ionice: 0 changes nothing, 3 is idle, and 2
    is best-effort at our lowest level. 1 is the same as 2, because real time would delay the trainer's own I/O.
    """
    if cpu_priority is not None:
        _priorities["nice"] = cpu_priority
    if io_priority is not None:
        if io_priority not in range(4):
            raise ValueError(f"io_priority is a class of ionice, 0 to 3, not {io_priority!r}")
        _priorities["io_class"] = ("none", "best-effort", "best-effort", "idle")[io_priority]


def record_spans(otel_bootstrap: Mapping[str, Any] | None) -> None:
    """Record spans with the names of nvrx's worker, if OpenTelemetry is installed and Megatron-LM asks for spans.

    This process records the spans with its own tracer, because it knows the worker's phases. nvrx configures its worker
    from ``otel_bootstrap``. Here only the presence of ``otel_bootstrap`` counts, not its contents.
    """
    if otel_bootstrap is not None and importlib.util.find_spec("opentelemetry") is not None:
        _listeners[:] = [_spans()]


@functools.cache
def _spans() -> Callable[[Event], object]:
    from asyncckpt.telemetry.otel import NVRX_SPANS, OpenTelemetry  # an optional dependency

    return OpenTelemetry(spans=NVRX_SPANS)


def engine(process_group: dist.ProcessGroup | None = None, *, alone: bool = False) -> Engine:
    """Return the engine for the ranks of ``process_group`` (None: the whole job); ``alone``: for this process."""
    config = _config or Config.from_env()
    config = replace(config, on_event=(*config.listeners, *_listeners), **_priorities)
    return engines.get(process_group, alone=alone, config=config)


class StagedWrite:
    """The function of a request for a save that is already under way. A call waits for the end of the save."""

    def __init__(self, save: Save, process_group: dist.ProcessGroup | None) -> None:
        self.save = save
        save.mark_reported()  # the finalize call raises a failure, not the next save
        self.process_group = process_group

    def __call__(self, *args: Any, **kwargs: Any) -> None:
        self.save.result()


class FileSystemWriterAsync(FileSystemWriter):
    """The destination of a checkpoint: the argument of ``save_state_dict_async_plan``.

    All ranks write their files into a hidden folder next to ``path``. When all files are written, they are moved into
    ``path``, beside its present files. ``.metadata`` is moved last.
    """

    # These caches exist for code that clears nvrx's caches. They stay empty, because the engine has its own.
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
        """Keep the destination.

        Each rank writes one or two files with ``Config.io_threads`` threads; ``thread_count`` is unused.

        Args:
            path, args, kwargs: As for DCP's ``FileSystemWriter``.
            separation_hint: A prefix of value names. Each rank writes the values with this prefix to a second file. The
                file's name has the prefix, too.
            use_msc: Whether paths are for multi-storage-client. Raises ``ValueError`` if multi-storage-client maps
                ``path`` to a storage outside mounted file systems.
            open_file: Must be ``open``. Any other value raises ``ValueError``.
            is_multiproc_io, use_cached_data_structure, use_cpu_shm_for_gpu_tensors: Ignored: all tensors are staged in
                CPU shared memory, which is kept for the next save.
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
                "open_file does not work with asyncckpt, whose worker opens its files itself; leave it out"
            )
        super().__init__(path, *args, **kwargs)
        self.separation_hint = separation_hint
        self.staged: StagedWrite | None = None

    def get_save_function_and_args(self) -> tuple[Callable[..., None] | None, None, list[Any]]:
        """Return the parts of an ``AsyncRequest``: its function, its ``preload_fn``, and its arguments."""
        return self.staged, None, []

    def retrieve_write_results(self) -> list[Any]:
        """Wait until the checkpoint is committed, and return no results. Raises ``CheckpointError``."""
        if self.staged is not None:
            self.staged()
        return []


def _is_in_a_file_system(path: str | os.PathLike[str]) -> bool:
    """Return whether multi-storage-client's configuration maps ``path`` to a path in a file system."""
    name = os.fspath(path)
    if name.startswith("msc:/"):  # pathlib turns msc:// into msc:/
        return False
    try:
        import multistorageclient
    except ModuleNotFoundError:  # nothing maps the path
        return True
    client, _ = multistorageclient.resolve_storage_client(os.path.abspath(name))
    return bool(client.is_default_profile())


class CheckpointMetadataCache:
    """Stands in for nvrx's metadata cache. The engine does not use it, because the engine keeps its own plans."""

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
    """Plan and stage ``state_dict``. Errors are raised by the finalize call, so that all ranks schedule the save.

    Args:
        state_dict: The caller may change its tensors when this returns.
        storage_writer: The destination.
        process_group, planner: As for ``dcp.async_save``.
        coordinator_rank: Ignored: the first rank of the group coordinates.
        enable_cache: Whether a given ``planner`` also puts the plans of all ranks into ``.metadata``. With these plans,
            stock code in a resumed job knows that it can reuse the metadata. The engine always keeps its own plan while
            the structure stays the same on all ranks.
        metadata_cache, reuse_metadata_obj: Ignored.

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
        save.synchronize_staging(by.config.timeout)  # nvrx's callers do not know ``Config.overlap``
    storage_writer.staged = StagedWrite(save, process_group)
    return storage_writer, None, _DistWrapper(process_group, dist.is_initialized(), coordinator_rank)


def _keep_local_plans(planner: SavePlanner) -> None:
    """Make ``planner`` put the plans of all ranks into the metadata that it creates on the first rank."""
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
    """Wait until all ranks' workers have committed the checkpoint, including ``.metadata``.

    Args:
        storage_writer, global_metadata, dist_wrapper: The results of ``save_state_dict_async_plan``.
        reuse_metadata_obj: Ignored: no save gathers metadata, and each save writes its own ``.metadata``.
        create_metadata_path: Path for a copy of the metadata file. The first rank writes the copy.

    Returns:
        DCP's metadata if there is a ``create_metadata_path``, otherwise None.

    Raises:
        CheckpointException: DCP's error, on all ranks: the save failed on a rank.
        ValueError: There are both ``reuse_metadata_obj`` and ``create_metadata_path``.
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
    """Return the exception that DCP and nvrx raise for failed writes. ``errors`` are the errors by rank."""
    return CheckpointException("write", {rank: (error, None) for rank, error in errors.items()})  # type: ignore[misc]


def get_write_results_queue(mp_mode: str = "spawn") -> None:
    """Return None, for any ``mp_mode``: workers report to each other, so no queue is needed."""


class CachedMetadataFileSystemReader(FileSystemReader):
    """DCP's reader with a cache. All readers of a folder share the metadata while ``.metadata`` is the same file."""

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
        """Forget the metadata of the checkpoint ``path``; None: of all checkpoints."""
        if path is None:
            cls._cache.clear()
        else:
            cls._cache.pop(os.path.abspath(os.fspath(path)), None)
