"""Run the ranks of a job in processes. They report their steps until they are killed."""

from __future__ import annotations

import contextlib
import logging
import multiprocessing
import os
import random
import shutil
import tempfile
import time
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any

import torch
import torch.distributed as dist
from tqdm import tqdm

from asyncckpt import Checkpointer
from asyncckpt.link.endpoint import FOLDER_VARIABLE
from torture.promises import check_root
from torture.tally import LIMIT_S, Tally

MARK = "ASYNCCKPT_TORTURE"

context = multiprocessing.get_context("forkserver")
context.set_forkserver_preload(["torch.distributed", "asyncckpt.checkpointer", "asyncckpt.ranks.rounds"])


class Job:
    """The ranks of a job, each in a process of its own."""

    def __init__(self, world_size: int, function: Callable[..., None], *args: Any) -> None:
        self._folder = tempfile.mkdtemp(prefix="asyncckpt-meeting-")
        self.pipes: list[Connection] = []
        self.processes = []
        given = {FOLDER_VARIABLE, MARK, *(name for name in os.environ if name.startswith(("AWS_", "TORTURE_")))}
        environment = {name: os.environ[name] for name in given}
        for rank in range(world_size):
            ours, theirs = context.Pipe()
            rendezvous = f"file://{self._folder}/meeting"
            process = context.Process(
                target=_rank, args=(theirs, rank, world_size, rendezvous, environment, function, args)
            )
            process.start()
            theirs.close()
            self.pipes.append(ours)
            self.processes.append(process)

    def hear(self, rank: int, kind: str, limit: float = LIMIT_S) -> tuple[Any, ...]:
        """Return the next report of this ``kind``. Raises ``TimeoutError``, or ``RuntimeError`` if the rank ends."""
        deadline = time.monotonic() + limit
        while time.monotonic() < deadline:
            if not self.pipes[rank].poll(0.5):
                continue
            try:
                said = self.pipes[rank].recv()
            except (EOFError, ConnectionResetError) as error:
                self.processes[rank].join(10)
                raise RuntimeError(f"rank {rank} has ended with {self.processes[rank].exitcode}") from error
            if said[0] == "error":
                raise RuntimeError(f"a trainer failed: {said[1]}")
            if said[0] == kind:
                return tuple(said[1:])
        raise TimeoutError(f"rank {rank} has not {kind} within {limit:g} s")

    def heard(self, rank: int) -> list[tuple[Any, ...]]:
        """Return the unread reports of a rank."""
        said = []
        with contextlib.suppress(EOFError, ConnectionResetError):
            while self.pipes[rank].poll(0):
                said.append(self.pipes[rank].recv())
        return said

    def kill(self, first: int) -> list[list[tuple[Any, ...]]]:
        """Kill a rank, then the others, as a launcher does. Return the unread reports of each."""
        for rank in [first, *range(len(self.processes))]:
            self.processes[rank].kill()
        said: list[list[tuple[Any, ...]]] = []
        for pipe in self.pipes:
            said.append([])
            with contextlib.suppress(EOFError, ConnectionResetError):
                while True:
                    said[-1].append(pipe.recv())
        for process in self.processes:  # a worker cannot be taken over before its trainer is dead
            process.join(LIMIT_S)
        return said

    def __enter__(self) -> Job:
        return self

    def __exit__(self, *_: object) -> None:
        for process, pipe in zip(self.processes, self.pipes, strict=True):
            process.kill()
            process.join()
            process.close()
            pipe.close()
        shutil.rmtree(self._folder, ignore_errors=True)


def _rank(
    pipe: Connection,
    rank: int,
    world_size: int,
    rendezvous: str,
    environment: dict[str, str],
    function: Callable[..., None],
    args: tuple[Any, ...],
) -> None:
    os.environ.update(environment)
    torch.set_num_threads(1)
    logging.getLogger("asyncckpt").setLevel(logging.CRITICAL)
    if world_size > 1:
        dist.init_process_group("gloo", init_method=rendezvous, rank=rank, world_size=world_size)
    try:
        function(pipe, rank, *args)
    except Exception as error:
        pipe.send(("error", f"{type(error).__name__}: {error}"))
        raise
    finally:
        pipe.close()
        if world_size > 1:
            dist.destroy_process_group()


def worker_of(checkpointer: Checkpointer) -> int:
    client = checkpointer._engine.worker
    if client is None:
        raise RuntimeError("there is no worker")
    return client.pid


def count_rounds(tally: Tally, root: str, rounds: int, train: Callable[..., None], choice: random.Random) -> None:
    """Run ``rounds`` in one trainer. Each round reports its kind, its duration and its losses."""
    with Job(1, train, root, rounds, choice.randrange(1 << 30)) as job:
        try:
            for _ in tqdm(range(rounds), desc=os.path.basename(root), unit="round", disable=None):
                what, took, losses = job.hear(0, "round")
                tally.counts[what] += 1
                tally.longest_s = max(tally.longest_s, took)
                for loss in losses:
                    tally.lose(loss)
            job.hear(0, "ended")
        except (TimeoutError, RuntimeError) as error:
            tally.lose(f"{root}: {error}")
    check_root(tally, root)
