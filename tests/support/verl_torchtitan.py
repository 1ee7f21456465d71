"""verl's torchtitan engine with torchtitan's own ``Trainer``, checkpointer and a tiny model on CPUs.

The engine's ``initialize``, ``save_checkpoint`` and ``load_checkpoint`` are verl's. Its ``__init__``, which asks for
weights for Hugging Face, is replaced. Import ``verl_training`` before this module.
"""

from __future__ import annotations

import copy
import importlib
import os
import sys
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from support import torchtitan_trainer, verl_stand_ins, verl_training

# verl expects the module at its older place. The stand-ins of torchtitan_trainer have to be imported before.
_schedulers = importlib.import_module("torchtitan.components.optimizer.lr_scheduler")
sys.modules["torchtitan.components.lr_scheduler"] = _schedulers
_impl: Any = importlib.import_module("verl.workers.engine.torchtitan.transformer_impl")


interval = 500
"""torchtitan's default, which verl leaves."""


class Engine(_impl.TorchTitanEngine):  # type: ignore[misc]  # verl has no types
    """verl's engine with its own way to build and train the model."""

    until_failed, wait = verl_training.Engine.until_failed, verl_training.Engine.wait

    def __init__(self, contents: list[str], lora: bool, seed: int) -> None:
        os.environ |= {"LOCAL_RANK": str(dist.get_rank())}
        os.environ |= {"RANK": str(dist.get_rank()), "WORLD_SIZE": str(dist.get_world_size())}
        config = torchtitan_trainer.debug()
        config.dataloader = _impl.NoOpDataLoader.Config()
        config.debug.seed = seed
        config.checkpoint.interval = interval
        self.engine_config = verl_stand_ins.tree({"forward_only": False})
        self._is_offload_param = self._is_offload_optimizer = False
        self.trainer = config.build()
        torch.manual_seed(seed + dist.get_rank())
        np.random.seed(seed + dist.get_rank())

    def to(self, device: Any, **_: Any) -> None:
        """Do nothing: the model stays on the CPU."""

    def train(self, steps: int = 1) -> float:
        """Train. The batches are random, and the same on all ranks."""
        for _ in range(steps):
            words = torch.randint(torchtitan_trainer.WORDS, (2, 17))
            dist.broadcast(words, 0)
            self.optimizer.zero_grad()
            (model,) = self.module
            loss = torch.nn.functional.cross_entropy(model(words[:, :-1]).flatten(0, 1), words[:, 1:].flatten())
            loss.backward()  # type: ignore[no-untyped-call]
            self.optimizer.step()
            self.lr_scheduler.step()
        return float(loss.detach())

    def state(self) -> dict[str, Any]:
        """Return the whole state with full tensors, for any number of ranks."""
        whole = self.checkpointer._flattened_model_states_sd()
        states = {name: value.state_dict() if hasattr(value, "state_dict") else value for name, value in whole.items()}
        return copy.deepcopy({name: _full(value) for name, value in states.items() if name != "dataloader"})

    def random(self) -> tuple[float, float]:
        """Draw and return the next random numbers of this rank."""
        return float(torch.rand(())), float(np.random.rand())


def _full(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _full(each) for name, each in value.items()}
    return value.full_tensor() if isinstance(value, DTensor) else value
