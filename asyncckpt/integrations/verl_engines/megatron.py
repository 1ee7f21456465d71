"""Provide the checkpoint manager that verl's Megatron engine makes on each rank.

The checkpoint has the files of verl's own manager: folders of ``dist_checkpointing`` for model, optimizer and random
number generators, weights and tokenizer for Hugging Face, and ``ckpt_contents.json``. verl and megatron-core load them.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

from megatron.core.dist_checkpointing.strategies.torch import (
    MCoreSavePlanner,
    TorchDistSaveShardedStrategy,
    _replace_state_dict_keys_with_sharded_keys,
    mcore_to_pyt_state_dict,
)
from verl.utils.checkpoint.megatron_checkpoint_manager import MegatronCheckpointManager

from asyncckpt.errors import UnsavableStateError
from asyncckpt.integrations.capture import Capture, replaced
from asyncckpt.integrations.verl_engines.manager import AsyncManager


class AsyncckptMegatronManager(AsyncManager, MegatronCheckpointManager):  # type: ignore[misc]  # verl has no types
    """Saves as verl's ``MegatronCheckpointManager`` does, but through our engine. verl loads the checkpoints.

    ``async_save`` makes no difference: every save is asynchronous. verl's own way to do this writes the tracker in a
    function of a queue that verl 0.9 never calls.
    """

    checkpoint_config: Any

    def __init__(self, *args: Any, **options: Any) -> None:
        """Start no worker yet. The arguments are the same as for verl's own manager."""
        super().__init__(*args, **options)
        self.checkpoint_config = dataclasses.replace(self.checkpoint_config, async_save=False)

    def _why_stock(self, local_path: str, hdfs_path: str | None) -> str | None:
        if hdfs_path is not None:
            return f"they are also copied to {hdfs_path}"
        if (getattr(self.checkpoint_config, "mbridge_config", None) or {}).get("distributed_filesystem"):
            return "mbridge's option distributed_filesystem wants one folder for all ranks"
        return super()._why_stock(local_path, hdfs_path)

    def _capture(self, capture: Capture, step: int) -> None:
        with replaced(TorchDistSaveShardedStrategy, "save", _captured(capture)):
            super()._capture(capture, step)


def _captured(capture: Capture) -> Callable[[Any, dict[str, Any], Any], None]:
    """Return a ``save`` of megatron-core's strategy that captures the state as a folder of DCP."""

    def save(strategy: Any, sharded_state_dict: dict[str, Any], checkpoint_dir: Any) -> None:
        if (name := capture.name_of(checkpoint_dir)) is None:
            raise UnsavableStateError(f"verl saves to {checkpoint_dir}, outside of its checkpoint: please report this")
        main_only = strategy.keep_only_main_replica
        sharded, *_ = _replace_state_dict_keys_with_sharded_keys(sharded_state_dict, main_only)
        planner = MCoreSavePlanner(dedup_replicated_tensors=not main_only, flatten_state_dict=False)
        capture.files.add_dcp_folder(name, mcore_to_pyt_state_dict(sharded, False), planner)

    return save
