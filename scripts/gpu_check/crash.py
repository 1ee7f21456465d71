"""The part ``crash``: a trainer is killed in the midst of a step; a new process goes on from memory, to the bit."""

from __future__ import annotations

import json
import multiprocessing
import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from bench import files

import asyncckpt
from gpu_check.device import Device
from gpu_check.figures import Figure
from gpu_check.model import Training
from gpu_check.task import Task

_WIDTH, _BATCH = 1024, 8
_STEPS, _SAVED = 8, 4
"""Steps of the training, and the one whose save is staged when the trainer is killed in the step after it."""
_LINGER_S = 60.0


def measure(task: Task) -> Iterator[Figure]:
    """Train whole, train again and be killed, go on; compare the losses."""
    device = task.device
    _be_deterministic()
    with files.working_folder(None) as folder, files.runtime_folder(f"{folder}/runtime"):
        trainer = multiprocessing.get_context("spawn").Process(
            target=_train_and_die, args=(folder, str(device.device) if device.is_real else "simulated", task.scale)
        )
        trainer.start()
        trainer.join(task.budget.left)
        if trainer.exitcode != -signal.SIGKILL:
            trainer.kill()
            trainer.join()
            raise RuntimeError(f"the trainer that was to be killed in its step ended with {trainer.exitcode}")
        with task.budget.limit():
            yield from _resume(device, task.scale, folder)


def _be_deterministic() -> None:
    """Have each run of the training compute the same bits; before the device is used."""
    os.environ["CUBLAS_WORKSPACE_CONFIG"] = ":4096:8"
    torch.use_deterministic_algorithms(True)


def _train_and_die(folder: str, name: str, scale: float) -> None:
    """Write down the losses of a whole training; begin it anew, save a step, and be killed in the next one."""
    _be_deterministic()
    device = Device(name)
    whole = Training(device, scale, _WIDTH, _BATCH)
    losses = [_step(whole, number) for number in range(1, _STEPS + 1)]
    Path(folder, "losses.json").write_text(json.dumps(losses))
    del whole
    training = Training(device, scale, _WIDTH, _BATCH)
    checkpointer = asyncckpt.Checkpointer(_root(folder), asyncckpt.Config(overlap=True, linger=_LINGER_S))
    checkpointer.guard(training.optimizer)
    for number in range(1, _SAVED + 1):
        _step(training, number)
    save = checkpointer.save(_SAVED, _state(training))
    training.backward(_SAVED + 1)
    training.update()  # waits for the copies, on the device
    save.wait_staged(_LINGER_S)
    training.backward(_SAVED + 2)
    os.kill(os.getpid(), signal.SIGKILL)


def _step(training: Training, number: int) -> float:
    loss = training.backward(number)
    training.update()
    return float(loss)


def _root(folder: str) -> str:
    return f"{folder}/checkpoints"


def _state(training: Training) -> dict[str, Any]:
    return {"model": training.model, "optimizer": training.optimizer}


def _resume(device: Device, scale: float, folder: str) -> Iterator[Figure]:
    training = Training(device, scale, _WIDTH, _BATCH)
    from_host = device.link_seconds(training.nbytes)[1]
    # A new optimizer has no state to load into: a step gives it one, of other values.
    _step(training, 1)
    device.synchronize()
    begun = time.perf_counter()
    with asyncckpt.Checkpointer(_root(folder)) as checkpointer:
        opened = time.perf_counter() - begun
        step = checkpointer.load(_state(training))
        device.synchronize()
        took = time.perf_counter() - begun - opened
        loaded = checkpointer.loaded
        losses = [_step(training, number) for number in range(step + 1, _STEPS + 1)]
        expected = json.loads(Path(folder, "losses.json").read_text())
    yield Figure("state", training.nbytes / 1e9, "GB")
    yield Figure("loaded from", "nowhere" if loaded is None else loaded.source)
    yield Figure("step that was loaded", step, at_least=_SAVED, at_most=_SAVED)
    other = sum(mine != theirs for mine, theirs in zip(losses, expected[step:], strict=True))
    yield Figure("losses after it that differ from an uninterrupted training's", other, at_most=0)
    yield Figure("start of the checkpointer", opened * 1e3, "ms")
    yield Figure("load from memory", took * 1e3, "ms")
    yield Figure("load from memory, by bytes / link", took / from_host, at_most=1.3)
