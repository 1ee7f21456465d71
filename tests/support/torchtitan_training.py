"""A training with torchtitan's optimizers, schedulers, data loader and checkpoint managers, and a small model.

The model is sharded if there are several ranks. ``Training`` calls the manager in the same order as torchtitan's
``Trainer``, and a test can look between the calls. The ``Trainer`` itself needs a CUDA device;
``torchtitan_trainer.py`` runs it with stand-ins.
"""

from __future__ import annotations

import contextlib
import dataclasses
import io
import logging
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch._dynamo  # otherwise each rank imports it at its first step
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard
from torch.utils.data import IterableDataset
from torchtitan.components.checkpointer import CheckpointManager
from torchtitan.components.dataloader import ParallelAwareDataloader
from torchtitan.components.optimizer import LRSchedulersContainer, OptimizersContainer, default_adamw

from asyncckpt.integrations.torchtitan import AsyncckptManager

STEPS = 8
MODEL_KEYS = {"0.weight", "0.bias", "2.weight", "2.bias"}


class Numbers(IterableDataset[torch.Tensor]):
    """Batches with a position that a resumed training has to restore."""

    def __init__(self) -> None:
        self.at = 0

    def __iter__(self) -> Iterator[torch.Tensor]:
        while True:
            self.at += 1
            yield torch.sin(torch.arange(8.0) * self.at)

    def state_dict(self) -> dict[str, Any]:
        return {"at": self.at}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.at = state_dict["at"]


class Training:
    """The checkpointing part of ``Trainer``."""

    def __init__(self, config: Any, folder: str | os.PathLike[str], sd_adapter: Any = None) -> None:
        rank, world = dist.get_rank(), dist.get_world_size()
        torch.manual_seed(0)
        self.model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.Tanh(), torch.nn.Linear(16, 8))
        if world > 1:
            fully_shard(self.model)
        self.optimizers = OptimizersContainer(
            dataclasses.replace(default_adamw(lr=0.1), implementation="for-loop"), model_parts=[self.model]
        )
        self.schedulers = LRSchedulersContainer.Config(warmup_steps=3).build(
            optimizers=self.optimizers, training_steps=STEPS
        )
        self.loader = ParallelAwareDataloader(Numbers(), rank, world, batch_size=2)
        self.step = self.ntokens_seen = 0
        self.load_step: int = config.load_step
        self.checkpointer = config.build(
            dataloader=self.loader,
            model_parts=[self.model],
            optimizers=self.optimizers,
            lr_schedulers=self.schedulers,
            states={"train_state": self},
            sd_adapter=sd_adapter,
            base_folder=str(folder),
        )

    def train(self, steps: int, last: bool = True) -> dict[int, float]:
        """Load, and train up to ``steps``, as ``Trainer.train`` does."""
        self.checkpointer.load(step=self.load_step)
        return self.go_on(steps, last)

    def go_on(self, steps: int, last: bool = True) -> dict[int, float]:
        """Train up to ``steps``. Return the losses by step. ``last``: save the final step as the last one."""
        losses = {}
        batches = iter(self.loader)
        while self.step < steps:
            self.step += 1
            batch = next(batches)
            loss = (self.model(batch) - batch.flip(1)).square().mean()
            loss.backward()
            self.checkpointer.maybe_wait_for_staging()
            self.optimizers.step()
            self.schedulers.step()
            self.optimizers.zero_grad()
            self.ntokens_seen += batch.numel()
            losses[self.step] = loss.item()
            self.checkpointer.save(self.step, last_step=last and self.step == steps)
        return losses

    def run(self, steps: int, last: bool = True) -> dict[int, float]:
        """Train as ``train`` does, then close the manager."""
        losses = self.train(steps, last)
        self.checkpointer.close()
        return losses

    def state_dict(self) -> dict[str, Any]:
        return {"step": self.step, "ntokens_seen": self.ntokens_seen}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.step, self.ntokens_seen = state_dict["step"], state_dict["ntokens_seen"]

    def values(self) -> dict[str, Any]:
        """Return copies of all values by name."""
        parts = {"model": self.model.state_dict(), "optimizer": self.optimizers.state_dict(), "own": self.state_dict()}
        parts |= {"schedulers": self.schedulers.state_dict(), "loader": self.loader.state_dict()}
        return {f"{part}.{name}": _plain(value) for part, state in parts.items() for name, value in state.items()}


def _plain(value: Any) -> Any:
    value = value.to_local() if hasattr(value, "to_local") else value
    return value.detach().clone() if isinstance(value, torch.Tensor) else value


def ours(**options: Any) -> Any:
    """Return a configuration of asyncckpt's manager."""
    return AsyncckptManager.Config(**_options(options))


def stock(**options: Any) -> Any:
    """Return a configuration of torchtitan's own manager."""
    return CheckpointManager.Config(**_options(options))


def _options(options: dict[str, Any]) -> dict[str, Any]:
    return {"enable": True, "interval": 2, "last_save_model_only": False, "keep_latest_k": 0} | options


def steps_in(folder: Path) -> list[int]:
    """Return the steps of the finalized checkpoints."""
    names = [path.name.removeprefix("step-") for path in (folder / "checkpoint").glob("step-*")]
    return sorted(int(name) for name in names if name.isdigit())


@contextlib.contextmanager
def heard(name: str) -> Iterator[io.StringIO]:
    """Capture the log of the loggers below ``name``."""
    said, logger = io.StringIO(), logging.getLogger(name)
    handler, level = logging.StreamHandler(said), logger.level
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    yield said
    logger.removeHandler(handler)
    logger.setLevel(level)
