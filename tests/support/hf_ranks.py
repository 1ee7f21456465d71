"""A rank of a job that trains with transformers' Trainer on CPUs: DDP, or FSDP2."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from support.peers import peer
from support.workers import wait_for

STEPS = 5


class Died(Exception):
    """The training ended, as the test wants."""


def dies_at(last: int) -> Callable[[int], None]:
    """Return an ``at_step`` for ``hf_training.trainer`` that ends the training at step ``last``."""

    def at_step(step: int) -> None:
        if step == last:
            raise Died

    return at_step


def set_up() -> None:
    """Let accelerate find the ranks, and allow FSDP on CPUs."""
    from accelerate import state

    rank, world_size = str(dist.get_rank()), str(dist.get_world_size())
    os.environ.update(RANK=rank, LOCAL_RANK=rank, WORLD_SIZE=world_size, LOCAL_WORLD_SIZE=world_size)
    os.environ.update(MASTER_ADDR="127.0.0.1", OMP_NUM_THREADS="1")
    torch.set_num_threads(1)
    stock = state.AcceleratorState.__init__

    def init(self: Any, *args: Any, **options: Any) -> None:
        if options.get("fsdp_plugin") is not None:  # accelerate silently ignores FSDP on several CPUs
            state.PartialState._shared_state["distributed_type"] = state.DistributedType.MULTI_XPU
        stock(self, *args, **options)

    state.AcceleratorState.__init__ = init


def train(folder: Path, kind: str, *, resume: bool = False, **more: Any) -> Any:
    """Train until the end or until ``dies_at``. Return the trainer."""
    from accelerate.state import AcceleratorState

    from support import hf_training

    options: dict[str, Any] = {"ddp_backend": "gloo", "ddp_find_unused_parameters": False, "max_steps": STEPS}
    if kind != "ddp":
        how = {"version": 2, "state_dict_type": kind, "transformer_layer_cls_to_wrap": ["LlamaDecoderLayer"]}
        options |= {"fsdp": True, "fsdp_config": how}
    AcceleratorState._reset_state(True)
    trainer = hf_training.trainer(folder, **options, **more)
    with contextlib.suppress(Died):
        trainer.train(resume_from_checkpoint=resume)
    return trainer


def _weights(trainer: Any) -> list[torch.Tensor]:
    return [getattr(each, "_local_tensor", each).detach() for each in trainer.model.parameters()]


def rank(folder: str, kinds: list[str]) -> dict[str, Any]:
    """On a rank: train without interruption, and with death and resume, for each kind. Return the results by kind.

    The interrupted run dies after its second save. Stock transformers resumes it.
    """
    set_up()
    ended: dict[str, Any] = {}
    whole: dict[str, Any] = {}
    for kind in kinds:
        run = Path(folder) / kind
        # The kind of state dict makes no difference to the losses of FSDP.
        name = "ddp" if kind == "ddp" else "fsdp"
        whole[name] = whole.get(name) or train(run, kind, enable=False, save_strategy="no")
        died = train(run, kind, at_step=dies_at(STEPS))
        wait_for((run / f"checkpoint-{STEPS - 1}").exists)
        dist.barrier()
        resumed = train(run, kind, enable=False, resume=True)
        pairs = zip(_weights(whole[name]), _weights(resumed), strict=True)
        ended[kind] = {
            "type": resumed.accelerator.distributed_type.name,
            "losses": [each.recorder.losses for each in (whole[name], died, resumed)],
            "same": all(one.equal(other) for one, other in pairs),
            "saved": died.recorder.saved,
        }
    return ended


def save_by_accelerate(folder: str, what: str) -> list[str]:
    """Save a state of accelerate that has a file of each rank. Return the files. ``what``: "scaler" or "loader"."""
    from accelerate import Accelerator
    from accelerate.state import AcceleratorState
    from accelerate.utils import DataLoaderConfiguration

    from asyncckpt.integrations import huggingface

    set_up()
    os.environ["MASTER_PORT"] = "1"  # unused: the ranks have joined already
    if what == "loader":
        sys.path.append(peer("torchdata-0.11.0"))
    AcceleratorState._reset_state(True)
    loader_config = DataLoaderConfiguration(use_stateful_dataloader=what == "loader")
    accelerator = Accelerator(cpu=True, dataloader_config=loader_config)
    model = torch.nn.Linear(4, 3)
    rows: Any = list(torch.ones(8, 4))
    data: Any = torch.utils.data.DataLoader(rows, batch_size=1)
    _, _, data = accelerator.prepare(model, torch.optim.AdamW(model.parameters()), data)
    if what == "scaler":
        accelerator.scaler = torch.amp.GradScaler("cpu")  # as for fp16 on a device
    else:
        next(iter(data))
    huggingface.enable_accelerator(accelerator)
    accelerator.save_state(folder)
    accelerator.wait_for_everyone()
    accelerator.load_state(folder)  # waits for the save
    accelerator.wait_for_everyone()
    return sorted(os.listdir(folder))
