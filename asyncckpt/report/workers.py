"""``asyncckpt workers``: list the workers of this user on this host, with their activity, or end some."""

from __future__ import annotations

import argparse
import datetime
import math
from typing import Any

from asyncckpt.errors import CheckpointError
from asyncckpt.link.running_workers import RunningWorker, end_worker, running_workers
from asyncckpt.publication import facts_of_job
from asyncckpt.report.answers import Answers, number, size_of


def show_workers(answers: Answers, _: None, args: argparse.Namespace) -> None:
    """List the workers, or end the workers with the ids in ``args.end``."""
    found = running_workers()
    if args.end is not None:
        for process in args.end:
            with answers.about(process, "id"):
                worker = next((each for each in found if each.pid == process), None)
                if worker is None:
                    raise CheckpointError(f"no worker of this user on this host has the id {process}")
                end_worker(worker, args.timeout, force=args.force)
                answers.add({"id": process, "ended": True})
                answers.line(f"the worker {process} has ended")
        return
    headers = ("id", "rank", "of", "trainer", "memory", "age", "does")
    for each in found:
        said, status = each.command_line, each.status
        job = facts_of_job(said.options.job)
        trainer = f"{each.trainer}{'' if each.has_trainer else ' (gone)'}" if each.trainer else "-"
        age = f"{datetime.timedelta(seconds=int(each.age))}"
        answers.row(headers, each.pid, said.options.rank, _of(job), trainer, size_of(each.nbytes), age, _does(each))
        facts: dict[str, Any] = {"id": each.pid, "rank": said.options.rank, **job, "trainer": each.trainer}
        facts |= {"has_trainer": each.has_trainer, "bytes": each.nbytes, "age_s": each.age, "does": each.doing}
        facts |= {"lingers_s": status and status.lingers, "saving": list(status.saving) if status else None}
        answers.add(facts | {"leaving": status and status.leaving, "trouble": each.trouble})
    answers.line(number(len(found), "worker"))


def _of(job: dict[str, str | None]) -> str:
    """Return the job of a worker, for a cell."""
    if job["address"] is not None:
        return f"weights at {job['address']!r}"
    if job["root"] is None:
        return "single saves, to any place"
    return job["root"] + (f" (job {job['job_id']})" if job["job_id"] else "")


def _does(worker: RunningWorker) -> str:
    """Return the activity of a worker, for a cell."""
    status = worker.status
    if status is None:
        plain = {"serving": "serves its trainer", "leaving": "leaves"}
        return plain[worker.doing] if worker.trouble is None else f"{worker.doing}: {worker.trouble}"
    match worker.doing:
        case "serving":
            return "waits for its trainer"
        case "writing":
            more = f", and {len(status.saving) - 1} more" if len(status.saving) > 1 else ""
            then = "" if worker.has_trainer else ", then leaves" if status.leaving else ", then lingers"
            return f"writes {status.saving[0]}{more}{then}"
        case "lingering":
            more = "" if status.lingers == math.inf else f", {status.lingers:.0f} s more"
            return f"lingers for {'another' if worker.trainer else 'a'} trainer{more}"
        case _:
            return "leaves"
