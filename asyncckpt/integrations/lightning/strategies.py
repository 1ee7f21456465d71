"""Provide strategies for the trainer and for Fabric that save sharded checkpoints: each rank saves its part.

The folder has Lightning's layout, and appears in one step. Lightning passes models and optimizers to Fabric's
strategies, and the states of models and optimizers to the trainer's strategies.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

from lightning.fabric.plugins.io.checkpoint_io import CheckpointIO
from lightning.fabric.strategies.fsdp import FSDPStrategy as FabricFSDPStrategy
from lightning.fabric.strategies.fsdp import _get_sharded_state_dict_context, _has_fsdp_modules
from lightning.fabric.strategies.model_parallel import ModelParallelStrategy as FabricModelParallelStrategy
from lightning.fabric.strategies.model_parallel import _has_dtensor_modules
from lightning.fabric.utilities.types import _Stateful
from lightning.pytorch.strategies import FSDPStrategy, ModelParallelStrategy
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict, get_optimizer_state_dict
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.nn import Module
from torch.optim import Optimizer

from asyncckpt.config import Config
from asyncckpt.extension import FileSet
from asyncckpt.integrations.lightning.checkpoint_io import AnyPath, AsyncckptIO, is_needed_at_once, place_of

# Lightning's name for the file without models and optimizers (lightning/fabric/strategies/fsdp.py).
_METADATA_NAME = "meta.pt"
_ON_DEVICE = StateDictOptions(cpu_offload=False)


class ShardedSaves:
    """The common part of all strategies. This class precedes Lightning's own strategy among the base classes."""

    # Members of Lightning's strategies.
    broadcast: Callable[[Any], Any]
    is_global_zero: bool
    _checkpoint_io: CheckpointIO | None

    def __init__(self, *arguments: Any, config: Config | None = None, **options: Any) -> None:
        """Initialize Lightning's own strategy.

        Args:
            arguments, options: As for Lightning's own strategy. A ``checkpoint_io``, or the trainer's plugin for
                checkpoints, must be an ``AsyncckptIO`` or absent.
            config: Config of the engines, if these are the first saves; None: from the environment.
        """
        super().__init__(*arguments, **options)
        self._config = config

    @property
    def checkpoint_io(self) -> AsyncckptIO:
        """The plugin that saves the files, and tracks the saves under way."""
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
        """Wait for the work pending for ``path``, then load as Lightning does.

        Raises as ``AsyncckptIO.load_checkpoint``.
        """
        self.checkpoint_io.pending.wait_for(place_of(path))
        return super().load_checkpoint(path, *arguments, **options)  # type: ignore[misc, no-any-return]

    def teardown(self) -> None:
        """Tear down Lightning's own strategy, and then the ``AsyncckptIO``, because Lightning does not."""
        super().teardown()  # type: ignore[misc]
        self.checkpoint_io.teardown()

    def save_parts(self, sharded: dict[str, Any], others: dict[str, Any], path: AnyPath) -> None:
        """Save this rank's part of the ``sharded`` values, and, on the first rank, the ``others``."""
        files = FileSet()
        files.add_dcp_folder("", sharded)
        if self.is_global_zero:
            files.add_torch_file(_METADATA_NAME, others)
        self.checkpoint_io.save_files(self.broadcast(place_of(path)), files)


class _TrainersShardedSaves(ShardedSaves):
    def _save_sharded(self, checkpoint: dict[str, Any], model: str, path: AnyPath) -> None:
        """Save ``checkpoint``, with the model under the name ``model``."""
        sharded = {model: checkpoint.pop("state_dict")}
        sharded |= {f"optimizer_{number}": each for number, each in enumerate(checkpoint.pop("optimizer_states", []))}
        self.save_parts(sharded, checkpoint, path)


# The strategies ignore type errors, because the replaced members have other types.
class AsyncckptFSDPStrategy(_TrainersShardedSaves, FSDPStrategy):  # type: ignore[misc]
    """``FSDPStrategy`` that saves its checkpoints in the background, sharded or in one file."""

    def save_checkpoint(self, checkpoint: dict[str, Any], filepath: AnyPath, storage_options: Any = None) -> None:
        """Save a checkpoint, and return when the tensors are copied. Raises as ``AsyncckptIO.save_checkpoint``."""
        if self._state_dict_type != "sharded" or storage_options is not None or is_needed_at_once(filepath):
            super().save_checkpoint(checkpoint, filepath, storage_options)
        else:
            self._save_sharded(checkpoint, "model", filepath)


class AsyncckptModelParallelStrategy(_TrainersShardedSaves, ModelParallelStrategy):  # type: ignore[misc]
    """``ModelParallelStrategy`` that saves its checkpoints in the background, sharded or in one file."""

    def lightning_module_state_dict(self) -> dict[str, Any]:
        """Return the model's state as Lightning does, but without copies to the CPU for a sharded checkpoint."""
        if not self._save_distributed_checkpoint:
            return super().lightning_module_state_dict()
        return get_model_state_dict(cast(Module, self.model), options=_ON_DEVICE)

    def optimizer_state(self, optimizer: Any) -> dict[str, Any]:
        """Return the optimizer's state as Lightning does, but without copies to the CPU for a sharded checkpoint."""
        if not self._save_distributed_checkpoint:
            return super().optimizer_state(optimizer)
        optimizer = getattr(optimizer, "_optimizer", optimizer)
        return get_optimizer_state_dict(cast(Module, self.model), optimizer, options=_ON_DEVICE)

    def save_checkpoint(self, checkpoint: dict[str, Any], filepath: AnyPath, storage_options: Any = None) -> None:
        """Save a checkpoint, and return when the tensors are copied. Raises as ``AsyncckptIO.save_checkpoint``."""
        if not self._save_distributed_checkpoint or storage_options is not None or is_needed_at_once(filepath):
            super().save_checkpoint(checkpoint, filepath, storage_options)
        else:
            self._save_sharded(checkpoint, "state_dict", filepath)


class AsyncckptFabricFSDPStrategy(ShardedSaves, FabricFSDPStrategy):  # type: ignore[misc]
    """Fabric's ``FSDPStrategy`` that saves sharded checkpoints in the background."""

    def save_checkpoint(
        self, path: AnyPath, state: dict[str, Any], storage_options: Any = None, filter: Any = None
    ) -> None:
        """Save a checkpoint, and return when the tensors are copied. Raises as ``AsyncckptIO.save_checkpoint``."""
        models = [each for each in state.values() if _has_fsdp_modules(each)]
        if self._state_dict_type != "sharded" or storage_options is not None or filter is not None or len(models) != 1:
            super().save_checkpoint(path, state, storage_options, filter)  # raises if Lightning refuses the state
            return
        sharded_states: Any = _get_sharded_state_dict_context(models[0])
        with sharded_states:
            optimizers = _of_kind(Optimizer, state)
            sharded = {name: each.state_dict() for name, each in _of_kind(Module, state).items()}
            sharded |= {n: FullyShardedDataParallel.optim_state_dict(models[0], each) for n, each in optimizers.items()}
        self.save_parts(sharded, _others(state, sharded), path)


class AsyncckptFabricModelParallelStrategy(ShardedSaves, FabricModelParallelStrategy):  # type: ignore[misc]
    """Fabric's ``ModelParallelStrategy`` that saves sharded checkpoints in the background."""

    def save_checkpoint(
        self, path: AnyPath, state: dict[str, Any], storage_options: Any = None, filter: Any = None
    ) -> None:
        """Save a checkpoint, and return when the tensors are copied. Raises as ``AsyncckptIO.save_checkpoint``."""
        models = [each for each in state.values() if _has_dtensor_modules(each)]
        if not self._save_distributed_checkpoint or storage_options is not None or filter or len(models) != 1:
            super().save_checkpoint(path, state, storage_options, filter)  # raises if Lightning refuses the state
            return
        sharded: dict[str, Any] = {
            name: get_model_state_dict(each, options=_ON_DEVICE) for name, each in _of_kind(Module, state).items()
        }
        for name, each in _of_kind(Optimizer, state).items():
            sharded[name] = get_optimizer_state_dict(models[0], each, options=_ON_DEVICE)
        self.save_parts(sharded, _others(state, sharded), path)


def _of_kind(kind: type[Any], state: dict[str, Any]) -> dict[str, Any]:
    return {name: each for name, each in state.items() if isinstance(each, kind)}


def _others(state: dict[str, Any], sharded: dict[str, Any]) -> dict[str, Any]:
    """Return all values but models and optimizers. A stateful value is replaced by its state, as in Lightning."""
    others = {name: each for name, each in state.items() if name not in sharded}
    return {name: each.state_dict() if isinstance(each, _Stateful) else each for name, each in others.items()}
