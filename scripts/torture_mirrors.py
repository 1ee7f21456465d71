#!/usr/bin/env python3
"""Kill workers, readers and trainers of weights on several hosts at random. Detect torn reads and stuck readers.

    scripts/torture_mirrors.py                      # 300 kills on four hosts: some minutes on two cores
    scripts/torture_mirrors.py --kills 5            # a taste

All elements of a version equal its number, except in two tensors. One is constant, and sent only once. In the other,
each version changes a few scattered elements, which are sent as a patch. A host is a runtime
folder. Readers on each host check every element. The exit code is 1 if an element has another version, a process fails
by itself, or a reader receives nothing new for a minute.
"""

from __future__ import annotations

import argparse
import contextlib
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

import torch
from tabulate import tabulate
from tqdm import tqdm

from asyncckpt.config import Config
from asyncckpt.link.endpoint import FOLDER_VARIABLE, connect, endpoint_names, peer_pid
from asyncckpt.weights import WeightPublisher, WeightSubscriber

ADDRESS = "torture"
LIMIT_S = 60.0
CONFIG = Config(timeout=LIMIT_S, linger=2.0)
SIZES = (1_500_000, 300_000, 70, 1)
CONSTANT = 1_000_000
# A version changes each of these elements whose number has the same rest.
SPARSE, PERIOD = 1_000_000, 64

_context = multiprocessing.get_context("forkserver")
_context.set_forkserver_preload(["asyncckpt.weights"])


def expected(name: str, version: int) -> torch.Tensor:
    """Return the elements of a tensor in a version. The result is broadcast to the shape."""
    if name == "sparse":
        return (version - (version - torch.arange(SPARSE)) % PERIOD).float()
    return torch.tensor(1.0 if name == "constant" else float(version))


def _publish(runtime: str, locator: str, published: Synchronized[int]) -> None:
    os.environ[FOLDER_VARIABLE] = runtime
    torch.set_num_threads(1)
    state = {f"layer.{number}.weight": torch.zeros(size) for number, size in enumerate(SIZES)}
    state |= {"constant": torch.zeros(CONSTANT), "sparse": torch.zeros(SPARSE)}
    with WeightPublisher(ADDRESS, when_busy="wait", config=CONFIG) as publisher:
        publisher.serve("127.0.0.1", file=locator)
        while True:
            version = published.value + 1
            for name, tensor in state.items():
                tensor.copy_(expected(name, version))
            publisher.publish(state, version)
            published.value = version
            time.sleep(0.05)


def _read(runtime: str, locator: str, reads: Synchronized[int], wrong: Synchronized[int]) -> None:
    os.environ[FOLDER_VARIABLE] = runtime
    torch.set_num_threads(1)
    newest = 0
    with WeightSubscriber(ADDRESS, locator=locator, config=CONFIG) as subscriber:
        while True:
            with subscriber.acquire(newest + 1, timeout=LIMIT_S) as weights:
                newest = weights.version
                wrong.value += any(
                    not bool((tensor == expected(name, newest)).all()) for name, tensor in weights.items()
                )
            reads.value += 1


class Process:
    """A process that can be killed and started again."""

    def __init__(self, target: Any, *arguments: Any) -> None:
        self._target, self._arguments = target, arguments
        self.start()

    def start(self) -> None:
        self._process = _context.Process(target=self._target, args=self._arguments, daemon=True)
        self._process.start()

    def kill(self) -> None:
        self._process.kill()
        self._process.join()
        self._process.close()

    def has_ended(self) -> bool:
        """Return whether the process has ended by itself, because of an error."""
        return not self._process.is_alive()


def _kill_workers(runtime: Path) -> int:
    """Kill the workers of a host. Return their number."""
    os.environ[FOLDER_VARIABLE] = str(runtime)
    killed = 0
    for name in endpoint_names():
        with contextlib.suppress(OSError, ProcessLookupError):
            if (connection := connect(name)) is not None:
                with connection:
                    os.kill(peer_pid(connection), signal.SIGKILL)
                    killed += 1
    return killed


def trial(hosts: int, kills: int, seed: int, folder: Path) -> dict[str, Any]:
    """Run the trial. Return the counts."""
    chance = random.Random(seed)
    runtimes = [folder / f"host-{number}" for number in range(hosts + 1)]
    locator = str(folder / "locator")
    published: Synchronized[int] = _context.Value(ctypes.c_longlong, 0)
    reads: list[Synchronized[int]] = [_context.Value(ctypes.c_longlong, 0) for _ in range(2 * hosts)]
    wrong: Synchronized[int] = _context.Value(ctypes.c_longlong, 0)
    seen: dict[str, Any] = dict.fromkeys(("trainers killed", "workers killed", "readers killed", "stuck", "failed"), 0)
    trainer = Process(_publish, str(runtimes[0]), locator, published)
    while not Path(locator).exists():
        time.sleep(0.01)
    readers = [
        Process(_read, str(runtimes[1 + number // 2]), locator, count, wrong) for number, count in enumerate(reads)
    ]
    try:
        for _ in tqdm(range(kills), leave=False, file=sys.stderr):
            time.sleep(chance.random() * 0.8)
            which = chance.random()
            if which < 0.1:
                trainer.kill()
                if chance.random() < 0.5:  # the trainer's host is lost, too
                    _kill_workers(runtimes[0])
                trainer.start()
                seen["trainers killed"] += 1
            elif which < 0.6:
                seen["workers killed"] += _kill_workers(chance.choice(runtimes[1:]))
            else:
                reader = chance.choice(readers)
                reader.kill()
                reader.start()
                seen["readers killed"] += 1
            seen["failed"] += sum(each.has_ended() for each in (trainer, *readers))
        had, deadline = [count.value for count in reads], time.monotonic() + LIMIT_S
        while any(count.value == before for count, before in zip(reads, had, strict=True)):
            if time.monotonic() > deadline:
                seen["stuck"] = sum(count.value == before for count, before in zip(reads, had, strict=True))
                break
            time.sleep(0.05)
    finally:
        for process in (*readers, trainer):
            process.kill()
        for runtime in runtimes:
            _kill_workers(runtime)
    return seen | {"versions": published.value, "reads": sum(count.value for count in reads), "wrong": wrong.value}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--hosts", type=int, default=4, help="beside the trainer's (default: %(default)s)")
    parser.add_argument("--kills", type=int, default=300)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--json", type=Path, help="write what was seen there")
    options = parser.parse_args()
    # A worker that is just starting has no endpoint yet. It exits by itself.
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        begun = time.perf_counter()
        seen = trial(options.hosts, options.kills, options.seed, Path(folder))
        seen["seconds"] = round(time.perf_counter() - begun, 1)
    print(tabulate(seen.items(), headers=("what", "seen")))
    if options.json is not None:
        options.json.write_text(json.dumps(seen))
    return int(bool(seen["wrong"] or seen["stuck"] or seen["failed"] or not seen["reads"]))


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
    sys.exit(main())
