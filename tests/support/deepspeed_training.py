"""A small training with DeepSpeed, for a process that has DeepSpeed on its path."""

from __future__ import annotations

import importlib
import os
from pathlib import Path
from typing import Any

import deepspeed
import deepspeed.runtime.zero.muon.muon_optimizer  # otherwise each rank imports it with torch's compiler
import torch
import torch.distributed as dist

from asyncckpt.integrations.deepspeed import attach

# DeepSpeed would compile this operator for two minutes. (``deepspeed.comm.torch`` as an attribute is torch itself.)
importlib.import_module("deepspeed.comm.torch").build_shm_op = lambda: None  # type: ignore[attr-defined]


class Model(torch.nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.layers = torch.nn.Sequential(torch.nn.Linear(16, width), torch.nn.Tanh(), torch.nn.Linear(width, 4))

    def forward(self, batch: torch.Tensor) -> torch.Tensor:
        outputs: torch.Tensor = self.layers(batch)
        return outputs.float().square().mean()


class Training:
    """An engine of DeepSpeed, with or without asyncckpt attached."""

    def __init__(self, stage: int, *, ours: bool, width: int = 32, **options: Any) -> None:
        os.environ["LOCAL_RANK"] = str(dist.get_rank())
        os.environ["WORLD_SIZE"] = str(dist.get_world_size())
        torch.manual_seed(0)
        model = Model(width)
        optimizer = {"type": "AdamW", "params": {"lr": 1e-2, "torch_adam": True}}
        config = {
            "train_micro_batch_size_per_gpu": 2,
            "zero_optimization": {"stage": stage},
            "bf16": {"enabled": True},
            "optimizer": optimizer,
            **options,
        }
        deepspeed.init_distributed(dist_backend="gloo")
        self.engine, *_ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=config)
        if ours:
            attach(self.engine)
            attach(self.engine)

    def run(self, last: int, save_at: tuple[int, ...] = (), folder: Path | None = None) -> dict[int, float]:
        """Train up to step ``last``. Return the losses by step."""
        losses = {}
        while self.engine.global_steps < last:
            torch.manual_seed(100 * self.engine.global_steps + dist.get_rank())
            loss = self.engine(torch.randn(2, 16, dtype=torch.bfloat16))
            self.engine.backward(loss)
            self.engine.step()
            losses[self.engine.global_steps] = loss.item()
            if self.engine.global_steps in save_at:
                self.engine.save_checkpoint(folder, client_state={"note": [self.engine.global_steps]})
        return losses
