"""Save DeepSpeed's checkpoints asynchronously: one line to switch.

    engine, *_ = deepspeed.initialize(...)
    attach(engine)  # then engine.save_checkpoint(folder) as ever

The files of all ranks under one tag form one checkpoint. The folder gets the tag as its name in one step, when all
files are durable. Then the first rank's worker writes the tag to ``latest``, even if the trainer was killed.
"""

from __future__ import annotations

import itertools
import logging
import os
from pathlib import Path
from typing import Any

import torch
from deepspeed.runtime.checkpoint_engine import TorchCheckpointEngine
from deepspeed.runtime.checkpoint_engine.checkpoint_engine import CheckpointCommitInfo, CheckpointEngine

from asyncckpt.config import Config
from asyncckpt.extension import FileSet, Pointer, engines, ranks_of, replace_or_set_aside

logger = logging.getLogger(__name__)

_LATEST = "latest"
_attached = itertools.count()


def attach(engine: Any, config: Config | None = None) -> None:
    """Have ``engine.save_checkpoint`` save in the background from now on. A second call changes nothing.

    ``save_checkpoint`` returns when the tensors are copied. A failure is raised by the next ``save_checkpoint``, or by
    ``load_checkpoint``, which waits until all saves have ended.

    Args:
        engine: The result of ``deepspeed.initialize``. The caller's own code must call ``save_checkpoint``, because a
            framework above DeepSpeed would remove older checkpoints too early. DeepSpeed saves by itself, with a
            warning, if the engine uses node-local storage, NVMe offload of the optimizer, a device mesh, or a
            checkpoint engine other than ``TorchCheckpointEngine``.
        config: Config of the job's engine, if this is its first save; None: from the environment.
    """
    if not isinstance(getattr(engine.save_checkpoint, "__self__", None), _Saves):
        _Saves(engine, config)


class _Saves:
    """The saves of one DeepSpeed engine. The public methods replace the engine's own."""

    def __init__(self, engine: Any, config: Config | None) -> None:
        self._engine, self._config = engine, config
        self._stock_save, self._stock_load = engine.save_checkpoint, engine.load_checkpoint
        self._warned = False
        self._kind = f"DeepSpeed's engine {next(_attached)}"
        engine.save_checkpoint, engine.load_checkpoint = self.save_checkpoint, self.load_checkpoint

    def save_checkpoint(
        self,
        save_dir: Any,
        tag: Any = None,
        client_state: Any = None,
        save_latest: bool = True,
        *args: Any,
        **options: Any,
    ) -> Any:
        """Call the engine's own method, and return when all tensors are staged."""
        engine, client_state = self._engine, client_state or {}
        if (reason := _why_stock(engine)) is not None:
            if not self._warned:
                logger.warning("DeepSpeed saves its checkpoints itself, and the training waits: %s", reason)
            self._warned = True
            return self._stock_save(save_dir, tag, client_state, save_latest, *args, **options)
        tag = f"global_step{engine.global_steps}" if tag is None else str(tag)
        place = os.path.abspath(os.path.join(save_dir, tag))
        collecting = _CollectingEngine(engine.checkpoint_engine, place, self._kind)
        engine.checkpoint_engine = collecting
        try:
            done = self._stock_save(save_dir, tag, client_state, False, *args, **options)
        finally:
            engine.checkpoint_engine = collecting.stock
        ours = engines.get(config=self._config)
        save = ours.save(
            place,
            collecting.files,
            step=engine.global_steps,
            existing=replace_or_set_aside(place),
            pointer=Pointer(os.path.join(os.path.abspath(save_dir), _LATEST), tag) if save_latest else None,
        )
        save.synchronize_staging(ours.config.timeout)
        return done

    def load_checkpoint(self, load_dir: Any, *args: Any, **options: Any) -> Any:
        """Wait until all saves have ended, then call the engine's own method."""
        # Only the first rank knows whether ``latest`` is written.
        ranks_of().on_all(engines.get(config=self._config).wait)
        return self._stock_load(load_dir, *args, **options)


class _CollectingEngine(CheckpointEngine):  # type: ignore[misc]  # DeepSpeed has no types
    """A checkpoint engine of DeepSpeed that collects the files of one folder instead of writing them."""

    def __init__(self, stock: Any, folder: str, kind: str) -> None:
        super().__init__()
        self.stock, self.name = stock, stock.name
        self.files = FileSet(kind)
        self._folder = folder

    def create(self, info: CheckpointCommitInfo) -> None:
        pass

    def commit(self, info: CheckpointCommitInfo) -> bool:
        return True

    def makedirs(self, path: Any, exist_ok: bool = False) -> None:
        if self._name_of(path) is None:
            self.stock.makedirs(path, exist_ok=exist_ok)

    def save(self, state_dict: Any, path: Any) -> None:
        if (name := self._name_of(path)) is None:
            self.stock.save(state_dict, path)
        else:
            self.files.add_torch_file(name, state_dict, torch.serialization.DEFAULT_PROTOCOL)

    def load(self, path: Any, map_location: Any = None) -> Any:
        return self.stock.load(path, map_location)

    def is_data_parallel_writer(self, dp_rank: int) -> bool:
        return bool(self.stock.is_data_parallel_writer(dp_rank))

    def _name_of(self, path: Any) -> str | None:
        """Return the name of a file in the folder, "." for the folder itself, or None for any other path."""
        place = Path(os.path.abspath(path))
        return place.relative_to(self._folder).as_posix() if place.is_relative_to(self._folder) else None


def _why_stock(engine: Any) -> str | None:
    """Return the reason why DeepSpeed has to save this engine itself; None if asyncckpt can save it."""
    if engine.use_node_local_storage():
        return "each node has files of its own (use_node_local_storage)"
    if engine.zero_nvme_offload_optimizer():
        return "the optimizer is offloaded to NVMe, whose files DeepSpeed copies"
    if engine.mesh_device is not None:
        return "with a device mesh several ranks write files of one name"
    if type(engine.checkpoint_engine) is not TorchCheckpointEngine:
        return f"a {type(engine.checkpoint_engine).__name__} is configured"
    return None
