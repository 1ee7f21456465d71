"""Save the checkpoints of torch_checkpointing through our engine: one import to switch.

    from asyncckpt.integrations.torch_checkpointing import CheckpointManager  # was: from torch_checkpointing import ...

A checkpoint has the files of torch_checkpointing's own manager: ``<item>_<rank>.pt``, and ``metadata.pkl`` if an item
can be resharded. Two files for ``asyncckpt verify`` are beside them. torch_checkpointing loads the checkpoints without
asyncckpt, and this manager loads all of its checkpoints.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import logging
import mmap
import os
import threading
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from functools import partial
from typing import Any

import torch.distributed as dist
from torch_checkpointing import CheckpointManager as StockManager
from torch_checkpointing.checkpoint_base import CheckpointBase, CheckpointInfo, CheckpointItem
from torch_checkpointing.checkpoint_layout import (
    JsonSerialization,
    LayoutInfo,
    RawSerialization,
    SafetensorsSerialization,
    TorchSerialization,
    default_torch_layout_info,
)
from torch_checkpointing.checkpoint_loader import CheckpointLoader
from torch_checkpointing.checkpoint_reader import CheckpointReader
from torch_checkpointing.checkpoint_saver import CheckpointSaver
from torch_checkpointing.checkpoint_writer import CallbackArgs, CheckpointWriterConfig
from torch_checkpointing.config import AsyncCheckpointSaverConfig, SyncCheckpointSaverConfig
from torch_checkpointing.logging_utils import EventLogger
from torch_checkpointing.metadata_serialization import METADATA_FILE_NAME
from torch_checkpointing.schema import RANK_PLACEHOLDER
from torch_checkpointing.storage.filesystem import LocalFileSystemStorageConfig
from torch_checkpointing.types import RankInfo

from asyncckpt.config import Config
from asyncckpt.errors import UnsavableStateError
from asyncckpt.extension import (
    MANIFEST_NAME,
    Engine,
    FileSet,
    Save,
    SetFiles,
    absolute_path,
    engines,
    held_files,
    ranks_of,
    replace_or_set_aside,
    synchronize_staging,
    wait_for_attempts,
)

logger = logging.getLogger(__name__)

_KIND = "torch_checkpointing"


class CheckpointManager(StockManager):
    """Saves as torch_checkpointing's ``CheckpointManager`` does, but through our engine.

    The engine's options come from the environment (``Config.from_env``). Options of torch_checkpointing's own staging,
    process and barriers have no effect. With a storage of another kind, or a ``pre_finalize_callback``, the manager
    logs a warning, and torch_checkpointing saves by itself.
    """

    class Config(StockManager.Config):
        """The same options as for torch_checkpointing's manager."""

        __slots__ = ()

        def build(self) -> CheckpointManager:
            """Make the manager."""
            return CheckpointManager(self)

    def __init__(self, config: StockManager.Config | None = None) -> None:
        """Start no worker yet. ``config``: as for torch_checkpointing's manager."""
        wanted = config or CheckpointManager.Config()
        if (reason := _why_stock(wanted)) is not None:
            logger.warning("torch_checkpointing saves its checkpoints itself: %s", reason)
            super().__init__(wanted)
            return
        # A writer of torch_checkpointing is made and not used. This writer needs neither a process nor a barrier.
        unused = CheckpointWriterConfig(barrier_config=None, write_to_temp_dir=False)
        super().__init__(dataclasses.replace(wanted, save=SyncCheckpointSaverConfig(writer_config=unused)))
        self._config, self._saver = wanted, _Saver(wanted, self._rank, self._metadata_manager)
        mine = self._rank, dist.get_world_size() if dist.is_initialized() else 1
        storage = wanted.storage_config or LocalFileSystemStorageConfig()
        reader = CheckpointReader(RankInfo(*mine, *mine), storage, not wanted.load.use_mmap, self._filling)
        self._loader = CheckpointLoader(reader, self._metadata_manager)
        self._loading = threading.local()  # has the ``files`` of the checkpoint that a thread loads

    def load(self, checkpoint_id: str | os.PathLike[str], *args: Any, **options: Any) -> Mapping[str, Any]:
        """Load as torch_checkpointing does. If the checkpoint is missing, first wait for the worker of a dead trainer.

        Files of ``torch.save`` that are read whole come from the memory of that worker, or else from storage, and their
        checksums are compared.

        Raises:
            StorageError: A worker writes to the folder for more than ``Config.timeout`` seconds.
            DamagedCheckpointError: A checksum differs.
        """
        place = os.fspath(checkpoint_id)
        if not isinstance(self._saver, _Saver):
            return self._load(place, *args, **options)
        engine, place = self._saver.engine, absolute_path(place)
        if not os.path.exists(place):
            wait_for_attempts(os.path.dirname(place), engine.config.timeout)
        if not os.path.exists(os.path.join(place, MANIFEST_NAME)):  # a checkpoint of torch_checkpointing's own manager
            return self._load(place, *args, **options)
        with contextlib.closing(held_files(engine, place)) as files:
            self._loading.files = files
            try:
                return self._load(place, *args, **options)
            finally:
                self._loading.files = None

    def _filling(self, _: object) -> Callable[..., Any] | None:
        files = getattr(self._loading, "files", None)
        return None if files is None else partial(_filled, files)

    def _load(self, *args: Any, **options: Any) -> Mapping[str, Any]:
        loaded: Mapping[str, Any] = super().load(*args, **options)
        return loaded

    def prewarm_staging(self, checkpoint: Mapping[str, Any]) -> None:
        """Start the worker, and allocate shared memory. All ranks make this call. Raises as ``Engine.prepare`` does."""
        if isinstance(self._saver, _Saver) and not self._saver.is_closed:
            items = self._schema.build_items(checkpoint, rank=self._rank)
            self._saver.engine.prepare(self._saver.files_of(items))
        else:
            super().prewarm_staging(checkpoint)

    def lock(self) -> contextlib.AbstractContextManager[Any]:
        """Return a context for changes of the tensors. Its begin waits until the tensors of all saves are copied."""
        lock: contextlib.AbstractContextManager[Any] = (
            self._saver if isinstance(self._saver, _Saver) else super().lock()
        )
        return lock


class _Saver(CheckpointSaver):
    """Gives the items of each checkpoint to our engine, as a set of files. As a context, waits for copies."""

    def __init__(self, config: StockManager.Config, rank: int, metadata: Any) -> None:
        self._config, self._rank, self._metadata = config, rank, metadata
        self._written: list[_Written] = []
        self._has_metadata = self.is_closed = False
        # The items with one name on all ranks.
        self._shared = {
            key for key, spec in config.items.items() if spec.layout and RANK_PLACEHOLDER not in spec.layout.file_path
        }

    @property
    def engine(self) -> Engine:
        config = Config.from_env()
        return engines.get(config=config, job=f"\n{config.job_id}" if config.job_id else None)

    def save(self, path: str, checkpoint: CheckpointBase) -> tuple[Future[Any], Future[Any]] | None:
        place, files = absolute_path(path), self.files_of(checkpoint.get_items())
        save = self.engine.save(place, files, existing=replace_or_set_aside(place))
        written = _Written(save, place, self._config)
        self._written = [each for each in self._written if not each.done()] + [written]
        staging = getattr(self._config.save, "staging_config", None)
        if staging is None:
            written.result(self._config.save.wait_timeout_secs)
            return None
        if not staging.use_async_staging:  # otherwise the caller guards its changes by ``lock``
            self.__enter__()
        return written, written

    def files_of(self, items: dict[str, CheckpointItem]) -> FileSet:
        files = FileSet(_KIND, is_held=True)
        try:
            mine = self._mine(items)  # first, because the ranks do this together
            info = CheckpointInfo(items)
            if self._metadata is not None and not self._has_metadata:  # as the stock manager, for the first save only
                self._metadata.compute_metadata(info)
                self._has_metadata = True
            for key in mine:
                layout = info.layout_info_mappings[key] or default_torch_layout_info(key, self._rank)
                _add(files, key, info.state_dict[key], layout)
            if self._rank == 0 and self._metadata is not None:
                files.add_bytes(METADATA_FILE_NAME, self._metadata.get_serialized_metadata() or b"")
        except Exception as error:
            files.fail(error)  # on all ranks, because the others would wait
        return files

    def close(self) -> None:
        """Wait for all saves, and raise the first failure. The engine is closed at the end of the process."""
        self.is_closed = True
        for each in self._written:
            each.result(self._config.save.wait_timeout_secs)

    def __enter__(self) -> None:
        synchronize_staging([each.save for each in self._written], self.engine.config.timeout)

    def __exit__(self, *_: object) -> None:
        pass

    def _mine(self, items: Mapping[str, Any]) -> list[str]:
        """Return the items that this rank writes. The first rank with a shared item writes it."""
        if not self._shared:
            return list(items)
        earlier = ranks_of().gather(sorted(self._shared & items.keys()))[: self._rank]
        return [key for key in items if not any(key in each for each in earlier)]


class _Written(Future[Any]):
    """The outcome of a save and of the caller's ``finalize_callback``. A failure that was read counts as reported."""

    def __init__(self, save: Save, place: str, config: StockManager.Config) -> None:
        super().__init__()
        self.save = save
        self._place, self._config = place, config
        self.set_running_or_notify_cancel()  # so that it cannot be cancelled
        save.future.add_done_callback(self._end)

    def exception(self, timeout: float | None = None) -> BaseException | None:
        failure = super().exception(timeout)
        self.save.mark_reported()
        return failure

    def result(self, timeout: float | None = None) -> Any:
        try:
            if (failure := self.exception(timeout)) is not None:
                raise failure
        finally:
            del self  # otherwise the error refers to this future, and so to itself
            failure = None

    def _end(self, _: object) -> None:
        failure = self.save.failure
        if failure is None and (callback := self._config.finalize_callback) is not None:
            storage = (self._config.storage_config or LocalFileSystemStorageConfig()).create_storage()
            try:
                callback(CallbackArgs(path=self._place, storage=storage, event_logger=EventLogger()))
            except BaseException as error:  # this thread has no caller
                logger.error("the finalize_callback of %s failed: %s", self._place, error)
                failure = error
        if failure is None:
            self.set_result(None)
        else:
            self.set_exception(failure)


def _filled(files: SetFiles, nbytes: int, path: os.PathLike[str], *_: int) -> mmap.mmap:
    """Return the ``nbytes`` of the file ``path`` of a checkpoint, in new memory."""
    memory = mmap.mmap(-1, nbytes)
    if not files.read(os.path.relpath(path, files.path), memoryview(memory)):
        with open(path, "rb") as file:
            file.readinto(memory)
    return memory


def _add(files: FileSet, key: str, value: Any, layout: LayoutInfo) -> None:
    """Add one item to a set of files, in the format of its layout."""
    match layout.serialization_format:
        case TorchSerialization():
            files.add_torch_file(layout.file_path, value)
        case JsonSerialization():
            files.add_bytes(layout.file_path, json.dumps(value, sort_keys=True, indent=4).encode())
        case RawSerialization() if isinstance(value, bytes):
            files.add_bytes(layout.file_path, value)
        case SafetensorsSerialization(metadata=metadata):
            files.add_safetensors(layout.file_path, SafetensorsSerialization.prepare_tensors_for_save(value), metadata)
        case other:
            raise UnsavableStateError(f"the item {key!r}, a {type(value).__name__}, cannot be saved as {other}")


def _why_stock(config: StockManager.Config) -> str | None:
    """Return the reason why torch_checkpointing has to save by itself; None if asyncckpt can save."""
    if config.storage_config is not None and type(config.storage_config) is not LocalFileSystemStorageConfig:
        return f"its storage is a {type(config.storage_config).__name__}"
    if config.pre_finalize_callback is not None:
        return "its pre_finalize_callback reads files before they have their names"
    if type(config.save) not in (AsyncCheckpointSaverConfig, SyncCheckpointSaverConfig):
        return f"its saver is a {type(config.save).__name__}"
    return None
