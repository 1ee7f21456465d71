"""Addresses: how a reader names the trainer whose weights it wants. Each names one job, as the doors of workers do."""

from __future__ import annotations

import os


def job_of_weights(address: str) -> str:
    """The job of a ``WeightPublisher`` with that ``address``, any text."""
    return f"weights\n{address}"


def job_of_checkpoints(root: str | os.PathLike[str], job_id: str | None) -> str:
    """The job of a ``Checkpointer``, see ``Config.job_id``."""
    return f"{os.path.realpath(os.fspath(root))}\n{job_id or ''}"
