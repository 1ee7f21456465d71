"""``torch.distributed.checkpoint``'s own three calls, on our engine: one line to switch.

    from asyncckpt import async_save        # was: from torch.distributed.checkpoint import async_save

One engine serves all calls of the process with the same process group. It is started by the first save, takes its
configuration from the environment (``Config.from_env``), and is closed when the interpreter ends, after the last save
is written.

For code that has to go on calling DCP's ``save`` there are ``EnginePlanner`` and ``EngineWriter``.
"""

from __future__ import annotations

import os
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.metadata import Metadata, StorageMeta
from torch.distributed.checkpoint.planner import LoadPlanner, SavePlan, SavePlanner, WriteItem
from torch.distributed.checkpoint.storage import StorageReader, StorageWriter, WriteResult

from asyncckpt import engines, reader
from asyncckpt.config import Config
from asyncckpt.engine import Engine
from asyncckpt.handle import Save
from asyncckpt.plan import StateDict
from asyncckpt.worker.messages import Existing

Path_ = str | os.PathLike[str]


def async_save(
    state_dict: StateDict,
    *,
    checkpoint_id: Path_ | None = None,
    storage_writer: StorageWriter | None = None,
    planner: SavePlanner | None = None,
    process_group: dist.ProcessGroup | None = None,
    async_checkpointer_type: Any = None,
    async_stager: Any = None,
    no_dist: bool = False,
    use_collectives: bool = True,
) -> Future[Path]:
    """Save ``state_dict`` in the folder ``checkpoint_id``, replacing a checkpoint that is there, whole, in one step.

    Returns when the tensors are copied, so that the caller may change them. The future ends when the checkpoint is
    complete and durable on all ranks. ``no_dist``: this process saves alone. ``async_checkpointer_type``,
    ``async_stager`` and ``use_collectives`` choose between ways that this one replaces, and do nothing. Raises as
    ``Engine.save`` does, ``ValueError`` for a ``storage_writer``.
    """
    return begin_save(
        state_dict,
        checkpoint_id=checkpoint_id,
        storage_writer=storage_writer,
        planner=planner,
        process_group=process_group,
        no_dist=no_dist,
    ).future


def save(
    state_dict: StateDict,
    *,
    checkpoint_id: Path_ | None = None,
    storage_writer: StorageWriter | None = None,
    planner: SavePlanner | None = None,
    process_group: dist.ProcessGroup | None = None,
    no_dist: bool = False,
    use_collectives: bool = True,
) -> Metadata:
    """As ``async_save``, and wait until it is durable. Returns DCP's metadata of it; also raises what went wrong."""
    handle = begin_save(
        state_dict,
        checkpoint_id=checkpoint_id,
        storage_writer=storage_writer,
        planner=planner,
        process_group=process_group,
        no_dist=no_dist,
    )
    return reader.ImageReader(handle.result()).read_metadata()


def begin_save(
    state_dict: StateDict,
    *,
    checkpoint_id: Path_ | None = None,
    storage_writer: StorageWriter | None = None,
    planner: SavePlanner | None = None,
    process_group: dist.ProcessGroup | None = None,
    no_dist: bool = False,
    config: Config | None = None,
    existing: Existing = "replace",
    **_: Any,
) -> Save:
    """As ``async_save``, but returns our own handle.

    ``existing``: what becomes of what is there, see ``Order``. ``config``: if it is the first save of these ranks
    (None: as the environment says).
    """
    if storage_writer is not None:
        raise ValueError("asyncckpt writes by itself: give it a checkpoint_id instead of a storage_writer")
    engine = engines.shared.get(process_group, alone=no_dist, config=config)
    return engine.save(os.path.realpath(_folder(checkpoint_id)), state_dict, existing=existing, planner=planner)


def load(
    state_dict: dict[str, Any],
    *,
    checkpoint_id: Path_ | None = None,
    storage_reader: StorageReader | None = None,
    planner: LoadPlanner | None = None,
    process_group: dist.ProcessGroup | None = None,
    no_dist: bool = False,
    weights_only: bool = True,
) -> None:
    """Load the checkpoint ``checkpoint_id``, ours or stock DCP's, into ``state_dict``, in place; see ``reader.load``.

    A ``storage_reader`` of the caller's own is given to DCP as it is. ``no_dist``: this process loads alone. Unlike
    DCP's own ``load``, this loads nothing that could run code unless ``weights_only`` is false.
    """
    if storage_reader is not None:
        reader.load_by_dcp(
            state_dict,
            checkpoint_id=checkpoint_id,
            storage_reader=storage_reader,
            planner=planner,
            process_group=process_group,
            no_dist=no_dist,
        )
        return
    reader.load(
        state_dict,
        _folder(checkpoint_id),
        planner=planner,
        weights_only=weights_only,
        process_group=process_group,
        no_dist=no_dist,
        progress=Config.from_env().progress,
    )


class EnginePlanner(DefaultSavePlanner):
    """For ``torch.distributed.checkpoint.save(planner=...)``, together with ``EngineWriter``.

    Gives DCP nothing to gather, deduplicate, scatter or broadcast: the engine has planned once, and knows.
    """

    def set_up_planner(
        self, state_dict: Any, storage_meta: StorageMeta | None = None, is_coordinator: bool = False
    ) -> None:
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
    """For ``torch.distributed.checkpoint.save(storage_writer=...)``, together with ``EnginePlanner``.

    DCP's collectives still run, and carry some bytes a rank; what DCP's ``save`` returns is an empty ``Metadata``
    (``.metadata`` in the checkpoint is whole). It returns, on every rank, when the checkpoint is committed. One writer
    is for any number of saves; with ``async_save``'s threads it is used in DCP's own.
    """

    def __init__(
        self,
        path: Path_ | None = None,
        config: Config | None = None,
        process_group: dist.ProcessGroup | None = None,
        planner: SavePlanner | None = None,
    ) -> None:
        """``path``: where to, if no ``checkpoint_id`` says. ``planner``: DCP's, or the user's own, to plan with."""
        self._path = path
        self._planner = planner
        self._engine = Engine(config or Config.from_env(), process_group)

    def reset(self, checkpoint_id: Path_ | None = None) -> None:
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
        self._engine.save(_folder(self._path), planner.given, existing="replace", planner=self._planner).result()
        done: torch.futures.Future[list[WriteResult]] = torch.futures.Future()
        done.set_result([])
        return done

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        pass  # the workers have committed it

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: Path_) -> bool:
        return True

    def close(self) -> None:
        """End the worker, give the memory back. Raises as ``Engine.close`` does."""
        self._engine.close()


def _folder(checkpoint_id: Path_ | None) -> str:
    if checkpoint_id is None:
        raise ValueError("checkpoint_id, the folder of the checkpoint, is missing")
    return os.fspath(checkpoint_id)
