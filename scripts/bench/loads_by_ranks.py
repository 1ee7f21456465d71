"""Measure loads of several ranks. Each rank fills its shards (FSDP2) or its replica from what all ranks saved.

The model is a stack of square linear layers. Files are dropped from the page cache before each load.
"""

from __future__ import annotations

import json
import math
import os
import time
from collections.abc import Callable
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import asyncckpt
from asyncckpt.storage import step_folder
from bench import files
from bench.limits import Limits, ReadLimit
from bench.loads import LIMIT_S, OURS, PEERS, STEP, Load
from bench.ranks import launch
from bench.states import GIB, State, local_of, same_tensors, tensors_of, with_tensors
from bench.turns import Pace, take

LOADS: dict[str, Load] = {name: (OURS | PEERS)[name] for name in ("asyncckpt, storage", "dcp-load")}


def _state(nbytes: int, layers: int, *, replicas: bool) -> State:
    """Return the state of the model, with the shards of this rank, or whole."""
    width = max(1, round(math.sqrt(nbytes / layers / 4)))
    torch.manual_seed(0)
    model = torch.nn.Sequential(*(torch.nn.Linear(width, width, bias=False) for _ in range(layers)))
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for each in () if replicas else [*model, model]:
        fully_shard(each, mesh=mesh)
    return {"model": model.state_dict(), "step": STEP}


def _rank(
    rank: int, count: int, rendezvous: str, folder: str, nbytes: int, layers: int, pace: Pace, replicas: bool
) -> None:
    torch.set_num_threads(1)
    limit = timedelta(seconds=300)
    dist.init_process_group("gloo", init_method=rendezvous, rank=rank, world_size=count, timeout=limit)
    state = _state(nbytes, layers, replicas=replicas)
    with asyncckpt.Checkpointer(f"{folder}/ours") as checkpointer:
        checkpointer.save(STEP, state).result(LIMIT_S)
    shards = with_tensors(state, local_of)
    expected = with_tensors(shards, torch.clone)
    ours = sum(tensor.nbytes for tensor in tensors_of(shards))
    read = ReadLimit(os.path.join(step_folder(f"{folder}/ours", STEP), f"__{rank}_0.distcp"))

    nbytes_read: dict[str, list[int]] = {name: [] for name in LOADS}

    def turn(name: str) -> float:
        for tensor in tensors_of(shards):
            tensor.detach().fill_(1)
        before = files.storage_bytes()
        elapsed = together(partial(LOADS[name], folder, state))
        nbytes_read[name].append(files.storage_bytes() - before)
        if not same_tensors(expected, shards):
            raise RuntimeError("it has loaded something else")
        return elapsed

    def together(call: Callable[[], float]) -> float:
        dist.barrier()
        if rank == 0:
            files.forget(folder)
            time.sleep(pace.pause)  # the kernel frees memory
        dist.barrier()
        return call()

    with Limits(ours, folder) as limits:
        turns = {name: partial(together, call) for name, call in limits.of_copies().items()}
        turns["direct read"] = partial(together, read.direct_read)
        turns |= {name: partial(turn, name) for name in LOADS}
        taken = take(turns, pace, f"load by {count} ranks")
    every: list[Any] = [None] * count
    dist.all_gather_object(every, (ours, taken.found, nbytes_read))
    if rank == 0:
        found = {name: [max(each) for each in zip(*(its[name] for _, its, _ in every), strict=True)] for name in turns}
        read_by_all = {name: list(map(sum, zip(*(its[name] for *_, its in every), strict=True))) for name in LOADS}
        facts = {
            "state": {
                "tensors": layers,
                "bytes": ours if replicas else sum(nbytes for nbytes, _, _ in every),
                "device": "cpu",
            },
            "limits": {name: seconds[1:] for name, seconds in found.items() if name not in LOADS},
            "results": {
                name: {
                    "load_s": found[name][1:],
                    "first_load_s": found[name][0],
                    "read_bytes": read_by_all[name][1:],
                }
                for name in LOADS
            },
            "left_out": {},
        }
        Path(folder, "result.json").write_text(json.dumps(facts))
    dist.destroy_process_group()


def measure(gib: float, layers: int, count: int, pace: Pace, folder: str, *, replicas: bool = False) -> dict[str, Any]:
    """Measure loads by a job of ``count`` ranks, and the limits on all ranks at once. The slowest rank counts.

    The bytes read from storage are those of all ranks together. ``replicas``: each rank loads the whole model.
    """
    found = launch(_rank, count, folder, int(gib * GIB), layers, pace, replicas)
    held = f", {count} replicas" if replicas else f" under FSDP2, {count} ranks"
    found["state"] |= {"description": f"{layers:,} layers{held}"}
    return found  # type: ignore[no-any-return]
