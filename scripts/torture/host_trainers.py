"""The trainers on hosts that may be lost. They load the newest step, and then save until they are killed."""

from __future__ import annotations

import contextlib
import logging
import os
import random
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from multiprocessing.connection import Connection
from pathlib import Path

import torch.distributed as dist

from asyncckpt import Checkpointer, Save
from asyncckpt.config import Transport
from asyncckpt.errors import CheckpointError, CheckpointNotFoundError, StorageError
from asyncckpt.link import process as worker_process
from asyncckpt.link.endpoint import FOLDER_VARIABLE
from asyncckpt.ranks.group import ADDRESS_VARIABLE, DOMAIN_VARIABLE
from torture.tally import CONFIG, LIMIT_S, is_of, state_of

_FAULTY = Path(__file__).parent.parent.parent / "tests" / "support" / "faulty_worker.py"
_GATE = "ASYNCCKPT_TEST_GATE"


@dataclass(frozen=True)
class Training:
    """A job on several hosts.

    ``place``: the folder of the job. ``places``: the host of each rank. From attempt ``hold_at`` on (0: never) workers
    write nothing until the file ``gate`` exists. ``timeout`` limits each wait, and each save. ``may_fail``: saves may
    fail.
    """

    place: str
    places: list[int]
    gate: str
    hold_at: int
    seed: int
    transport: Transport
    timeout: float
    may_fail: bool


def train(pipe: Connection, rank: int, training: Training) -> None:
    """Run one rank. Report the load, the end of ``prepare``, and the replicated and durable steps through ``pipe``."""
    choice = random.Random(f"{training.seed} {rank}")
    host = training.places[rank]
    os.environ[FOLDER_VARIABLE] = f"{training.place}/host-{host}"
    os.environ[ADDRESS_VARIABLE] = f"127.{host // 60000}.{host // 250 % 240}.{host % 250 + 2}"
    os.environ[DOMAIN_VARIABLE] = str(host)
    if training.hold_at:
        os.environ[_GATE] = training.gate
        real = worker_process.command()
        worker_process.command = lambda: [real[0], str(_FAULTY), f"create:hold:{training.hold_at}"]
    config = replace(CONFIG, timeout=training.timeout, commit_timeout=training.timeout)
    config = replace(config, replicas=1, transport=training.transport)
    checkpointer = Checkpointer(f"{training.place}/root", config)
    found = _load(pipe, checkpointer)
    _prepare(pipe, checkpointer, found)
    held = 0.0
    for step in range(found + 1, 10**9):
        dist.barrier()
        begun = time.monotonic()
        try:
            try:
                save = checkpointer.save(step, state_of(step))
            finally:
                held = max(held, time.monotonic() - begun)
            is_replicated = _wait(pipe, save, step, durable=not training.hold_at and choice.random() < 0.3)
        except CheckpointError:
            if not training.may_fail:
                raise
            is_replicated = False
        if is_replicated:
            pipe.send(("replicated", step, held, time.monotonic() - begun))
        time.sleep(choice.uniform(0, 0.02))


def _load(pipe: Connection, checkpointer: Checkpointer) -> int:
    """Load, and retry while a stopped worker that may be writing causes a refusal."""
    into, found, source, until = state_of(0), 0, "nothing", time.monotonic() + LIMIT_S
    while True:
        begun = time.monotonic()
        with _warnings() as said:
            try:
                found = checkpointer.load(into)
                source = checkpointer.loaded.source if checkpointer.loaded is not None else "nothing"
                break
            except CheckpointNotFoundError:
                break
            except StorageError as error:
                if time.monotonic() > until:
                    raise
                pipe.send(("loaded", 0, "refused", True, time.monotonic() - begun, [*said, str(error)]))
    pipe.send(("loaded", found, source, found == 0 or is_of(into, found), time.monotonic() - begun, said))
    return found


def _prepare(pipe: Connection, checkpointer: Checkpointer, found: int) -> None:
    """Prepare to save, and retry while a stopped worker causes a refusal."""
    refused, until = "", time.monotonic() + LIMIT_S
    while True:
        try:
            checkpointer.prepare(state_of(found))
            break
        except CheckpointError as error:
            refused = str(error)
            if time.monotonic() > until:
                raise
    pipe.send(("ready", refused))


def _wait(pipe: Connection, save: Save, step: int, *, durable: bool) -> bool:
    """Wait until the other hosts have the step. Return False if a newer step was copied first."""
    is_replicated = False
    with contextlib.suppress(CheckpointError):
        save.wait_replicated(LIMIT_S)
        is_replicated = True
    if durable:
        save.result(LIMIT_S)
        pipe.send(("durable", step))
    return is_replicated


@contextlib.contextmanager
def _warnings() -> Iterator[list[str]]:
    """Collect the warnings of loads in the block."""
    logger, said = logging.getLogger("asyncckpt.loading"), list[str]()
    handler = logging.Handler(logging.WARNING)
    handler.emit = lambda record: said.append(record.getMessage())  # type: ignore[method-assign]
    logger.addHandler(handler)
    logger.setLevel(logging.WARNING)
    logger.propagate = False
    try:
        yield said
    finally:
        logger.setLevel(logging.NOTSET)
        logger.removeHandler(handler)
        logger.propagate = True
