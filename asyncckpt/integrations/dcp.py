"""Provide the three calls of ``torch.distributed.checkpoint`` (DCP) on our engine: one line to switch.

    from asyncckpt import async_save        # was: from torch.distributed.checkpoint import async_save

All calls with the same process group share one engine (see ``engine/shared.py``), configured by the environment. A call
with DCP's own writer or reader for folders uses our engine. A call with any other writer or reader goes to DCP.
``EnginePlanner`` and ``EngineWriter`` are for code that must keep calling DCP's own ``save``.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import os
from collections.abc import Iterator, Mapping
from concurrent.futures import Future
from typing import Any, Literal, cast

import torch
import torch.distributed as dist
from torch.distributed.checkpoint import state_dict_saver
from torch.distributed.checkpoint.api import CheckpointException, _wrap_exception
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.metadata import Metadata, StorageMeta
from torch.distributed.checkpoint.planner import LoadPlanner, SavePlan, SavePlanner, WriteItem
from torch.distributed.checkpoint.storage import StorageReader, StorageWriter, WriteResult

from asyncckpt.config import Config
from asyncckpt.errors import CheckpointExistsError, StorageError, UntrustedValueError
from asyncckpt.extension import (
    METADATA_NAME,
    CheckpointReader,
    Engine,
    Filled,
    Save,
    absolute_path,
    engines,
    load_by_dcp,
    ranks_of,
    storage_for,
)
from asyncckpt.extension import load as load_checkpoint

logger = logging.getLogger(__name__)

# The first rank's file, in a checkpoint without a common metadata file.
_OWN_METADATA_NAME = "__0.metadata"

CheckpointId = str | os.PathLike[str]
"""The folder of a checkpoint."""


def async_save(
    state_dict: Mapping[str, Any],
    *,
    checkpoint_id: CheckpointId | None = None,
    storage_writer: StorageWriter | None = None,
    planner: SavePlanner | None = None,
    process_group: dist.ProcessGroup | None = None,
    async_checkpointer_type: Any = None,
    async_stager: Any = None,
    no_dist: bool = False,
    use_collectives: bool = True,
) -> Any:
    """Save ``state_dict`` in a folder. An existing checkpoint there is replaced in one step.

    Args:
        state_dict: The caller may change its tensors when this returns.
        checkpoint_id: The folder.
        storage_writer: A ``FileSystemWriter`` of DCP sets the folder and the overwrite option. A call with any other
            writer goes to DCP's own ``async_save``.
        planner: A planner of DCP, or the user's own.
        process_group: The ranks that save together; None for the whole job.
        async_checkpointer_type, async_stager, use_collectives: Options of DCP's own code. In a save by our engine only
            ``async_stager`` counts, for the type of the result.
        no_dist: This process saves alone.

    Returns:
        A future that ends when the checkpoint is complete and durable on all ranks. If ``async_stager`` stages
        asynchronously, the result is DCP's ``AsyncSaveResponse`` with that future and with a done staging future.

    Raises:
        ValueError: There is neither a ``storage_writer`` nor a ``checkpoint_id``.
        CheckpointException: DCP's error: a checkpoint exists, and the writer does not overwrite.
        CheckpointError: As ``Engine.save`` raises.
    """
    ranks: dict[str, Any] = {"planner": planner, "process_group": process_group, "no_dist": no_dist}
    if not says_folder(storage_writer, checkpoint_id):
        ways = {"async_checkpointer_type": async_checkpointer_type, "async_stager": async_stager}
        where = {"checkpoint_id": checkpoint_id, "storage_writer": storage_writer, "use_collectives": use_collectives}
        return state_dict_saver.async_save(dict(state_dict), **_asked_for(**where, **ways, **ranks))
    with _as_dcp_refuses(storage_writer):
        save = begin_save(state_dict, checkpoint_id, storage_writer, **ranks)
    if not getattr(getattr(async_stager, "_config", None), "use_async_staging", False):
        return save.future
    save.wait_staged()
    staged, durable = Future[None](), cast("Future[Any]", save.future)
    staged.set_result(None)
    return state_dict_saver.AsyncSaveResponse(staged, durable)


def save(
    state_dict: Mapping[str, Any],
    storage_writer: StorageWriter | None = None,
    *,
    checkpoint_id: CheckpointId | None = None,
    planner: SavePlanner | None = None,
    process_group: dist.ProcessGroup | None = None,
    no_dist: bool = False,
    use_collectives: bool = True,
) -> Metadata:
    """Save as ``async_save`` does, and wait until the checkpoint is durable. Raise any error of the save.

    Args:
        state_dict, storage_writer, checkpoint_id, planner, process_group, no_dist, use_collectives: As for
            ``async_save``.

    Returns:
        DCP's metadata of the checkpoint.
    """
    ranks: dict[str, Any] = {"planner": planner, "process_group": process_group, "no_dist": no_dist}
    if not says_folder(storage_writer, checkpoint_id):
        where = {"checkpoint_id": checkpoint_id, "storage_writer": storage_writer, "use_collectives": use_collectives}
        theirs: Metadata = state_dict_saver.save(state_dict, **_asked_for(**where, **ranks))
        return theirs
    with _as_dcp_refuses(storage_writer):
        path = begin_save(state_dict, checkpoint_id, storage_writer, **ranks).result()
    # No rank returns before all have read the metadata, because afterwards any rank may remove the checkpoint.
    ranks_of_save = ranks_of(False if no_dist else process_group)
    metadata: Metadata = ranks_of_save.on_all(lambda: CheckpointReader(path).read_metadata())
    if isinstance(storage_writer, FileSystemWriter) and metadata.storage_meta is not None:
        storage_writer.save_id = metadata.storage_meta.save_id or storage_writer.save_id
    return metadata


def begin_save(
    state_dict: Mapping[str, Any],
    checkpoint_id: CheckpointId | None = None,
    storage_writer: StorageWriter | None = None,
    planner: SavePlanner | None = None,
    process_group: dist.ProcessGroup | None = None,
    no_dist: bool = False,
    *,
    config: Config | None = None,
    **_: Any,
) -> Save:
    """Save as ``async_save`` does, and return our own handle. ``says_folder`` must accept the arguments.

    Args:
        state_dict, checkpoint_id, storage_writer, planner, process_group, no_dist: As for ``async_save``.
        config: Config of the engine, if this is the first save of these ranks; None: from the environment.
    """
    folder = os.path.realpath(_folder(checkpoint_id, storage_writer))
    existing = _existing(folder, overwrite=getattr(storage_writer, "overwrite", True))
    engine = engines.get(process_group, alone=no_dist, config=config)
    save = engine.save(folder, state_dict, existing=existing, planner=planner)
    save.synchronize_staging(engine.config.timeout)  # DCP's callers change tensors at once, despite Config.overlap
    return save


def load(
    state_dict: dict[str, Any],
    storage_reader: StorageReader | None = None,
    *,
    checkpoint_id: CheckpointId | None = None,
    planner: LoadPlanner | None = None,
    process_group: dist.ProcessGroup | None = None,
    no_dist: bool = False,
    weights_only: bool = True,
    strict: bool = True,
) -> Filled:
    """Load a checkpoint, ours or stock DCP's, into ``state_dict``, in place. Raises as ``loading.load`` does.

    Args:
        state_dict: The state dict to fill. The load overwrites its tensors.
        storage_reader: A ``FileSystemReader`` of DCP sets the folder. A call with any other reader goes to DCP's own
            ``load``. A call with ``weights_only=False`` also goes to DCP if each rank's metadata is in its own file.
        checkpoint_id, planner, process_group, no_dist: As for ``async_save``.
        weights_only: Refuse values that could run code. DCP's own ``load`` does not refuse them.
        strict: Raise if the checkpoint lacks a value of the state dict. If False, that value stays unchanged.

    Returns:
        The names that the checkpoint lacks (``missing``), and the names that the state dict lacks (``unexpected``).
        Both are empty for a load that goes to DCP.
    """
    ranks: dict[str, Any] = {"planner": planner, "process_group": process_group, "no_dist": no_dist}
    if says_folder(storage_reader, checkpoint_id):
        folder = _folder(checkpoint_id, storage_reader)
        exists = storage_for(folder).exists
        if exists(os.path.join(folder, METADATA_NAME)) or not exists(os.path.join(folder, _OWN_METADATA_NAME)):
            options: dict[str, Any] = {
                "weights_only": weights_only,
                "strict": strict,
                "progress": Config.from_env().progress,
            }
            return load_checkpoint(state_dict, folder, **options, **ranks)
        if weights_only:
            raise UntrustedValueError(
                "each rank's metadata is in a file of its own, as by use_collectives=False: DCP alone reads these, and"
                " runs what is in them; if you trust who wrote the checkpoint, load it with weights_only=False",
                path=folder,
            )
    if not strict:
        raise ValueError("strict=False is for folders; DCP's way is a DefaultLoadPlanner(allow_partial_load=True)")
    load_by_dcp(state_dict, checkpoint_id=checkpoint_id, storage_reader=storage_reader, **ranks)
    return Filled()


def says_folder(storage: Any, checkpoint_id: CheckpointId | None) -> bool:
    """Return whether our engine serves a call with these arguments. If not, warn once: the call goes to DCP.

    Args:
        storage: The caller's writer or reader. Our engine serves ``FileSystemWriter`` and ``FileSystemReader`` with the
            default format and without extensions. Any other storage may behave differently.
        checkpoint_id: The folder. A call with an address (``s3://``) goes to DCP.
    """
    if storage is None:
        if "://" not in str(checkpoint_id) or isinstance(checkpoint_id, os.PathLike):
            return True
        _warn_of(f"the address {str(checkpoint_id).partition('://')[0]}://...")
        return False
    is_plain = type(storage) in (FileSystemWriter, FileSystemReader) and _asks_for(storage) == _asks_for(
        type(storage)(storage.path)
    )
    if not is_plain:
        _warn_of(f"a {type(storage).__module__}.{type(storage).__qualname__}")
    return is_plain


class EnginePlanner(DefaultSavePlanner):
    """Planner for ``torch.distributed.checkpoint.save(planner=...)``, together with ``EngineWriter``.

    The planner gives DCP nothing to gather, deduplicate, scatter or broadcast, because the engine keeps its own plan.
    """

    def set_up_planner(
        self, state_dict: Any, storage_meta: StorageMeta | None = None, is_coordinator: bool = False
    ) -> None:
        """Keep the state dict; DCP calls this.

        Args:
            state_dict: The state that ``EngineWriter`` saves.
            storage_meta, is_coordinator: Ignored.
        """
        self.given = state_dict

    def create_local_plan(self) -> SavePlan:
        return SavePlan([])

    def create_global_plan(self, all_plans: list[SavePlan]) -> tuple[list[SavePlan], Metadata]:
        return all_plans, Metadata({})

    def finish_plan(self, new_plan: SavePlan) -> SavePlan:
        return new_plan

    def resolve_data(self, write_item: WriteItem) -> Any:
        raise NotImplementedError("EnginePlanner works with EngineWriter only, and is asked for no data by it")


class EngineWriter(StorageWriter):
    """Writer for ``torch.distributed.checkpoint.save(storage_writer=...)``, together with ``EnginePlanner``.

    DCP's collectives still run, with a few bytes per rank. DCP's ``save`` returns when the checkpoint is committed. The
    returned ``Metadata`` is empty on every rank; the file ``.metadata`` in the checkpoint is complete. One writer
    serves any number of saves. DCP's ``async_save`` uses the writer in a thread of its own.
    """

    def __init__(
        self,
        path: CheckpointId | None = None,
        config: Config | None = None,
        process_group: dist.ProcessGroup | None = None,
        planner: SavePlanner | None = None,
    ) -> None:
        """Set the folder and make the engine. The first save starts the worker.

        Args:
            path: The folder for calls of DCP's ``save`` without a ``checkpoint_id``.
            config: Config of the engine; None: from the environment.
            process_group, planner: As for ``async_save``.
        """
        self._path = path
        self._planner = planner
        self._engine = Engine(config, process_group)

    def reset(self, checkpoint_id: CheckpointId | None = None) -> None:
        self._path = self._path if checkpoint_id is None else checkpoint_id

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        _folder(self._path)

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        return plan

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        return plans

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> torch.futures.Future[list[WriteResult]]:
        if not isinstance(planner, EnginePlanner):
            raise ValueError("give DCP's save an EnginePlanner beside the EngineWriter")
        folder = _folder(self._path)
        self._engine.save(folder, planner.given, existing=_existing(folder), planner=self._planner).result()
        done: torch.futures.Future[list[WriteResult]] = torch.futures.Future()
        done.set_result([])
        return done

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        pass  # the workers have committed the checkpoint

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: CheckpointId) -> bool:
        return True

    def close(self) -> None:
        """End the worker and free the memory. Raises as ``Engine.close`` does."""
        self._engine.close()


def _asks_for(storage: Any) -> tuple[Any, ...]:
    """Return the options of DCP's own writer or reader, beyond the folder, that change the bytes of the files."""
    transforms = getattr(storage, "transforms", None)
    registry = getattr(transforms, "extension_registry", None)
    extensions = getattr(transforms, "extensions", None) or getattr(registry, "extensions", None)
    return getattr(storage, "serialization_format", None), extensions


def _asked_for(**options: Any) -> dict[str, Any]:
    """Return the ``options`` that differ from their defaults, because an older torch does not know all of them."""
    return {name: value for name, value in options.items() if value not in (None, name == "use_collectives")}


@functools.cache
def _warn_of(what: str) -> None:
    logger.warning("%s is left to torch.distributed.checkpoint itself: asyncckpt neither saves nor loads by it", what)


@contextlib.contextmanager
def _as_dcp_refuses(storage_writer: Any) -> Iterator[None]:
    """Raise DCP's error if a checkpoint exists and the caller's writer does not overwrite."""
    try:
        yield
    except CheckpointExistsError as error:
        if getattr(storage_writer, "overwrite", True):
            raise
        refusal = RuntimeError(f"Checkpoint already exists and self.overwrite=False: {error}")
        raise CheckpointException("plan", {error.rank or 0: _wrap_exception(refusal)}) from error


def _folder(checkpoint_id: CheckpointId | None, storage: Any = None) -> str:
    """Return the folder of a call that ``says_folder`` accepts. Raises ``ValueError`` if the call names none."""
    if storage is not None:
        if checkpoint_id is not None:
            storage.reset(checkpoint_id)
        checkpoint_id = storage.path
    if checkpoint_id is None:
        raise ValueError("checkpoint_id, the folder of the checkpoint, is missing")
    absolute_path(checkpoint_id)  # raises for an address
    return os.fspath(checkpoint_id)


def _existing(folder: str, *, overwrite: bool = True) -> Literal["refuse", "replace", "join"]:
    """Return how to treat the contents of ``folder``: as in DCP, but a lone checkpoint is replaced in one step."""
    folder, storage = os.path.realpath(folder), storage_for(folder)  # DCP follows links
    with contextlib.suppress(StorageError):  # the first rank's save reports the error to all ranks
        if not overwrite and (storage.exists(os.path.join(folder, METADATA_NAME)) or storage.may_put(folder, "refuse")):
            return "refuse"  # also if the folder is free, to keep a file that appears before the rename
        if not storage.may_put(folder, "replace"):
            return "join"  # the folder has other files, and DCP writes beside them
    return "replace"
