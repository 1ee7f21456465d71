"""Measure the first save of a job of thousands of ranks on the first rank, in a new job and in a resumed job.

The first rank is real: its engine, its worker and the store. torch fakes the other ranks of the process group. Their
messages are in the store before the save begins, so the result leaves out the network and the waiting time. The result
also leaves out the time to read the stored plan at load. A save before the measurement takes the cost of imports.
"""

from __future__ import annotations

import gc
import multiprocessing
import os
import statistics
import tempfile
import time
from array import array
from collections.abc import Callable, Sequence
from dataclasses import replace
from multiprocessing.connection import Connection
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import SavePlan, TensorWriteData, WriteItem, WriteItemType
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard

from asyncckpt.config import Config
from asyncckpt.engine.engine import Engine
from asyncckpt.format.index import Index
from asyncckpt.link.api import Rendezvous
from asyncckpt.planning import plan as planning
from asyncckpt.planning.dcp_plan import DcpPlan
from asyncckpt.planning.draft import StoredPlan, make_plans
from asyncckpt.planning.metadata import StoredPlaces
from asyncckpt.ranks import group
from asyncckpt.ranks.ranks import OneRank
from asyncckpt.ranks.rounds import Call, Rounds, pack, round_name

_TIMEOUT_S = 300.0
_STEP, _ATTEMPT = 1, "attempt"
# The shape of each tensor on a rank, in elements.
_ROWS, _COLUMNS = 64, 1024


class FirstSaves(NamedTuple):
    """Seconds of ``save`` on the first rank with a new plan and with a stored plan.

    ``nbytes``: bytes that each other rank sends for a new plan.
    """

    planned_s: float
    stored_s: float
    nbytes: float


def save_plan(rank: int, world_size: int, items: int) -> SavePlan:
    """Return a plan like that of FSDP2 and Adam, with every tensor sharded over all ranks."""
    properties = TensorProperties(dtype=torch.float32)
    size = torch.Size([world_size * _ROWS, _COLUMNS])
    made = []
    for number in range(items):
        offsets = torch.Size([rank * _ROWS, 0])
        chunk = ChunkStorageMetadata(offsets=offsets, sizes=torch.Size([_ROWS, _COLUMNS]))
        index = MetadataIndex(f"optimizer.state.layers.{number}.weight.exp_avg", offsets)
        made.append(WriteItem(index, WriteItemType.SHARD, tensor_data=TensorWriteData(chunk, properties, size)))
    return SavePlan(made, planner_data={item.index.fqn: tuple(item.index.fqn.split(".")) for item in made})


def simulate_first_saves(world_size: int, items: int) -> FirstSaves:
    """Measure the first ``save`` of a job.

    Args:
        world_size: The number of ranks.
        items: The number of tensors with a shard on each rank.
    """
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    with tempfile.TemporaryDirectory() as folder:
        path = os.path.join(folder, "step")
        process = context.Process(target=_first_rank, args=(theirs, world_size, items, path))
        process.start()
        theirs.close()
        plans = [pack([save_plan(rank, world_size, items)]) for rank in range(1, world_size)]
        zeros = array("Q", bytes(8 * items))
        places = pack([StoredPlaces(zeros, zeros, None, [("", 0)])])
        call = Call.of_save(_STEP, path)
        took = []
        for attempt in (0, _ATTEMPT):
            rendezvous: Rendezvous = ours.recv()
            others = _others(rendezvous, world_size)
            said: dict[str, Sequence[bytes]] = {"agree": [pack((attempt, call))] * len(others)}
            if not attempt:
                said |= {"plan": plans, "layout": [places] * len(others)}
            for kind, values in {**said, "memory": [pack(2)] * len(others)}.items():
                for rank, value in zip(others, values, strict=True):
                    rank.report(round_name(kind, 1), value)
            ours.send(None)
            took.append(ours.recv())
            others[0].close()
        process.join()
    if process.exitcode:
        raise RuntimeError("the first rank has failed")
    return FirstSaves(took[0], took[1], statistics.mean(map(len, plans)) + len(places))


def _others(rendezvous: Rendezvous, world_size: int) -> list[Rounds]:
    """Return the other ranks, which share one connection."""
    first = Rounds(_of(rendezvous, 1), _TIMEOUT_S)
    first.store_id(_TIMEOUT_S)
    return [
        first,
        *(Rounds(_of(rendezvous, rank), _TIMEOUT_S, connection=first.connection) for rank in range(2, world_size)),
    ]


def _of(rendezvous: Rendezvous, rank: int) -> Rendezvous:
    return replace(rendezvous, rank=rank)


def _first_rank(pipe: Connection, world_size: int, items: int, path: str) -> None:
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", rank=0, world_size=world_size, store=FakeStore())
    plans: list[DcpPlan] = []
    with tempfile.TemporaryDirectory() as folder, Engine(Config(timeout=_TIMEOUT_S), alone=True) as engine:
        engine.save(os.path.join(folder, "step"), {"a": torch.zeros(1)}).result()  # run all imports of a first save

    def noting(*args: Any) -> None:
        make_plans(*args)
        plans.append(args[0][0].plan)

    class FirstRank(OneRank):
        def from_first(self, do: Callable[[], Any]) -> Any:
            rendezvous, scope = do()
            pipe.send(rendezvous)
            return rendezvous, scope

    setattr(planning, "make_plans", noting)  # noqa: B010
    setattr(group, "ranks_of", lambda *_, **__: FirstRank())  # noqa: B010
    state = _state(world_size, items)
    for stored in (False, True):
        engine = Engine(Config(timeout=_TIMEOUT_S))
        engine.start()
        if stored:
            engine.plan_as(_stored(plans[0]))
        gc.collect()  # otherwise the second save pays for the garbage of the first
        pipe.recv()
        begun = time.perf_counter()
        engine.save(path, state, step=_STEP)
        pipe.send(time.perf_counter() - begun)
        engine.abort()
    if len(plans) > 1:
        raise AssertionError("it was planned again")
    dist.destroy_process_group()


def _state(world_size: int, items: int) -> dict[str, Any]:
    mesh = init_device_mesh("cpu", (world_size,))
    layers = {}
    for number in range(items):
        local = torch.full((_ROWS, _COLUMNS), float(number))
        layers[str(number)] = {"weight": {"exp_avg": DTensor.from_local(local, mesh, [Shard(0)], run_check=False)}}
    return {"optimizer": {"state": {"layers": layers}}}


def _stored(plan: DcpPlan) -> StoredPlan:
    """Return the plan as read from the checkpoint that ``plan`` saved."""
    indexes = []
    for file in plan.planned:
        tail = Index.tail(file.nbytes, array("Q", bytes(8 * (len(file.spans) - 1))))
        indexes.append(Index.parse(file.index_head + tail, ""))
    return StoredPlan(_ATTEMPT, indexes, plan.metadata)
