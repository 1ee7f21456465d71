"""Ranks that nvrx's ``inprocess.Wrapper`` restarts many times, each in the same process."""

from __future__ import annotations

import contextlib
import gc
import logging
import os
import random
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from datetime import timedelta
from multiprocessing import get_context
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
import torch.distributed as dist

from asyncckpt import Checkpointer, Save
from asyncckpt.config import Config
from asyncckpt.errors import CheckpointError
from asyncckpt.staging.slot_copy import SlotStager
from support.peers import peer
from support.ranks import LIMIT_S
from support.segments import mapped_segments
from support.states import same

FAULTS = ("between saves", "in save", "in load", "at random")
"""Each iteration has the next fault, on a random rank. Except for "in load", nvrx interrupts the other saves."""


MOST_THREADS = max(2, min(4, os.cpu_count() or 1))
"""Maximum number of threads of an abandoned checkpointer, which the next checkpointer closes.

They are the copying threads and, with overlap, the thread that stages in place of the caller.
"""


@dataclass(frozen=True)
class Plan:
    """The folders of a job, and its faults."""

    root: str
    folder: str
    iterations: int
    port: int
    """The port of nvrx's own store."""
    seed: int = 0
    kill_at: int = -1
    """The iteration in which the last rank is killed."""
    spare: bool = False
    """Start one rank more than the active ranks."""


@dataclass
class Seen:
    """The observations of a rank in an iteration."""

    world: int
    rank: int
    source: str = ""
    loaded: int = 0
    is_right: bool = False
    is_newest: bool = False
    holds: dict[str, int] = field(default_factory=dict)
    before: list[tuple[int, str]] = field(default_factory=list)
    """The saves of the previous iteration: their steps, and the outcomes of their handles."""


def run(plan: Plan, world: int) -> list[list[Seen] | str | None]:
    """Run the job. Return for each rank its observations, or the traceback of its error, or None if it was killed."""
    context = get_context("forkserver")
    started = []
    path = [
        str(Path(__file__).parents[2]),
        str(Path(__file__).parents[1]),
        peer("nvrx-0.7.0"),
        peer("defusedxml-0.7.1"),
    ]
    for rank in range(world):
        ours, theirs = context.Pipe()
        process = context.Process(target=_main, args=(theirs, rank, world, path, dict(os.environ), plan))
        process.start()
        theirs.close()
        started.append((process, ours))
    deadline = time.monotonic() + LIMIT_S + 10 * plan.iterations
    found: list[list[Seen] | str | None] = []
    for _, pipe in started:
        said = None
        with contextlib.suppress(EOFError):
            if pipe.poll(max(0.0, deadline - time.monotonic())):
                said = pipe.recv()
        found.append(said)
    for process, pipe in started:
        process.join(30)
        process.kill()
        process.join()
        process.close()
        pipe.close()
    return found


def _main(pipe: Connection, rank: int, world: int, path: list[str], environment: dict[str, str], plan: Plan) -> None:
    os.environ.clear()
    os.environ.update(environment, RANK=str(rank), WORLD_SIZE=str(world))
    sys.path[:0] = path
    torch.set_num_threads(1)
    # The reason not to load from memory is logged below the level of warnings. A failed test has to show it.
    log = logging.getLogger("asyncckpt")
    log.setLevel(logging.INFO)
    log.addHandler(logging.StreamHandler())
    try:
        pipe.send(_wrapped(plan)() or [])
    except BaseException:
        pipe.send(traceback.format_exc())
    finally:
        pipe.close()


def _wrapped(plan: Plan) -> Callable[[], list[Seen] | None]:
    import nvidia_resiliency_ext.inprocess as inprocess
    from nvidia_resiliency_ext.inprocess.abort import AbortTorchDistributed
    from nvidia_resiliency_ext.inprocess.rank_assignment import MaxActiveWorldSize, ShiftRanks

    from asyncckpt.integrations.nvrx import AbortAsyncckpt

    def seconds(number: float) -> timedelta:
        return timedelta(seconds=number)

    training = Training(plan)

    wrapper = inprocess.Wrapper(
        store_kwargs={"host_name": "127.0.0.1", "port": plan.port},
        abort=inprocess.Compose(AbortTorchDistributed(), AbortAsyncckpt()),
        rank_assignment=inprocess.Compose(MaxActiveWorldSize(2 if plan.spare else None), ShiftRanks()),
        monitor_thread_interval=seconds(0.25),
        monitor_process_interval=seconds(0.05),
        heartbeat_interval=seconds(0.1),
        progress_watchdog_interval=seconds(0.1),
        last_call_wait=seconds(0.02),
        soft_timeout=seconds(60),
        hard_timeout=seconds(70),
        heartbeat_timeout=seconds(20),
        barrier_timeout=seconds(100),
        completion_timeout=seconds(100),
    )

    def train(call: Any = None) -> list[Seen]:
        return training.run(call.iteration)

    train.__annotations__["call"] = inprocess.CallWrapper  # nvrx looks for the class, not for its name
    wrapped: Callable[[], list[Seen] | None] = wrapper(train)
    return wrapped


class Training:
    """The wrapped function, and the state that this process keeps between iterations."""

    def __init__(self, plan: Plan) -> None:
        self._plan = plan
        self._seen: list[Seen] = []
        self._durable = 0
        self._handles: list[Save] = []

    def run(self, iteration: int) -> list[Seen]:
        """Run an iteration: load, save a few times, and, unless it is the last iteration, fail."""
        rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
        seen = Seen(world, rank, before=[_outcome(save) for save in self._handles], holds=_holds())
        self._handles.clear()
        self._seen.append(seen)
        plan = self._plan
        dist.init_process_group(
            "gloo", init_method=f"file://{plan.folder}/meeting-{iteration}", rank=rank, world_size=world
        )
        dist.barrier()
        # With one slot, a save that fails on one rank has overwritten the images of the step before.
        config = Config(slots=2, overlap=iteration % 2 == 1, timeout=30, commit_timeout=30)
        turn = random.Random(plan.seed * 1000 + iteration)
        fault, on = FAULTS[iteration % len(FAULTS)], turn.randrange(world)
        if iteration == plan.iterations:
            fault = ""
        elif iteration == plan.kill_at:
            fault, on = "kill", world - 1
        checkpointer = Checkpointer(plan.root, config)
        with checkpointer if iteration % 3 else contextlib.nullcontext():
            first = self._load(checkpointer, seen, fault if on == rank else "") + 1
            for step in range(first, first + 3):
                self._save(checkpointer, step, wait=step == first)
            if on == rank:
                self._fail(checkpointer, fault, first + 3, turn)
            elif fault:
                self._save_until_interrupted(checkpointer, first + 3)
            self._handles[-1].result(30)
        checkpointer.close()
        dist.destroy_process_group()
        return self._seen

    def _load(self, checkpointer: Checkpointer, seen: Seen, fault: str) -> int:
        if checkpointer.latest() is None:
            return 0
        into = _state(-1)
        if fault == "in load":
            into["w"] = torch.zeros(3)
        seen.loaded = checkpointer.load(into)
        assert checkpointer.loaded is not None
        seen.source = checkpointer.loaded.source
        seen.is_right = same(into, _state(seen.loaded, seen.rank))
        seen.is_newest = seen.loaded >= self._durable
        self._durable = max(self._durable, seen.loaded)
        return seen.loaded

    def _save(self, checkpointer: Checkpointer, step: int, *, wait: bool = False) -> None:
        save = checkpointer.save(step, _state(step))
        self._handles.append(save)
        if wait:
            save.result(30)
            self._durable = step
        checkpointer.synchronize_staging()

    def _fail(self, checkpointer: Checkpointer, fault: str, step: int, turn: random.Random) -> None:
        if fault == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        if fault == "in save":
            with _failing_copies():
                self._save(checkpointer, step, wait=True)
        if fault == "at random":  # the other rank is saving
            for each in range(step, step + turn.randrange(3)):
                self._save(checkpointer, each)
            time.sleep(turn.random() / 10)  # a random delay, so that the fault hits the other rank at any point
        if fault:
            raise RuntimeError(f"as the test wants: {fault}")

    def _save_until_interrupted(self, checkpointer: Checkpointer, step: int) -> None:
        deadline = time.monotonic() + 60
        while time.monotonic() < deadline:
            self._save(checkpointer, step, wait=step % 5 == 0)
            step += 1
        raise TimeoutError("nobody has interrupted this")


@contextlib.contextmanager
def _failing_copies() -> Iterator[None]:
    real: Any = SlotStager.copy

    def fail(*args: Any) -> None:
        real(*args)
        raise RuntimeError("as the test wants")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(SlotStager, "copy", fail)
        yield


def _state(step: int, rank: int | None = None) -> dict[str, Any]:
    rank = dist.get_rank() if rank is None else rank
    return {
        "w": torch.full((50_000,), float(step)),
        f"of {rank}": torch.arange(step, step + 1000, dtype=torch.float32),
        "step": step,
    }


def _outcome(save: Save) -> tuple[int, str]:
    assert save.step is not None
    begun = time.monotonic()
    try:
        save.result(60)
    except CheckpointError as error:
        took = time.monotonic() - begun
        return (
            save.step,
            f"{type(error).__name__}: {error.message}" if took < 5 else f"ended after {took:.1f} s: {error}",
        )
    return save.step, "committed"


def _threads() -> int:
    return sum(each.name.startswith("asyncckpt") for each in threading.enumerate())


def _holds() -> dict[str, int]:
    """Collect garbage, wait for threads of abandoned messages, and return the resources that this process holds."""
    gc.collect()
    process = psutil.Process()
    deadline = time.monotonic() + 10
    while (threads := _threads()) > MOST_THREADS and time.monotonic() < deadline:
        time.sleep(0.01)
    return {
        "threads": threads,
        "descriptors": process.num_fds(),
        "workers": len(process.children()),
        "segments": len(mapped_segments()),
    }
