#!/usr/bin/env python3
"""Save a trainer, its prompts and its rollouts as one checkpoint, while processes and workers are killed at random.

    scripts/torture_parties.py                                  # 200 kills
    scripts/torture_parties.py --kills 6                        # a taste

A loader hands out prompts. A process of rollouts keeps the prompts until the trainer trains on them. Each process saves
its own state to the same steps. A dead process is started again, at times with another runtime folder, as on another
host. Then all load one step. Each prompt from the loader must be trained on, or in the buffer, exactly once.
The same is checked for every complete step at the end.

The exit code is 1 if a prompt is lost or there twice, if the parts of a step have different cuts, or if a call takes
longer than its budget.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import multiprocessing
import os
import random
import signal
import sys
import tempfile
import threading
import time
from collections import Counter
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import psutil
import torch
from tabulate import tabulate
from tqdm import tqdm

from asyncckpt import Checkpointer, CheckpointError, CheckpointNotFoundError, Config, FileSet, Save, join, load
from asyncckpt.link.endpoint import FOLDER_VARIABLE
from asyncckpt.party import Party

OTHERS = ("loader", "rollouts")
NAMES = ("trainer", *OTHERS)
COMMIT_S, LINGER_S = 8.0, 30.0
LIMIT_S = 60.0
"""The budget of each call: the end of a save, a restart of the worker, and a load."""
CONFIG = Config(commit_timeout=COMMIT_S, linger=LINGER_S, timeout=30.0, worker_restarts=10_000, restart_pause=0.01)
PROMPTS = 1 << 16

_context = multiprocessing.get_context("forkserver")


class Dead(Exception):
    """A process is dead, or does not answer."""


class Role:
    """A process of the application: its state, and its part of the checkpoint."""

    def __init__(self, root: str) -> None:
        self.saves: list[tuple[int, Save]] = []

    def load(self, step: int | None) -> Any:
        raise NotImplementedError

    def save(self, step: int, cut: str) -> None:
        raise NotImplementedError

    def settle(self) -> dict[int, str]:
        """Wait for all saves. Return the outcome of each step."""
        outcomes = {step: _outcome(save) for step, save in self.saves}
        self.saves.clear()
        return outcomes


def _outcome(save: Save) -> str:
    try:
        save.result(LIMIT_S)
    except CheckpointError as error:
        return type(error).__name__
    return "committed"


class TrainerRole(Role):
    """Counts how often each prompt was trained on."""

    def __init__(self, root: str) -> None:
        super().__init__(root)
        config = Config(**{**vars(CONFIG), "parties": OTHERS, "failure": "warn"})
        self.checkpointer = Checkpointer(root, config)
        self.state = {"counts": torch.zeros(PROMPTS, dtype=torch.int64), "weight": torch.ones(300_000)}

    def load(self, step: int | None) -> Any:
        self.settle()
        self.state["counts"].zero_()
        try:
            found = self.checkpointer.load(self.state)
        except CheckpointNotFoundError:
            self.checkpointer.prepare(self.state)
            found = 0
        return found, self.state["counts"].nonzero().flatten().tolist(), int(self.state["counts"].sum())

    def train(self, prompts: list[int]) -> None:
        self.state["counts"][prompts] += 1
        self.state["weight"] += 1

    def save(self, step: int, cut: str) -> None:
        self.saves.append((step, self.checkpointer.save(step, self.state, cut=cut)))


class PartyRole(Role):
    """The loader with its cursor as bytes, or the rollouts with their buffer as a state dict or a set of files."""

    def __init__(self, root: str, name: str) -> None:
        super().__init__(root)
        config = Config(**{**vars(CONFIG), "failure": "warn"})
        self.party: Party = join(root, name, of=NAMES, config=config)
        self.cursor, self.buffer = 0, list[int]()

    def load(self, step: int | None) -> Any:
        self.settle()
        self.cursor, self.buffer = 0, []
        if step and (part := self.party.load(step=step)) is not None:
            if part.data is not None:
                self.cursor = json.loads(part.data)
            else:
                self.buffer = json.loads((Path(part.folder) / "buffer.json").read_text())
        return self.cursor, self.buffer

    def next(self, number: int) -> list[int]:
        self.cursor += number
        return [*range(self.cursor - number, self.cursor)]

    def add(self, prompts: list[int]) -> None:
        self.buffer += prompts

    def take(self, number: int) -> list[int]:
        taken, self.buffer = self.buffer[:number], self.buffer[number:]
        return taken

    def save(self, step: int, cut: str) -> None:
        part: FileSet | bytes = json.dumps(self.cursor).encode()
        if self.party.name == "rollouts":
            part = FileSet()
            part.add_bytes("buffer.json", json.dumps(self.buffer).encode())
            part.add_dcp_folder("tokens", {"tokens": torch.full((50_000,), step)})
        self.saves.append((step, self.party.save(step, part, cut=cut)))


def _serve(name: str, root: str, runtime: str, pipe: Connection) -> None:
    os.environ[FOLDER_VARIABLE] = runtime
    torch.set_num_threads(1)
    role = TrainerRole(root) if name == "trainer" else PartyRole(root, name)
    while True:
        method, arguments = pipe.recv()
        try:
            pipe.send((None, getattr(role, method)(*arguments)))
        except CheckpointError as error:
            pipe.send((repr(error), None))


class Actor:
    """A process of the application, as the driver sees it."""

    def __init__(self, name: str, root: str, runtime: str) -> None:
        self.name = name
        self.pipe, other = _context.Pipe()
        self.process = _context.Process(target=_serve, args=(name, root, runtime, other), daemon=True)
        self.process.start()
        other.close()

    def call(self, method: str, *arguments: Any) -> Any:
        try:
            self.pipe.send((method, arguments))
            if not self.pipe.poll(LIMIT_S) and self.process.is_alive():
                raise TimeoutError(f"{self.name}.{method} takes longer than {LIMIT_S:g} s")
            failure, value = self.pipe.recv()
        except (EOFError, OSError) as error:
            if isinstance(error, TimeoutError):
                raise
            raise Dead(self.name) from error
        if failure is not None:
            raise CheckpointError(failure)
        return value

    def kill(self) -> None:
        self.process.kill()
        self.process.join()


def _workers(folder: str) -> list[psutil.Process]:
    """Return the workers with a runtime folder below ``folder``."""
    found = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            if "asyncckpt.worker" in process.cmdline() and process.environ()[FOLDER_VARIABLE].startswith(folder):
                found.append(process)
    return found


class Application:
    """The driver: it starts the processes, moves prompts between them, and checks the loaded parts."""

    def __init__(self, folder: Path, seed: int) -> None:
        self.root, self.folder = str(folder / "root"), folder
        self.random = random.Random(seed)
        self.seen: Counter[str] = Counter(dict.fromkeys(("lost or twice", "mixed", "late"), 0))
        self.hosts = dict.fromkeys(NAMES, 0)
        self.actors = {name: self._start(name) for name in NAMES}

    def _start(self, name: str) -> Actor:
        if self.random.random() < 0.3:
            self.hosts[name] += 1  # elsewhere, where the worker before is not found
        return Actor(name, self.root, str(self.folder / f"{name}-{self.hosts[name]}"))

    def recover(self) -> int:
        """Start dead processes again, and let all load one step. Return the step."""
        while True:
            try:
                for name, actor in self.actors.items():
                    if not actor.process.is_alive():
                        self.actors[name] = self._start(name)
                step, trained, total = self.actors["trainer"].call("load", None)
                cursor, _ = self.actors["loader"].call("load", step)
                _, buffer = self.actors["rollouts"].call("load", step)
            except Dead:
                continue
            except TimeoutError as error:
                print(error, file=sys.stderr)
                self.seen["late"] += 1
                for actor in self.actors.values():
                    actor.kill()
                continue
            self.check(step, trained, total, buffer, cursor)
            return int(step)

    def check(self, step: int, trained: list[int], total: int, buffer: list[int], cursor: int) -> None:
        """Check that each prompt was trained on, or waits, exactly once."""
        if sorted(trained + buffer) != [*range(cursor)] or total != len(trained):
            self.seen["lost or twice"] += 1
            print(f"step {step}: {total} trained, {len(buffer)} wait, {cursor} handed out", file=sys.stderr)

    def train(self, step: int, until: float) -> None:
        """Train and save until ``until``. Raises ``Dead``."""
        while time.monotonic() < until:
            self.actors["rollouts"].call("add", self.actors["loader"].call("next", self.random.randint(1, 20)))
            self.actors["trainer"].call("train", self.actors["rollouts"].call("take", self.random.randint(1, 20)))
            step += 1
            if self.random.random() < 0.3:
                for name in self.random.sample(NAMES, 3):
                    with contextlib.suppress(CheckpointError):  # e.g. the worker is dead; the next save has a new one
                        self.actors[name].call("save", step, f"cut of {step}")
                if self.random.random() < 0.5:
                    for actor in self.actors.values():
                        self.seen.update(actor.call("settle").values())

    def kill(self) -> None:
        """Kill something."""
        which = self.random.choice((*NAMES, "all", "workers", "worker", "everything"))
        self.seen[f"killed: {which}"] += 1
        if which in ("workers", "worker", "everything"):
            found = _workers(str(self.folder))
            for worker in found if which != "worker" else self.random.sample(found, min(1, len(found))):
                with contextlib.suppress(psutil.Error):
                    worker.kill()
        for name, actor in self.actors.items():
            if which in (name, "all", "everything"):
                actor.process.kill()

    def run(self, kills: int) -> dict[str, int]:
        """Run the application with so many kills."""
        for _ in tqdm(range(kills), leave=False, file=sys.stderr):
            step = self.recover()
            seconds = self.random.uniform(0.05, 1.5)
            killer = threading.Timer(seconds, self.kill)
            killer.start()
            try:
                self.train(step, time.monotonic() + seconds + 0.5)
            except Dead:
                pass
            except TimeoutError as error:
                print(error, file=sys.stderr)
                self.seen["late"] += 1
            killer.join()
        self.train(self.recover(), time.monotonic() + 3)
        self.seen["last step"] = self.recover()
        self.look_at_all()
        return dict(self.seen)

    def look_at_all(self) -> None:
        """Check every complete step of the root."""
        for folder in sorted(Path(self.root).glob("step-*")):
            if not (folder / "asyncckpt.json").exists():
                continue
            self.seen["complete steps"] += 1
            cuts = {json.loads((folder / "parties" / f"{name}.json").read_text())["cut"] for name in NAMES}
            state = {"counts": torch.zeros(PROMPTS, dtype=torch.int64)}
            load(state, checkpoint_id=folder, no_dist=True)
            trained = state["counts"].nonzero().flatten().tolist()
            buffer = json.loads((folder / "parties/rollouts/buffer.json").read_text())
            cursor = json.loads((folder / "parties/loader/part").read_text())
            self.check(int(folder.name[5:13]), trained, int(state["counts"].sum()), buffer, cursor)
            self.seen["mixed"] += len(cuts) != 1

    def close(self) -> None:
        for actor in self.actors.values():
            actor.kill()
        for worker in _workers(str(self.folder)):
            with contextlib.suppress(psutil.Error):
                worker.kill()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=200)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--json", type=Path, help="write the counts to this file")
    options = parser.parse_args()
    _context.set_forkserver_preload(["asyncckpt.party", "asyncckpt.checkpointer", "torch"])
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        begun = time.perf_counter()
        application = Application(Path(folder), options.seed)
        try:
            seen = application.run(options.kills)
        finally:
            application.close()
        seen["seconds"] = round(time.perf_counter() - begun)
    print(tabulate(seen.items(), headers=("what", "seen")))
    if options.json is not None:
        options.json.write_text(json.dumps(seen))
    return int(bool(seen["lost or twice"] or seen["mixed"] or seen["late"] or not seen["complete steps"]))


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
    sys.exit(main())
