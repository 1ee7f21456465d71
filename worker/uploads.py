"""Uploads: what a worker is asked to copy to another root (see ``uploader.py``), and what its trainer knows of that."""

from __future__ import annotations

import threading
from dataclasses import dataclass

from asyncckpt.errors import CheckpointError, SaveTimeoutError, WorkerDiedError


@dataclass(frozen=True)
class Upload:
    """The checkpoint at ``path``, once it is committed, is to be copied ``to`` another place, of the same step.

    ``sets_aside``: what is there gets another name; else nothing may be there. ``keep_last``, ``keep`` and ``timeout``
    are as those of ``WriteRequest``.
    """

    path: str
    to: str
    step: int
    sets_aside: bool
    keep_last: int | None
    keep: bool
    timeout: float


@dataclass(frozen=True)
class UploadEnded:
    """``to``: as of ``Upload``. ``error``: why it is not there; None: it is, or a newer one goes in its place."""

    to: str
    error: CheckpointError | None


class OpenUploads:
    """Those of one trainer. They outlive its workers: what one has died with, the next save asks for again."""

    def __init__(self) -> None:
        # By where they go to; with the number of the save that asks, None: no worker that lives knows of it.
        self._open: dict[str, tuple[Upload, int | None]] = {}
        self._failures: list[CheckpointError] = []
        self._changed = threading.Condition()

    def add(self, save_id: int, uploads: tuple[Upload, ...]) -> None:
        """A worker is told of them, with that save."""
        with self._changed:
            self._open |= {each.to: (each, save_id) for each in uploads}

    def add_overdue(self, upload: Upload) -> None:
        """A trainer before this one has left it undone."""
        with self._changed:
            self._open[upload.to] = upload, None

    def overdue(self) -> tuple[Upload, ...]:
        """Those that have to be asked for again."""
        with self._changed:
            return tuple(upload for upload, save_id in self._open.values() if save_id is None)

    def on_end(self, to: str, error: CheckpointError | None) -> None:
        """What was to go ``to`` there is there; or why not."""
        with self._changed:
            self._open.pop(to, None)
            self._failures += [] if error is None else [error]
            self._changed.notify_all()

    def on_failed_save(self, save_id: int, path: str) -> None:
        """The save to ``path`` has failed, so there is nothing to upload; others that it asked for are overdue."""
        with self._changed:
            mine = {to: upload for to, (upload, its) in self._open.items() if its == save_id}
            self._open |= {to: (upload, None) for to, upload in mine.items()}
            for to in [to for to, upload in mine.items() if upload.path == path]:
                del self._open[to]
            self._changed.notify_all()

    def on_exit(self) -> None:
        """The worker is gone."""
        with self._changed:
            self._open = {to: (upload, None) for to, (upload, _) in self._open.items()}
            self._changed.notify_all()

    def wait(self, timeout: float) -> None:
        """Wait until all have ended.

        Raises the first failure that nobody was told of, ``WorkerDiedError`` where one is overdue, or
        ``SaveTimeoutError`` after ``timeout`` seconds.
        """
        with self._changed:
            is_done = self._changed.wait_for(lambda: all(its is None for _, its in self._open.values()), timeout)
            failures, self._failures = self._failures, []
            if failures:
                raise failures[0]
            for upload, _ in self._open.values():
                if is_done:
                    raise WorkerDiedError(
                        f"its worker died before it was uploaded to {upload.to}; the next save begins that again",
                        path=upload.path,
                        step=upload.step,
                    )
                raise SaveTimeoutError(
                    f"not uploaded after {timeout:g} s; it is still under way", path=upload.to, step=upload.step
                )
