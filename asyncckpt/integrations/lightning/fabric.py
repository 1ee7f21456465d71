"""The strategies of ``strategies.py`` for Fabric, which are given models and optimizers, not their states."""

from __future__ import annotations

from typing import Any

from lightning.fabric.strategies.fsdp import FSDPStrategy, _get_sharded_state_dict_context, _has_fsdp_modules
from lightning.fabric.strategies.model_parallel import ModelParallelStrategy, _has_dtensor_modules
from lightning.fabric.utilities.types import _Stateful
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict, get_optimizer_state_dict
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.nn import Module
from torch.optim import Optimizer

from asyncckpt.integrations.lightning.files import AnyPath
from asyncckpt.integrations.lightning.strategies import ShardedSaves


class AsyncckptFabricFSDPStrategy(ShardedSaves, FSDPStrategy):  # type: ignore[misc]  # what it replaces has other types
    """Fabric's ``FSDPStrategy``, whose sharded checkpoints are saved in the background."""

    def save_checkpoint(
        self, path: AnyPath, state: dict[str, Any], storage_options: Any = None, filter: Any = None
    ) -> None:
        """Return when the tensors are copied. Raises as ``AsyncckptIO.save_checkpoint``."""
        models = [each for each in state.values() if _has_fsdp_modules(each)]
        if self._state_dict_type != "sharded" or storage_options is not None or filter is not None or len(models) != 1:
            super().save_checkpoint(path, state, storage_options, filter)  # what it refuses, it says
            return
        sharded_states: Any = _get_sharded_state_dict_context(models[0])
        with sharded_states:
            optimizers = _of_kind(Optimizer, state)
            sharded = {name: each.state_dict() for name, each in _of_kind(Module, state).items()}
            sharded |= {n: FullyShardedDataParallel.optim_state_dict(models[0], each) for n, each in optimizers.items()}
        self.save_parts(sharded, _others(state, sharded), path)


class AsyncckptFabricModelParallelStrategy(ShardedSaves, ModelParallelStrategy):  # type: ignore[misc]  # what it replaces has other types
    """Fabric's ``ModelParallelStrategy``, whose sharded checkpoints are saved in the background."""

    def save_checkpoint(
        self, path: AnyPath, state: dict[str, Any], storage_options: Any = None, filter: Any = None
    ) -> None:
        """Return when the tensors are copied. Raises as ``AsyncckptIO.save_checkpoint``."""
        models = [each for each in state.values() if _has_dtensor_modules(each)]
        if not self._save_distributed_checkpoint or storage_options is not None or filter or len(models) != 1:
            super().save_checkpoint(path, state, storage_options, filter)  # what it refuses, it says
            return
        where_they_are = StateDictOptions(cpu_offload=False)
        sharded: dict[str, Any] = {
            name: get_model_state_dict(each, options=where_they_are) for name, each in _of_kind(Module, state).items()
        }
        for name, each in _of_kind(Optimizer, state).items():
            sharded[name] = get_optimizer_state_dict(models[0], each, options=where_they_are)
        self.save_parts(sharded, _others(state, sharded), path)


def _of_kind(kind: type[Any], state: dict[str, Any]) -> dict[str, Any]:
    return {name: each for name, each in state.items() if isinstance(each, kind)}


def _others(state: dict[str, Any], sharded: dict[str, Any]) -> dict[str, Any]:
    """What is neither a model nor an optimizer, or its state if it has one, as Lightning asks for it."""
    others = {name: each for name, each in state.items() if name not in sharded}
    return {name: each.state_dict() if isinstance(each, _Stateful) else each for name, each in others.items()}
