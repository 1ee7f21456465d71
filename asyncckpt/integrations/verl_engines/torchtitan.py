"""Make verl's torchtitan engine save through our engine: the folder of torchtitan's checkpointer in ``actor``.

By itself, the engine saves the actor and the critic to one folder ``step-N`` beside theirs, and only those steps that
torchtitan's own interval names. The random number generators, which torchtitan does not save, are files of each rank.
"""

from __future__ import annotations

import functools
import logging
import os
from collections.abc import Callable
from functools import partial
from typing import Any

from verl.utils.checkpoint.checkpoint_manager import BaseCheckpointManager
from verl.utils.fs import is_non_local

from asyncckpt.extension import MANIFEST_NAME, absolute_path, ranks_of, storage_for
from asyncckpt.integrations.capture import Capture, replaced
from asyncckpt.integrations.verl_engines.fsdp import extra_file, extra_name, read_extra
from asyncckpt.integrations.verl_engines.manager import AsyncManager

logger = logging.getLogger(__name__)

_MANAGER_ATTRIBUTE = "_asyncckpt_manager"
_INSIDE = "torchtitan"  # the engine saves beside the folder that it is told


class _EngineManager(BaseCheckpointManager):  # type: ignore[misc]  # verl has no types
    """A manager by the methods of a torchtitan engine."""

    def __init__(self, engine: Any, save: Callable[..., None], load: Callable[..., None]) -> None:
        super().__init__(None, None)
        self._engine, self._save, self._load = engine, save, load

    def save_checkpoint(self, local_path: str, *args: Any, **options: Any) -> None:
        with replaced(self._engine.checkpointer, "interval", 1):  # verl's trainer says when to save
            self._save(self._engine, local_path, *args, **options)


class AsyncckptTorchTitanManager(AsyncManager, _EngineManager):
    """Saves as verl's torchtitan engine does, but through our engine. Loads checkpoints of both."""

    def load_checkpoint(self, local_path: str, *args: Any, **options: Any) -> None:
        """Load one checkpoint, with any number of ranks. The arguments are the same as for verl's engine.

        Raises:
            CheckpointError: The states of the random number generators cannot be read.
        """
        path = None if is_non_local(local_path) else absolute_path(local_path)
        if path is None or not ranks_of().from_first(partial(_is_ours, path)):
            self._load(self._engine, local_path, *args, **options)
            return
        self._load(self._engine, os.path.join(path, _INSIDE), *args, **options)
        _, rng = read_extra(path, self.rank, self.world_size)
        if rng is None:
            logger.info("the random generators of this rank are not loaded: fewer ranks have saved")
        else:
            self.load_rng_state(rng)

    def _capture(self, capture: Capture, step: int) -> None:
        self.have_verl_write(os.path.join(capture.folder, _INSIDE), step)
        capture.files.add_bytes(extra_name(self.rank, self.world_size), extra_file(None, self.get_rng_state()))


def _is_ours(path: str) -> bool:
    return storage_for(path).exists(os.path.join(path, MANIFEST_NAME))


def wrap(engine_class: Any) -> None:
    """Make the engines of a class save and load through a manager."""
    stock_save, stock_load = engine_class.save_checkpoint, engine_class.load_checkpoint

    def manager(engine: Any) -> Any:
        if _MANAGER_ATTRIBUTE not in vars(engine):
            setattr(engine, _MANAGER_ATTRIBUTE, AsyncckptTorchTitanManager(engine, stock_save, stock_load))
        return getattr(engine, _MANAGER_ATTRIBUTE)

    @functools.wraps(stock_save)
    def save_checkpoint(self: Any, *args: Any, **options: Any) -> None:
        manager(self).save_checkpoint(*args, **options)

    @functools.wraps(stock_load)
    def load_checkpoint(self: Any, *args: Any, **options: Any) -> None:
        manager(self).load_checkpoint(*args, **options)

    engine_class.save_checkpoint, engine_class.load_checkpoint = save_checkpoint, load_checkpoint
