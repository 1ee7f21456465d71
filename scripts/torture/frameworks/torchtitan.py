"""torchtitan's Trainer with a Llama of one layer, on two ranks. It resumes from its latest checkpoint by itself."""

from __future__ import annotations

import dataclasses
import os
import re
from pathlib import Path
from typing import Any

import torch.distributed as dist
from support import torchtitan_trainer as titan
from torchtitan.trainer import Trainer

from torture.frameworks.checks import read_dcp
from torture.frameworks.kind import EVERY, STEPS, Kind, Options
from torture.frameworks.log import Log

_FOLDER = "checkpoint"


def config() -> Any:
    """Return the configuration for ``--config``: the training of the tests, with more words."""
    titan.WORDS = 24_000
    made = titan.debug()
    schedule = dataclasses.replace(made.lr_scheduler, total_steps=STEPS)
    checkpoint = dataclasses.replace(made.checkpoint, interval=EVERY, folder=_FOLDER, keep_latest_k=0)
    return dataclasses.replace(made, lr_scheduler=schedule, checkpoint=checkpoint)


def _train(folder: Path, log: Log, options: Options | None) -> None:
    body, step = Trainer.forward_backward_step, Trainer.train

    def forward_backward_step(self: Any, *args: Any, **others: Any) -> Any:
        loss = body(self, *args, **others)
        log.add_loss(self.step, loss.item())
        return loss

    def train(self: Any) -> None:
        step(self)
        parts = [part.state_dict() for part in self.model_parts]
        log.add_end([*parts, self.optimizers.state_dict(), dist.get_rank()])

    Trainer.forward_backward_step, Trainer.train = forward_backward_step, train
    arguments = [f"--{name}={value}" for name, value in (options or {}).items()]
    arguments += [f"--dump_folder={folder}", f"--training.steps={STEPS}"]
    if options is None:
        titan.main(f"--module={__name__}", "--config=config", *arguments)
    else:
        titan.main("--module=asyncckpt.integrations.torchtitan", f"--config={__name__}.config", *arguments)


def _checkpoints(folder: Path) -> dict[str, int | None]:
    named = [(re.fullmatch(r"step-(\d+)", each.name), each) for each in folder.glob(f"{_FOLDER}/step-*")]
    return {str(path): int(name[1]) for name, path in named if name}


def _candidates(folder: Path) -> list[str]:
    found = _checkpoints(folder)
    return sorted(found, key=lambda path: found[path] or 0)[-1:]


def _read(path: str) -> tuple[int, Any]:
    return int(os.path.basename(path).removeprefix("step-")), read_dcp(path)


KIND = Kind(
    world_size=2,
    options=tuple(
        {"checkpoint.async_mode": mode, "checkpoint.keep_latest_k": keep}
        for mode, keep in (("async", 2), ("async_with_pinned_mem", 2), ("async_with_pinned_mem", 3))
    ),
    train=_train,
    checkpoints=_checkpoints,
    candidates=_candidates,
    root=_FOLDER,
    read=_read,
)
