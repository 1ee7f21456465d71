"""Notes of uploads: each has one, a small file in the local folder, from before its checkpoint is committed until it is
at the root, or nobody wants it there any more. So what a worker dies with, the next one finds.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
from collections.abc import Iterator
from dataclasses import asdict

from asyncckpt.format.write_request import Upload
from asyncckpt.storage.file_system import lock_alone, lock_alone_soon, make_folder, translated

_FOLDER = "asyncckpt.uploads"
_NOTE = re.compile(r"\.?step-(\d+)\.json")
_EVER = "ever"
_CHANGING = "changing"


class UploadNotes:
    """The notes in one local folder. A note whose name begins with a dot is of a checkpoint that is not committed yet.

    All methods raise ``StorageError`` where the folder refuses.
    """

    def __init__(self, local: str) -> None:
        """Make the folder for them in ``local``, if it is missing."""
        self._folder = os.path.join(local, _FOLDER)
        with translated("making a folder", self._folder):
            make_folder(self._folder)

    def add(self, upload: Upload) -> None:
        """Note it, durably, for when its checkpoint is committed."""
        path = self._path(upload.step, hidden=True)
        last = max((at for at, _ in [*self._found(hidden=True), *self._found(hidden=False)]), default=0)
        with translated("noting an upload", path), open(path, "w") as file:
            json.dump(asdict(upload), file)
            file.flush()
            if os.fstat(file.fileno()).st_mtime_ns <= last:  # the clock was set back: it is the newest all the same
                os.utime(file.fileno(), ns=(last + 1, last + 1))
            os.fsync(file.fileno())

    def show(self, step: int) -> None:
        """The checkpoint of the hidden one is committed."""
        path = self._path(step, hidden=True)
        with self._changing(), translated("noting an upload", path):
            os.replace(path, self._path(step))

    def drop(self, step: int) -> None:
        """That of the hidden one is not."""
        self._unlink(self._path(step, hidden=True))

    def remove(self, upload: Upload) -> None:
        """It has ended, or will not be; but its step may have another one meanwhile."""
        path = self._path(upload.step)
        with self._changing():
            if (known := self._read(path)) is not None and known[1].attempt == upload.attempt:
                self._unlink(path)

    def hidden(self) -> list[Upload]:
        """Those of checkpoints that are not committed yet, or whose worker died just then."""
        return [upload for _, upload in self._found(hidden=True)]

    def steps(self) -> list[int]:
        """All steps that have one."""
        return [step for _, step in self._names()]

    def all(self) -> list[Upload]:
        """Those of committed checkpoints, the oldest note first."""
        found = sorted(self._found(hidden=False), key=lambda each: (each[0], each[1].step))
        return [upload for _, upload in found]

    def lock(self) -> int | None:
        """Take the lock: one worker at a time uploads. The descriptor holds it; None: another worker has it."""
        with translated("taking a lock", self._folder):
            fd = os.open(self._folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
            if lock_alone(fd) is False:  # None: its file system has no locks
                os.close(fd)
                return None
            return fd

    @contextlib.contextmanager
    def _changing(self) -> Iterator[None]:
        """Others wait, threads and processes, that change which note a step has."""
        path = os.path.join(self._folder, _CHANGING)
        with contextlib.ExitStack() as undo:
            with translated("taking a lock", path):
                fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
                undo.callback(os.close, fd)
                lock_alone_soon(fd)
            yield

    def note_success(self) -> None:
        """Something of this run is in its root, from now on."""
        with contextlib.suppress(OSError), open(os.path.join(self._folder, _EVER), "w"):
            pass

    def _found(self, *, hidden: bool) -> list[tuple[int, Upload]]:
        names = [name for name, _ in self._names() if name.startswith(".") == hidden]
        return list(filter(None, (self._read(os.path.join(self._folder, name)) for name in names)))

    def _read(self, path: str) -> tuple[int, Upload] | None:
        """A note, and when it was made; None: there is none. One that was not written to its end is removed."""
        with translated("reading a note", path), contextlib.suppress(FileNotFoundError):
            try:
                with open(path) as file:
                    return os.fstat(file.fileno()).st_mtime_ns, Upload(**json.load(file))
            except (ValueError, TypeError):
                self._unlink(path)
        return None

    def _unlink(self, path: str) -> None:
        with translated("removing a note", path), contextlib.suppress(FileNotFoundError):
            os.unlink(path)

    def _names(self) -> list[tuple[str, int]]:
        with translated("listing", self._folder):
            names = ((name, _NOTE.fullmatch(name)) for name in os.listdir(self._folder))
            return [(name, int(match[1])) for name, match in names if match]

    def _path(self, step: int, *, hidden: bool = False) -> str:
        return os.path.join(self._folder, f"{'.' if hidden else ''}step-{step:08d}.json")


def has_uploaded(local: str) -> bool:
    """Whether something was uploaded from the folder ``local``, ever."""
    return os.path.exists(os.path.join(local, _FOLDER, _EVER))
