"""Storage on local and shared file systems: folders of files, finalized by a rename.

An *orphan* is a leftover of a killed worker beside checkpoints. It has the name and the contents of an attempt, and
belongs to this user. No process holds a lock on an orphan, and none of its files was changed recently.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import secrets
import stat
import time
from collections.abc import Iterator

from asyncckpt.errors import (
    CheckpointError,
    CheckpointNotFoundError,
    DamagedCheckpointError,
    StorageError,
)
from asyncckpt.format.manifest import MANIFEST_NAME, METADATA_NAME, Manifest
from asyncckpt.format.write_request import Existing
from asyncckpt.storage.file_system import (
    files_under,
    holds_only_a_checkpoint,
    is_locked,
    is_replaceable,
    lock_alone,
    lock_alone_soon,
    lock_shared,
    make_folder,
    open_regular,
    opened,
    read_all,
    remove_folder,
    replace_text,
    sync_folder,
    translated,
)
from asyncckpt.storage.local_file import LocalInputFile
from asyncckpt.storage.partial import (
    CHECKPOINT_ATTEMPT,
    FILE_ATTEMPT,
    OLD_SUFFIX,
    PARTIAL_SUFFIX,
    SHORTENED,
    TRASH_SUFFIX,
    PartialFile,
    PartialFolder,
    attempt_path,
    rename,
    set_aside,
    undo_join,
)
from asyncckpt.storage.storage import FileIdentity, FileStamp, Resolution, Storage

logger = logging.getLogger(__name__)

# Maximum size of a file that is read at once. The indexes of tens of millions of tensors are smaller.
_SMALL_BYTES = 8 << 30
# Unit of ``st_blocks`` on all file systems, see stat(2).
_BLOCK_BYTES = 512
# Without locks, a writer counts as dead only after a day.
_NO_LOCKS_S = 86400.0


class LocalStorage(Storage):
    """Folders on a file system of this host. Finalizing and revoking both rename the attempt, so only one succeeds."""

    def __init__(self, direct_io: bool = True) -> None:
        self._direct = direct_io

    def begin_checkpoint(
        self, final: str, attempt: str, nbytes: int, orphan_s: float | None = None, *, linked_bytes: int = 0
    ) -> PartialFolder:
        parent = os.path.dirname(final)
        with translated("making a folder", parent):
            make_folder(parent)
        partial = PartialFolder(attempt_path(final, attempt), final, self._direct)
        try:
            with translated("making a folder", partial.path):
                partial.make()
                if orphan_s is not None:
                    _sweep_checkpoints(parent, os.stat(partial.path).st_mtime, orphan_s)
                require_space(partial.path, final, "checkpoint", nbytes - linked_bytes)
        except StorageError:
            partial.discard(())
            raise
        return partial

    def has_claimed(self, final: str, attempt: str, name: str) -> bool:
        return self.exists(os.path.join(attempt_path(final, attempt), name))

    def begin_file(self, final: str, attempt: str, nbytes: int, orphan_s: float) -> PartialFile:
        parent = os.path.dirname(final)
        with translated("looking at the folder", parent):
            _sweep_files(parent, time.time(), orphan_s)
            require_space(parent, final, "file", nbytes)
        return PartialFile(attempt_path(final, attempt), final, self._direct)

    def resolve(self, final: str, attempt: str, existing: Existing, inode: int | None = None) -> Resolution:
        leftover = self.revoke(final, attempt)
        # Revoke first, then look at the final place. A leftover does not prove that the attempt is unfinished. It may
        # be the old checkpoint after an exchange, or an emptied folder after a join.
        try:
            is_finalized = self.is_finalized(final, attempt, inode)
        except CheckpointError as error:
            if leftover is None or not self._is_unfinished(leftover, attempt, existing):
                raise StorageError(f"the final path cannot be checked: {error.message}", path=final) from error
            is_finalized = False
        with contextlib.suppress(OSError):
            if is_finalized:
                sync_folder(os.path.dirname(final))  # the rank that finalized the attempt may have died before its sync
            elif leftover is not None and existing == "join":
                undo_join(leftover, final)
        return Resolution(is_finalized, leftover)

    def revoke(self, final: str, attempt: str) -> str | None:
        path = attempt_path(final, attempt)
        trash = path.removesuffix(PARTIAL_SUFFIX) + TRASH_SUFFIX
        with translated("revoking an attempt", path):
            try:
                rename(path, trash)
            except FileNotFoundError:
                return None
            except OSError as error:
                if error.errno not in (errno.EACCES, errno.EPERM, errno.EROFS):
                    raise
                # The folder is not writable here, so no process with these rights can finalize the attempt either.
                logger.warning("%s could not be revoked: %s", path, error)
                return None
        return trash

    def remove(self, leftover: str | None) -> None:
        if leftover is not None:
            with contextlib.suppress(OSError):
                os.unlink(leftover)
            try:
                remove_folder(leftover)
            except (FileNotFoundError, NotADirectoryError):
                pass
            except OSError as error:
                logger.warning("%s could not be removed whole: %s", leftover, error)

    def is_finalized(self, final: str, attempt: str, inode: int | None = None) -> bool:
        manifest = os.path.join(final, MANIFEST_NAME)
        if inode is not None:
            return (stamp := self.stamp(final)) is not None and stamp.inode == inode
        if not self.exists(manifest):
            return False
        try:
            text = self.read(manifest)
        except StorageError:
            if self.exists(manifest):
                raise
            return False  # the manifest was removed meanwhile, e.g. by retention
        return Manifest.parse(text, manifest).attempt == attempt

    def _is_unfinished(self, leftover: str, attempt: str, existing: Existing) -> bool:
        """Return True if ``leftover`` is the attempt, False if it is the old checkpoint that the attempt replaced."""
        if existing in ("refuse", "set aside"):
            return True
        try:
            names = self.names_in(leftover)
            return self.is_finalized(leftover, attempt) if MANIFEST_NAME in names else METADATA_NAME not in names
        except CheckpointError:
            return False

    def may_put(self, path: str, existing: Existing) -> bool:
        if existing == "set aside":
            return True
        if existing == "join":
            return os.path.isdir(path) or not os.path.lexists(path)
        if existing == "refuse" and (os.path.islink(path) or not os.path.isdir(path)):
            return not os.path.lexists(path)
        with translated("looking at the folder", path):
            return is_replaceable(path) if existing == "replace" else not os.listdir(path)

    def check_writable(self, path: str) -> None:
        folder = os.path.dirname(path)
        while not os.path.lexists(folder) and folder != "/":
            folder = os.path.dirname(folder)
        with translated("writing to a folder", folder):
            if os.path.isdir(folder) and not os.access(folder, os.W_OK | os.X_OK, effective_ids=True):
                code = errno.EROFS if os.statvfs(folder).f_flag & os.ST_RDONLY else errno.EACCES
                raise OSError(code, os.strerror(code))

    def check_file_place(self, path: str) -> None:
        with translated("saving a file", path):
            with contextlib.suppress(FileNotFoundError):
                mode = os.lstat(path).st_mode
                if stat.S_ISDIR(mode):
                    raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR))
                if not stat.S_ISREG(mode) and not stat.S_ISLNK(mode):
                    raise OSError(errno.EINVAL, "it is a device, a pipe or a socket, and would be replaced by the file")
            os.stat(os.path.dirname(path))
        self.check_writable(path)

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

    def stamp(self, path: str) -> FileStamp | None:
        with translated("looking at a file", path), contextlib.suppress(FileNotFoundError, NotADirectoryError):
            facts = os.stat(path)
            return FileStamp(facts.st_mtime_ns, facts.st_size, facts.st_ino)
        return None

    def identity(self, path: str) -> FileIdentity | None:
        with translated("looking at a file", path), contextlib.suppress(FileNotFoundError, NotADirectoryError):
            facts = os.stat(path)
            # Some network file systems do not report the number of blocks of a file.
            allocated = facts.st_blocks * _BLOCK_BYTES or facts.st_size
            return FileIdentity(facts.st_dev, facts.st_ino, facts.st_nlink, allocated)
        return None

    def distrust(self, path: str) -> None:
        with contextlib.suppress(OSError):
            os.utime(path, follow_symlinks=False)

    def read(self, path: str) -> bytes:
        with translated("reading", path):
            fd = open_regular(path)
            try:
                if (nbytes := os.fstat(fd).st_size) > _SMALL_BYTES:
                    raise DamagedCheckpointError(
                        f"the file has {nbytes:,} bytes, and no such file is that large", path=path
                    )
                return read_all(fd, nbytes)
            finally:
                os.close(fd)

    def open(self, path: str) -> LocalInputFile:
        return LocalInputFile(path)

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
        return [path for path in partial if self._is_under_way(path)]

    def _is_under_way(self, path: str) -> bool:
        with translated("looking at an attempt", path), contextlib.suppress(FileNotFoundError, NotADirectoryError):
            try:
                return is_locked(path)
            except PermissionError:
                if os.lstat(path).st_uid == os.geteuid():
                    raise
        return False  # the attempt is gone, or belongs to another user

    def take_name(self, path: str) -> str | None:
        with translated("removing a checkpoint", path), opened(path, os.O_NONBLOCK) as fd:
            if lock_alone(fd) is False:
                return None
            parent, name = os.path.split(path)
            trash = os.path.join(parent, f".{name}.{secrets.token_hex(6)}{TRASH_SUFFIX}")
            rename(path, trash)
            if not _is_same(fd, trash):  # another checkpoint has taken its place meanwhile
                rename(trash, path)
                return None
            try:
                # Sync before removing files. Otherwise the name could be back after a power cut, without its files.
                sync_folder(parent)
            except OSError:
                rename(trash, path)
                raise
            with contextlib.suppress(OSError):  # so that no sweep takes the folder for an orphan
                os.utime(fd)
        return trash

    def advance(self, path: str, text: str, at: int) -> bool:
        folder = os.path.dirname(path)
        with translated("naming the newest checkpoint", path), opened(folder) as fd:
            lock_alone_soon(fd)  # several workers may advance one file, e.g. for an actor and a critic
            if (its := self.stamp(path)) is not None and its.modified > at:
                return False
            replace_text(path, text, at)
        return True

    def set_aside(self, path: str, why: str) -> None:
        with translated("setting a checkpoint aside", path):
            set_aside(path, why)


def _is_same(folder: int, path: str) -> bool:
    """Return whether ``path`` leads to the open ``folder``. Raises ``OSError``.

    Some network file systems give a renamed folder another inode number. In this case, compare the manifests.
    """
    if os.path.samestat(os.fstat(folder), os.stat(path)):
        return True
    try:
        with opened(MANIFEST_NAME, 0, folder) as one, opened(os.path.join(path, MANIFEST_NAME), 0) as other:
            return read_all(one, _SMALL_BYTES) == read_all(other, _SMALL_BYTES)
    except FileNotFoundError:
        return False


def require_space(folder: str, final: str, kind: str, nbytes: int) -> None:
    """Check that the file system of ``folder`` has ``nbytes`` free for ``final``, a checkpoint or a file (``kind``).

    Raises ``OSError`` or ``StorageError``.
    """
    if (free := free_bytes(folder)) is not None and free < nbytes:
        raise StorageError(
            f"the {kind} needs {nbytes:,} bytes and the file system has {free:,} left;"
            " free space there, or choose another place"
            + (" (Config.keep_last=N takes room for N + 1)" if kind == "checkpoint" else ""),
            path=final,
        )


def free_bytes(folder: str) -> int | None:
    """Return the free bytes of the file system of ``folder``; None if it does not tell. Raises ``OSError``."""
    try:
        space = os.statvfs(folder)
    except OSError as error:
        if error.errno != errno.ENOSYS:
            raise
        return None  # FUSE without statfs
    return space.f_bavail * space.f_frsize if space.f_blocks else None  # FUSE with an empty statfs


def _sweep_checkpoints(root: str, now: float, orphan_s: float) -> None:
    """Remove orphaned attempts at checkpoints, and half-removed checkpoints, in ``root``. Raises ``OSError``.

    An old checkpoint gets its name back if its replacement never took the name. ``now``: time in seconds by the clock
    of the file system. A folder that was changed within ``orphan_s`` seconds is not an orphan.
    """
    with os.scandir(root) as entries:
        names = [entry.name for entry in entries if entry.is_dir(follow_symlinks=False)]
    for name in names:
        attempt = CHECKPOINT_ATTEMPT.fullmatch(name)
        if attempt is None and not (name.startswith(".") and name.endswith(TRASH_SUFFIX)):
            continue
        final = os.path.join(root, attempt[1]) if attempt is not None and name.endswith(OLD_SUFFIX) else None
        if final is not None and os.path.basename(final).startswith(SHORTENED):
            logger.warning("%s has lost its final name: rename it back, or remove it", os.path.join(root, name))
            continue
        _sweep(os.path.join(root, name), now, orphan_s, final)


def _sweep_files(folder: str, now: float, orphan_s: float) -> None:
    """Remove orphaned attempts at single files in ``folder``. Raises ``OSError``."""
    with os.scandir(folder) as entries:
        paths = [entry.path for entry in entries if FILE_ATTEMPT.fullmatch(entry.name)]
    for path in paths:
        _sweep(path, now, orphan_s, None, is_file=True)


def _sweep(path: str, now: float, orphan_s: float, final: str | None, *, is_file: bool = False) -> None:
    """Remove ``path`` if it is an orphan. If ``final`` is given and free, rename the orphan to ``final`` instead."""
    try:
        if not _is_orphan(path, now, orphan_s, is_file=is_file):
            return
        if final is not None and not os.path.lexists(final):
            logger.warning("%s is renamed back: a worker was killed while replacing it", final)
            rename(path, final)
            return
        logger.warning("%s is removed: a killed worker left it unfinished", path)
        os.unlink(path) if is_file else remove_folder(path)
    except OSError as error:
        logger.info("%s stays: %s", path, error)


def _is_orphan(path: str, now: float, orphan_s: float, *, is_file: bool) -> bool:
    facts = os.lstat(path)
    if facts.st_uid != os.geteuid() or (is_file and not stat.S_ISREG(facts.st_mode)):
        return False
    with opened(path, os.O_NOFOLLOW | (os.O_NONBLOCK if is_file else os.O_DIRECTORY)) as fd:
        is_free = lock_alone(fd)
        # List the folder only if it is not locked. A network file system may cache the listing of an attempt that
        # others are still writing.
        if is_free is False or not (is_file or holds_only_a_checkpoint(path, is_attempt=True)):
            return False
        changed = [os.fstat(fd).st_mtime]
        if not is_file:
            names = files_under(fd)
            changed += [os.stat(name, dir_fd=fd, follow_symlinks=False).st_mtime for name in names]
        # A change far in the future is not recent either, because the clock was set back since.
        return min(abs(now - each) for each in changed) >= orphan_s + (0 if is_free else _NO_LOCKS_S)
