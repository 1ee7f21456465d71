#!/usr/bin/env python3
"""What a load costs, beside the limits of this machine's memory and disk, and beside other ways to load.

    scripts/bench_load.py --gib 1 --tensors 400 --loads 5 --peers dcp-load,torch-load
    scripts/bench_load.py --tensors 8000 --tensor-kb 50

A trainer saves and is killed; this process then loads in its place, over and over: from the memory of the worker that
it left, and from storage. All take turns in one run: each round measures every limit and every contestant once. The
first round is the cold one and given apart. Files are out of the page cache before each load. All bytes are checked by
asyncckpt, and by no peer.
"""

from __future__ import annotations

import argparse
import json
import mmap
import multiprocessing
import os
import random
import shutil
import signal
import statistics
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch
from tabulate import tabulate
from torch.distributed.checkpoint import state_dict_loader

try:
    import asyncckpt
except ImportError:  # a checkout that is not installed
    sys.path.insert(0, str(Path(__file__).parent.parent))
    import asyncckpt

from asyncckpt.spans import READ_THREADS, RUN_BYTES
from asyncckpt.worker.door import FOLDER_VARIABLE, door_name
from asyncckpt.worker.visit import Visit

State = dict[str, Any]
STEP = 1
LINGER_S = 3600.0
LIMIT_S = 60.0


def make_state(tensors: int, tensor_bytes: int, seed: int) -> State:
    torch.manual_seed(seed)
    return {"model": {f"layer.{number}": torch.randn(tensor_bytes // 4) for number in range(tensors)}}


def save_and_die(folder: str, tensors: int, tensor_bytes: int, with_torch: bool) -> None:
    """The trainer before this one."""
    state = make_state(tensors, tensor_bytes, seed=STEP)
    checkpointer = asyncckpt.Checkpointer(f"{folder}/ours", asyncckpt.Config(linger=LINGER_S))
    checkpointer.save(STEP, state).result(LIMIT_S)
    if with_torch:
        torch.save(state, f"{folder}/state.pt")
        os.sync()
    os.kill(os.getpid(), signal.SIGKILL)


def load_from_memory(folder: str, state: State) -> float:
    """By a trainer that has just been started: the memory has to be found and mapped."""
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
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is", category=UserWarning)
        begun = time.perf_counter()
        state_dict_loader.load(state, checkpoint_id=f"{folder}/ours/step-{STEP:08d}")
        return time.perf_counter() - begun


def load_by_torch(folder: str, state: State) -> float:
    begun = time.perf_counter()
    loaded = torch.load(f"{folder}/state.pt", mmap=True)
    for name, tensor in state["model"].items():
        tensor.copy_(loaded["model"][name])
    return time.perf_counter() - begun


Load = Callable[[str, State], float]
"""Fills the state, and returns the seconds that took."""

OURS: dict[str, Load] = {"asyncckpt, memory": load_from_memory, "asyncckpt, storage": load_from_storage}
PEERS: dict[str, Load] = {"dcp-load": load_by_dcp, "torch-load": load_by_torch}


class Limits:
    """What no load can beat: one memcpy of the same bytes between memory in use; that, and a direct read of them."""

    def __init__(self, nbytes: int, path: str) -> None:
        self._source = torch.ones(nbytes, dtype=torch.uint8)
        self._target = torch.ones(nbytes, dtype=torch.uint8)
        self._path = path
        self._buffers = [mmap.mmap(-1, RUN_BYTES) for _ in range(READ_THREADS)]

    def memcpy(self) -> float:
        """With torch's own threads."""
        begun = time.perf_counter()
        self._target.copy_(self._source)
        return time.perf_counter() - begun

    def direct_read(self) -> float:
        begun = time.perf_counter()
        fd = os.open(self._path, os.O_RDONLY | os.O_DIRECT)
        offsets = range(0, os.fstat(fd).st_size, RUN_BYTES)

        def read(number: int) -> None:
            for offset in offsets[number::READ_THREADS]:
                os.preadv(fd, [self._buffers[number]], offset)

        with ThreadPoolExecutor(READ_THREADS) as pool:
            list(pool.map(read, range(READ_THREADS)))
        os.close(fd)
        return time.perf_counter() - begun

    def close(self) -> None:
        for buffer in self._buffers:
            buffer.close()


def forget_files(folder: str) -> None:
    """Out of the page cache with them."""
    for path in Path(folder).rglob("*"):
        if path.is_file():
            fd = os.open(path, os.O_RDONLY)
            os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
            os.close(fd)


def measure(load: Load, folder: str, state: State, expected: State) -> float:
    for tensor in state["model"].values():
        tensor.fill_(1)
    forget_files(folder)
    elapsed = load(folder, state)
    if not all(torch.equal(tensor, expected["model"][name]) for name, tensor in state["model"].items()):
        raise RuntimeError("it has loaded something else")
    return elapsed


def run(args: argparse.Namespace, folder: str) -> dict[str, Any]:
    tensor_bytes = args.tensor_kb * 1000 if args.tensor_kb else int(args.gib * (1 << 30)) // args.tensors
    tensor_bytes = max(4, tensor_bytes // 4 * 4)
    trainer = multiprocessing.get_context("spawn").Process(
        target=save_and_die, args=(folder, args.tensors, tensor_bytes, "torch-load" in args.peers)
    )
    trainer.start()
    expected = make_state(args.tensors, tensor_bytes, seed=STEP)
    state = make_state(args.tensors, tensor_bytes, seed=0)
    trainer.join()
    if trainer.exitcode != -signal.SIGKILL:
        raise RuntimeError(f"the trainer that was to save ended with {trainer.exitcode}")
    limits = Limits(args.tensors * tensor_bytes, f"{folder}/ours/step-{STEP:08d}/__0_0.distcp")
    loads = OURS | {name: PEERS[name] for name in args.peers}
    turns: dict[str, Callable[[], float]] = {"memcpy": limits.memcpy, "direct read": limits.direct_read} | {
        name: partial(measure, load, folder, state, expected) for name, load in loads.items()
    }
    seconds: dict[str, list[float]] = {name: [] for name in turns}
    dice = random.Random(0)
    for _ in range(args.loads + 1):
        # In any order: a disk that gives a burst after a rest would favour whoever comes after those that rest it.
        for name in dice.sample(list(turns), len(turns)):
            time.sleep(args.pause)
            seconds[name].append(turns[name]())
    limits.close()
    return {
        "settings": {name: value for name, value in vars(args).items() if name not in ("json", "folder")}
        | {"bytes": args.tensors * tensor_bytes, "torch": torch.__version__},
        "limits": {"memcpy_s": seconds["memcpy"][1:], "direct_read_s": seconds["direct read"][1:]},
        "results": {name: {"load_s": seconds[name][1:], "first_load_s": seconds[name][0]} for name in loads},
    }


def report(found: dict[str, Any]) -> str:
    memcpy = statistics.median(found["limits"]["memcpy_s"])
    limit = memcpy + statistics.median(found["limits"]["direct_read_s"])
    medians = {name: statistics.median(result["load_s"]) for name, result in found["results"].items()}
    rows: list[tuple[Any, ...]] = [
        ("memcpy", memcpy * 1e3, 1, None, None),
        ("direct read + memcpy", limit * 1e3, memcpy / limit, 1, None),
    ]
    for name, result in found["results"].items():
        first = result["first_load_s"] / medians[name]
        rows.append((name, medians[name] * 1e3, memcpy / medians[name], medians[name] / limit, first))
    headers = ["", "load ms", "speed / memcpy", "time / (read + memcpy)", "first / later"]
    lines = [tabulate(rows, headers=headers, floatfmt=("", ".1f", ".2f", ".2f", ".2f"))]
    if "dcp-load" in medians:
        lines.append(
            f"from storage {medians['dcp-load'] / medians['asyncckpt, storage']:.1f} times as fast as dcp-load"
        )
    return "\n".join(lines)


@contextmanager
def working_folder(inside: str | None) -> Iterator[str]:
    """A folder for all of it; the worker leaves with it."""
    if inside is not None:
        os.makedirs(inside, exist_ok=True)
    folder = tempfile.mkdtemp(dir=inside, prefix="bench-")
    os.environ[FOLDER_VARIABLE] = f"{folder}/runtime"
    try:
        yield folder
    finally:
        visit = Visit.pay(door_name(f"{os.path.realpath(folder)}/ours\n", 0), LIMIT_S)
        if visit is not None:
            visit.retire(LIMIT_S)
            visit.close()
        shutil.rmtree(folder)


def main(argv: list[str] | None = None) -> int:
    """Measure, print a table, write the figures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gib", type=float, default=1.0, help="bytes of all tensors, in GiB")
    parser.add_argument("--tensors", type=int, default=400)
    parser.add_argument("--tensor-kb", type=int, help="instead of --gib: the size of each tensor, in 1000 bytes")
    parser.add_argument("--loads", type=int, default=5, help="rounds, after a first one that is cold")
    parser.add_argument("--pause", type=float, default=0.5, help="seconds before each turn")
    parser.add_argument(
        "--peers", type=lambda text: [name for name in text.split(",") if name], default=list(PEERS), metavar="A,B"
    )
    parser.add_argument("--folder", help="where to write, on the disk in question (default: the system's temporary)")
    parser.add_argument("--json", help="write all figures to this file")
    args = parser.parse_args(argv)
    unknown = set(args.peers) - set(PEERS)
    if unknown:
        parser.error(f"no such peer: {', '.join(sorted(unknown))}; there are: {', '.join(PEERS)}")
    with working_folder(args.folder) as folder:
        found = run(args, folder)
    print(report(found))
    if args.json:
        Path(args.json).write_text(json.dumps(found, indent=1))
    return 0


if __name__ == "__main__":
    sys.exit(main())
