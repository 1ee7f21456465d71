"""Simulate a job of thousands of ranks, and measure the first rank's cost of the first save and of later saves.

The first rank's code receives the messages of all ranks through a real store. A few connections send them in turn, so
the result leaves out only the network. DCP's coordinator runs on the same plans, with and without its plan cache.
"""

from __future__ import annotations

import inspect
import json
import multiprocessing
import os
import pickle
import resource
import shutil
import statistics
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import FileSystemWriter, _StorageInfo
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner
from torch.distributed.checkpoint.storage import WriteResult

from asyncckpt.format.manifest import data_name, index_name
from asyncckpt.format.segment_layout import DataFile, ImageLayout, Region
from asyncckpt.format.write_request import WriteRequest
from asyncckpt.link.api import Rendezvous
from asyncckpt.ranks import store_connection
from asyncckpt.ranks.rounds import Rounds, round_name
from asyncckpt.ranks.store import Store
from asyncckpt.shm.hosted_segment import HostedSegment
from asyncckpt.shm.segment import PAGE, Segment
from asyncckpt.storage import storage_for
from asyncckpt.worker.attempt import begin_attempt
from asyncckpt.worker.durable_files import DurableFiles
from asyncckpt.worker.staged_image import StagedImage
from bench.first_saves import save_plan, simulate_first_saves


class _Counting(store_connection.StoreClient):
    """A connection that counts its messages and bytes."""

    messages = 0
    nbytes = 0

    def _send(self, text: bytes) -> None:
        _Counting.messages += 1
        _Counting.nbytes += len(text)
        super()._send(text)

    def _receive(self, nbytes: int) -> bytes:
        _Counting.nbytes += nbytes
        return super()._receive(nbytes)


def _host(pipe: Any, world_size: int, saves: int, folder: str) -> None:
    """Run the first rank's worker: host the store, collect, commit. Report the CPU seconds of each save."""
    store = Store(b"secret")
    pipe.send(store.port)
    rendezvous: Rendezvous = pipe.recv()
    mine = Rounds(rendezvous, 300)
    with Segment.create("bench", 4 * PAGE) as segment, ThreadPoolExecutor(2) as pool:
        bounds = Region(PAGE, 16)
        segment.view[PAGE : PAGE + 16] = memoryview(bytes(8) + PAGE.to_bytes(8, "little"))
        small = Region(2 * PAGE, 64)
        file = DataFile(0, PAGE, small, PAGE, bounds, number=0, prefix="")
        layout = ImageLayout((file,), PAGE, (3 * PAGE,), (("", small),), is_held=True)
        hosted = HostedSegment(segment)
        hosted.layout = layout
        for save in range(1, saves + 1):
            path = os.path.join(folder, f"save-{save}")
            order = WriteRequest(save, 1, 0, path, "attempt", save, 0, 1, "refuse", None, False, 300.0)
            staged_image = StagedImage(order, hosted, lambda: True)
            staged_image.complete()
            attempt = begin_attempt(storage_for(path), staged_image, DurableFiles())
            attempt.write(pool)
            report = attempt.seal()
            for rank in range(1, world_size):  # create the other ranks' files
                for name in (data_name(rank), index_name(rank)):
                    os.close(os.open(os.path.join(attempt.opened.path, name), os.O_CREAT | os.O_WRONLY))
            pipe.send(report)
            before, begun = _cpu(), time.perf_counter()
            mine.report(round_name("save", save), report)
            reports = mine.collect(round_name("save", save), 300)
            collected = time.perf_counter()
            attempt.commit([json.loads(each) for each in reports])
            attempt.release()
            mine.conclude(round_name("save", save), b"")
            mine.clear("save", save)
            pipe.send((time.perf_counter() - collected, collected - begun))
            pipe.recv()  # all ranks have the outcome
            pipe.send(_cpu() - before)
            shutil.rmtree(path)
    mine.close()
    store.close()


def _cpu() -> float:
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime


def simulate_commit(world_size: int, saves: int, where: str) -> dict[str, float]:
    """Return the cost of a later save for the first rank's worker, through a real store."""
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    folder = tempfile.mkdtemp(dir=where)
    process = context.Process(target=_host, args=(theirs, world_size, saves, folder))
    process.start()
    real = store_connection.StoreClient
    setattr(store_connection, "StoreClient", _Counting)  # noqa: B010
    try:
        rendezvous = Rendezvous("127.0.0.1", ours.recv(), "bench", b"secret", 0, world_size)
        ours.send(rendezvous)
        shared = [Rounds(rendezvous, 300) for _ in range(4)]
        for each in shared:
            each.store_id(60)
        ranks = [
            Rounds(replace(rendezvous, rank=rank), 300, connection=shared[rank % len(shared)].connection)
            for rank in range(1, world_size)
        ]
        measured = []
        for save in range(1, saves + 1):
            first = json.loads(ours.recv())
            name = round_name("save", save)
            _Counting.messages = _Counting.nbytes = 0
            for rank in ranks:
                number, known = rank.rendezvous.rank, first["files"]
                files = {data_name(number): known[data_name(0)], index_name(number): known[index_name(0)]}
                rank.report(name, json.dumps(first | {"files": files}).encode())
            conclude_s, _ = ours.recv()
            for rank in ranks:
                rank.outcome(name, 300)
            ours.send(None)
            measured.append((ours.recv(), conclude_s, _Counting.messages, _Counting.nbytes))
        for each in shared:
            each.close()
        process.join()
        cpu, conclude_s, messages, nbytes = (statistics.median(column) for column in zip(*measured[1:], strict=True))
        return {"cpu": cpu, "conclude": conclude_s, "messages": messages / world_size, "bytes": nbytes / world_size}
    finally:
        setattr(store_connection, "StoreClient", real)  # noqa: B010
        shutil.rmtree(folder, ignore_errors=True)


class _Cached(DefaultSavePlanner):
    pass


def simulate_dcp(world_size: int, items: int, cached: bool, where: str) -> tuple[float, float]:
    """Return the cost of a later save for DCP's coordinator: seconds, and bytes sent and received for each rank."""
    planner = _Cached(enable_plan_caching=True) if cached else DefaultSavePlanner()
    plans = [save_plan(rank, world_size, items) for rank in range(world_size)]
    for cache in ("_cached_all_plans", "_cached_global_plan", "_cached_metadata"):
        getattr(SavePlanner, cache, {}).pop("_Cached", None)
    if cached:
        planner.create_global_plan(plans)
        plans = [SavePlan([], usable=False)] * world_size
    results = [
        [WriteResult(item.index, 1 << 18, _StorageInfo(data_name(rank), 0, 1 << 18)) for item in plan.items]
        for rank, plan in enumerate(save_plan(rank, world_size, items) for rank in range(world_size))
    ]
    sent, told = [pickle.dumps(plan) for plan in plans], [pickle.dumps(result) for result in results]
    del plans, results
    folder = tempfile.mkdtemp(dir=where)
    writer = FileSystemWriter(folder)
    begun = time.perf_counter()
    answers, metadata = planner.create_global_plan([pickle.loads(each) for each in sent])
    scattered = sum(len(pickle.dumps(answer)) for answer in answers) / world_size
    writer.finish(metadata, [pickle.loads(each) for each in told])
    broadcast = len(pickle.dumps(metadata))
    took = time.perf_counter() - begun
    shutil.rmtree(folder)
    received = (sum(map(len, sent)) + sum(map(len, told))) / world_size
    return took, received + scattered + broadcast


def measure(counts: Sequence[int], items: int, saves: int, where: str) -> list[dict[str, Any]]:
    """Return a row for each number of ranks."""
    found = []
    for count in counts:
        first = simulate_first_saves(count, items)
        commit = simulate_commit(count, saves, where)
        plain_s, plain_bytes = simulate_dcp(count, items, cached=False, where=where)
        found.append(
            {
                "ranks": count,
                "first save s": first.planned_s,
                "first save: bytes/rank": first.nbytes,
                "first save, plan stored s": first.stored_s,
                "later: worker CPU s": commit["cpu"],
                "later: all in to told s": commit["conclude"],
                "later: messages/rank": commit["messages"],
                "later: bytes/rank": commit["bytes"],
                "DCP later s": plain_s,
                "DCP later bytes/rank": plain_bytes,
            }
        )
        if "enable_plan_caching" in inspect.signature(DefaultSavePlanner).parameters:  # missing in older torch
            cached_s, cached_bytes = simulate_dcp(count, items, cached=True, where=where)
            found[-1] |= {"DCP cached s": cached_s, "DCP cached bytes/rank": cached_bytes}
    return found
