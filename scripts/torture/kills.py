"""Kill trainers and workers at random instants."""

from __future__ import annotations

import contextlib
import os
import random
import signal
import time
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import TypeAlias

import torch
import torch.distributed as dist
from tqdm import tqdm

from asyncckpt import Checkpointer
from asyncckpt.errors import CheckpointError, CheckpointNotFoundError
from torture.jobs import Job, worker_of
from torture.promises import check_root
from torture.tally import LIMIT_S, Tally, config_of_killed, is_of, state_of, to_save

Check: TypeAlias = Callable[[Tally, str], None]
"""Checks a root at the end."""


def kill_trainers(
    tally: Tally, place: str, kills: int, choice: random.Random, world_size: int, check: Check = check_root
) -> None:
    """Kill trainers at random instants. Each next trainer must find the newest step that all ranks have staged."""
    root = f"{place}/trainers-{world_size}"
    staged = 0
    for _ in tqdm(range(kills + 1), desc=f"trainer kills, {world_size} rank(s)", unit="kill", disable=None):
        victim = choice.randrange(world_size)
        with Job(world_size, _train, root, choice.randrange(1 << 30)) as job:
            try:
                when = choice.random()
                if when < 0.1:  # kill during the load
                    time.sleep(choice.uniform(0, 0.3))
                else:
                    _check_loads(tally, job, root, staged)
                    if when > 0.3:  # otherwise kill during the takeover
                        staged = min(job.hear(rank, "staged")[0] for rank in range(world_size))
                    time.sleep(choice.uniform(0, 0.4))
            except (TimeoutError, RuntimeError) as error:
                tally.lose(f"{root}: {error}")
            said = job.kill(victim)
        news = [max((each[1] for each in of_rank if each[0] == "staged"), default=0) for of_rank in said]
        staged = max(staged, min(news))
        tally.counts["trainers killed"] += 1
    check(tally, root)


def _check_loads(tally: Tally, job: Job, root: str, staged: int) -> None:
    for rank in range(len(job.pipes)):
        for memory in (True, False):
            step, source, good = job.hear(rank, "loaded")
            if step < staged:
                tally.lose(f"{root}: rank {rank} found step {step} in {source}; {staged} had been staged on all ranks")
            if not good:
                tally.lose(f"{root}: rank {rank} loaded wrong bytes of step {step} from {source}")
            if memory and staged > 0 and rank == 0:
                tally.counts[f"recovered from {source}"] += 1
        job.hear(rank, "ready")


def kill_workers(
    tally: Tally, place: str, kills: int, choice: random.Random, world_size: int, check: Check = check_root
) -> None:
    """Kill workers at random instants. The save in flight may fail on all ranks. The next save must work."""
    root = f"{place}/workers-{world_size}"
    with Job(world_size, _train_on, root) as job:
        try:
            for _ in tqdm(range(kills), desc=f"worker kills, {world_size} rank(s)", unit="kill", disable=None):
                _kill_a_worker(tally, job, choice)
            job.pipes[0].send("stop")
            for rank in range(world_size):
                job.hear(rank, "ended")
        except (TimeoutError, RuntimeError) as error:
            tally.lose(f"{root}: {error}")
    check(tally, root)


def _kill_a_worker(tally: Tally, job: Job, choice: random.Random) -> None:
    victim = choice.randrange(len(job.pipes))
    _, worker = job.hear(victim, "begun")
    time.sleep(choice.uniform(0, 0.1))
    with contextlib.suppress(ProcessLookupError):
        os.kill(worker, signal.SIGKILL)
    tally.counts["workers killed"] += 1
    least = 0
    for rank in [victim, *(rank for rank in range(len(job.pipes)) if rank != victim)]:
        step, its = job.hear(rank, "saved")
        while its == worker or step < least:  # the report is older than the kill
            step, its = job.hear(rank, "saved")
        least = step


def _train(pipe: Connection, rank: int, root: str, seed: int) -> None:
    """Load from memory and from storage, then save without end."""
    choice = random.Random(seed)
    checkpointer = Checkpointer(root, config_of_killed())
    last = 0
    for memory in (True, False):
        into, found, source = state_of(0, rank), 0, "nothing"
        with contextlib.suppress(CheckpointNotFoundError):
            found = checkpointer.load(into, memory=memory)
            source = checkpointer.loaded.source if checkpointer.loaded is not None else "nothing"
        pipe.send(("loaded", found, source, found == 0 or is_of(into, found)))
        last = max(last, found)
    pipe.send(("ready",))
    for step in range(last + 1, 10**9):
        state = to_save(step, rank)
        if dist.is_initialized():
            dist.barrier()
        save = checkpointer.save(step, state)
        pipe.send(("staged", step))
        if choice.random() < 0.3:
            save.result(LIMIT_S)
        time.sleep(choice.uniform(0, 0.02))


def _train_on(pipe: Connection, rank: int, root: str) -> None:
    """Save regardless of killed workers, until the first rank receives a stop."""
    with Checkpointer(root, config_of_killed()) as checkpointer:
        for step in range(1, 10**9):
            # As in any training, all ranks run the same steps.
            ends = torch.tensor(float(rank == 0 and pipe.poll()))
            if dist.is_initialized():
                dist.all_reduce(ends)
            if ends:
                break
            try:
                save = checkpointer.save(step, to_save(step, rank))
                pipe.send(("begun", step, worker := worker_of(checkpointer)))
                save.result(LIMIT_S)
                pipe.send(("saved", step, worker))
            except CheckpointError as error:
                pipe.send(("failed", step, type(error).__name__))
    pipe.send(("ended",))
