"""Measure saves of real jobs on this machine by number of ranks, next to a direct write of the same bytes."""

from __future__ import annotations

import json
import multiprocessing
import os
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard

import asyncckpt
from bench.limits import WriteLimit

# Seconds for the removal of older checkpoints after a save.
_PAUSE_S = 0.5


def _sharded(total: int, tensors: int) -> dict[str, Any]:
    """Return ``total`` bytes in ``tensors`` tensors, each sharded over all ranks, and a replicated tensor."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    rows = total // tensors // (256 * 4) // dist.get_world_size()
    shards = {
        f"layers.{number}.weight": DTensor.from_local(torch.randn(rows, 256), mesh, [Shard(0)])
        for number in range(tensors)
    }
    return {"model": shards, "norm": torch.ones(256), "step": 0}


def _rank(rank: int, world_size: int, rendezvous: str, folder: str, total: int, tensors: int, saves: int) -> None:
    torch.set_num_threads(1)
    limit = timedelta(seconds=300)
    dist.init_process_group("gloo", init_method=rendezvous, rank=rank, world_size=world_size, timeout=limit)
    state = _sharded(total, tensors)
    writer = WriteLimit(total, folder) if rank == 0 else None
    config = asyncckpt.Config(keep_last=1, assume_constant_structure=True)
    rows = []
    with asyncckpt.Checkpointer(os.path.join(folder, "checkpoints"), config) as checkpointer:
        begun = time.perf_counter()
        checkpointer.prepare(state)
        prepared = time.perf_counter() - begun
        for step in range(saves + 1):
            dist.barrier()
            direct = writer.direct_write() if writer is not None else 0.0
            time.sleep(_PAUSE_S)
            dist.barrier()
            state["step"] = step
            begun = time.perf_counter()
            save = checkpointer.save(step, state)
            save.result(300)
            durable = time.perf_counter() - begun
            timings = save.timings
            mine = [durable, timings["stall_s"], timings["stall_s"] - timings["copy_s"], timings["write_s"], direct]
            every: list[Any] = [None] * world_size
            dist.all_gather_object(every, mine)
            rows.append([max(column) for column in zip(*every, strict=True)])
    if rank == 0:
        medians = [statistics.median(column) for column in zip(*rows[1:], strict=True)]
        Path(folder, "result.json").write_text(json.dumps([prepared, *medians]))
    dist.destroy_process_group()


def launch(rank: Callable[..., None], count: int, where: str, *args: object) -> Any:
    """Run a job of ``count`` processes that call ``rank(number, count, rendezvous, folder, *args)``.

    Returns the content of ``folder/result.json``. Raises ``RuntimeError`` if a rank fails.
    """
    context = multiprocessing.get_context("spawn")
    folder = tempfile.mkdtemp(dir=where)
    try:
        rendezvous = f"file://{folder}/meeting"
        ranks = [
            context.Process(target=rank, args=(number, count, rendezvous, folder, *args)) for number in range(count)
        ]
        for process in ranks:
            process.start()
        for process in ranks:
            process.join()
        if any(process.exitcode for process in ranks):
            raise RuntimeError(f"a rank of {count} failed")
        return json.loads(Path(folder, "result.json").read_text())
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def measure(counts: Sequence[int], total: int, tensors: int, saves: int, where: str) -> list[dict[str, Any]]:
    """Return a row for each number of processes."""
    found = []
    for count in counts:
        result = launch(_rank, count, where, total, tensors, saves)
        prepared, durable, stall, beside, write, direct = result
        found.append(
            {
                "processes": count,
                "prepare s": prepared,
                "call ms": stall * 1e3,
                "beside the copy ms": beside * 1e3,
                "durable s": durable,
                "slowest write s": write,
                "direct write s": direct,
                "durable / direct": durable / direct,
                "write / direct": write / direct,
            }
        )
    return found
