"""Versions of published weights. Their numbers ensure that no reader takes older weights for newer ones.

A version is a number that the publishing trainer chooses, usually its step. Versions grow within an *epoch*. A
restarted trainer begins a new epoch, and readers can see the change. A trainer that goes back on purpose also
begins a new epoch.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TypeAlias

from asyncckpt.errors import VersionError
from asyncckpt.events import Event
from asyncckpt.shm.slots import PublishedVersion
from asyncckpt.storage import absolute, is_address, whole_number

logger = logging.getLogger(__name__)

_WEIGHTS = "weights\n"
_NOTHING = PublishedVersion(0, -1, rolled_back=False, ranks=0)

VersionState: TypeAlias = tuple[int, int, int, bool, int]
"""State of versions on a rank.

In this order: the least epoch that can follow; the last version that counts; the last version that readers may have
had; whether there was a rollback before; the epoch that the rank proposes.
"""


@dataclass(frozen=True)
class Publication:
    """Outcome of one ``publish``. ``epoch``: the epoch of the publisher; a later epoch has a greater number.

    ``skipped``: True if nothing was published, because readers hold all the memory for versions, or because the save
    was given up. Readers keep the previous version then. ``timings``: seconds of ``plan_s`` (checking that the
    structure is as before, or planning), ``wait_s`` (for a slot) and ``stage_s`` (copying); 0.0 for a phase that did
    not happen. ``nbytes``: number of bytes copied.
    """

    version: int
    epoch: int
    skipped: bool
    nbytes: int = 0
    timings: Mapping[str, float] = field(default_factory=lambda: {"plan_s": 0.0, "wait_s": 0.0, "stage_s": 0.0})

    def event(self, rank: int, path: str, step: int | None = None) -> Event:
        """Return the event for listeners.

        Args:
            rank: The rank of this process.
            path: The checkpoint, or the address of the weights.
            step: The step of the checkpoint.
        """
        return Event(
            phase="published",
            rank=rank,
            path=path,
            step=step,
            version=self.version,
            seconds=sum(self.timings.values()) if self.nbytes else None,
            nbytes=self.nbytes or None,
            timings=self.timings if self.nbytes else {},
        )


class Versions:
    """The versions of one publishing trainer."""

    def __init__(self) -> None:
        self._epoch = 0
        self._newest = -1
        self._newest_read = -1  # greater than ``_newest`` if the checkpoint of that version was removed
        self._least_epoch = 0
        self._rolled_back = False
        self._skipped = 0  # since the last version that was published

    def inherit(self, published: Mapping[PublishedVersion, bool]) -> None:
        """Continue after the versions of the previous trainer.

        Args:
            published: The versions that trainer has published, and whether each counts. A version counts unless its
                checkpoint was removed. Readers may have had a removed version all the same.
        """
        if published and self._epoch == 0:
            last = max(published)
            self._newest = max((each for each, counts in published.items() if counts), default=_NOTHING).version
            self._newest_read, self._least_epoch, self._rolled_back = last.version, last.epoch + 1, last.rolled_back

    def note(self, published: PublishedVersion) -> None:
        """Note that ``published`` is the last version from now on."""
        self._newest = self._newest_read = published.version

    def log(self, version: int, why_not: str | None) -> None:
        """Log that ``version`` is not published because of ``why_not``.

        If several in a row are not published, only the first is logged. If ``why_not`` is None, the version is
        published. Then log how many versions before it were not.
        """
        if why_not is None:
            if self._skipped > 1:
                logger.warning("version %d is published; the %d before it were not", version, self._skipped)
            self._skipped = 0
            return
        if not self._skipped:
            logger.warning("version %d is not published: %s", version, why_not)
        self._skipped += 1

    def admit(
        self, version: int, ranks: int, gather: Callable[[VersionState], list[VersionState]], *, roll_back: bool
    ) -> PublishedVersion:
        """Return the epoch and version under which to publish ``version``.

        Args:
            version: The number, 0 or greater.
            ranks: The number of ranks that publish together.
            gather: Collects the state of every rank.
            roll_back: Allow a version that is not newer than the last one.

        Raises:
            VersionError: The version is not newer.
            TypeError, ValueError: The number is no valid version.
        """
        version = whole_number(version, "version")
        if version >= 1 << 63:
            raise ValueError(f"a version is a number of 63 bits, not {version}")
        first = self._epoch == 0
        if not first:
            self._check(version, roll_back=roll_back)
        if first or version <= self._newest_read:
            # Taken from the clock, so that the epoch grows even if no trace of the previous trainer is left.
            proposed = max(time.time_ns(), self._epoch + 1)
            said = gather((self._least_epoch, self._newest, self._newest_read, self._rolled_back, proposed))
            if first:
                # The previous trainer may have died when only some of its ranks had published. All ranks have to know
                # the newest.
                self._least_epoch, self._newest, self._newest_read, self._rolled_back, _ = max(said)
                self._check(version, roll_back=roll_back)
            self._epoch = max(self._least_epoch, *(epoch for *_, epoch in said))
            # Keep the flag after a rollback, because a reader may have missed the version that went back.
            self._rolled_back = self._rolled_back or version <= self._newest_read
        return PublishedVersion(self._epoch, version, self._rolled_back, ranks)

    def _check(self, version: int, *, roll_back: bool) -> None:
        if version <= self._newest and not roll_back:
            who = " by the process before this one, whose worker still has it" if self._epoch == 0 else ""
            raise VersionError(
                f"version {version} is not newer than {self._newest}, the last one published{who}; if the training has"
                " gone back, or begins anew, publish it with roll_back=True"
            )


def job_of_weights(address: str) -> str:
    """Return the job of a ``WeightPublisher`` with that ``address``, any text."""
    return f"{_WEIGHTS}{address}"


def job_of_checkpoints(root: str | os.PathLike[str], job_id: str | None) -> str:
    """Return the name of the job that saves to ``root``; see ``Config.job_id``."""
    place = absolute(root)
    return f"{place if is_address(place) else os.path.realpath(place)}\n{job_id or ''}"


def facts_of_job(job: str | None) -> dict[str, str | None]:
    """Return the ``address`` of a job, or its ``root`` and ``job_id``, by name.

    ``job`` is None for saves that go to any path.
    """
    facts: dict[str, str | None] = {"root": None, "job_id": None, "address": None}
    if job is not None and job.startswith(_WEIGHTS):
        facts["address"] = job.removeprefix(_WEIGHTS)
    elif job is not None:
        root, _, job_id = job.partition("\n")
        facts["root"] = root or None
        facts["job_id"] = job_id or None
    return facts
