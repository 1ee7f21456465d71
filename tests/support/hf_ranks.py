"""A rank of a job that trains with transformers' Trainer on CPUs: DDP, or FSDP2."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch.distributed as dist


class Died(Exception):
    """The training ended, as the test wants."""


def dies_at(last: int) -> Callable[[int], None]:
    """For ``hf_training.trainer``: end the training at that step."""

    def at_step(step: int) -> None:
        if step == last:
            raise Died

    return at_step


def wait_for(condition: Callable[[], bool]) -> None:
    """Wait until it is so."""
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def set_up() -> None:
    """Have accelerate find the ranks, and take FSDP for what CPUs can do, which they can."""
    from accelerate import state

    rank, world_size = str(dist.get_rank()), str(dist.get_world_size())
    os.environ.update(RANK=rank, LOCAL_RANK=rank, WORLD_SIZE=world_size, LOCAL_WORLD_SIZE=world_size)
    os.environ.update(MASTER_ADDR="127.0.0.1", OMP_NUM_THREADS="1")
    stock = state.AcceleratorState.__init__

    def init(self: Any, *args: Any, **options: Any) -> None:
        if options.get("fsdp_plugin") is not None:  # of several CPUs it would be ignored, without a word
            state.PartialState._shared_state["distributed_type"] = state.DistributedType.MULTI_XPU
        stock(self, *args, **options)

    state.AcceleratorState.__init__ = init


def trains(folder: Path, kind: str) -> dict[str, Any]:
    """An uninterrupted run, and one that dies and is resumed by stock transformers: what they end with."""
    from accelerate.state import AcceleratorState

    from support import hf_training

    options: dict[str, Any] = {"ddp_backend": "gloo", "ddp_find_unused_parameters": False}
    if kind != "ddp":
        how = {"version": 2, "state_dict_type": kind, "transformer_layer_cls_to_wrap": ["LlamaDecoderLayer"]}
        options |= {"fsdp": True, "fsdp_config": how}

    def train(name: str, *, resume: bool = False, **more: Any) -> Any:
        AcceleratorState._reset_state(True)
        trainer = hf_training.trainer(folder / name, **options, **more)
        try:
            trainer.train(resume_from_checkpoint=resume)
        except Died:
            pass
        return trainer

    whole = train("whole", enable=False)
    died = train("run", at_step=dies_at(5))
    wait_for((folder / "run/checkpoint-4").exists)
    dist.barrier()
    resumed = train("run", enable=False, resume=True)
    weights = [[getattr(each, "_local_tensor", each) for each in one.model.parameters()] for one in (whole, resumed)]
    return {
        "type": whole.accelerator.distributed_type.name,
        "losses": (whole.recorder.losses, died.recorder.losses, resumed.recorder.losses),
        "same": all(one.equal(other) for one, other in zip(*weights, strict=True)),
        "saved": died.recorder.saved,
    }


def rank(folder: str, kinds: list[str]) -> dict[str, Any]:
    """On a rank: ``trains`` of each kind."""
    set_up()
    return {kind: trains(Path(folder) / kind, kind) for kind in kinds}
