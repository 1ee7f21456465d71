"""Lightning's Trainer with two layers, on one process, and sharded over two. It resumes by ``ckpt_path="last"``."""

from __future__ import annotations

import functools
import os
import re
import zipfile
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.strategies import ModelParallelStrategy
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.utils.data import DataLoader, TensorDataset

from asyncckpt.integrations.lightning import AsyncckptIO, AsyncckptModelParallelStrategy
from torture.frameworks.checks import read_dcp
from torture.frameworks.kind import EVERY, STEPS, Kind, Options
from torture.frameworks.log import Log


class _Model(LightningModule):
    def __init__(self, log: Log) -> None:
        super().__init__()
        torch.manual_seed(1)
        layers = [torch.nn.Linear(8, 768), torch.nn.Linear(768, 4096), torch.nn.Linear(4096, 1)]
        self.layers = torch.nn.Sequential(layers[0], torch.nn.ReLU(), layers[1], torch.nn.ReLU(), layers[2])
        self._log_file = log

    def training_step(self, *_: object) -> torch.Tensor:
        # Lightning restarts an epoch when it resumes in the middle of one, so the data depend on the step only.
        seed = 10 * self.global_step + self.global_rank
        data = torch.randn(2, 8, generator=torch.Generator().manual_seed(seed))
        loss: torch.Tensor = (self.layers(data).sum(1) - data.sum(1)).pow(2).mean()
        self._log_file.add_loss(self.global_step + 1, loss.item())
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=0.01)


class _ShardedModel(_Model):
    def configure_model(self) -> None:
        if not isinstance(self.layers, FSDPModule):
            fully_shard(self.layers, mesh=self.device_mesh["data_parallel"])  # type: ignore[index]


def _train(folder: Path, log: Log, options: Options | None, *, sharded: bool) -> None:
    how: dict[str, Any] = {"devices": 1, "plugins": [] if options is None else [AsyncckptIO()]}
    if sharded:
        kind = ModelParallelStrategy if options is None else AsyncckptModelParallelStrategy
        how = {"devices": 2, "strategy": kind(data_parallel_size=2, tensor_parallel_size=1)}
    saving: dict[str, Any] = {"save_top_k": -1} if options is None else {"save_top_k": 1, **options}
    # Lightning puts the step into the file name: step=4.ckpt.
    saves = ModelCheckpoint(dirpath=folder, filename="{step}", every_n_train_steps=EVERY, **saving)
    quiet: dict[str, Any] = dict.fromkeys(("logger", "enable_progress_bar", "enable_model_summary", "barebones"), False)
    trainer = Trainer(accelerator="cpu", max_steps=STEPS, max_epochs=-1, callbacks=[saves], **quiet, **how)
    model = (_ShardedModel if sharded else _Model)(log)
    nothing: DataLoader[Any] = DataLoader(TensorDataset(torch.zeros(STEPS)))
    trainer.fit(model, nothing, ckpt_path=None if options is None else "last")
    log.add_end([model.state_dict(), trainer.optimizers[0].state_dict()])


def _checkpoints(folder: Path) -> dict[str, int | None]:
    found = {}
    for path in folder.glob("*.ckpt"):
        named = re.fullmatch(r"step=(\d+)(-v\d+)?\.ckpt", path.name)
        if not path.name.startswith(".") and (path.exists() or not path.is_symlink()):
            found[str(path)] = int(named[1]) if named else None
    return found


def _candidates(folder: Path) -> list[str]:
    return [str(path) for path in folder.glob("last*.ckpt")]


def _read(path: str) -> tuple[int, Any]:
    loaded = torch.load(path, weights_only=True)
    with zipfile.ZipFile(path) as archive:
        if (bad := archive.testzip()) is not None:
            raise zipfile.BadZipFile(f"{bad} has another checksum than it says")
    return loaded["global_step"], [loaded["state_dict"], loaded["optimizer_states"]]


def _read_sharded(path: str) -> tuple[int, Any]:
    meta = torch.load(os.path.join(path, "meta.pt"), weights_only=True)
    return meta["global_step"], read_dcp(path)


KIND = Kind(
    world_size=1,
    options=({"save_last": "link"}, {"save_last": True}),
    train=functools.partial(_train, sharded=False),
    checkpoints=_checkpoints,
    candidates=_candidates,
    read=_read,
    verifies=False,
)
SHARDED = Kind(
    world_size=2,
    options=KIND.options,
    train=functools.partial(_train, sharded=True),
    checkpoints=_checkpoints,
    candidates=_candidates,
    read=_read_sharded,
)
