"""The reports of a worker to its trainer about uploads. ``uploader.py`` carries out the uploads."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

from asyncckpt.budgets import POLL_S
from asyncckpt.errors import CheckpointError, SaveTimeoutError
from asyncckpt.events import Event


@dataclass(frozen=True)
class UploadsUnderWay:
    """The uploads that have not ended.

    ``to``: the targets of the uploads. ``failure``: the error of an upload that will be retried, or was given up.
    """

    to: tuple[str, ...]
    failure: CheckpointError | None


@dataclass(frozen=True)
class Uploaded:
    """The end of an attempt at an upload.

    ``seconds``: time since the commit of the checkpoint, or, after a failure, since the attempt began; None if an
    earlier worker completed the copy and died. ``nbytes``: size of the checkpoint in bytes. ``error``: the failure.
    """

    to: str
    step: int
    seconds: float | None
    nbytes: int | None
    error: str | None = None

    def event(self, rank: int) -> Event:
        """Return the event that reports the upload. ``rank``: the rank of the worker."""
        return Event(
            phase="uploaded" if self.error is None else "upload failed",
            rank=rank,
            path=self.to,
            step=self.step,
            seconds=self.seconds,
            nbytes=self.nbytes,
            error=self.error,
        )


def wait_for_uploads(ask: Callable[[], UploadsUnderWay], timeout: float) -> None:
    """Wait until no uploads are under way. Raises the error of a failed upload, or ``SaveTimeoutError``.

    Args:
        ask: Ask the worker for its uploads.
        timeout: Maximum seconds to wait.
    """
    deadline = time.monotonic() + timeout
    while (found := ask()).to or found.failure is not None:
        if found.failure is not None:
            raise found.failure
        if time.monotonic() >= deadline:
            raise SaveTimeoutError(f"the upload is still under way after {timeout:g} s", path=found.to[0])
        time.sleep(POLL_S)
