"""A trainer that saves and dies, so that a test can start another trainer in its place."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeAlias

import psutil
import torch

from asyncckpt import Checkpointer, FileSet
from asyncckpt.config import Config
from asyncckpt.errors import StorageError
from asyncckpt.link import process as worker_process
from asyncckpt.link.takeover import is_running
from asyncckpt.staging import slot_copy as staging
from support.ranks import alone, say
from support.workers import FAULTY

NUMBERS = 3_000_000
"""The number of elements of the state's tensor."""
Files: TypeAlias = Callable[[dict[str, Any]], FileSet]


def _train(root: str, last: int, death: str, fault: str, linger: float, slots: int | None, files: Files | None) -> None:
    if fault:
        real = worker_process.command()
        script = FAULTY
        worker_process.command = lambda: [real[0], script, fault]
    checkpointer = Checkpointer(root, Config(linger=linger, slots=slots))
    state = empty()
    for step in range(1, last + 1):
        state["w"].fill_(step)
        state["step"] = step
        if death == "staging" and step == last:
            staging.SlotStager.copy = _half_a_copy  # type: ignore[method-assign]
        save = checkpointer.save(step, state if files is None else files(state))
        if death != "staged" or step < last:
            with contextlib.suppress(StorageError):
                save.result(60)
    worker = checkpointer._engine.worker
    assert worker is not None
    say(worker.pid)
    if death == "raise":
        with checkpointer:
            raise RuntimeError("the training has failed")
    if death == "close":
        checkpointer.close()
    else:
        os.kill(os.getpid(), signal.SIGKILL)


def archive(state: dict[str, Any]) -> FileSet:
    """Return a set of one file."""
    files = FileSet()
    files.add_torch_file("state.pt", state)
    return files


def mixed(state: dict[str, Any]) -> FileSet:
    """Return a set with files of all kinds. The state is a folder of DCP at the top, but not the first folder."""
    files = FileSet()
    files.add_torch_file("model/state.pt", state)
    files.add_safetensors("model/model.safetensors", {"w": state["w"]})
    files.add_dcp_folder("optimizer", {"moment": state["w"] + 1})
    files.add_dcp_folder("", state)
    files.add_bytes("model/config.json", b"{}")
    return files


def _half_a_copy(self: Any, tensors: Any, *args: Any, **options: Any) -> None:
    tensors[0][len(tensors[0]) // 2 :] = 99.0
    real_copy(self, tensors, *args, **options)
    os.kill(os.getpid(), signal.SIGKILL)


real_copy = staging.SlotStager.copy


def train(
    root: Path,
    last: int,
    death: str = "kill",
    fault: str = "",
    linger: float = 600.0,
    *,
    slots: int | None = 2,
    files: Files | None = None,
) -> psutil.Process | None:
    """Save the steps up to ``last`` in a trainer that then dies. Return its worker, or None if the worker is gone.

    ``files``: returns the set of files to save in the place of a state.
    """
    code, worker = alone(_train, str(root), last, death, fault, linger, slots, files)
    assert code == {"raise": 1, "close": 0}.get(death, -signal.SIGKILL)
    try:
        return psutil.Process(worker) if worker is not None else None
    except psutil.NoSuchProcess:
        return None


def has_left(worker: psutil.Process | None, within: float = 30.0) -> bool:
    """Return whether the worker ends within ``within`` seconds. A zombie counts as ended."""
    assert worker is not None
    deadline = time.monotonic() + within
    while is_running(worker.pid):
        if time.monotonic() > deadline:
            return False
        time.sleep(0.01)
    return True


def empty() -> dict[str, Any]:
    return {"w": torch.zeros(NUMBERS), "step": 0}


def is_of(state: dict[str, Any], step: int) -> bool:
    return state["step"] == step and torch.equal(state["w"], torch.full((NUMBERS,), float(step)))


def source(checkpointer: Checkpointer) -> str:
    assert checkpointer.loaded is not None
    return checkpointer.loaded.source
