"""DeepSpeed's engine on two ranks, with ZeRO 1 and ZeRO 3. It resumes from the tag in ``latest``."""

from __future__ import annotations

import functools
import re
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from support.deepspeed_training import Training

from asyncckpt import Config
from asyncckpt.integrations.deepspeed import attach
from torture.frameworks.kind import EVERY, STEPS, Kind, Options
from torture.frameworks.log import Log

_WIDTH = 100_000


def _train(folder: Path, log: Log, options: Options | None, *, stage: int) -> None:
    dist.init_process_group("gloo")
    training = Training(stage, ours=False, width=_WIDTH)
    engine = training.engine
    if options is not None:
        attach(engine, Config(**options))
    engine.load_checkpoint(folder)
    for step in range(engine.global_steps + 1, STEPS + 1):
        log.add_loss(step, training.run(step)[step])
        if step % EVERY == 0:
            engine.save_checkpoint(folder)
    log.add_end(engine.optimizer.state_dict())  # includes the parameters


def _checkpoints(folder: Path) -> dict[str, int | None]:
    named = [(re.fullmatch(r"global_step(\d+)", each.name), each) for each in folder.glob("global_step*")]
    return {str(path): int(name[1]) for name, path in named if name}


def _candidates(folder: Path) -> list[str]:
    latest = folder / "latest"
    return [str(folder / latest.read_text())] if latest.exists() else []


def _read(path: str) -> tuple[int, Any]:
    loaded = {file.name: torch.load(file, weights_only=False) for file in Path(path).glob("*.pt")}
    (step,) = {each["global_steps"] for each in loaded.values() if "global_steps" in each}
    return step, loaded


KIND, SHARDED = (
    Kind(
        world_size=2,
        options=({}, {"slots": 1}),
        train=functools.partial(_train, stage=stage),
        checkpoints=_checkpoints,
        candidates=_candidates,
        read=_read,
    )
    for stage in (1, 3)
)
