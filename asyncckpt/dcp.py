"""``torch.distributed.checkpoint``'s own three calls, on our engine: one line to switch.

    from asyncckpt import async_save        # was: from torch.distributed.checkpoint import async_save

One engine serves all calls of the process. It is started by the first save, takes its configuration from the
environment (``Config.from_env``), and is closed when the interpreter ends, after the last save is written.
"""

from __future__ import annotations

import atexit
import logging
import os
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch.distributed.checkpoint import state_dict_loader
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import LoadPlanner, SavePlanner
from torch.distributed.checkpoint.storage import StorageReader, StorageWriter

from asyncckpt import reader
from asyncckpt.config import Config
from asyncckpt.engine import Engine
from asyncckpt.errors import CheckpointError
from asyncckpt.handle import Save
from asyncckpt.plan import StateDict

logger = logging.getLogger(__name__)

Path_ = str | os.PathLike[str]

_engine: Engine | None = None


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
    complete and durable. ``async_checkpointer_type``, ``async_stager`` and ``use_collectives`` choose between ways that
    this one replaces, and do nothing. Raises as ``Engine.save`` does, ``ValueError`` for a ``storage_writer``.
    """
    return _save(state_dict, checkpoint_id, storage_writer, planner).future


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
    handle = _save(state_dict, checkpoint_id, storage_writer, planner)
    return reader.ImageReader(handle.result()).read_metadata()


def load(
    state_dict: dict[str, Any],
    *,
    checkpoint_id: Path_ | None = None,
    storage_reader: StorageReader | None = None,
    planner: LoadPlanner | None = None,
    process_group: dist.ProcessGroup | None = None,
    no_dist: bool = False,
) -> None:
    """Load the checkpoint ``checkpoint_id``, ours or stock DCP's, into ``state_dict``, in place; see ``reader.load``.

    A ``storage_reader`` of the caller's own is given to DCP as it is.
    """
    if storage_reader is not None:
        state_dict_loader.load(
            state_dict,
            checkpoint_id=checkpoint_id,
            storage_reader=storage_reader,
            planner=planner,
            process_group=process_group,
        )
        return
    reader.load(state_dict, _folder(checkpoint_id), planner=planner, process_group=process_group)


def _save(
    state_dict: StateDict,
    checkpoint_id: Path_ | None,
    storage_writer: StorageWriter | None,
    planner: SavePlanner | None,
) -> Save:
    global _engine
    if storage_writer is not None:
        raise ValueError("asyncckpt writes by itself: give it a checkpoint_id instead of a storage_writer")
    if _engine is None:
        _engine = Engine(Config.from_env())
        atexit.register(_close)
    return _engine.save(_folder(checkpoint_id), state_dict, overwrite=True, planner=planner)


def _close() -> None:
    global _engine
    engine, _engine = _engine, None
    if engine is not None:
        try:
            engine.close()
        except CheckpointError as error:
            logger.error("a checkpoint was lost at the end of the process: %s", error)


def _folder(checkpoint_id: Path_ | None) -> str:
    if checkpoint_id is None:
        raise ValueError("checkpoint_id, the folder of the checkpoint, is missing")
    return os.fspath(checkpoint_id)
