#!/usr/bin/env python3
"""Publish weights tens of thousands of times to readers that are killed at random. Detect torn reads and lost slots.

    scripts/torture_weights.py                                              # some minutes on two cores
    scripts/torture_weights.py --publications 500 --kills 10 --ends 4 --rank-rounds 50    # a taste

All elements of a version equal its number. Readers check all elements and hold some versions for a while. They also
write to some tensors, and no other reader may see these writes. Readers are killed at random points. Three trials run
one after the other:

- One trainer publishes the same structure again and again.
- Trainers end without closing their publisher, each in another way, and start again.
- Four ranks publish together, on meshes of some of the ranks, and at times with no tensors of their own.

The exit code is 1 if an element has another version, a resource grows, or a reader receives nothing new for 30 seconds.
It is also 1 if, without readers, a slot stays taken or more than two images take memory.
"""

from __future__ import annotations

import argparse
import atexit
import contextlib
import ctypes
import gc
import json
import multiprocessing
import os
import random
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Sequence
from multiprocessing.sharedctypes import Synchronized
from pathlib import Path
from typing import Any

import psutil
import torch
import torch.distributed as dist
from tabulate import tabulate
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Shard, distribute_tensor
from tqdm import tqdm

from asyncckpt.errors import WeightsTimeoutError
from asyncckpt.link.endpoint import FOLDER_VARIABLE, endpoint_names
from asyncckpt.weights import WeightPublisher, WeightSubscriber

ADDRESS = "torture"
LIMIT_S = 30.0
SLOTS = 5
RANKS = 4
SIZES = (300_000, 40_000, 1_000, 70, 7, 1)
IMAGE_BYTES = 8 * sum(SIZES)
# After this number of publications, all memory that nobody needs is freed.
AT_REST = 2 * SLOTS + 10
ENDS = ("dropped", "sys.exit", "os._exit", "error")

_context = multiprocessing.get_context("forkserver")
_context.set_forkserver_preload(["asyncckpt.weights", "torch.distributed.tensor"])


class Reader:
    """One reading process, which is replaced after each kill."""

    def __init__(self, seed: int) -> None:
        self._seed = seed
        self.reads: Synchronized[int] = _context.Value(ctypes.c_longlong, 0)
        self.torn: Synchronized[int] = _context.Value(ctypes.c_longlong, 0)
        self.newest: Synchronized[int] = _context.Value(ctypes.c_longlong, 0)
        self.process: Any = None

    def start(self) -> None:
        self._seed += 1
        counts = (self.reads, self.torn, self.newest)
        self.process = _context.Process(target=_read, args=(self._seed, *counts), daemon=True)
        self.process.start()

    def kill(self) -> None:
        self.process.kill()
        self.process.join()
        self.process.close()


@contextlib.contextmanager
def _reading(seed: int, seen: dict[str, Any]) -> Any:
    """Run two readers, and kill them at the end. Add their counts to ``seen``."""
    readers = [Reader(seed * 1000), Reader(seed * 1000 + 500)]
    try:
        for reader in readers:
            reader.start()
        yield readers
    finally:
        for reader in readers:
            reader.kill()
            seen["reads"] = seen.get("reads", 0) + reader.reads.value
            seen["torn"] = seen.get("torn", 0) + reader.torn.value


def _read(seed: int, reads: Synchronized[int], torn: Synchronized[int], last: Synchronized[int]) -> None:
    chance = random.Random(seed)
    torch.set_num_threads(1)
    newest, kept = 0, []
    trial = multiprocessing.parent_process()
    with WeightSubscriber(ADDRESS) as subscriber:
        while trial is None or trial.is_alive():  # the trial may be killed, too
            with subscriber.acquire(newest, timeout=LIMIT_S) as weights:
                newest = weights.version
                tensors = list(weights.values())
                torn.value += _is_torn(tensors, newest)
                if chance.random() < 0.2:
                    time.sleep(chance.random() * 0.005)
                    torn.value += _is_torn(tensors, newest)
                if chance.random() < 0.1:
                    torn.value += _is_seen_by_others(tensors, newest, subscriber)
                elif chance.random() < 0.1:
                    kept.append((newest, tensors))  # the tensors outlive the block
            del tensors
            if len(kept) > 1 or (kept and chance.random() < 0.3):
                version, tensors = kept.pop(0)
                torn.value += _is_torn(tensors, version)
                del tensors
            reads.value += 1
            last.value = newest


def _is_seen_by_others(tensors: Sequence[torch.Tensor], version: int, subscriber: WeightSubscriber) -> bool:
    """Write to acquired tensors. Return whether another reader sees the write, or the write is lost."""
    for tensor in tensors:
        tensor.add_(1)
    is_wrong = _is_torn(tensors, version + 1)
    for readonly in (False, True):
        try:
            weights = subscriber.acquire(version=version, readonly=readonly, timeout=0.0)
        except WeightsTimeoutError:
            continue  # the trainer was replaced
        with weights:
            is_wrong |= _is_torn(weights.values(), version)
    return is_wrong or _is_torn(tensors, version + 1)


def _is_torn(tensors: Any, version: int) -> bool:
    return any(not bool((tensor == version).all()) for tensor in tensors)


def publish_to_readers(publications: int, kills: int, seed: int) -> dict[str, Any]:
    """Publish from one trainer while readers are killed. Return the counts."""
    chance = random.Random(seed)
    state = {f"layer.{number}.weight": torch.zeros(size, dtype=torch.int64) for number, size in enumerate(SIZES)}
    kill_at = sorted(chance.sample(range(publications), kills))
    seen: dict[str, Any] = {"publications": publications, "readers killed": kills, "skipped": 0}
    with WeightPublisher(ADDRESS, slots=SLOTS) as publisher:
        publisher.prepare(state)
        worker = publisher.worker.pid if publisher.worker is not None else 0
        before: dict[str, int] = {}
        version = 0
        with _reading(seed, seen) as readers:
            for published in tqdm(range(publications), leave=False, file=sys.stderr):
                while True:
                    version += 1
                    if not _publish(publisher, state, version):
                        break
                    seen["skipped"] += 1
                while kill_at and kill_at[0] <= published:
                    kill_at.pop(0)
                    reader = chance.choice(readers)
                    reader.kill()
                    reader.start()
                if published == publications // 4:
                    before = _taken(worker)
            after = _taken(worker)
            _await(lambda: all(reader.newest.value == version for reader in readers), "a reader reads no more")
        allowed = {"bytes": (4 << 20) + (SLOTS - 2) * IMAGE_BYTES}
        seen |= {f"{what}, at a quarter and the end": f"{before[what]} {after[what]}" for what in before}
        seen["growth"] = [what for what in before if after[what] > before[what] + allowed.get(what.split()[-1], 2)]
        seen["slots lost"] = sum(_publish(publisher, state, version + turn) for turn in range(1, AT_REST))
        seen["images at rest"] = [_images(worker)]
        with WeightSubscriber(ADDRESS) as subscriber, contextlib.ExitStack() as held:  # no slot is lost
            for turn in range(AT_REST, AT_REST + SLOTS - 1):
                seen["slots lost"] += _publish(publisher, state, version + turn)
                held.enter_context(subscriber.acquire(version=version + turn))
            seen["slots lost"] += _publish(publisher, state, version + AT_REST + SLOTS)
    return seen


def _publish(publisher: WeightPublisher, state: dict[str, torch.Tensor], version: int) -> bool:
    """Publish ``state`` filled with ``version``. Return whether the publication was skipped."""
    for tensor in state.values():
        tensor.fill_(version)
    return publisher.publish(iter(state.items()) if version % 3 == 0 else state, version).skipped


def end_without_close(ends: int, seed: int) -> dict[str, Any]:
    """Run trainers one after the other, while readers follow them. Return the counts."""
    chance = random.Random(seed)
    seen: dict[str, Any] = dict.fromkeys((f"ended by {how}" for how in ENDS), 0)
    version = 1
    with _reading(seed + 1, seen) as readers:
        newest = [reader.newest for reader in readers]
        for turn in tqdm(range(ends), leave=False, file=sys.stderr):
            how, count = ENDS[turn % len(ENDS)], chance.randrange(1, 20)
            trainer = _context.Process(target=_train, args=(how, version, count, newest))
            trainer.start()
            trainer.join(4 * LIMIT_S)
            if trainer.exitcode != 0:
                raise RuntimeError(f"a trainer that was to end by {how} has ended with {trainer.exitcode}")
            version += 2 * count
            seen[f"ended by {how}"] += 1
    with WeightPublisher(ADDRESS, slots=SLOTS) as publisher:
        state = {"w": torch.zeros(1000, dtype=torch.int64)}
        seen["slots lost"] = sum(_publish(publisher, state, version + turn) for turn in range(AT_REST))
        seen["images at rest"] = [_images(publisher.worker.pid if publisher.worker is not None else 0)]
    _await(lambda: not endpoint_names(), "a worker stays")
    return seen


def _train(how: str, first: int, count: int, newest: Sequence[Synchronized[int]]) -> None:
    """Publish, then end like a normal Python process. A forked process does not run the exit functions by itself."""
    try:
        publisher = _train_from(first, count, newest)
        if how == "dropped":
            del publisher
            gc.collect()
            publisher = _train_from(first + count, count, newest)
        elif how == "os._exit":
            os._exit(0)
        elif how == "sys.exit":
            sys.exit(0)
        elif how == "error":
            raise ValueError("as the trial wants")
    except ValueError as error:
        sys.last_value = error
    except SystemExit:
        pass
    atexit._run_exitfuncs()


def _train_from(first: int, count: int, newest: Sequence[Synchronized[int]]) -> WeightPublisher:
    """Publish ``count`` versions, and wait until all readers have read the last one."""
    publisher = WeightPublisher(ADDRESS, slots=SLOTS)
    state = {f"layer.{number}.weight": torch.zeros(size, dtype=torch.int64) for number, size in enumerate(SIZES)}
    for version in range(first, first + count):
        while _publish(publisher, state, version):
            time.sleep(0.001)
    _await(lambda: all(each.value == first + count - 1 for each in newest), "a reader does not follow")
    return publisher


def publish_in_ranks(rounds: int, seed: int) -> dict[str, Any]:
    """Publish from several ranks together. Return the counts."""
    chance = random.Random(seed)
    seen: dict[str, Any] = {"rounds of ranks": rounds, "readers killed": 0}
    rest, ours, theirs = _context.Event(), *_context.Pipe(duplex=False)
    with tempfile.TemporaryDirectory() as folder, _reading(seed + 2, seen) as readers:
        ranks = [
            _context.Process(target=_rank, args=(rank, f"{folder}/meeting", rounds, rest, theirs))
            for rank in range(RANKS)
        ]
        for process in ranks:
            process.start()
        for _ in tqdm(range(RANKS), leave=False, file=sys.stderr):
            while not ours.poll(chance.random()):
                if not all(process.is_alive() for process in ranks):
                    raise RuntimeError("a rank has ended")
                reader = chance.choice(readers)
                reader.kill()
                reader.start()
                seen["readers killed"] += 1
            ours.recv()
        _await(lambda: all(reader.newest.value == rounds for reader in readers), "a reader reads no more")
    rest.set()
    found = [ours.recv() for _ in ranks]
    for process in ranks:
        process.join()
    return seen | {"slots lost": sum(lost for lost, _ in found), "images at rest": [images for _, images in found]}


def _rank(rank: int, meeting: str, rounds: int, rest: Any, said: Any) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{meeting}", rank=rank, world_size=RANKS)
    meshes = {"all": DeviceMesh("cpu", list(range(RANKS))), "some": DeviceMesh("cpu", [1, 2])}
    with WeightPublisher(ADDRESS, slots=SLOTS, when_busy="wait", process_group=dist.group.WORLD) as publisher:
        for version in range(1, rounds + 1):
            publisher.publish(_part(rank, meshes, version), version)
        said.send(None)
        rest.wait()
        dist.barrier()
        last = _part(rank, meshes, rounds)
        lost = sum(publisher.publish(last, rounds + turn).skipped for turn in range(1, AT_REST))
        said.send((lost, _images(publisher.worker.pid if publisher.worker is not None else 0)))
        dist.barrier()
    dist.destroy_process_group()


def _part(rank: int, meshes: dict[str, DeviceMesh], version: int) -> dict[str, torch.Tensor]:
    """Return the tensors of a rank in a version. Three structures take turns. Some tensors are on some ranks only."""
    kind = version // 40 % 3
    whole = torch.full((301, 137), version)
    weights: dict[str, torch.Tensor] = {}
    if kind == 0:
        weights["all"] = distribute_tensor(whole, meshes["all"], [Shard(0)], src_data_rank=None)
    if kind < 2:  # the other ranks hold no part of this tensor, but they know its mesh
        weights["some"] = distribute_tensor(whole, meshes["some"], [Shard(1)], src_data_rank=None)
    if rank == 2:
        weights["of one"] = whole[:7].clone()
    return weights


def _await(seen: Callable[[], bool], otherwise: str) -> None:
    deadline = time.monotonic() + LIMIT_S
    while not seen():
        if time.monotonic() > deadline:
            raise TimeoutError(otherwise)
        time.sleep(0.002)


def _images(worker: int) -> int:
    """Return the number of images with memory in a worker. Each image is a memory file, and so is the shared header."""
    files = [each for each in Path(f"/proc/{worker}/fd").iterdir() if os.readlink(each).startswith("/memfd:asyncckpt ")]
    return sum(each.stat().st_blocks > 0 for each in files) - 1


def _taken(worker: int) -> dict[str, int]:
    taken = {}
    for name, process in (("trainer", psutil.Process()), ("worker", psutil.Process(worker))):
        memory = process.memory_info()
        taken[f"{name}: descriptors"] = process.num_fds()
        taken[f"{name}: threads"] = process.num_threads()
        taken[f"{name}: private bytes"] = memory.rss - memory.shared
        taken[f"{name}: shared bytes"] = sum(
            int(line.split()[1]) << 10
            for line in Path(f"/proc/{process.pid}/smaps_rollup").read_text().splitlines()
            if line.startswith("Pss_Shmem")
        )
    return taken


def summary(trials: Iterable[dict[str, Any]]) -> dict[str, Any]:
    """Merge the counts of all trials: add numbers, and join lists."""
    seen: dict[str, Any] = {}
    for each in trials:
        seen |= {what: seen[what] + value if what in seen else value for what, value in each.items()}
    return seen


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--publications", type=int, default=20_000)
    parser.add_argument("--kills", type=int, default=200, help="of readers")
    parser.add_argument("--ends", type=int, default=60, help="of trainers")
    parser.add_argument("--rank-rounds", type=int, default=2_000)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--json", type=Path, help="write what was seen there")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        os.environ[FOLDER_VARIABLE] = folder
        begun = time.perf_counter()
        seen = summary(
            [
                publish_to_readers(options.publications, options.kills, options.seed),
                end_without_close(options.ends, options.seed),
                publish_in_ranks(options.rank_rounds, options.seed),
            ]
        )
        seen["seconds"] = round(time.perf_counter() - begun, 1)
    print(tabulate(seen.items(), headers=("what", "seen")))
    if options.json is not None:
        options.json.write_text(json.dumps(seen))
    is_at_rest = all(images == 2 for images in seen["images at rest"])
    return int(bool(seen["torn"] or seen["slots lost"] or seen["growth"] or not seen["reads"] or not is_at_rest))


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
    sys.exit(main())
