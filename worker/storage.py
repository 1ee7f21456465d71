"""Local folders: how files get onto storage for good, and how a folder of them gets its final name.

The one place where the operating system's errors become ours. A checkpoint is written in a folder of its *attempt*,
hidden beside the final place, which each rank's worker holds locked (``flock``, shared) until it is published or
discarded: so anybody can tell an attempt under way from what a dead worker left behind.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import fcntl
import logging
import os
import re
import shutil
import stat
import time
from collections.abc import Iterator, Sequence

from asyncckpt.errors import CheckpointExistsError, StorageError
from asyncckpt.worker.manifest import MANIFEST_NAME, METADATA_NAME, is_checkpoint_file
from asyncckpt.worker.messages import Existing

logger = logging.getLogger(__name__)

PARTIAL_SUFFIX = ".partial"
# What is being removed, and what is making way for another of the same name.
TRASH_SUFFIX = ".asyncckpt-trash"
OLD_SUFFIX = ".asyncckpt-old"
_ATTEMPT = re.compile(r"\.(.+)\.[0-9a-f]+-\d+(?:\.partial|\.asyncckpt-old)")

_FILE_ATTEMPT = re.compile(r"\..+\.[0-9a-f]{12}-\d+\.partial")

_LOCK_TIMEOUT_S = 30.0
_LOCK_POLL_S = 0.01
_NO_LOCKS_S = 86400.0

_AT_FDCWD = -100
_RENAME_EXCHANGE = 2
_libc = ctypes.CDLL(None, use_errno=True)

_ADVICE = {
    errno.ENOSPC: "free space there, or choose another place",
    errno.EDQUOT: "the quota is used up: free space there, or choose another place",
    errno.EACCES: "check the permissions",
    errno.EPERM: "check the permissions",
    errno.EROFS: "the file system is mounted read-only",
    errno.ENOTDIR: "part of the path is a file: choose another place",
    errno.EFBIG: "the file may not grow that far (see ulimit -f): raise the limit, or choose another place",
}


@contextlib.contextmanager
def translated(doing: str, path: str) -> Iterator[None]:
    """Turn an ``OSError`` inside into a ``StorageError`` that says what was being done, and to what."""
    try:
        yield
    except OSError as error:
        advice = _ADVICE.get(error.errno or 0, "look at the storage there")
        raise StorageError(f"{doing} failed: {error.strerror or error}; {advice}", path=path) from error


def attempt_folder(final: str, attempt: str) -> str:
    """Where the checkpoint ``final`` is written until it is published."""
    parent, name = os.path.split(final)
    return os.path.join(parent, f".{name}.{attempt}{PARTIAL_SUFFIX}")


def withdraw(final: str, attempt: str) -> str | None:
    """Take its name from an ``attempt`` at ``final``, so that nobody can publish it any more.

    Publishing is a rename too, so one of the two comes first, and the other finds nothing. Returns where it is now,
    to be removed; None where nothing was, or where storage is not to be changed (by whoever would publish, either).
    Raises ``OSError`` where it is not known what has become of it.
    """
    path = attempt_folder(final, attempt)
    trash = path.removesuffix(PARTIAL_SUFFIX) + TRASH_SUFFIX
    try:
        os.rename(path, trash)
    except FileNotFoundError:
        return None
    except OSError as error:
        if error.errno not in (errno.EACCES, errno.EPERM, errno.EROFS):
            raise
        logger.warning("%s could not be taken away: %s", path, error)
        return None
    return trash


def disjoin(trash: str, final: str) -> None:
    """Of an attempt in ``trash`` that was just being joined to ``final`` when it was taken away: see that DCP finds no
    checkpoint there, whose ``.metadata`` goes there just before our manifest.
    """
    if METADATA_NAME not in (names := os.listdir(trash)) and MANIFEST_NAME in names:
        os.unlink(os.path.join(final, METADATA_NAME))


def remove(path: str) -> None:
    """Remove a file or a folder, as far as storage lets us."""
    with contextlib.suppress(OSError):
        os.unlink(path)
    shutil.rmtree(path, ignore_errors=True)


class OutputFile:
    """A file being written, past the page cache where the file system allows."""

    def __init__(self, path: str, direct: bool) -> None:
        """Create ``path``, which must not exist. Raises ``StorageError``."""
        self.path = path
        self.direct = direct
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
        with translated("creating a file", path):
            try:
                self._fd = os.open(path, flags | (os.O_DIRECT if direct else 0), 0o644)
            except OSError as error:
                if not direct or error.errno != errno.EINVAL:
                    raise
                # The file system knows no direct I/O; whether the file was made before it said so differs.
                self.direct = False
                self._fd = os.open(path, flags & ~os.O_EXCL, 0o644)

    def write(self, data: memoryview, offset: int) -> None:
        """Write all of ``data`` at ``offset``. Direct I/O wants both aligned to pages. Any thread may call it."""
        with translated("writing", self.path):
            while data:
                try:
                    done = os.pwrite(self._fd, data, offset)
                except OSError as error:
                    if not self.direct or error.errno != errno.EINVAL:
                        raise
                    self._write_buffered()
                    continue
                data = data[done:]
                offset += done

    def _write_buffered(self) -> None:
        """Some file systems refuse direct I/O only now, or want another alignment after a short write."""
        self.direct = False
        fcntl.fcntl(self._fd, fcntl.F_SETFL, fcntl.fcntl(self._fd, fcntl.F_GETFL) & ~os.O_DIRECT)

    def truncate(self, nbytes: int) -> None:
        """Cut off what is behind ``nbytes``: direct writes are of whole pages."""
        with translated("writing", self.path):
            os.ftruncate(self._fd, nbytes)

    def sync(self) -> None:
        """Return when all that was written is on storage; what went through the page cache leaves it."""
        with translated("flushing to storage", self.path):
            os.fsync(self._fd)
            if not self.direct:
                os.posix_fadvise(self._fd, 0, 0, os.POSIX_FADV_DONTNEED)

    def close(self) -> None:
        """Give the descriptor back; safe to call twice."""
        fd, self._fd = self._fd, -1
        if fd >= 0:
            with translated("closing", self.path):
                os.close(fd)


class LocalStorage:
    """Folders on a file system of this host. One call after the other, as ``commit.py`` makes them:

    ``begin`` an attempt, ``create`` its files, ``publish`` it or ``discard`` it.
    """

    def __init__(self, direct: bool = True) -> None:
        self._direct = direct
        self._locks: dict[str, int] = {}

    def begin(self, final: str, attempt: str, nbytes: int, orphan_s: float | None = None) -> str:
        """Make and lock the folder of an attempt at ``final``; ``nbytes`` will be written into it. Returns its path.

        What dead workers left beside it ``orphan_s`` seconds ago, or earlier, is removed first (None: nothing is).
        """
        parent = os.path.dirname(final)
        self._make_folder(parent)
        folder = attempt_folder(final, attempt)
        with translated("making a folder", folder):
            with contextlib.suppress(FileExistsError):  # another rank was here first
                os.mkdir(folder, 0o755)
            fd = self._locks[folder] = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
            _lock_shared(fd)
            if orphan_s is not None:
                sweep(parent, os.fstat(fd).st_mtime - orphan_s)
            space = os.statvfs(folder)
        try:
            _require_space(final, "checkpoint", nbytes, space.f_bavail * space.f_frsize)
        except StorageError:
            self.discard(folder, ())
            raise
        return folder

    def create(self, path: str, *, large: bool) -> OutputFile:
        """A new file; ``large`` ones are written past the page cache, in aligned pieces."""
        return OutputFile(path, direct=large and self._direct)

    def publish(self, folder: str, final: str, *, existing: Existing) -> None:
        """Give the attempt in ``folder`` its final name, durably. Its files must be synced.

        An empty folder at ``final`` is replaced, and what else stands there dealt with as ``existing`` says. Raises
        ``CheckpointExistsError`` where that cannot be done.
        """
        with translated("flushing a folder", folder):
            sync_folder(folder)
        taken = existing == "join" and os.path.isdir(final)
        with translated("publishing the checkpoint", final):
            try:
                if not taken:
                    os.rename(folder, final)
            except OSError as error:
                if error.errno not in (errno.ENOTEMPTY, errno.EEXIST, errno.ENOTDIR):
                    raise
                taken = True
        if taken:
            self._settle(folder, final, existing)
        parent = os.path.dirname(final)
        with translated("flushing a folder", parent):
            try:
                sync_folder(parent)
            except OSError:
                if not taken:
                    os.rename(final, folder)  # what has failed is not to be found there
                raise

    def discard(self, folder: str, names: Sequence[str] | None = None) -> None:
        """Remove an attempt, or just the files ``names`` of it, and the folder with the last one.

        As far as storage lets us: the error that led here matters more than one from here.
        """
        if names is None:
            shutil.rmtree(folder, ignore_errors=True)
        else:
            for name in names:
                with contextlib.suppress(OSError):
                    os.unlink(os.path.join(folder, name))
            with contextlib.suppress(OSError):
                os.rmdir(folder)
        self.release(folder)

    def close(self) -> None:
        """Let go of all attempts."""
        for folder in list(self._locks):
            self.release(folder)

    def release(self, folder: str) -> None:
        """Let go of an attempt, be it published or not."""
        fd = self._locks.pop(folder, -1)
        if fd >= 0:
            os.close(fd)

    # And for a single file, whose attempt is no folder but a file: ``begin_file``, ``create``, ``hold``, then
    # ``publish_file`` or ``discard_file``.

    def begin_file(self, final: str, attempt: str, nbytes: int, orphan_s: float) -> str:
        """Where an attempt at the file ``final`` of ``nbytes`` is to be written: beside it, in a folder that is there.

        What dead workers left in that folder ``orphan_s`` seconds ago, or earlier, is removed first.
        """
        parent = os.path.dirname(final)
        with translated("looking at the folder", parent):
            _sweep_files(parent, time.time() - orphan_s)
            space = os.statvfs(parent)
        _require_space(final, "file", nbytes, space.f_bavail * space.f_frsize)
        return attempt_folder(final, attempt)

    def hold(self, path: str) -> int:
        """Lock the attempt at a file, which is there by now, until it is published or discarded. Returns its inode."""
        with translated("locking a file", path):
            fd = self._locks[path] = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
            _lock_shared(fd)
            return os.fstat(fd).st_ino

    def publish_file(self, path: str, final: str) -> None:
        """Give the file ``path``, which must be synced, its final name, durably. A file that has it is replaced."""
        with translated("publishing the file", final):
            with contextlib.suppress(FileNotFoundError):
                os.chmod(path, stat.S_IMODE(os.stat(final).st_mode))
            os.rename(path, final)
        parent = os.path.dirname(final)
        with translated("flushing a folder", parent):
            sync_folder(parent)

    def discard_file(self, path: str) -> None:
        """Remove an attempt at a file, as far as storage lets us."""
        with contextlib.suppress(OSError):
            os.unlink(path)
        self.release(path)

    def _settle(self, folder: str, final: str, existing: Existing) -> None:
        """Publish ``folder`` where something stands."""
        if existing == "join" and os.path.isdir(final):
            with translated("publishing the checkpoint", final):
                _join(folder, final)
        elif existing == "replace" and replaceable(final):
            self._replace(folder, final)
        else:
            raise exists_error(final, existing)

    def _replace(self, folder: str, final: str) -> None:
        """Put ``folder`` in the place of the checkpoint ``final`` and remove that."""
        with translated("replacing the checkpoint", final):
            old = folder
            if not _exchange(folder, final):
                # No exchange on this file system: for a moment neither has the name, the old one is whole beside it.
                old = folder.removesuffix(PARTIAL_SUFFIX) + OLD_SUFFIX
                os.rename(final, old)
                try:
                    os.rename(folder, final)
                except OSError:
                    os.rename(old, final)
                    raise
            try:
                sync_folder(os.path.dirname(final))
            except OSError:
                if old != folder:
                    os.rename(final, folder)
                    os.rename(old, final)
                else:
                    _exchange(folder, final)
                raise
        shutil.rmtree(old, ignore_errors=True)

    def _make_folder(self, path: str) -> None:
        """Make ``path`` and what is missing above it, each entry durable."""
        if os.path.isdir(path):
            return
        with translated("making a folder", path):
            parent = os.path.dirname(path)
            if parent != path:
                self._make_folder(parent)
            with contextlib.suppress(FileExistsError):
                os.mkdir(path, 0o755)
            if not os.path.isdir(path):
                raise NotADirectoryError(errno.ENOTDIR, "it is a file", path)
            sync_folder(parent)


def _require_space(final: str, kind: str, nbytes: int, free: int) -> None:
    if free < nbytes:
        raise StorageError(
            f"the {kind} needs {nbytes:,} bytes and the file system has {free:,} left;"
            " free space there, or choose another place",
            path=final,
        )


def replaceable(path: str) -> bool:
    """Whether ``path`` is free, or holds a checkpoint and nothing else, so that nobody's files are lost with it."""
    try:
        with os.scandir(path) as entries:
            return all(is_checkpoint_file(entry.name) and not entry.is_dir() for entry in entries)
    except FileNotFoundError:
        return True
    except NotADirectoryError:
        return False


def fits(path: str, existing: Existing) -> bool:
    """Whether a checkpoint may be put at ``path``."""
    if existing == "replace":
        return replaceable(path)
    if existing == "join":
        return os.path.isdir(path) or not os.path.lexists(path)
    return not os.path.lexists(path) or _is_empty_folder(path)


def exists_error(path: str, existing: Existing, *, step: int | None = None) -> CheckpointExistsError:
    """The error for a final place that is taken."""
    why = {
        "replace": "there is something here that is not a checkpoint, or not only one; move it away or save elsewhere",
        "join": "there is something here that is no folder; move it away or save elsewhere",
        "refuse": "there is something here already, and a checkpoint never replaces another by accident;"
        " remove it first, or save under another step",
    }
    return CheckpointExistsError(why[existing], path=path, step=step)


def _is_empty_folder(path: str) -> bool:
    if os.path.islink(path) or not os.path.isdir(path):
        return False
    with os.scandir(path) as entries:
        return next(entries, None) is None


def _join(folder: str, final: str) -> None:
    """Move the files in ``folder`` into ``final``, durably, what says that they are complete after all others.

    A checkpoint that stands there is none from the first moment on: its files have the names of these.
    """
    if os.stat(folder).st_dev != os.stat(final).st_dev:
        raise OSError(errno.EXDEV, "it is on another file system than the folder it is in; save into a folder of it")
    last = [METADATA_NAME, MANIFEST_NAME]
    for name in reversed(last):
        with contextlib.suppress(FileNotFoundError):
            os.unlink(os.path.join(final, name))
    sync_folder(final)
    present = os.listdir(folder)
    for names in ([name for name in present if name not in last], [name for name in last if name in present]):
        for name in names:
            os.rename(os.path.join(folder, name), os.path.join(final, name))
        sync_folder(final)
    with contextlib.suppress(OSError):  # it is published all the same
        os.rmdir(folder)


@contextlib.contextmanager
def reading(folder: str) -> Iterator[None]:
    """Hold ``folder`` against removal while its files are read. Raises ``OSError`` where it is gone."""
    with _opened(folder) as fd:
        _lock_shared(fd)
        yield


def under_way(folder: str) -> bool:
    """Whether somebody holds the attempt in ``folder``: a worker that is still writing it."""
    try:
        with _opened(folder) as fd:
            return not _lock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return False


def remove_checkpoint(folder: str) -> bool:
    """Remove a checkpoint that nobody reads, its final name first; False where one does. Raises ``OSError``."""
    with _opened(folder) as fd:
        if not _lock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB):
            return False
        parent, name = os.path.split(folder)
        trash = os.path.join(parent, f".{name}{TRASH_SUFFIX}")
        shutil.rmtree(trash, ignore_errors=True)  # of an earlier removal that was cut short
        os.rename(folder, trash)
        shutil.rmtree(trash)
    return True


def sweep(root: str, before: float) -> None:
    """Remove what workers that were killed left under ``root``: attempts and half-removed checkpoints.

    They are known by their names, by what is in them, by their owner, this user, by the lock that nobody holds on them,
    and by their age: nothing in them was changed after ``before``, a time of that file system in seconds. A checkpoint
    that was to make way for another that never came gets its name back.
    """
    with os.scandir(root) as entries:
        names = [entry.name for entry in entries if entry.is_dir(follow_symlinks=False)]
    for name in names:
        attempt = _ATTEMPT.fullmatch(name)
        if attempt is None and not (name.startswith(".") and name.endswith(TRASH_SUFFIX)):
            continue
        folder = os.path.join(root, name)
        try:
            if not _is_orphan(folder, before):
                continue
            final = os.path.join(root, attempt[1]) if attempt is not None else ""
            if name.endswith(OLD_SUFFIX) and not os.path.lexists(final):
                logger.warning("%s gets its name back: a worker was killed while it was being replaced", final)
                os.rename(folder, final)
            else:
                logger.warning("removing %s, which a worker left that was killed", folder)
                shutil.rmtree(folder)
        except OSError as error:
            logger.info("%s stays: %s", folder, error)


def _is_orphan(folder: str, before: float) -> bool:
    if os.lstat(folder).st_uid != os.geteuid() or not replaceable(folder):
        return False
    with _opened(folder) as fd:
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        except OSError:  # no locks here: give whoever it is a day
            before -= _NO_LOCKS_S
        with os.scandir(fd) as entries:
            changed = [entry.stat(follow_symlinks=False).st_mtime for entry in entries]
        return max([os.fstat(fd).st_mtime, *changed]) <= before


def _sweep_files(folder: str, before: float) -> None:
    """Remove attempts at single files that killed workers left in ``folder``, known as ``sweep`` knows those there."""
    with os.scandir(folder) as entries:
        paths = [entry.path for entry in entries if _FILE_ATTEMPT.fullmatch(entry.name)]
    for path in paths:
        try:
            if _is_orphaned_file(path, before):
                logger.warning("removing %s, which a worker left that was killed", path)
                os.unlink(path)
        except OSError as error:
            logger.info("%s stays: %s", path, error)


def _is_orphaned_file(path: str, before: float) -> bool:
    facts = os.lstat(path)
    if not stat.S_ISREG(facts.st_mode) or facts.st_uid != os.geteuid():
        return False
    with _opened(path, 0) as fd:
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        except OSError:  # no locks here
            before -= _NO_LOCKS_S
        return os.fstat(fd).st_mtime <= before


def sync_folder(path: str) -> None:
    """Make the entries of a folder durable. Raises ``OSError``."""
    with _opened(path) as fd:
        try:
            os.fsync(fd)
        except OSError as error:
            if error.errno != errno.EINVAL:  # some network file systems have nothing to sync for a folder
                raise


@contextlib.contextmanager
def _opened(path: str, flags: int = os.O_DIRECTORY) -> Iterator[int]:
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | flags)
    try:
        yield fd
    finally:
        os.close(fd)


def _lock(fd: int, how: int) -> bool:
    """Lock a folder; False if another holds it. On a file system without locks nothing is locked, and all is True."""
    try:
        fcntl.flock(fd, how)
    except BlockingIOError:
        return False
    except OSError:
        pass
    return True


def _lock_shared(fd: int) -> None:
    """Lock a folder together with others; who removes it, or looks whether it is locked, has it alone for a moment."""
    deadline = time.monotonic() + _LOCK_TIMEOUT_S
    while not _lock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB):
        if time.monotonic() > deadline:
            raise TimeoutError(errno.ETIMEDOUT, f"another process has held it locked for {_LOCK_TIMEOUT_S:g} s")
        time.sleep(_LOCK_POLL_S)


def _exchange(one: str, other: str) -> bool:
    """Swap two names in one step; False where the file system or the kernel cannot."""
    try:
        rename = _libc.renameat2
    except AttributeError:  # glibc before 2.28
        return False
    if rename(_AT_FDCWD, os.fsencode(one), _AT_FDCWD, os.fsencode(other), _RENAME_EXCHANGE) == 0:
        return True
    code = ctypes.get_errno()
    if code in (errno.EINVAL, errno.ENOSYS, errno.ENOTSUP):
        return False
    raise OSError(code, os.strerror(code), other)
