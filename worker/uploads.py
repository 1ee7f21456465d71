"""Uploads: what a worker is asked to copy to another root (see ``uploader.py``), and what its trainer knows of that."""

from __future__ import annotations

import threading
from dataclasses import dataclass

from asyncckpt.errors import CheckpointError, SaveTimeoutError, StorageError, WorkerDiedError


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
    """Those of one trainer. They outlive its workers: what one has died with, or what the place that it goes to has
    refused, the next save asks for again.
    """

    def __init__(self) -> None:
        # By where they go to.
        self._under_way: dict[str, tuple[Upload, int]] = {}  # with the number of the save that has asked for it
        self._overdue: dict[str, tuple[Upload, CheckpointError]] = {}
        self._failures: list[CheckpointError] = []
        self._changed = threading.Condition()  # whose lock may be taken twice

    def add(self, save_id: int, uploads: tuple[Upload, ...]) -> None:
        """A worker is told of them, with that save."""
        with self._changed:
            for each in uploads:
                self._overdue.pop(each.to, None)
                self._under_way[each.to] = each, save_id

    def add_overdue(self, upload: Upload, why: str = "its worker died") -> None:
        """It has to be asked for again."""
        error = WorkerDiedError(
            f"not uploaded to {upload.to} yet: {why}; the next save begins it again", path=upload.path, step=upload.step
        )
        with self._changed:
            self._overdue[upload.to] = upload, error

    def overdue(self) -> tuple[Upload, ...]:
        """Those that have to be asked for again."""
        with self._changed:
            return tuple(upload for upload, _ in self._overdue.values())

    def on_end(self, to: str, error: CheckpointError | None) -> None:
        """What was to go ``to`` there is there, or a newer one goes instead; or why not."""
        with self._changed:
            upload, _ = self._under_way.pop(to, (None, 0))
            if upload is not None and type(error) is StorageError:
                self._overdue[to] = upload, error
            elif error is not None:
                self._failures.append(error)
            self._changed.notify_all()

    def on_failed_save(self, save_id: int, path: str) -> None:
        """The save to ``path`` has failed, so there is nothing to upload; others that it asked for are overdue."""
        with self._changed:
            for to, (upload, its) in [*self._under_way.items()]:
                if its == save_id:
                    del self._under_way[to]
                    if upload.path != path:
                        self.add_overdue(upload, "a save failed")
            self._overdue = {to: each for to, each in self._overdue.items() if each[0].path != path}
            self._changed.notify_all()

    def on_exit(self) -> None:
        """The worker is gone."""
        with self._changed:
            for upload, _ in self._under_way.values():
                self.add_overdue(upload)
            self._under_way.clear()
            self._changed.notify_all()

    def wait(self, timeout: float) -> None:
        """Wait until all have ended.

        Raises a failure that nobody was told of; or why one is overdue, as long as it is; or ``SaveTimeoutError``
        after ``timeout`` seconds.
        """
        with self._changed:
            is_done = self._changed.wait_for(lambda: not self._under_way, timeout)
            failures, self._failures = self._failures, []
            failures += [error for _, error in self._overdue.values()]
            if failures:
                raise failures[0]
            if not is_done:
                upload, _ = next(iter(self._under_way.values()))
                raise SaveTimeoutError(
                    f"not uploaded after {timeout:g} s; it is still under way", path=upload.to, step=upload.step
                )
