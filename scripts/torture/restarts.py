"""Measure the speed of a restart from memory."""

from __future__ import annotations

import os
import signal
import statistics
import time
from concurrent.futures import ThreadPoolExecutor
from multiprocessing.connection import Connection
from pathlib import Path

import numpy
import torch
from tqdm import tqdm

from asyncckpt import Checkpointer
from asyncckpt.link.endpoint import endpoint_name
from asyncckpt.link.takeover import Takeover
from asyncckpt.loading.data_file import READ_THREADS
from torture.jobs import Job
from torture.tally import CONFIG, LIMIT_S


def time_restarts(folder: Path, rounds: int, nbytes: int) -> dict[str, float]:
    """Return medians over restarts, each in a new process."""
    root = str(folder / "restarts")
    with Job(1, _hold, root, nbytes) as job:
        job.processes[0].join(LIMIT_S)
    took = []
    for _ in tqdm(range(rounds), desc="restarts from memory", unit="restart", disable=None):
        with Job(1, _restart, root, nbytes) as job:
            took.append(job.hear(0, "took"))
    names = ("memcpy_s", "load_s", "load_again_s", "memcpy_attached_s")
    return {name: statistics.median(each) for name, each in zip(names, zip(*took, strict=True), strict=True)}


def _hold(pipe: Connection, rank: int, root: str, nbytes: int) -> None:
    checkpointer = Checkpointer(root, CONFIG)
    checkpointer.save(1, {"model": _weights(nbytes, 1.0)}).result(LIMIT_S)
    os.kill(os.getpid(), signal.SIGKILL)


def _weights(nbytes: int, value: float) -> dict[str, torch.Tensor]:
    return {f"layer{number}": torch.full((nbytes // 400 // 4,), value) for number in range(400)}


def _restart(pipe: Connection, rank: int, root: str, nbytes: int) -> None:
    """Report seconds of a memcpy, of two loads from memory, and of a memcpy out of newly attached memory."""
    torch.set_num_threads(READ_THREADS)
    source, into = _weights(nbytes, 2.0), _weights(nbytes, 3.0)
    memcpy = []
    for _ in range(5):
        begun = time.perf_counter()
        for name, tensor in into.items():
            tensor.copy_(source[name])
        memcpy.append(time.perf_counter() - begun)
    with Checkpointer(root, CONFIG) as checkpointer:
        begun = time.perf_counter()
        checkpointer.load({"model": into})
        load = time.perf_counter() - begun
        if checkpointer.loaded is None or checkpointer.loaded.source != "memory":
            raise RuntimeError("not loaded from memory")
        begun = time.perf_counter()
        checkpointer.load({"model": into})
        again = time.perf_counter() - begun
    takeover = Takeover.find(endpoint_name(f"{os.path.realpath(root)}\n", 0), LIMIT_S)
    if takeover is None:
        raise RuntimeError("the worker has left")
    buffers = [numpy.ones(nbytes // READ_THREADS, dtype=numpy.uint8) for _ in range(READ_THREADS)]
    with takeover, ThreadPoolExecutor(READ_THREADS) as pool:
        memory = numpy.frombuffer(next(iter(takeover.segments.values())).view, dtype=numpy.uint8)
        begun = time.perf_counter()
        for task in [
            pool.submit(numpy.copyto, buffer, memory[number * len(buffer) : (number + 1) * len(buffer)])
            for number, buffer in enumerate(buffers)
        ]:
            task.result()
        attached = time.perf_counter() - begun
        del memory
    pipe.send(("took", statistics.median(memcpy), load, again, attached))
