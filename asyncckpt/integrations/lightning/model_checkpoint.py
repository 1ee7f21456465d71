"""``ModelCheckpoint`` looks for files and links to them without asking the plugin: here it is made to ask."""

from __future__ import annotations

import functools
import os
from typing import Any

from lightning.pytorch.callbacks import ModelCheckpoint

from asyncckpt.integrations.lightning.checkpoint_io import AsyncckptIO
from asyncckpt.integrations.lightning.files import AnyPath, local_place, place_of


def install() -> None:
    """Replace two methods. With another plugin than ``AsyncckptIO`` they do what they did."""
    file_exists, link_checkpoint = ModelCheckpoint.file_exists, ModelCheckpoint._link_checkpoint

    @functools.wraps(file_exists)
    def ask_file_exists(self: ModelCheckpoint, filepath: AnyPath, trainer: Any) -> bool:
        """It gives no name to two checkpoints of which one is under way."""
        io, place = trainer.strategy.checkpoint_io, local_place(filepath)
        known = None
        if isinstance(io, AsyncckptIO) and place is not None and trainer.is_global_zero:
            known = io.pending.will_exist(place)
        if known is None:
            return bool(file_exists(self, filepath, trainer))
        return bool(trainer.strategy.reduce_boolean_decision(known, all=False))  # as the other ranks, in file_exists

    @functools.wraps(link_checkpoint)
    def ask_link_checkpoint(trainer: Any, filepath: str, linkpath: str) -> None:
        """A link leads to a checkpoint that is there, and stays where it is until the newer one is."""
        io = trainer.strategy.checkpoint_io
        if not isinstance(io, AsyncckptIO):
            link_checkpoint(trainer, filepath, linkpath)
            return
        target, place = place_of(filepath), place_of(linkpath)
        if trainer.is_global_zero and target != place:
            io.pending.link(place, os.path.relpath(target, os.path.dirname(place)))
        trainer.strategy.barrier()

    ModelCheckpoint.file_exists = ask_file_exists  # type: ignore[method-assign]
    ModelCheckpoint._link_checkpoint = staticmethod(ask_link_checkpoint)  # type: ignore[method-assign]
