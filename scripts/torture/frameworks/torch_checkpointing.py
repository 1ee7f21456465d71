"""A training on two ranks with a manager of torch_checkpointing. It resumes from the folder with the highest number."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from support.torch_checkpointing_training import Training, manager

from torture.frameworks.kind import EVERY, STEPS, Kind, Options
from torture.frameworks.log import Log

_WIDTH = 100_000


def _train(folder: Path, log: Log, options: Options | None) -> None:
    dist.init_process_group("gloo")
    if options is not None:
        os.environ["ASYNC_CKPT_JOB_ID"] = str(folder)  # a load comes from memory, if a worker still has the checkpoint
        os.environ.update({f"ASYNC_CKPT_{name.upper()}": str(value) for name, value in options.items()})
    training, saver = Training(_WIDTH), manager(ours=options is not None)
    found = [_candidates(folder)]
    dist.broadcast_object_list(found)  # a checkpoint may appear between the looks of two ranks
    begun = training.load(saver, found[0][0]) if found[0] else 0
    saver.prewarm_staging(training.state(begun))  # starts a worker, which removes the socket of a killed worker
    for step in range(begun + 1, STEPS + 1):
        log.add_loss(step, training.train(step))
        if step % EVERY == 0:
            saver.save(str(folder / f"step_{step}"), training.state(step))
            with saver.lock():
                pass
    log.add_end(training.state(STEPS))
    saver.close()


def _checkpoints(folder: Path) -> dict[str, int | None]:
    named = [(re.fullmatch(r"step_(\d+)", each.name), each) for each in folder.glob("step_*")]
    return {str(path): int(name[1]) for name, path in named if name}


def _candidates(folder: Path) -> list[str]:
    found = _checkpoints(folder)
    return [max(found, key=lambda path: found[path] or 0)] if found else []


def _read(path: str) -> tuple[int, Any]:
    loaded = {file.name: torch.load(file, weights_only=False) for file in Path(path).glob("*.pt")}
    return loaded["step_0.pt"], loaded


KIND = Kind(
    world_size=2,
    options=({}, {"slots": 1}),
    train=_train,
    checkpoints=_checkpoints,
    candidates=_candidates,
    read=_read,
)
