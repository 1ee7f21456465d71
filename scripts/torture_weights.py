#!/usr/bin/env python3
"""Publishes weights by the ten thousands, to readers that are killed at random: is a read ever torn, a slot ever lost?

    scripts/torture_weights.py                                  # 20,000 publications: some minutes on two cores
    scripts/torture_weights.py --publications 500 --kills 10    # a taste

All elements of a version are its number. Readers look at all of them, hold on to some for a while, and are killed
wherever they are. Exits with 1 if an element was of another version, if a slot stays taken when no reader is left, if
anything grows, or if a reader gets nothing new for 30 seconds.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import multiprocessing
import os
import random
import signal
import sys
import tempfile
import time
from multiprocessing.sharedctypes import Synchronized
from pathlib import Path
from typing import Any

import psutil
import torch
from tabulate import tabulate
from tqdm import tqdm

from asyncckpt.weights import WeightPublisher, WeightSubscriber
from asyncckpt.worker.endpoint import FOLDER_VARIABLE

ADDRESS = "torture"
LIMIT_S = 30.0
SLOTS = 5
SIZES = (300_000, 40_000, 1_000, 70, 7, 1)

_context = multiprocessing.get_context("forkserver")
_context.set_forkserver_preload(["asyncckpt.weights"])


class Reader:
    """One reading process at a time, started anew when it was killed."""

    def __init__(self, seed: int) -> None:
        self._seed = seed
        self.reads: Synchronized[int] = _context.Value(ctypes.c_longlong, 0)
        self.torn: Synchronized[int] = _context.Value(ctypes.c_longlong, 0)
        self.process: Any = None

    def start(self) -> None:
        self._seed += 1
        self.process = _context.Process(target=_read, args=(self._seed, self.reads, self.torn), daemon=True)
        self.process.start()

    def kill(self) -> None:
        self.process.kill()
        self.process.join()
        self.process.close()


def _read(seed: int, reads: Synchronized[int], torn: Synchronized[int]) -> None:
    chance = random.Random(seed)
    torch.set_num_threads(1)
    newest, kept = 0, []
    trial = multiprocessing.parent_process()
    with WeightSubscriber(ADDRESS) as subscriber:
        while trial is None or trial.is_alive():  # which may be killed, too
            weights = subscriber.acquire(newest, timeout=LIMIT_S)
            with weights:
                newest = weights.version
                torn.value += _is_torn(weights.values(), newest)
                if chance.random() < 0.2:
                    time.sleep(chance.random() * 0.005)
                    torn.value += _is_torn(weights.values(), newest)
                if chance.random() < 0.1:
                    kept.append((newest, list(weights.values())))  # beyond the block
            if len(kept) > 1 or (kept and chance.random() < 0.3):
                version, tensors = kept.pop(0)
                torn.value += _is_torn(tensors, version)
            reads.value += 1


def _is_torn(tensors: Any, version: int) -> bool:
    return any(not bool((tensor == version).all()) for tensor in tensors)


def trial(publications: int, kills: int, seed: int) -> dict[str, Any]:
    """All of it. Returns what was seen."""
    chance = random.Random(seed)
    state = {f"layer.{number}.weight": torch.zeros(size, dtype=torch.int64) for number, size in enumerate(SIZES)}
    kill_at = sorted(chance.sample(range(publications), kills))
    seen: dict[str, Any] = {"publications": publications, "readers killed": kills, "skipped": 0}
    readers = [Reader(seed * 1000), Reader(seed * 1000 + 500)]
    with WeightPublisher(ADDRESS, slots=SLOTS) as publisher:
        publisher.prepare(state)
        for reader in readers:
            reader.start()
        worker = publisher.worker.pid if publisher.worker is not None else 0
        before: dict[str, int] = {}
        version = 0
        for published in tqdm(range(publications), leave=False, file=sys.stderr):
            while True:
                version += 1
                for tensor in state.values():
                    tensor.fill_(version)
                by_name = version % 3 == 0
                if not publisher.publish(iter(state.items()) if by_name else state, version).skipped:
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
        seen |= {f"{what}, at a quarter and the end": f"{before[what]} {after[what]}" for what in before}
        seen["growth"] = [
            what for what in before if after[what] > before[what] + (4 << 20 if what.endswith("bytes") else 2)
        ]
        _await_reads(readers)
        for reader in readers:
            reader.kill()
        seen["slots lost"] = sum(publisher.publish(state, version + turn).skipped for turn in range(1, 2 * SLOTS + 1))
        with WeightSubscriber(ADDRESS) as subscriber:
            seen["slots lost"] += SLOTS - len(subscriber.versions())
    seen["reads"] = sum(reader.reads.value for reader in readers)
    seen["torn"] = sum(reader.torn.value for reader in readers)
    return seen


def _await_reads(readers: list[Reader]) -> None:
    """Each of them has to come to the newest version."""
    deadline = time.monotonic() + LIMIT_S
    for reader in readers:
        had = reader.reads.value
        while reader.reads.value == had:
            if time.monotonic() > deadline or not reader.process.is_alive():
                raise TimeoutError("a reader reads no more")
            time.sleep(0.01)


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


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--publications", type=int, default=20_000)
    parser.add_argument("--kills", type=int, default=200, help="of readers")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--json", type=Path, help="write what was seen there")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        os.environ[FOLDER_VARIABLE] = folder
        begun = time.perf_counter()
        seen = trial(options.publications, options.kills, options.seed)
        seen["seconds"] = round(time.perf_counter() - begun, 1)
    print(tabulate(seen.items(), headers=("what", "seen")))
    if options.json is not None:
        options.json.write_text(json.dumps(seen))
    return int(bool(seen["torn"] or seen["slots lost"] or seen["growth"] or not seen["reads"]))


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
    sys.exit(main())
