"""The messages about the lock of a root (see ``root_lock.py``): what is asked for, and who has it."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Claim:
    """The lock of the folder ``root``, which is to be of the job ``job_id``; None: of any.

    ``local``: the folder that is saved to, if it is another one, and from which that worker uploads to the root.
    """

    root: str
    job_id: str | None
    local: str | None = None


@dataclass(frozen=True)
class RootHolder:
    """Who has the lock. ``scope``: where its process ids are valid. ``leaving``: its trainer has gone, and it finishes
    what that had staged.
    """

    host: str
    scope: str
    worker: int
    trainer: int
    job_id: str | None
    leaving: bool


@dataclass(frozen=True)
class Claimed:
    """``holder``: who has the lock; None: this worker, or nobody. ``trouble``: why there is no lock; None: there is."""

    holder: RootHolder | None = None
    trouble: str | None = None
