"""The three calls of ``torch.distributed.checkpoint`` (DCP), on our engine: one line to switch.

    from asyncckpt import async_save        # was: from torch.distributed.checkpoint import async_save

All calls with the same process group share one engine (see ``engine/shared.py``), which takes its configuration from
the environment. For code that has to go on calling DCP's ``save`` there are ``EnginePlanner`` and ``EngineWriter``.
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

from asyncckpt.config import Config
from asyncckpt.engine import shared as engines
from asyncckpt.engine.engine import Engine
from asyncckpt.loading import dcp_reader
from asyncckpt.loading import load as reader
from asyncckpt.planning.plan import StateDict
from asyncckpt.save_handle import Save
from asyncckpt.worker.messages import Existing

CheckpointId = str | os.PathLike[str]
"""The folder of a checkpoint."""


def async_save(
    state_dict: StateDict,
    *,
    checkpoint_id: CheckpointId | None = None,
    storage_writer: StorageWriter | None = None,
    planner: SavePlanner | None = None,
    process_group: dist.ProcessGroup | None = None,
    async_checkpointer_type: Any = None,
    async_stager: Any = None,
    no_dist: bool = False,
    use_collectives: bool = True,
) -> Future[Path]:
    """Save ``state_dict`` in a folder, replacing a checkpoint that is there, whole, in one step.

    Args:
        state_dict: The caller may change its tensors when this returns.
        checkpoint_id: The folder.
        storage_writer: Refused.
        planner: DCP's, or the user's own.
        process_group: The ranks that save together; None for the whole job.
        async_checkpointer_type, async_stager, use_collectives: Change nothing; they choose between DCP's own ways.
        no_dist: This process saves alone.

    Returns:
        A future that ends when the checkpoint is complete and durable on all ranks.

    Raises:
        ValueError: There is a ``storage_writer``, or no ``checkpoint_id``.
        CheckpointError: As ``Engine.save`` raises.
    """
    return begin_save(state_dict, checkpoint_id, storage_writer, planner, process_group, no_dist).future


def save(
    state_dict: StateDict,
    *,
    checkpoint_id: CheckpointId | None = None,
    storage_writer: StorageWriter | None = None,
    planner: SavePlanner | None = None,
    process_group: dist.ProcessGroup | None = None,
    no_dist: bool = False,
    use_collectives: bool = True,
) -> Metadata:
    """As ``async_save``, and wait until the checkpoint is durable; raises also what went wrong until then.

    Args:
        state_dict, checkpoint_id, storage_writer, planner, process_group, no_dist, use_collectives: As there.

    Returns:
        DCP's metadata of it.
    """
    handle = begin_save(state_dict, checkpoint_id, storage_writer, planner, process_group, no_dist)
    return dcp_reader.CheckpointReader(handle.result()).read_metadata()


def begin_save(
    state_dict: StateDict,
    checkpoint_id: CheckpointId | None = None,
    storage_writer: StorageWriter | None = None,
    planner: SavePlanner | None = None,
    process_group: dist.ProcessGroup | None = None,
    no_dist: bool = False,
    *,
    config: Config | None = None,
    existing: Existing = "replace",
    **_: Any,
) -> Save:
    """As ``async_save``; returns our own handle.

    Args:
        state_dict, checkpoint_id, storage_writer, planner, process_group, no_dist: As there.
        config: For the engine, if this is the first save of these ranks; None: as the environment says.
        existing: What becomes of what is in the folder, see ``WriteRequest``.
    """
    if storage_writer is not None:
        raise ValueError("asyncckpt writes by itself: give it a checkpoint_id instead of a storage_writer")
    engine = engines.shared.get(process_group, alone=no_dist, config=config)
    return engine.save(os.path.realpath(_folder(checkpoint_id)), state_dict, existing=existing, planner=planner)


def load(
    state_dict: dict[str, Any],
    *,
    checkpoint_id: CheckpointId | None = None,
    storage_reader: StorageReader | None = None,
    planner: LoadPlanner | None = None,
    process_group: dist.ProcessGroup | None = None,
    no_dist: bool = False,
    weights_only: bool = True,
) -> None:
    """Load a checkpoint, ours or stock DCP's, into ``state_dict``, in place; raises as ``loading.load`` does.

    Args:
        state_dict: Its tensors are written to.
        checkpoint_id, planner, process_group, no_dist: As of ``async_save``.
        storage_reader: The caller's own, which is given to DCP as it is.
        weights_only: Load nothing that could run code. DCP's own ``load`` has no such limit.
    """
    how: dict[str, Any] = {"planner": planner, "process_group": process_group, "no_dist": no_dist}
    if storage_reader is not None:
        dcp_reader.load_by_dcp(state_dict, checkpoint_id=checkpoint_id, storage_reader=storage_reader, **how)
        return
    progress = Config.from_env().progress
    reader.load(state_dict, _folder(checkpoint_id), weights_only=weights_only, progress=progress, **how)


class EnginePlanner(DefaultSavePlanner):
    """For ``torch.distributed.checkpoint.save(planner=...)``, together with ``EngineWriter``.

    Gives DCP nothing to gather, deduplicate, scatter or broadcast: the engine keeps its own plan.
    """

    def set_up_planner(
        self, state_dict: Any, storage_meta: StorageMeta | None = None, is_coordinator: bool = False
    ) -> None:
        """Called by DCP.

        Args:
            state_dict: For ``EngineWriter`` to save.
            storage_meta, is_coordinator: Change nothing.
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
    """For ``torch.distributed.checkpoint.save(storage_writer=...)``, together with ``EnginePlanner``.

    DCP's collectives still run, and carry some bytes a rank. DCP's ``save`` returns an empty ``Metadata``
    (``.metadata`` in the checkpoint is whole), on every rank, when the checkpoint is committed. One writer is for any
    number of saves; DCP's ``async_save`` uses it in a thread of its own.
    """

    def __init__(
        self,
        path: CheckpointId | None = None,
        config: Config | None = None,
        process_group: dist.ProcessGroup | None = None,
        planner: SavePlanner | None = None,
    ) -> None:
        """No worker is started yet.

        Args:
            path: The folder, where DCP's ``save`` is given no ``checkpoint_id``.
            config: For the engine; None: as the environment says.
            process_group, planner: As of ``async_save``.
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
        self._engine.save(_folder(self._path), planner.given, existing="replace", planner=self._planner).result()
        done: torch.futures.Future[list[WriteResult]] = torch.futures.Future()
        done.set_result([])
        return done

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        pass  # the workers have committed it

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: CheckpointId) -> bool:
        return True

    def close(self) -> None:
        """End the worker, give the memory back. Raises as ``Engine.close`` does."""
        self._engine.close()


def _folder(checkpoint_id: CheckpointId | None) -> str:
    if checkpoint_id is None:
        raise ValueError("checkpoint_id, the folder of the checkpoint, is missing")
    return os.fspath(checkpoint_id)
