"""Hosts burn: trainers, workers and all that could be found of them are gone at once, and a spare host comes.

A host is a runtime folder and an address of the loopback range. At most one is lost at a time, and the next one only
when all that is new was replicated again; then what was replicated must be found, whatever storage has of it. Now and
then two are lost at once: then there is what storage has.
"""

from __future__ import annotations

import contextlib
import os
import random
import shutil
import time
from dataclasses import replace
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import psutil
import torch.distributed as dist
from tqdm import tqdm

from asyncckpt import Checkpointer
from asyncckpt.config import Transport
from asyncckpt.errors import CheckpointError, CheckpointNotFoundError
from asyncckpt.ranks.address import ADDRESS_VARIABLE, DOMAIN_VARIABLE
from asyncckpt.worker import process as worker_process
from asyncckpt.worker.endpoint import FOLDER_VARIABLE
from torture.jobs import Job
from torture.leftovers import send_away
from torture.tally import CONFIG, LIMIT_S, Tally, check_root, is_of, state_of

_FAULTY = Path(__file__).parent.parent.parent / "tests" / "support" / "faulty_worker.py"
_GATE = "ASYNCCKPT_TEST_GATE"
# How many ranks there are on each host, in turns: as before, in another order, more, fewer.
_SHAPES: tuple[tuple[int, ...], ...] = ((2, 2), (1, 1, 1), (1, 2), (2, 1), (1, 1))


def kill_hosts(tally: Tally, folder: Path, kills: int, choice: random.Random, transport: Transport) -> None:
    """Lose a host ``kills`` times, at random instants."""
    place = folder / f"hosts-{transport}"
    place.mkdir()
    cluster = _Cluster(place)
    for number in tqdm(range(kills + 1), desc=f"host kills, by {transport}", unit="kill", disable=None):
        cluster.be(len(choice.choice(_SHAPES)) if choice.random() < 0.3 else max(2, len(cluster.hosts)), choice)
        places = cluster.places(choice)
        gate = place / f"gate-{number}"
        hold_at = choice.choice((0, 1, 2, 3, 5, 8))  # from this attempt on, nothing is written
        with Job(
            len(places), _train, str(place), places, str(gate), hold_at, choice.randrange(1 << 30), transport
        ) as job:
            try:
                _round(tally, cluster, job, places, choice)
            except (TimeoutError, RuntimeError) as error:
                tally.lose(f"hosts, by {transport}, round {number}: {error}")
            gate.touch()
    for host in range(cluster.seen):
        os.environ[FOLDER_VARIABLE] = str(place / f"host-{host}")
        send_away(place / f"host-{host}")
    os.environ[FOLDER_VARIABLE] = str(folder / "runtime")
    check_root(tally, str(place / "root"))


class _Cluster:
    """Which hosts there are, and what must be found in the memory of them, or in storage."""

    def __init__(self, place: Path) -> None:
        self.place = place
        self.hosts: list[int] = []
        self.seen = 0
        self.replicated = self.durable = 0

    def be(self, count: int, choice: random.Random) -> None:
        """Have ``count`` hosts. One that is not needed any more stays as it is."""
        while len(self.hosts) < count:
            self.hosts.append(self.seen)
            self.seen += 1
        choice.shuffle(self.hosts)

    def places(self, choice: random.Random) -> list[int]:
        """The host of each rank."""
        shapes = [shape for shape in _SHAPES if len(shape) == len(self.hosts)] or [(1,) * len(self.hosts)]
        shape = choice.choice(shapes)
        return [host for host, ranks in zip(self.hosts, shape, strict=True) for _ in range(ranks)]

    def lose(self, host: int) -> None:
        """It burns."""
        lose_host(self.place, host)
        self.hosts.remove(host)


def lose_host(place: Path, host: int) -> None:
    """A host of ``place`` burns: its workers, those of jobs before, too, and all that could be found of them."""
    runtime = str(place / f"host-{host}")
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            said = worker_process.parse(process.cmdline())
            if said is not None and said.runtime == runtime:
                process.kill()
                process.wait(LIMIT_S)
    shutil.rmtree(runtime, ignore_errors=True)


def _round(tally: Tally, cluster: _Cluster, job: Job, places: list[int], choice: random.Random) -> None:
    """One job, until a host of it is lost."""
    ranks = range(len(places))
    for rank in ranks:
        step, source, good, took = job.hear(rank, "loaded")
        tally.longest_s = max(tally.longest_s, took)
        least = max(cluster.replicated, cluster.durable)
        if step < least:
            tally.lose(f"rank {rank} found step {step} in {source}; {least} was replicated or durable")
        if not good:
            tally.lose(f"rank {rank} loaded wrong bytes of step {step} from {source}")
        if rank == 0 and least:
            tally.counts[f"hosts: recovered from {source}"] += 1
    for rank in ranks:
        job.hear(rank, "ready")
    # What the job before had is safe again when something newer is.
    cluster.replicated = max(cluster.replicated, *(job.hear(rank, "replicated")[0] for rank in ranks))
    time.sleep(choice.uniform(0, 0.5))
    victim = choice.choice(sorted({*places}))
    both = choice.random() < 0.05
    lost = {*places} if both else {victim}
    first = [rank for rank in ranks if places[rank] in lost]
    for rank in first:
        job.processes[rank].kill()
    for host in lost:
        cluster.lose(host)
    said = job.kill(first[0])
    news: dict[str, int] = {"replicated": 0, "durable": 0}
    for each in (each for of_rank in said for each in of_rank if each[0] in news):
        news[each[0]] = max(news[each[0]], each[1])
    cluster.durable = max(cluster.durable, news["durable"])
    cluster.replicated = 0 if both else max(cluster.replicated, news["replicated"])
    tally.counts["hosts lost, all at once" if both else "hosts lost"] += 1


def _train(
    pipe: Connection,
    rank: int,
    place: str,
    places: list[int],
    gate: str,
    hold_at: int,
    seed: int,
    transport: Transport,
) -> None:
    """Load, then save without end."""
    choice = random.Random(f"{seed} {rank}")
    os.environ[FOLDER_VARIABLE] = f"{place}/host-{places[rank]}"
    os.environ[ADDRESS_VARIABLE] = f"127.{places[rank] // 60000}.{places[rank] // 250 % 240}.{places[rank] % 250 + 2}"
    os.environ[DOMAIN_VARIABLE] = str(places[rank])
    if hold_at:
        os.environ[_GATE] = gate
        real = worker_process.command()
        worker_process.command = lambda: [real[0], str(_FAULTY), f"create:hold:{hold_at}"]
    checkpointer = Checkpointer(f"{place}/root", replace(CONFIG, replicas=1, transport=transport))
    into, found, source = _state(0), 0, "nothing"
    begun = time.monotonic()
    with contextlib.suppress(CheckpointNotFoundError):
        found = checkpointer.load(into)
        source = checkpointer.loaded.source if checkpointer.loaded is not None else "nothing"
    pipe.send(("loaded", found, source, found == 0 or is_of(into, found), time.monotonic() - begun))
    checkpointer.prepare(_state(found))
    pipe.send(("ready",))
    for step in range(found + 1, 10**9):
        dist.barrier()
        save = checkpointer.save(step, _state(step))
        with contextlib.suppress(CheckpointError):  # a newer one may have been copied first
            save.wait_replicated(LIMIT_S)
            pipe.send(("replicated", step))
        if not hold_at and choice.random() < 0.3:
            save.result(LIMIT_S)
            pipe.send(("durable", step))
        time.sleep(choice.uniform(0, 0.02))


def _state(step: int) -> dict[str, Any]:
    """The same on any number of ranks, which spread it among them."""
    return state_of(step)
