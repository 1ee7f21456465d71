"""A script: two ranks train with Lightning, and save checkpoints of the first rank and sharded checkpoints.

Each rank writes its findings to the folder in the first argument. Then both ranks are killed during a third save.
"""

import json
import os
import signal
import sys
from pathlib import Path
from threading import Timer
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from lightning.fabric import Fabric
from lightning.fabric.strategies.model_parallel import ModelParallelStrategy as ModelParallelStrategyOfFabric
from lightning.pytorch import Callback
from lightning.pytorch.strategies import ModelParallelStrategy
from torch.distributed.fsdp import FSDPModule, fully_shard

from asyncckpt.engine import shared as engines
from asyncckpt.integrations.lightning import (
    AsyncckptFabricModelParallelStrategy,
    AsyncckptIO,
    AsyncckptModelParallelStrategy,
)
from support.lightning_training import Model, batches, every, trainer
from support.ranks import faulty
from support.workers import wait_reached

found: dict[str, Any] = {}
folder = Path(sys.argv[1])
gate = Path(os.environ["ASYNCCKPT_TEST_GATE"])


def close_gate() -> None:
    """Make workers wait again."""
    gate.unlink()
    gate.with_name("gate.reached").unlink(missing_ok=True)


class Loading(Callback):
    """Loads a checkpoint on each rank while the first rank's worker still writes it."""

    def on_train_batch_end(self, trainer: Any, *_: object) -> None:
        if trainer.global_step == 4:
            if trainer.is_global_zero:
                Timer(0.5, gate.touch).start()
            path = folder / "now.ckpt"
            trainer.save_checkpoint(path)
            found["step of what was being saved"] = trainer.strategy.load_checkpoint(path)["global_step"]
            trainer.strategy.barrier()
            trainer.strategy.remove_checkpoint(path)


class Watching(Callback):
    """Records the checkpoints in the folder during the first save."""

    def on_train_batch_end(self, trainer: Any, *_: object) -> None:
        if trainer.global_step == 4:
            wait_reached(gate)
            found["sharded, under way"] = names(folder / "sharded")
            trainer.strategy.barrier()
            gate.touch()


class ShardedModel(Model):
    def configure_model(self) -> None:
        if not isinstance(self.layers, FSDPModule):
            fully_shard(self.layers, mesh=self.device_mesh["data_parallel"])  # type: ignore[index]


class Death(Callback):
    """Kills the ranks while the worker waits."""

    def on_train_batch_end(self, trainer: Any, *_: object) -> None:
        if trainer.is_global_zero and trainer.global_step == 5:
            engines.shared.get(alone=True).wait()
            close_gate()
        if trainer.global_step == 7:
            if trainer.is_global_zero:
                wait_reached(gate)
                worker = engines.shared.get(alone=True).worker
                assert worker is not None
                (folder / "worker").write_text(str(worker.pid))
            trainer.strategy.barrier()
            os.kill(os.getpid(), signal.SIGKILL)


def names(of: Path) -> list[str]:
    """Return the names of the checkpoints in a folder."""
    return sorted(path.name for path in of.iterdir() if not path.name.startswith(".")) if of.exists() else []


def train(*callbacks: Callback) -> int:
    training = trainer(*callbacks, plugins=[AsyncckptIO()], devices=2, strategy="ddp")
    training.fit(Model(), batches())
    return training.global_rank


def train_sharded(kind: type[ModelParallelStrategy], *callbacks: Callback, **options: Any) -> dict[int, float]:
    model, strategy = ShardedModel(), kind(data_parallel_size=2, tensor_parallel_size=1)
    ckpt_path = options.pop("ckpt_path", None)
    saving = every(3, folder / "sharded", save_last="link")
    trainer(*callbacks, saving, devices=2, strategy=strategy, **options).fit(model, batches(), ckpt_path=ckpt_path)
    return model.losses


def save_with_fabric() -> int:
    """Save a sharded checkpoint, and load its model with stock Fabric. Return the step of the checkpoint."""
    path, state = folder / "fabric", fabric_state(AsyncckptFabricModelParallelStrategy)
    state.fabric.save(path, state.values | {"step": 5})
    assert isinstance(state.fabric.strategy, AsyncckptFabricModelParallelStrategy)
    state.fabric.strategy.teardown()
    other = fabric_state(ModelParallelStrategyOfFabric)
    for parameter in other.model.parameters():
        parameter.data.zero_()
    loaded = other.values | {"step": 0}
    other.fabric.load(path, loaded)
    pairs = zip(state.model.parameters(), other.model.parameters(), strict=True)
    assert all(torch.equal(one.to_local(), two.to_local()) for one, two in pairs)
    return int(loaded["step"])


class FabricState(NamedTuple):
    fabric: Fabric
    model: Any
    values: dict[str, Any]


def fabric_state(kind: Any) -> FabricState:
    strategy = kind(lambda model, mesh: fully_shard(model, mesh=mesh["data_parallel"]), 2, 1)
    fabric = Fabric(accelerator="cpu", devices=2, strategy=strategy)
    fabric.launch()
    torch.manual_seed(0)
    model: Any = fabric.setup_module(torch.nn.Linear(8, 8))
    optimizer: Any = fabric.setup_optimizers(torch.optim.AdamW(model.parameters()))
    model(torch.ones(2, 8)).sum().backward()
    optimizer.step()
    return FabricState(fabric, model, {"model": model, "optimizer": optimizer})


if __name__ == "__main__":
    faulty("begin:hold")
    rank = train(Loading(), every(6, folder / "saves", save_last=True))
    found["files"] = names(folder / "saves")
    found["step of last.ckpt"] = torch.load(folder / "saves" / "last.ckpt", weights_only=True)["global_step"]

    dist.barrier()
    if rank == 0:
        close_gate()
    dist.barrier()
    train_sharded(AsyncckptModelParallelStrategy, Watching(), steps=7)
    found["sharded"] = names(folder / "sharded")
    found["losses after them"] = train_sharded(ModelParallelStrategy, ckpt_path="last")
    found["step of fabric's"] = save_with_fabric()
    (folder / f"rank-{rank}.json").write_text(json.dumps(found))

    train(Death(), every(2, folder / "killed", save_last="link"))
