"""Strategies that save sharded checkpoints, each rank its part: the folder that Lightning makes, in one step."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

from lightning.fabric.plugins.io.checkpoint_io import CheckpointIO
from lightning.pytorch.strategies import FSDPStrategy, ModelParallelStrategy
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict, get_optimizer_state_dict
from torch.nn import Module

from asyncckpt.config import Config
from asyncckpt.extension import FileSet
from asyncckpt.integrations.lightning.checkpoint_io import AsyncckptIO
from asyncckpt.integrations.lightning.files import AnyPath, is_needed_at_once, place_of

# As Lightning calls it: all that is neither a model nor an optimizer (lightning/fabric/strategies/fsdp.py).
_METADATA_NAME = "meta.pt"


class ShardedSaves:
    """What is the same for both strategies. It comes before Lightning's own among the base classes."""

    # Of Lightning's strategies.
    broadcast: Callable[[Any], Any]
    is_global_zero: bool
    _checkpoint_io: CheckpointIO | None

    def __init__(self, *arguments: Any, config: Config | None = None, **options: Any) -> None:
        """As Lightning's own.

        Args:
            arguments, options: As of that strategy. A ``checkpoint_io``, or the trainer's plugin, is an
                ``AsyncckptIO``, or there is none.
            config: For the engines, if these are the first saves; None: as the environment says.
        """
        super().__init__(*arguments, **options)
        self._config = config

    @property
    def checkpoint_io(self) -> AsyncckptIO:
        """What saves to one file, and knows what is under way."""
        if self._checkpoint_io is None:
            self._checkpoint_io = AsyncckptIO(self._config)
        if not isinstance(self._checkpoint_io, AsyncckptIO):
            kind = type(self._checkpoint_io).__name__
            raise TypeError(f"{type(self).__name__} saves by an AsyncckptIO, not by a {kind}; leave that plugin out")
        return self._checkpoint_io

    @checkpoint_io.setter
    def checkpoint_io(self, io: CheckpointIO) -> None:
        self._checkpoint_io = io

    def load_checkpoint(self, path: AnyPath, *arguments: Any, **options: Any) -> dict[str, Any]:
        """As Lightning's own, after what is under way for that path. Raises as ``AsyncckptIO.load_checkpoint``."""
        self.checkpoint_io.pending.wait_for(place_of(path))
        return super().load_checkpoint(path, *arguments, **options)  # type: ignore[misc, no-any-return]

    def teardown(self) -> None:
        """As Lightning's own, and that of the ``AsyncckptIO``, which theirs leaves out."""
        super().teardown()  # type: ignore[misc]
        self.checkpoint_io.teardown()

    def save_parts(self, sharded: dict[str, Any], others: dict[str, Any], path: AnyPath) -> None:
        """Save what all ranks have a part of, and what the first has."""
        files = FileSet()
        files.add_dcp_folder("", sharded)
        if self.is_global_zero:
            files.add_torch_file(_METADATA_NAME, others)
        self.checkpoint_io.save_files(self.broadcast(place_of(path)), files)


class _TrainersShardedSaves(ShardedSaves):
    def _save_sharded(self, checkpoint: dict[str, Any], model: str, path: AnyPath) -> None:
        """Save ``checkpoint``, in which the model is called ``model`` then."""
        sharded = {model: checkpoint.pop("state_dict")}
        sharded |= {f"optimizer_{number}": each for number, each in enumerate(checkpoint.pop("optimizer_states", []))}
        self.save_parts(sharded, checkpoint, path)


class AsyncckptFSDPStrategy(_TrainersShardedSaves, FSDPStrategy):  # type: ignore[misc]  # what it replaces has other types
    """``FSDPStrategy``, whose checkpoints are saved in the background, sharded or in one file."""

    def save_checkpoint(self, checkpoint: dict[str, Any], filepath: AnyPath, storage_options: Any = None) -> None:
        """Return when the tensors are copied. Raises as ``AsyncckptIO.save_checkpoint``."""
        if self._state_dict_type != "sharded" or storage_options is not None or is_needed_at_once(filepath):
            super().save_checkpoint(checkpoint, filepath, storage_options)
        else:
            self._save_sharded(checkpoint, "model", filepath)


class AsyncckptModelParallelStrategy(_TrainersShardedSaves, ModelParallelStrategy):  # type: ignore[misc]  # what it replaces has other types
    """``ModelParallelStrategy``, whose checkpoints are saved in the background, sharded or in one file."""

    def lightning_module_state_dict(self) -> dict[str, Any]:
        """As Lightning's own, but where they are saved sharded, of the tensors where they are, not of copies."""
        if not self._save_distributed_checkpoint:
            return super().lightning_module_state_dict()
        return get_model_state_dict(cast(Module, self.model), options=StateDictOptions(cpu_offload=False))

    def optimizer_state(self, optimizer: Any) -> dict[str, Any]:
        """As Lightning's own, but where they are saved sharded, of the tensors where they are, not of copies."""
        if not self._save_distributed_checkpoint:
            return super().optimizer_state(optimizer)
        optimizer = getattr(optimizer, "_optimizer", optimizer)
        return get_optimizer_state_dict(
            cast(Module, self.model), optimizer, options=StateDictOptions(cpu_offload=False)
        )

    def save_checkpoint(self, checkpoint: dict[str, Any], filepath: AnyPath, storage_options: Any = None) -> None:
        """Return when the tensors are copied. Raises as ``AsyncckptIO.save_checkpoint``."""
        if not self._save_distributed_checkpoint or storage_options is not None or is_needed_at_once(filepath):
            super().save_checkpoint(checkpoint, filepath, storage_options)
        else:
            self._save_sharded(checkpoint, "state_dict", filepath)
