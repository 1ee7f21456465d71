"""The diagnosis: what a training will meet at a place, found out before its first step."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import partial

from asyncckpt.budgets import ANSWER_S
from asyncckpt.config import Config
from asyncckpt.doctor.finding import Finding, Level
from asyncckpt.doctor.host import examine_host
from asyncckpt.doctor.place import Need, examine_place
from asyncckpt.doctor.survival import examine_survival, has_worker_outside
from asyncckpt.doctor.together import examine_together
from asyncckpt.link.endpoint import endpoint_name
from asyncckpt.publication import job_of_checkpoints
from asyncckpt.ranks.group import loopback_scope
from asyncckpt.ranks.ranks import OneRank, Ranks
from asyncckpt.threads import start

_LEVELS: Sequence[Level] = ("ok", "slow", "risk", "fails")


@dataclass(frozen=True)
class Diagnosis:
    """The findings about a place, a host and the ranks of a job. ``str`` has a line for each.

    Attributes:
        findings: The findings, in the order in which they were made.
    """

    findings: Sequence[Finding]

    @property
    def level(self) -> Level:
        """The worst level of all findings."""
        return max((each.level for each in self.findings), key=_LEVELS.index, default="ok")

    def __str__(self) -> str:
        width = max((len(each.subject) for each in self.findings), default=0)
        return "\n".join(
            f"{each.level:5}  {each.subject:{width}}  {each.text}" + (f"; {each.advice}" if each.advice else "")
            for each in self.findings
        )


def diagnose(roots: Sequence[str], config: Config, ranks: Ranks | None = None, nbytes: int | None = None) -> Diagnosis:
    """Examine the place of checkpoints, this host, and the ranks of the job. Takes a few seconds.

    All ranks make this call, and get the same diagnosis.

    Args:
        roots: The folders of the checkpoints, absolute paths or addresses. Saves go to the first one, and the job is
            known by the last one.
        config: The configuration of the training.
        ranks: The ranks that save together; None: this process alone.
        nbytes: The bytes of this rank's part of a checkpoint; None: unknown.

    Raises:
        RankFailedError: Another rank does not make the call.
    """
    ranks = ranks or OneRank()
    parts = ranks.gather((loopback_scope(), nbytes))
    sizes = [size for _, size in parts if size is not None]
    on_host = sum(size or 0 for scope, size in parts if scope == parts[ranks.rank][0]) if sizes else None
    endpoint = endpoint_name(job_of_checkpoints(roots[-1], config.job_id), ranks.rank)
    is_outside = has_worker_outside(endpoint)
    found: list[Finding] = []
    if ranks.rank == 0:
        need = Need(sum(sizes) if sizes else None, config.keep_last, config.job_id, config.direct_io)
        for root in roots:
            keeps = config.keep_last if root == roots[-1] else config.local_keep_last
            found += _in_time(root, need._replace(keeps=keeps))
    found += _made("host", examine_host(on_host, nbytes, config.start_timeout, is_outside=is_outside))
    found += _made("host", examine_survival(config.linger, config.replicas, os.environ, is_outside=is_outside))
    if ranks.size > 1:
        found += examine_together(ranks, roots[0], config)
    return Diagnosis(_merged(ranks.gather(found)))


def _in_time(root: str, need: Need) -> list[Finding]:
    """Return the findings about the place. A file system that does not answer blocks the thread that asks it."""
    found: list[Finding] = []
    examine = partial(_made, "save", examine_place(root, need), found)
    thread = threading.Thread(target=examine, name="asyncckpt-doctor", daemon=True)
    start(thread)
    thread.join(ANSWER_S)
    if not thread.is_alive():
        return found
    text = f"{root} has not answered for {ANSWER_S:g} s"
    return [*found, Finding("save", "fails", text, "look at the storage there, or choose another place")]


def _made(subject: str, findings: Iterable[Finding], found: list[Finding] | None = None) -> list[Finding]:
    """Append ``findings`` to ``found``. An error becomes a finding, because the other ranks wait for this one."""
    found = [] if found is None else found
    try:
        found.extend(findings)
    except Exception as error:
        found.append(Finding(subject, "fails", f"this cannot be examined: {error!r}", "please report this"))
    return found


def _merged(found: Sequence[Sequence[Finding]]) -> list[Finding]:
    """Return the findings of all ranks: each good one once, and each trouble with its ranks."""
    ranks_of: dict[Finding, list[int]] = {}
    for rank, findings in enumerate(found):
        for each in findings:
            ranks_of.setdefault(each, []).append(rank)
    troubled = {each.subject for each in ranks_of if each.level != "ok"}
    merged: dict[tuple[str, ...], Finding] = {}
    for each, ranks in ranks_of.items():
        if each.level == "ok":
            if each.subject not in troubled:
                merged.setdefault((each.subject,), each)
        else:
            where = f" (ranks {', '.join(map(str, ranks))})" if 0 < len(ranks) < len(found) else ""
            merged[each.subject, each.text] = each._replace(text=each.text + where)
    return list(merged.values())
