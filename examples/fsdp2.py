#!/usr/bin/env python3
"""FSDP2 with asyncckpt: trains a small model, and goes on where the last run ended, with any number of ranks.

    torchrun --nproc-per-node 4 examples/fsdp2.py checkpoints --steps 20
    torchrun --nproc-per-node 2 examples/fsdp2.py checkpoints --steps 40     # resumes at step 20, resharded

On a machine without GPUs it trains on the CPU. ``checkpoints`` must be on a file system that all nodes share.
"""

from __future__ import annotations

import argparse
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict, get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import asyncckpt


class Training:
    """All that a checkpoint has to hold, as DCP's ``Stateful``."""

    def __init__(self, model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> None:
        self.model, self.optimizer, self.step = model, optimizer, 0

    def state_dict(self) -> dict[str, Any]:
        model, optimizer = get_state_dict(self.model, self.optimizer)
        return {"model": model, "optimizer": optimizer, "step": self.step}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        set_state_dict(self.model, self.optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"])
        self.step = state["step"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checkpoints")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--every", type=int, default=5, help="steps between checkpoints")
    asyncckpt.add_arguments(parser)
    options = parser.parse_args()

    device = "cuda" if torch.cuda.is_available() else "cpu"
    dist.init_process_group("nccl" if device == "cuda" else "gloo")
    if device == "cuda":
        torch.cuda.set_device(dist.get_rank() % torch.cuda.device_count())
    torch.manual_seed(0)  # the same initial weights on all ranks
    mesh = init_device_mesh(device, (dist.get_world_size(),))
    layers = [torch.nn.Sequential(torch.nn.Linear(128, 128), torch.nn.GELU()) for _ in range(4)]
    model = torch.nn.Sequential(*layers, torch.nn.Linear(128, 1)).to(device)
    for layer in layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    training = Training(model, optimizer)

    with asyncckpt.Checkpointer(options.checkpoints, asyncckpt.Config.from_args(options)) as checkpointer:
        if checkpointer.latest() is not None:
            get_optimizer_state_dict(model, optimizer)  # gives a new optimizer a state to load into
            checkpointer.load({"training": training})
        checkpointer.watch_signals()
        resumed, loss = training.step, torch.zeros(())
        while training.step < options.steps and not checkpointer.terminating():
            inputs = torch.randn(32, 128, generator=torch.Generator().manual_seed(training.step)).to(device)
            loss = (model(inputs) - inputs.sum(1, keepdim=True)).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            training.step += 1
            if training.step % options.every == 0:
                checkpointer.save(training.step, {"training": training})
        if checkpointer.terminating() and training.step % options.every:
            checkpointer.save(training.step, {"training": training})  # torchrun leaves half a minute for it
    if dist.get_rank() == 0:
        print(f"steps {resumed} to {training.step} with {dist.get_world_size()} ranks, loss {loss.item():.6f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
