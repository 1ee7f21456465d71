"""Measure loads from the memory that a killed trainer left, and from storage.

A trainer saves and is killed. Then this process loads in its place, again and again, in turns. Files are dropped from
the page cache before each load. asyncckpt checks all bytes, and its peers check none. The loaded values are compared
after each turn.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from typing import Any

import torch

import asyncckpt
from asyncckpt.link.endpoint import endpoint_name
from asyncckpt.link.takeover import Takeover
from asyncckpt.storage import step_folder
from bench import files
from bench.contestants import dcp, torch_save
from bench.limits import Limits, ReadLimit
from bench.states import Request, State, blank, make, same_tensors, tensors_of
from bench.turns import Pace, take

STEP = 1
LINGER_S = 3600.0
LIMIT_S = 60.0


def save_and_die(folder: str, request: Request) -> None:
    """Run the trainer that saves and is killed."""
    state = make(request).state
    checkpointer = asyncckpt.Checkpointer(f"{folder}/ours", asyncckpt.Config(linger=LINGER_S))
    checkpointer.save(STEP, state).result(LIMIT_S)
    torch_save.write(f"{folder}/state.pt", state)
    with suppress(ImportError):  # then its loads are left out
        from bench.contestants.torch_checkpointing import ITEM, loader

        loader().save(f"{folder}/theirs", {ITEM: state})
        files.sync(f"{folder}/theirs")
    os.kill(os.getpid(), signal.SIGKILL)


def load_from_memory(folder: str, state: State) -> float:
    """Load as a new trainer does. The time includes finding and mapping the memory."""
    with asyncckpt.Checkpointer(f"{folder}/ours") as checkpointer:
        begun = time.perf_counter()
        checkpointer.load(state)
        elapsed = time.perf_counter() - begun
        if checkpointer.loaded is None or checkpointer.loaded.source != "memory":
            raise RuntimeError("it was not loaded from memory")
    return elapsed


def load_from_storage(folder: str, state: State) -> float:
    with asyncckpt.Checkpointer(f"{folder}/ours") as checkpointer:
        begun = time.perf_counter()
        checkpointer.load(state, memory=False)
        return time.perf_counter() - begun


def load_by_dcp(folder: str, state: State) -> float:
    begun = time.perf_counter()
    dcp.load(step_folder(f"{folder}/ours", STEP), state)
    return time.perf_counter() - begun


def load_by_torch(folder: str, state: State) -> float:
    begun = time.perf_counter()
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*TypedStorage is deprecated", category=UserWarning)
        loaded = torch.load(f"{folder}/state.pt", mmap=True)
    for mine, theirs in zip(tensors_of(state), tensors_of(loaded), strict=True):
        mine.copy_(theirs)
    return time.perf_counter() - begun


def load_by_torch_checkpointing(folder: str, state: State) -> float:
    from bench.contestants.torch_checkpointing import ITEM, loader

    manager = loader()
    begun = time.perf_counter()
    manager.load(f"{folder}/theirs", into={ITEM: state})
    return time.perf_counter() - begun


def load_files_of_torch_checkpointing(folder: str, state: State) -> float:
    from bench.contestants.torch_checkpointing import ITEM

    begun = time.perf_counter()
    asyncckpt.load({ITEM: state}, checkpoint_id=f"{folder}/theirs")
    return time.perf_counter() - begun


Load = Callable[[str, State], float]
"""Fills the state, and returns the seconds of the load."""

OURS: dict[str, Load] = {"asyncckpt, memory": load_from_memory, "asyncckpt, storage": load_from_storage}
PEERS: dict[str, Load] = {
    "dcp-load": load_by_dcp,
    "torch-load": load_by_torch,
    "torch_checkpointing 0.1": load_by_torch_checkpointing,
    "asyncckpt, of torch_checkpointing": load_files_of_torch_checkpointing,
}


def _turn(load: Load, folder: str, state: State, expected: State, pause: float) -> float:
    for tensor in tensors_of(state):
        tensor.fill_(1)
    files.forget(folder)
    time.sleep(pause)  # the kernel frees memory
    elapsed = load(folder, state)
    if not same_tensors(expected, state):
        raise RuntimeError("it has loaded something else")
    return elapsed


def measure(request: Request, pace: Pace, folder: str) -> dict[str, Any]:
    """Measure loads by asyncckpt and by all peers, because there are only a few, and the limits."""
    with _left_worker(folder):
        trainer = multiprocessing.get_context("spawn").Process(target=save_and_die, args=(folder, request))
        trainer.start()
        made = make(request)
        state = blank(made.state)
        trainer.join()
        if trainer.exitcode != -signal.SIGKILL:
            raise RuntimeError(f"the trainer that was to save ended with {trainer.exitcode}")
        read = ReadLimit(f"{step_folder(f'{folder}/ours', STEP)}/__0_0.distcp")
        loads = OURS | PEERS
        with Limits(made.nbytes, folder, request.device) as limits:
            turns = limits.of_copies() | {"direct read": read.direct_read}
            turns |= {name: partial(_turn, load, folder, state, made.state, pace.pause) for name, load in loads.items()}
            taken = take(turns, pace, f"load {request.label}")
    return {
        "state": made.facts(),
        "limits": {name: taken.found[name][1:] for name in turns if name not in loads},
        "results": {
            name: {"load_s": seconds[1:], "first_load_s": seconds[0]}
            for name, seconds in taken.found.items()
            if name in loads
        },
        "left_out": taken.left_out,
    }


@contextmanager
def _left_worker(folder: str) -> Iterator[None]:
    """Set the runtime folder of the killed trainer's worker, and retire the worker at the end."""
    with files.runtime_folder(f"{folder}/runtime"):
        try:
            yield
        finally:
            takeover = Takeover.find(endpoint_name(f"{os.path.realpath(folder)}/ours\n", 0), LIMIT_S)
            if takeover is not None:
                takeover.retire(LIMIT_S)
                takeover.close()
