"""Kill trainers and workers that save to S3, directly or through a local folder, and inject faults into requests."""

from __future__ import annotations

import contextlib
import os
import random
import shutil
import threading
from collections import Counter
from dataclasses import replace
from multiprocessing.connection import Connection
from pathlib import Path

from s3.proxy import Asked, StoreProxy
from s3.server import served, set_environment
from tqdm import tqdm

from asyncckpt import Checkpointer
from asyncckpt.errors import CheckpointError
from asyncckpt.loading.source import verify
from asyncckpt.storage import complete_steps, object_sweep, objects, step_folder
from asyncckpt.storage.record import is_finalized, list_below
from asyncckpt.storage.stock_names import shown
from torture import kills
from torture.jobs import Job
from torture.promises import check_root
from torture.tally import (
    CONFIG,
    LIMIT_S,
    LOCAL_VARIABLE,
    SETS_VARIABLE,
    Tally,
    config_of_killed,
    is_of,
    state_of,
    to_save,
)

_BUCKET = "torture"
# The share of requests with a fault while trainers and workers are killed, and while they are not.
_AT_KILLS, _ALONE = 0.02, 0.1


class _Spoiler:
    """Choose requests at random, inject faults into them, and count the faults."""

    def __init__(self, choice: random.Random) -> None:
        self.chance = 0.0
        self.counts: Counter[str] = Counter()
        self._choice, self._lock = choice, threading.Lock()

    def __call__(self, asked: Asked) -> str | None:
        with self._lock:
            if self._choice.random() >= self.chance:
                return None
            fault = self._choice.choice(asked.faults)
            self.counts[fault] += 1
            return fault


def torture_store(tally: Tally, folder: Path, count: int, choice: random.Random) -> None:
    """Kill ``count`` trainers and as many workers during saves to S3. Then inject faults into as many requests."""
    spoiler = _Spoiler(choice)
    with served(folder, _BUCKET) as endpoint, StoreProxy(endpoint, spoiler) as proxy:
        set_environment(proxy.endpoint)

        def check(tally: Tally, root: str) -> None:
            spoiler.chance = 0.0
            _check_store(tally, root)

        for place, chance in (("plain", 0.0), ("spoiled", _AT_KILLS), ("sets", _AT_KILLS)):
            if place == "sets":
                os.environ[SETS_VARIABLE] = "1"
            for ranks in (1, 2):
                for kill in (kills.kill_trainers, kills.kill_workers):
                    spoiler.chance = chance
                    kill(tally, f"s3://{_BUCKET}/{place}", -(-count // 4), choice, ranks, check)
        del os.environ[SETS_VARIABLE]
        _kill_tiers(tally, folder / "local", spoiler, count, choice)
        _spoil_saves(tally, f"s3://{_BUCKET}/faults", spoiler, -(-count // 2))
        os.environ[SETS_VARIABLE] = "1"
        _spoil_saves(tally, f"s3://{_BUCKET}/faults-sets", spoiler, -(-count // 2))
        del os.environ[SETS_VARIABLE]
    for fault, times in spoiler.counts.items():
        tally.counts[f"requests to the store spoiled: {fault}"] += times


def _kill_tiers(tally: Tally, local: Path, spoiler: _Spoiler, count: int, choice: random.Random) -> None:
    """Kill trainers and workers during saves to a ``local`` folder and uploads from there."""
    local.mkdir()
    os.environ[LOCAL_VARIABLE] = str(local)

    def check(tally: Tally, root: str) -> None:
        spoiler.chance = 0.0
        with Checkpointer(root, config_of_killed()) as checkpointer:
            checkpointer.prepare(state_of(0))  # waits for a worker that may still be writing
            checkpointer.wait_uploads(4 * LIMIT_S)
            newest = checkpointer.latest()
        uploaded = complete_steps(root)
        tally.counts["steps uploaded, at the end"] += len(uploaded)
        # If trainers are killed early, there may be no step at all.
        if newest is not None and newest not in uploaded:
            tally.lose(f"{root}: step {newest} was to be uploaded, and {uploaded} are there")
        for folder in local.iterdir():
            check_root(tally, str(folder))
            shutil.rmtree(folder)
        _check_store(tally, root)

    for ranks in (1, 2):
        for kill in (kills.kill_trainers, kills.kill_workers):
            spoiler.chance = _AT_KILLS
            kill(tally, f"s3://{_BUCKET}/tiers", -(-count // 4), choice, ranks, check)
    del os.environ[LOCAL_VARIABLE]


def _spoil_saves(tally: Tally, root: str, spoiler: _Spoiler, count: int) -> None:
    """Save until ``count`` requests had faults. Compare the outcomes with the steps in the store."""
    spoiler.chance, begun, saved = _ALONE, sum(spoiler.counts.values()), []
    with Job(1, _save_on, root) as job, tqdm(total=count, desc="faults of the store", disable=None) as bar:
        while (spoiled := sum(spoiler.counts.values()) - begun) < count:
            step, is_saved = job.hear(0, "told")
            saved += [step] if is_saved else []
            bar.update(spoiled - bar.n)
        spoiler.chance = 0.0
        job.pipes[0].send("stop")
        saved += job.hear(0, "ended")[0]
    with Checkpointer(root, CONFIG) as checkpointer:
        if checkpointer.steps() != saved:
            tally.lose(f"{root}: {saved} were told to be saved, and {checkpointer.steps()} are there")
        for step in saved:
            checkpointer.load(into := state_of(0), step=step)
            if not is_of(into, step):
                tally.lose(f"{root}: wrong bytes of step {step}")
    tally.counts["steps saved while requests were spoiled"] += len(saved)
    _check_store(tally, root)


def _save_on(pipe: Connection, rank: int, root: str) -> None:
    last: list[int] = []
    with Checkpointer(root, replace(CONFIG, keep_last=None)) as checkpointer:
        for step in range(1, 10**9):
            is_saved = False
            with contextlib.suppress(CheckpointError):
                checkpointer.save(step, to_save(step, rank)).result(4 * LIMIT_S)
                is_saved = True
            if pipe.poll():
                last = [step] if is_saved else []
                break
            pipe.send(("told", step, is_saved))
    pipe.send(("ended", last))


def _check_store(tally: Tally, root: str) -> None:
    """Verify the checkpoints in the store, and look for leftovers after the removal of orphans."""
    with Checkpointer(root, CONFIG) as checkpointer:
        checkpointer.prepare(state_of(0))  # waits for a worker that may still be writing
        last = max(checkpointer.steps(), default=0) + 1
        checkpointer.save(last, state_of(last)).result(LIMIT_S)
    for step in complete_steps(root):
        for damage in verify(step_folder(root, step)).damages:
            tally.lose(f"published, and not whole: {damage}")
    store, key = objects.objects_at(root), objects.split_address(root)[1]
    object_sweep._swept.clear()
    object_sweep.sweep(store, key, 0.0)
    listing = list_below(store, key)
    published = {place for place, found in listing.records.items() if is_finalized(found)}
    for parts in listing.parts:
        if os.path.dirname(parts) not in published or len(listing.parts) > len(published):
            tally.lose(f"left over: {root}/{parts}")
    for parts, files in listing.parts.items():
        for name in shown(files):
            if f"{os.path.dirname(parts)}/{name}" not in listing.seen:
                tally.lose(f"not there for stock readers: {root}/{os.path.dirname(parts)}/{name}")
