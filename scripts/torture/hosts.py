"""Lose hosts at random instants: kill the workers and trainers of a host, remove its runtime folder, add a spare host.

A host is a runtime folder and an address of the loopback range. Normally one host is lost at a time, and the next one
only after a newer step is replicated. The next job must then find the newest replicated step, even if storage does not
have that step. Sometimes two hosts are lost at once. Then the next job must find the newest durable step.

Three further faults occur. At the end of some jobs, bytes of copies are flipped, with or without a lost host. At the
end of other jobs, a surviving worker is stopped until after the next load, or all workers of a host are stopped and no
host is lost. If this affects all images of a rank, the replicated step need not be found. During some jobs, a worker
that receives copies is stopped.
"""

from __future__ import annotations

import contextlib
import os
import random
import shutil
import time
from dataclasses import dataclass
from pathlib import Path

import psutil
from tqdm import tqdm

from asyncckpt.config import Transport
from asyncckpt.link.endpoint import FOLDER_VARIABLE
from torture.host_faults import Memory, Stopped, check_idle, runtime_of, workers_of
from torture.host_trainers import Training, train
from torture.jobs import Job
from torture.leftovers import send_away
from torture.promises import check_root
from torture.tally import CONFIG, LIMIT_S, Tally

# Numbers of ranks on each host. Each job takes one of these shapes.
_SHAPES: tuple[tuple[int, ...], ...] = ((2, 2), (1, 1, 1), (1, 2), (2, 1), (1, 1))
# While workers are stopped, jobs run with a timeout so short that calls reach it. The other two numbers are the maximum
# total time of a save and of a load on a busy machine.
_TIMEOUT_S, _SAVE_S, _LOAD_S = 6.0, 16.0, 30.0
# Check for workers that burn a core after this number of rounds.
_IDLE_EVERY = 20


@dataclass(frozen=True)
class Shares:
    """The shares of rounds that flip bytes of copies, and that stop workers."""

    flips: float
    stops: float


def kill_hosts(
    tally: Tally, folder: Path, kills: int, choice: random.Random, transport: Transport, shares: Shares
) -> None:
    """Lose a host ``kills`` times, at random instants."""
    place = folder / f"hosts-{transport}"
    place.mkdir()
    cluster = _Cluster(tally, place, shares, choice)
    for number in tqdm(range(kills + 1), desc=f"host kills, by {transport}", unit="kill", disable=None):
        cluster.be(len(choice.choice(_SHAPES)) if choice.random() < 0.3 else max(2, len(cluster.hosts)))
        places = cluster.places()
        gate = place / f"gate-{number}"
        stops = choice.random() < shares.stops / 2
        # From this attempt on, workers write nothing. A job with a stopped worker needs free slots, so it writes.
        hold_at = 0 if stops else choice.choice((0, 1, 2, 3, 5, 8))
        timeout = _TIMEOUT_S if stops or cluster.stopped is not None else CONFIG.timeout
        seed = choice.randrange(1 << 30)
        training = Training(str(place), places, str(gate), hold_at, seed, transport, timeout, may_fail=stops)
        with Job(len(places), train, training) as job:
            try:
                _Round(cluster, job, places, is_strict=timeout == CONFIG.timeout).go(stops=stops)
            except (TimeoutError, RuntimeError) as error:
                tally.lose(f"hosts, by {transport}, round {number}: {error}")
                cluster.go_on()
                cluster.open()
        # While the gate is closed, workers write nothing, so the next load cannot find these steps in storage.
        cluster.gate = gate
        if not cluster.replicated or cluster.is_spoiled or choice.random() < 0.5:
            cluster.open()
        if number % _IDLE_EVERY == _IDLE_EVERY - 1 or number == kills:
            cluster.go_on()
            cluster.open()
            check_idle(tally, place, range(cluster.seen))
    for host in range(cluster.seen):
        os.environ[FOLDER_VARIABLE] = str(runtime_of(place, host))
        send_away(runtime_of(place, host))
    os.environ[FOLDER_VARIABLE] = str(folder / "runtime")
    check_root(tally, str(place / "root"))


def lose_host(place: Path, host: int) -> None:
    """Kill all workers of ``host``, including those of earlier jobs, and remove its runtime folder."""
    for process in workers_of(place, host):
        with contextlib.suppress(psutil.Error):
            process.kill()
            process.wait(LIMIT_S)
    shutil.rmtree(runtime_of(place, host), ignore_errors=True)


class _Cluster:
    """The hosts that exist, and the steps that must be found in their memory or in storage."""

    def __init__(self, tally: Tally, place: Path, shares: Shares, choice: random.Random) -> None:
        self.tally, self.place, self.shares, self.choice = tally, place, shares, choice
        self.hosts: list[int] = []
        self.seen = 0
        self.replicated = self.durable = 0
        self.stopped: Stopped | None = None
        self.gate: Path | None = None
        self.is_spoiled = False
        """Whether all images of a rank of the replicated step are damaged, or on stopped workers."""

    def be(self, count: int) -> None:
        """Add hosts until there are ``count``, and shuffle them. Surplus hosts are kept."""
        while len(self.hosts) < count:
            self.hosts.append(self.seen)
            self.seen += 1
        self.choice.shuffle(self.hosts)

    def places(self) -> list[int]:
        """Return the host of each rank."""
        shapes = [shape for shape in _SHAPES if len(shape) == len(self.hosts)] or [(1,) * len(self.hosts)]
        shape = self.choice.choice(shapes)
        return [host for host, ranks in zip(self.hosts, shape, strict=True) for _ in range(ranks)]

    def least(self) -> int:
        """Return the oldest step that a load may find."""
        return self.durable if self.is_spoiled else max(self.replicated, self.durable)

    def lose(self, host: int) -> None:
        """Lose ``host``, and remove it from the list."""
        lose_host(self.place, host)
        self.hosts.remove(host)

    def spoil(self, victim: int, *, flips: bool, stops: str) -> None:
        """Flip bytes of copies, stop one surviving ``"worker"``, or stop all workers of the ``"host"`` ``victim``."""
        chosen: list[psutil.Process] = []
        with Memory(self.place, self.hosts) as memory:
            if flips and (flipped := memory.flip(self.choice)):
                self.tally.counts["hosts: copies with flipped bytes"] += flipped
                self.tally.counts["hosts: restarts after flips"] += 1
            if stops:
                workers = [each for host in self.hosts for each in workers_of(self.place, host)]
                chosen = [self.choice.choice(workers)] if stops == "worker" else [*workers_of(self.place, victim)]
                memory.rule_out(each.pid for each in chosen)
            self.is_spoiled = memory.has_lost(self.replicated)
        if chosen:
            # The workers resume before the next job, or while the next job starts and loads.
            after = self.choice.choice((0.0, self.choice.uniform(1, 5)))
            self.stopped = Stopped(chosen, with_children=self.choice.random() < 0.5, after=after)
            self.tally.counts[f"hosts: restarts with a {stops} stopped"] += 1

    def open(self) -> None:
        """Let the workers of the previous job write again."""
        if self.gate is not None:
            self.gate.touch()

    def go_on(self, *, kill: bool = False) -> None:
        """Resume the stopped processes, or kill them."""
        if self.stopped is not None:
            self.stopped.end(kill=kill)
            self.stopped = None


class _Round:
    """One job, from its load until a host is lost."""

    def __init__(self, cluster: _Cluster, job: Job, places: list[int], *, is_strict: bool) -> None:
        """``is_strict``: the timeouts are long, so a refused call counts as a failure."""
        self._is_strict = is_strict
        self._cluster, self._job, self._places = cluster, job, places
        self._tally, self._choice = cluster.tally, cluster.choice
        self._ranks = range(len(places))

    def go(self, *, stops: bool) -> None:
        """Run the round. If ``stops``, stop a worker during the job. Raises ``TimeoutError``, ``RuntimeError``."""
        cluster, job = self._cluster, self._job
        reasons: list[str] = []
        step = min([self._loaded(rank, reasons) for rank in self._ranks])
        is_older = step < cluster.replicated
        if is_older and not reasons:
            self._tally.lose(f"step {step} was loaded, and it was not said why not {cluster.replicated}")
        self._tally.counts["hosts: loads that found damage"] += any("damage" in each for each in reasons)
        self._tally.counts["hosts: loads of an older step, as no good image was left"] += is_older
        cluster.open()
        if cluster.stopped is not None:
            time.sleep(self._choice.choice((0.0, self._choice.uniform(0, 2 * _TIMEOUT_S))))
            cluster.go_on(kill=self._choice.random() < 0.3)
        for rank in self._ranks:
            (refused,) = job.hear(rank, "ready", 2 * LIMIT_S)
            self._tally.counts["hosts: ranks that were refused to get ready, and then could"] += bool(refused)
            if refused and self._is_strict:
                self._tally.lose(f"rank {rank} could not get ready to save: {refused}")
        # The replicated steps of the previous job are safe again when this job has replicated a newer step.
        cluster.replicated, cluster.is_spoiled = min(cluster.replicated, step), False
        cluster.replicated = max(cluster.replicated, *(job.hear(rank, "replicated")[0] for rank in self._ranks))
        if stops:
            self._stop_one()
        self._end()

    def _loaded(self, rank: int, reasons: list[str]) -> int:
        """Wait until a rank has loaded, check the result, and return the step. Add its warnings to ``reasons``."""
        cluster, tally, least = self._cluster, self._tally, self._cluster.least()
        what = "load" if cluster.stopped is None else "load with workers stopped"
        step, source, good, took, said = self._job.hear(rank, "loaded", 2 * _LOAD_S)
        while source == "refused" and not self._is_strict:
            # React as a user does to the error that a worker does not answer or still writes, and wait for a retry.
            tally.counts["hosts: loads that were refused, as workers were stopped"] += rank == 0
            tally.wait("hosts: longest load that was refused, s", took)
            reasons += said
            cluster.go_on()
            cluster.open()
            step, source, good, took, said = self._job.hear(rank, "loaded", 2 * _LOAD_S)
        tally.wait(f"hosts: longest {what}, s", took)
        if took > _LOAD_S:
            tally.lose(f"rank {rank} took {took:.1f} s to load step {step} from {source}")
        if step < least:
            tally.lose(f"rank {rank} found step {step} in {source}; {least} was replicated or durable: {said}")
        if not good:
            tally.lose(f"rank {rank} loaded wrong bytes of step {step} from {source}")
        if rank == 0 and (least or step):
            tally.counts[f"hosts: recovered from {source}"] += 1
        reasons += said
        return int(step)

    def _stop_one(self) -> None:
        """Stop a worker of the job, then resume or kill the worker. Check that steps are replicated again."""
        cluster, job, choice, tally = self._cluster, self._job, self._choice, self._tally
        trainers = {process.pid for process in job.processes}
        found = {each: owner for host in {*self._places} for each, owner in workers_of(cluster.place, host).items()}
        time.sleep(choice.uniform(0, 0.3))
        own = sorted((each for each, owner in found.items() if owner in trainers), key=lambda each: each.pid)
        stopped, kills = Stopped([choice.choice(own)], with_children=choice.random() < 0.5), choice.random() < 0.3
        time.sleep(choice.choice((choice.uniform(0, 2), choice.uniform(_TIMEOUT_S, 2 * _TIMEOUT_S))))
        stopped.end(kill=kills)
        tally.counts[f"hosts: workers stopped in a job, then {'killed' if kills else 'going on'}"] += 1
        ended = time.monotonic()
        told = [said[1] for rank in self._ranks for said in job.heard(rank) if said[0] == "replicated"]
        # A save in flight when the worker was killed may be reported as replicated although its copies are lost.
        since = max(cluster.replicated, *told, 0) + 2
        for rank in self._ranks:
            step = 0
            while step < since:
                step, held, waited = job.hear(rank, "replicated", _SAVE_S + LIMIT_S)
                tally.wait("hosts: longest save and replication with a worker stopped, s", waited)
            cluster.replicated = max(cluster.replicated, step)
            tally.wait("hosts: longest call of save with a worker stopped, s", held)
            if held > _SAVE_S:
                tally.lose(f"rank {rank} was held {held:.1f} s by a call of save while a worker was stopped")
        tally.wait("hosts: longest until steps are replicated again, s", time.monotonic() - ended)

    def _end(self) -> None:
        """End the job: kill its trainers, and lose a host, flip bytes of copies, or stop workers."""
        cluster, choice = self._cluster, self._choice
        time.sleep(choice.uniform(0, 0.5))
        victim = choice.choice(sorted({*self._places}))
        flips = choice.random() < cluster.shares.flips
        stops = choice.choice(("worker", "host")) if choice.random() < cluster.shares.stops / 2 else ""
        both = choice.random() < 0.05 and not stops
        keeps = stops == "host" or (flips and not both and choice.random() < 0.4)
        lost = {*self._places} if both else {victim}
        first = [rank for rank in self._ranks if self._places[rank] in lost]
        for rank in first:
            self._job.processes[rank].kill()
        if not keeps:
            for host in lost:
                cluster.lose(host)
        what = "jobs killed, their hosts left" if keeps else "hosts lost, all at once" if both else "hosts lost"
        self._tally.counts[what] += 1
        said = self._job.kill(first[0])
        news: dict[str, int] = {"replicated": 0, "durable": 0}
        for each in (each for of_rank in said for each in of_rank if each[0] in news):
            news[each[0]] = max(news[each[0]], each[1])
        cluster.durable = max(cluster.durable, news["durable"])
        cluster.replicated = 0 if both else max(cluster.replicated, news["replicated"])
        if flips or stops:
            cluster.spoil(victim, flips=flips, stops=stops)
