"""A tiny model for Lightning that records its losses."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from torch.utils.data import DataLoader, TensorDataset

STEPS = 12
"""The steps of an epoch."""


class Model(LightningModule):
    """Two layers. ``losses`` has the losses of this process by step."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.layers = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.ReLU(), torch.nn.Linear(16, 1))
        self.losses: dict[int, float] = {}

    def training_step(self, *_: object) -> torch.Tensor:
        # If Lightning resumes in the middle of an epoch, it restarts the epoch. So the data depend on the step only.
        data = torch.randn(2, 8, generator=torch.Generator().manual_seed(self.global_step))
        loss: torch.Tensor = (self.layers(data).sum(1) - data.sum(1)).pow(2).mean()
        self.losses[self.global_step + 1] = loss.item()
        self.log("loss", loss)
        self.log("improving", float(-self.global_step))
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=0.01)


def batches() -> DataLoader[Any]:
    """Return a loader of one batch for each step. Their values are not used."""
    return DataLoader(TensorDataset(torch.zeros(STEPS)))


def every(steps: int, folder: Path, **options: Any) -> ModelCheckpoint:
    """Return a callback that saves to ``folder`` every ``steps`` steps."""
    chosen: dict[str, Any] = {"save_top_k": 1, "filename": "{step}"} | options
    return ModelCheckpoint(dirpath=folder, every_n_train_steps=steps, **chosen)


def trainer(*callbacks: Callback, plugins: Sequence[Any] = (), steps: int = STEPS, **options: Any) -> Trainer:
    """Return a trainer on the CPU, without logs and progress bars."""
    quiet: dict[str, Any] = dict.fromkeys(("logger", "enable_progress_bar", "enable_model_summary", "barebones"), False)
    kind: dict[str, Any] = {"accelerator": "cpu", "devices": 1, "max_steps": steps, "max_epochs": -1} | quiet | options
    if not callbacks:
        kind["enable_checkpointing"] = False
    return Trainer(plugins=list(plugins), callbacks=list(callbacks), **kind)
