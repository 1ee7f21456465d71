"""Uploads: what is said of them between a trainer and its worker (``uploader.py`` carries them out)."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

from asyncckpt.errors import CheckpointError, SaveTimeoutError
from asyncckpt.events import Event

_POLL_S = 0.05


class AskUploads:
    """Tell which uploads there are."""


@dataclass(frozen=True)
class UploadsUnderWay:
    """``to``: where those go that have not ended. ``failure``: why one is not there, of them or of those given up."""

    to: tuple[str, ...]
    failure: CheckpointError | None


@dataclass(frozen=True)
class Uploaded:
    """An attempt at an upload has ended.

    ``seconds``: since its checkpoint was committed, or, where this failed, since it began; None: it was there already,
    as the worker before this one had died then. ``nbytes``: of the checkpoint; ``error``: what went wrong.
    """

    to: str
    step: int
    seconds: float | None
    nbytes: int | None
    error: str | None = None

    def event(self, rank: int) -> Event:
        """To be told of it; ``rank``: that of the worker."""
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
    """Wait until there are none any more. Raises what one failed with, or ``SaveTimeoutError``.

    Args:
        ask: Asks the worker.
        timeout: Seconds.
    """
    deadline = time.monotonic() + timeout
    while (found := ask()).to or found.failure is not None:
        if found.failure is not None:
            raise found.failure
        if time.monotonic() >= deadline:
            raise SaveTimeoutError(f"not uploaded after {timeout:g} s; it is still under way", path=found.to[0])
        time.sleep(_POLL_S)
