"""verl's engines on two ranks, and its trainer's driver with its prompts. It resumes from the step in its tracker.

The engine, the checkpoint manager, the trainers that save and load, and the data loader are real. The model, the
training, the driver's connection to its workers (a socket in place of Ray), and the queue of prompts (in place of
TransferQueue) come from the tests.
"""

from __future__ import annotations

import importlib
import json
import logging
import os
import random
import re
import time
from functools import partial
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

from support import verl_prompts as prompts  # noqa: E402
from support import verl_training as verl  # noqa: E402

verl.WORDS = 96_000
_RANKS = 2
_TRACKER = "latest_checkpointed_iteration.txt"

# This logger warns of each tensor of verl's own checkpoints that is read without ranks.
logging.getLogger("torch.distributed.device_mesh").setLevel(logging.ERROR)


def _with_log(engine_class: Any, log: Log) -> Any:
    class Engine(engine_class):  # type: ignore[misc]
        def train_step(self, step: int) -> float:
            loss: float = self.train()
            log.add_loss(step, loss)
            return loss

        def end(self) -> None:
            log.add_end([self.state(), self.random()])

    return Engine(["model", "optimizer", "extra"], lora=False, seed=0)


def _train(engine_name: str, folder: Path, log: Log, options: Options | None) -> None:
    if options is not None:
        verl_stand_ins.import_external("asyncckpt.integrations.verl_engines")
    verl.strategy = engine_name
    rank, address = int(os.environ["RANK"]), f"\0asyncckpt-torture-{os.environ['MASTER_PORT']}"
    if rank == _RANKS:
        with Listener(address) as listener:
            _drive(folder, log, [listener.accept() for _ in range(_RANKS)], **(options or {}))
        return
    os.environ |= {"WORLD_SIZE": str(_RANKS), "LOCAL_WORLD_SIZE": str(_RANKS)}
    random.seed(rank)  # the engine seeds all other generators
    dist.init_process_group("gloo")
    engine_class = verl.Engine
    if engine_name != "fsdp2":
        module: Any = importlib.import_module(f"support.verl_{engine_name}")
        module.distributed_optimizer = True  # for Megatron
        module.interval = EVERY  # for torchtitan, which saves by its own interval without asyncckpt
        engine_class = module.Engine
    engine = _with_log(engine_class, log)
    engine.initialize()
    verl.serve(engine, _connect(address))


def _connect(address: str) -> Connection:
    while True:
        try:
            return Client(address)
        except ConnectionRefusedError:  # the driver does not listen yet
            time.sleep(0.01)


def _drive(
    folder: Path,
    log: Log,
    pipes: list[Any],
    trainer: int = 0,
    replays: bool = False,
    keep: int | None = None,
) -> None:
    workers = verl.Workers(pipes)
    driver = verl.driver(verl.trainers[trainer], folder, workers, keep=keep, steps=STEPS)
    driver.train_dataloader, buffer = prompts.loader(), prompts.Buffer()
    if replays:
        driver.trainer_mode = "separate_async"
        queue = importlib.import_module(type(driver).__base__.__module__).tq
        for name in ("save_checkpoint", "load_checkpoint", "kv_list"):
            setattr(queue, name, getattr(buffer, name))
    driver._load_checkpoint()
    batches = iter(driver.train_dataloader)
    for step in range(driver.global_steps + 1, STEPS + 1):
        batch = buffer.take(batches) if replays else next(batches)
        log.add_loss(step, min(workers.call("train_step", step)))  # the workers have connected in any order
        log.add_prompts(trained=step, prompts=batch)
        if step % EVERY == 0:
            verl.save(driver, step)
    log.add_prompts(left=buffer.waiting)
    workers.call("end")


def _checkpoints(folder: Path) -> dict[str, int | None]:
    # torchtitan itself has no folder of the actor.
    named = [(re.fullmatch(r"global_step_(\d+)", each.parent.name), each) for each in folder.glob("*/*")]
    return {str(path): int(name[1]) for name, path in named if name and re.fullmatch(r"actor|step-\d+", path.name)}


def _candidates(folder: Path) -> list[str]:
    tracker = folder / _TRACKER
    latest = f"global_step_{tracker.read_text()}" if tracker.exists() else ""
    return [path for path in _checkpoints(folder) if Path(path).parent.name == latest]


def _read_folders(path: str) -> tuple[int, Any]:
    """Read checkpoints of Megatron's and torchtitan's engines: all folders of DCP, and other files of torch."""
    folders = sorted(each.parent for each in Path(path).rglob(".metadata"))
    # The ends of Megatron's buckets are memory that nothing has written. Two saves of one state differ there.
    states = [
        {name: value for name, value in read_dcp(str(each)).items() if ".bucket_idx_" not in name} for each in folders
    ]
    common = [torch.load(file, weights_only=False) for each in folders for file in each.glob("common.pt")]
    contents = Path(path, "ckpt_contents.json")
    step = json.loads(contents.read_text())["global_step"] if contents.exists() else int(folders[0].name[5:])
    return step, [states, common]


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


def _kind(engine: str, ways: list[dict[str, Any]], read: Any) -> Kind:
    return Kind(
        world_size=_RANKS + 1,  # with the driver
        options=tuple({**way, "keep": keep} for way in ways for keep in (1, 2)),
        train=partial(_train, engine),
        checkpoints=_checkpoints,
        candidates=_candidates,
        read=read,
        root="global_step_*",
        history=partial(prompts.check, STEPS),
    )


_ASYNCHRONOUS = [{"trainer": len(verl.trainers) - 1, "replays": True}]

KIND = _kind("fsdp2", [{"trainer": number} for number in range(len(verl.trainers))], _read)
REPLAY = _kind("fsdp2", _ASYNCHRONOUS, _read)
VEOMNI = _kind("veomni", _ASYNCHRONOUS, _read)
MEGATRON = _kind("megatron", _ASYNCHRONOUS, _read_folders)
TORCHTITAN = _kind("torchtitan", _ASYNCHRONOUS, _read_folders)
