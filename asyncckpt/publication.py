"""Versions: how published weights are numbered, so that no reader takes older ones for newer.

A version is the publishing trainer's own number, its step as a rule. Within an *epoch* versions grow. A trainer that is
started anew begins a new epoch, which readers can see, and so does one that goes back on purpose.
"""

from __future__ import annotations

import logging
import operator
import os
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import SupportsIndex, TypeAlias

from asyncckpt.errors import VersionError
from asyncckpt.events import Event
from asyncckpt.shm.slots import PublishedVersion
from asyncckpt.storage import absolute, is_address

logger = logging.getLogger(__name__)

_WEIGHTS = "weights\n"
_NOTHING = PublishedVersion(0, -1, rolled_back=False, ranks=0)

VersionState: TypeAlias = tuple[int, int, int, bool, int]
"""What a rank knows of versions: the least epoch there can be now, the last version that counts, the last one that
readers may have had, whether they had been rolled back; and the epoch that it proposes."""


@dataclass(frozen=True)
class Publication:
    """What became of one ``publish``. ``epoch``: of the publisher; a later one has a greater number.

    ``skipped``: nothing was published, because readers have all the memory there is for it, or because the save it is
    of was given up; they go on with the version before. ``timings``: seconds of ``plan_s`` (seeing that the structure
    is as before, or planning), ``wait_s`` (for a slot) and ``stage_s`` (copying), each 0.0 where there was none of it.
    ``nbytes``: bytes that were copied.
    """

    version: int
    epoch: int
    skipped: bool
    nbytes: int = 0
    timings: Mapping[str, float] = field(default_factory=lambda: {"plan_s": 0.0, "wait_s": 0.0, "stage_s": 0.0})

    def event(self, rank: int, path: str, step: int | None = None) -> Event:
        """What those are told who listen to events.

        Args:
            rank: That of this process.
            path: Of the checkpoint, or the address of the weights.
            step: Of the checkpoint.
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
    """Those of one publishing trainer."""

    def __init__(self) -> None:
        self._epoch = 0
        self._newest = -1
        self._newest_read = -1  # it is greater where the checkpoint of that version was removed
        self._least_epoch = 0
        self._rolled_back = False
        self._skipped = 0  # since one was published

    def inherit(self, published: Mapping[PublishedVersion, bool]) -> None:
        """Go on after a trainer before this one.

        Args:
            published: What it has published, and whether that counts: a version whose checkpoint was removed does not.
                Readers may have had it all the same.
        """
        if published and self._epoch == 0:
            last = max(published)
            self._newest = max((each for each, counts in published.items() if counts), default=_NOTHING).version
            self._newest_read, self._least_epoch, self._rolled_back = last.version, last.epoch + 1, last.rolled_back

    def note(self, published: PublishedVersion) -> None:
        """It is published: from now on it is the last one."""
        self._newest = self._newest_read = published.version

    def log(self, version: int, why_not: str | None) -> None:
        """Log that ``version`` is not published, and ``why_not``: of several in a row the first. None: it is published,
        and how many before it were not is logged.
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
        """What to publish ``version`` as.

        Args:
            version: A number from 0 on.
            ranks: How many ranks publish it together.
            gather: Tells what each of them says.
            roll_back: Allow a version that is not newer than the last one.

        Raises:
            VersionError: It is not newer.
            TypeError, ValueError: It is no version at all.
        """
        version = whole_number(version, "version")
        if version >= 1 << 63:
            raise ValueError(f"a version is a number of 63 bits, not {version}")
        first = self._epoch == 0
        if not first:
            self._check(version, roll_back=roll_back)
        if first or version <= self._newest_read:
            # By the clock, so that it grows even where nothing is left of the trainer before this one.
            proposed = max(time.time_ns(), self._epoch + 1)
            said = gather((self._least_epoch, self._newest, self._newest_read, self._rolled_back, proposed))
            if first:
                # That trainer may have died when only some of its ranks had published: all have to know of that.
                self._least_epoch, self._newest, self._newest_read, self._rolled_back, _ = max(said)
                self._check(version, roll_back=roll_back)
            self._epoch = max(self._least_epoch, *(epoch for *_, epoch in said))
            # Who goes on after one that has gone back: a reader may have missed that one.
            self._rolled_back = self._rolled_back or version <= self._newest_read
        return PublishedVersion(self._epoch, version, self._rolled_back, ranks)

    def _check(self, version: int, *, roll_back: bool) -> None:
        if version <= self._newest and not roll_back:
            who = " by the process before this one, whose worker still has it" if self._epoch == 0 else ""
            raise VersionError(
                f"version {version} is not newer than {self._newest}, the last one published{who}; if the training has"
                " gone back, or begins anew, publish it with roll_back=True"
            )


def whole_number(value: SupportsIndex, what: str) -> int:
    """A step or a version, which may be of numpy or a tensor, as what can be written down anywhere.

    Args:
        value: It.
        what: What it is, for the error.

    Raises:
        TypeError: It is no whole number.
        ValueError: It is below 0.
    """
    try:
        if isinstance(value, bool):
            raise TypeError("a bool")
        number = operator.index(value)
    except (TypeError, ValueError) as error:
        raise TypeError(f"a {what} is a whole number, not {value!r}") from error
    if number < 0:
        raise ValueError(f"a {what} is a number from 0 on, not {number}")
    return number


def job_of_weights(address: str) -> str:
    """The job of a ``WeightPublisher`` with that ``address``, any text."""
    return f"{_WEIGHTS}{address}"


def job_of_checkpoints(root: str | os.PathLike[str], job_id: str | None) -> str:
    """Return the name of the job that saves to ``root``; see ``Config.job_id``."""
    place = absolute(root)
    return f"{place if is_address(place) else os.path.realpath(place)}\n{job_id or ''}"


def facts_of_job(job: str | None) -> dict[str, str | None]:
    """What a job is, by name: its ``address``, or its ``root`` and ``job_id``. None: of saves that go anywhere."""
    facts: dict[str, str | None] = {"root": None, "job_id": None, "address": None}
    if job is not None and job.startswith(_WEIGHTS):
        facts["address"] = job.removeprefix(_WEIGHTS)
    elif job is not None:
        facts["root"], _, job_id = job.partition("\n")
        facts["job_id"] = job_id or None
    return facts
