"""verl's FSDP engine on two ranks, and its trainer's driver. It resumes from the step in its tracker.

The engine, the checkpoint manager, and the trainers that save and load are verl's own. The model, the training and the
driver's connection to its workers (a socket in place of Ray) come from the tests.
"""

from __future__ import annotations

import logging
import os
import random
import re
import time
from multiprocessing.connection import Client, Connection, Listener
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from support import verl_stand_ins

from torture.frameworks.checks import read_dcp
from torture.frameworks.kind import EVERY, STEPS, Kind, Options
from torture.frameworks.log import Log

verl_stand_ins.install()

from support import verl_training as verl  # noqa: E402

verl.WORDS = 96_000
_RANKS = 2
_TRACKER = "latest_checkpointed_iteration.txt"

# This logger warns of each tensor of verl's own checkpoints that is read without ranks.
logging.getLogger("torch.distributed.device_mesh").setLevel(logging.ERROR)


class _Engine(verl.Engine):
    def __init__(self, log: Log) -> None:
        super().__init__(["model", "optimizer", "extra"], lora=False, seed=0)
        self._log_file = log

    def train_step(self, step: int) -> float:
        loss = self.train()
        self._log_file.add_loss(step, loss)
        return loss

    def end(self) -> None:
        self._log_file.add_end([self.state(), self.random()])


def _train(folder: Path, log: Log, options: Options | None) -> None:
    if options is not None:
        verl_stand_ins.import_external("asyncckpt.integrations.verl_fsdp")
    rank, address = int(os.environ["RANK"]), f"\0asyncckpt-torture-{os.environ['MASTER_PORT']}"
    if rank == _RANKS:
        with Listener(address) as listener:
            _drive(folder, log, [listener.accept() for _ in range(_RANKS)], **(options or {}))
        return
    os.environ |= {"WORLD_SIZE": str(_RANKS), "LOCAL_WORLD_SIZE": str(_RANKS)}
    random.seed(rank)  # the engine seeds all other generators
    dist.init_process_group("gloo")
    engine = _Engine(log)
    engine.initialize()
    verl.serve(engine, _connect(address))


def _connect(address: str) -> Connection:
    while True:
        try:
            return Client(address)
        except ConnectionRefusedError:  # the driver does not listen yet
            time.sleep(0.01)


def _drive(folder: Path, log: Log, pipes: list[Any], trainer: int = 0, keep: int | None = None) -> None:
    workers = verl.Workers(pipes)
    driver = verl.driver(verl.trainers[trainer], folder, workers, keep=keep, steps=STEPS)
    driver._load_checkpoint()
    if driver.train_dataloader.position != driver.global_steps:
        raise RuntimeError(f"step {driver.global_steps}, data of {driver.train_dataloader.position}")
    for step in range(driver.global_steps + 1, STEPS + 1):
        log.add_loss(step, workers.call("train_step", step)[0])
        if step % EVERY == 0:
            verl.save(driver, step)
    workers.call("end")


def _checkpoints(folder: Path) -> dict[str, int | None]:
    named = [(re.fullmatch(r"global_step_(\d+)", each.parent.name), each) for each in folder.glob("*/actor")]
    return {str(path): int(name[1]) for name, path in named if name}


def _candidates(folder: Path) -> list[str]:
    tracker = folder / _TRACKER
    return [str(folder / f"global_step_{tracker.read_text()}" / "actor")] if tracker.exists() else []


def _read(path: str) -> tuple[int, Any]:
    """Read the common content of verl's own checkpoints and asyncckpt's: all values, without names that differ."""
    if stored := _load(path, "model"):
        optimizers = _load(path, "optim")
        model = {name: _whole([each[name] for each in stored]) for name in stored[0]}
        # In verl's own checkpoints a parameter is a number.
        states = {
            name: {key: _whole([each["state"][number][key] for each in optimizers]) for key in state}
            for name, (number, state) in zip(model, optimizers[0]["state"].items(), strict=True)
        }
        groups = optimizers[0]["param_groups"]
    else:
        state = read_dcp(path)
        model, states, groups = state["model"], state["optimizer"]["state"], state["optimizer"]["param_groups"]
    extras = _load(path, "extra_state")
    for extra in extras:
        kind, keys, *rest = extra["rng"]["numpy"]
        extra["rng"]["numpy"] = [kind, keys.tolist(), *rest]
    settings = [{name: value for name, value in group.items() if name != "params"} for group in groups]
    return extras[0]["lr_scheduler"]["last_epoch"], [model, states, settings, extras]


def _load(path: str, part: str) -> list[Any]:
    """Load the files of all ranks."""
    files = sorted(Path(path).glob(f"{part}_world_size_{_RANKS}_rank_*.pt"))
    return [torch.load(file, weights_only=False) for file in files]


def _whole(parts: list[Any]) -> Any:
    return torch.cat([part.to_local() for part in parts]) if hasattr(parts[0], "to_local") else parts[0]


KIND = Kind(
    world_size=_RANKS + 1,  # with the driver
    options=tuple({"trainer": number, "keep": keep} for number in range(len(verl.trainers)) for keep in (1, 2)),
    train=_train,
    checkpoints=_checkpoints,
    candidates=_candidates,
    read=_read,
    root="global_step_*",
)
