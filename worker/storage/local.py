"""Local and shared file systems, the first kind of storage: folders of files, decided by a rename."""

from __future__ import annotations

import contextlib
import errno
import itertools
import logging
import os
import shutil
import time
from collections.abc import Iterator

from asyncckpt.errors import CheckpointError, CheckpointNotFoundError, StorageError
from asyncckpt.worker.manifest import MANIFEST_NAME, Manifest
from asyncckpt.worker.messages import Existing
from asyncckpt.worker.storage.folders import holds_only_a_checkpoint, make_folder, sync_folder
from asyncckpt.worker.storage.locks import is_locked, lock_alone, lock_shared, opened
from asyncckpt.worker.storage.names import PARTIAL_SUFFIX, TRASH_SUFFIX, attempt_path, with_suffix
from asyncckpt.worker.storage.orphans import sweep_checkpoints, sweep_files
from asyncckpt.worker.storage.os_errors import translated
from asyncckpt.worker.storage.partial import PartialFile, PartialFolder, undo_join
from asyncckpt.worker.storage.storage import Resolution, Storage

logger = logging.getLogger(__name__)


class LocalStorage(Storage):
    """Folders on a file system of this host. Finalizing and revoking are renames of the attempt: one comes first."""

    def __init__(self, direct_io: bool = True) -> None:
        self._direct = direct_io

    def begin_checkpoint(self, final: str, attempt: str, nbytes: int, orphan_s: float | None = None) -> PartialFolder:
        parent = os.path.dirname(final)
        with translated("making a folder", parent):
            make_folder(parent)
        partial = PartialFolder(attempt_path(final, attempt), final, self._direct)
        try:
            with translated("making a folder", partial.path):
                partial.make()
                if orphan_s is not None:
                    sweep_checkpoints(parent, os.stat(partial.path).st_mtime - orphan_s)
                _require_space(partial.path, final, "checkpoint", nbytes)
        except StorageError:
            partial.discard(())
            raise
        return partial

    def begin_file(self, final: str, attempt: str, nbytes: int, orphan_s: float) -> PartialFile:
        parent = os.path.dirname(final)
        with translated("looking at the folder", parent):
            sweep_files(parent, time.time() - orphan_s)
            _require_space(parent, final, "file", nbytes)
        return PartialFile(attempt_path(final, attempt), final, self._direct)

    def resolve(self, final: str, attempt: str, existing: Existing, inode: int | None = None) -> Resolution:
        leftover = self.revoke(final, attempt)
        # In this order: what it was replacing, or being joined to, may be what has just been revoked.
        is_finalized = self.is_finalized(final, attempt, inode)
        with contextlib.suppress(OSError):
            if is_finalized:
                sync_folder(os.path.dirname(final))  # whoever finalized it may have died before
            elif leftover is not None and existing == "join":
                undo_join(leftover, final)
        return Resolution(is_finalized, leftover)

    def revoke(self, final: str, attempt: str) -> str | None:
        path = attempt_path(final, attempt)
        trash = with_suffix(path, TRASH_SUFFIX)
        with translated("revoking an attempt", path):
            try:
                os.rename(path, trash)
            except FileNotFoundError:
                return None
            except OSError as error:
                if error.errno not in (errno.EACCES, errno.EPERM, errno.EROFS):
                    raise
                # Then whoever would finalize it cannot change anything either.
                logger.warning("%s could not be revoked: %s", path, error)
                return None
        return trash

    def remove(self, leftover: str | None) -> None:
        if leftover is not None:
            with contextlib.suppress(OSError):
                os.unlink(leftover)
            shutil.rmtree(leftover, ignore_errors=True)

    def is_finalized(self, final: str, attempt: str, inode: int | None = None) -> bool:
        manifest = os.path.join(final, MANIFEST_NAME)
        try:
            if inode is not None:
                return os.stat(final).st_ino == inode
            return Manifest.parse(self.read(manifest), manifest).attempt == attempt
        except (OSError, CheckpointError):
            return False

    def may_put(self, path: str, existing: Existing) -> bool:
        with translated("looking at the folder", path):
            if existing == "replace":
                return holds_only_a_checkpoint(path)
            if existing == "join":
                return os.path.isdir(path) or not os.path.lexists(path)
            is_folder = os.path.isdir(path) and not os.path.islink(path)
            return not os.listdir(path) if is_folder else not os.path.lexists(path)

    def check_file_place(self, path: str) -> None:
        with translated("saving a file", path):
            if os.path.isdir(path):
                raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR))
            os.stat(os.path.dirname(path))

    def names_in(self, folder: str) -> list[str]:
        with translated("listing", folder), contextlib.suppress(FileNotFoundError, NotADirectoryError):
            return os.listdir(folder)
        return []

    def exists(self, path: str) -> bool:
        with translated("looking at a file", path), contextlib.suppress(FileNotFoundError, NotADirectoryError):
            os.lstat(path)
            return True
        return False

    def size(self, path: str) -> int | None:
        with translated("looking at a file", path), contextlib.suppress(FileNotFoundError, NotADirectoryError):
            return os.stat(path).st_size
        return None

    def read(self, path: str) -> bytes:
        with translated("reading", path), open(path, "rb") as file:
            return file.read()

    @contextlib.contextmanager
    def reading(self, path: str) -> Iterator[None]:
        with contextlib.ExitStack() as held:
            with translated("opening", path):
                try:
                    folder = held.enter_context(opened(path))
                except (FileNotFoundError, NotADirectoryError) as error:
                    raise CheckpointNotFoundError("there is no checkpoint here", path=path) from error
                lock_shared(folder)
            yield

    def attempts_under_way(self, folder: str) -> list[str]:
        partial = [os.path.join(folder, name) for name in self.names_in(folder) if name.endswith(PARTIAL_SUFFIX)]
        return [path for path in partial if is_locked(path)]

    def remove_checkpoint(self, path: str) -> bool:
        with translated("removing a checkpoint", path), opened(path) as fd:
            if lock_alone(fd) is False:
                return False
            parent, name = os.path.split(path)
            trash = os.path.join(parent, f".{name}{TRASH_SUFFIX}")
            shutil.rmtree(trash, ignore_errors=True)  # of an earlier removal that was cut short
            os.rename(path, trash)
            shutil.rmtree(trash)
        return True

    def set_aside(self, path: str) -> None:
        aside = next(name for number in itertools.count(1) if not os.path.lexists(name := f"{path}.damaged-{number}"))
        with translated("setting a checkpoint aside", path):
            os.rename(path, aside)
            sync_folder(os.path.dirname(path))


def _require_space(folder: str, final: str, kind: str, nbytes: int) -> None:
    """Raises ``OSError`` or ``StorageError``."""
    space = os.statvfs(folder)
    if (free := space.f_bavail * space.f_frsize) < nbytes:
        raise StorageError(
            f"the {kind} needs {nbytes:,} bytes and the file system has {free:,} left;"
            " free space there, or choose another place",
            path=final,
        )
