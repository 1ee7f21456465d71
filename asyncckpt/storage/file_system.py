"""File system operations for storage: durable folders, locks, and the translation of errors.

A lock (``flock``) belongs to an open descriptor, and the kernel drops the lock when the process dies. So any process
can tell an attempt under way from the leftover of a dead worker.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import os
import stat
from collections.abc import Iterator, Mapping
from typing import Any

from asyncckpt.budgets import SILENCE_S
from asyncckpt.errors import DamagedCheckpointError, FormatError, StorageError, unless_interrupt
from asyncckpt.format.manifest import MANIFEST_NAME, UPLOADED_NAME, Manifest, is_checkpoint_file, is_index
from asyncckpt.shm.segment import Descriptor, close
from asyncckpt.threads import wait_until

_MOST_AT_ONCE = 1 << 30
_synced: set[str] = set()  # folders whose entries this process has synced

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
    """Turn an ``OSError`` in the block into a ``StorageError`` that names the operation and the path."""
    try:
        yield
    except unless_interrupt(OSError) as error:
        advice = _ADVICE.get(error.errno or 0, "look at the storage there")
        raise StorageError(f"{doing} failed: {error.strerror or error}; {advice}", path=path) from error


# All functions below raise ``OSError``. Their callers know the operation and translate the error.


def open_regular(path: str, flags: int = 0) -> int:
    """Open a regular file for reading. Refuse pipes and devices: opening may block, and reading may never end.

    Raises ``DamagedCheckpointError`` if ``path`` is not a regular file.
    """
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK | os.O_NOCTTY | flags)
    if not stat.S_ISREG(os.fstat(fd).st_mode):
        os.close(fd)
        raise DamagedCheckpointError("the path is no file", path=path)
    # With O_NONBLOCK some network file systems answer reads with EAGAIN.
    fcntl.fcntl(fd, fcntl.F_SETFL, fcntl.fcntl(fd, fcntl.F_GETFL) & ~os.O_NONBLOCK)
    return fd


def read_all(fd: int, nbytes: int) -> bytes:
    """Read up to ``nbytes`` of a file. Python's own file objects would mistake EAGAIN for the end of the file."""
    parts = []
    while nbytes > 0 and (part := os.read(fd, min(nbytes, _MOST_AT_ONCE))):
        parts.append(part)
        nbytes -= len(part)
    return b"".join(parts)


@contextlib.contextmanager
def opened(path: str, flags: int = os.O_DIRECTORY, folder: int | None = None) -> Iterator[int]:
    """Open a folder, or with other ``flags`` a file. ``folder``: the open folder that ``path`` is relative to."""
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | flags, dir_fd=folder)
    try:
        yield fd
    finally:
        close(fd)


def is_at(fd: int, path: str, folder: int | None = None) -> bool:
    """Return whether ``path``, relative to an open ``folder``, leads to the open file.

    Raises ``OSError`` on a file system without lasting inode numbers, because the check needs them.
    """
    its = os.fstat(fd)
    if not os.path.samestat(its, os.fstat(fd)):
        raise OSError(errno.EOPNOTSUPP, "this file system gives an open file a new inode number each time")
    with contextlib.suppress(FileNotFoundError):
        return os.path.samestat(its, os.stat(path, dir_fd=folder, follow_symlinks=False))
    return False


def sync_folder(path: str) -> None:
    """Make the entries of a folder durable."""
    with opened(path) as fd:
        try:
            os.fsync(fd)
        except OSError as error:
            if error.errno != errno.EINVAL:  # some network file systems cannot sync folders
                raise


def make_folder(path: str, mode: int = 0o755) -> None:
    """Create the folder ``path`` and its missing parents, each entry durable.

    Each process syncs the entry of an existing folder once, because the creator may have been killed before its sync.
    """
    parent = os.path.dirname(path)
    if is_new := not os.path.isdir(path):
        if parent != path:
            make_folder(parent, mode)
        with contextlib.suppress(FileExistsError):
            os.mkdir(path, mode)
        if not os.path.isdir(path):
            raise NotADirectoryError(errno.ENOTDIR, "it is a file", path)
    elif path in _synced:
        return
    try:
        sync_folder(parent)
    except OSError:
        if is_new:  # an existing folder may belong to a user who forbids reading
            raise
    _synced.add(path)


def files_under(folder: int) -> Iterator[str]:
    """Yield the relative paths of all files in and below an open folder, including links and folders without files.

    A subfolder that cannot be read is an error. Without its files, a foreign folder might look like a checkpoint.
    """
    for name, is_folder in _entries(folder):
        if not is_folder:
            yield name
            continue
        with contextlib.suppress(FileNotFoundError):  # the subfolder was removed meanwhile
            with opened(name, os.O_DIRECTORY | os.O_NOFOLLOW, folder) as below:
                within = list(files_under(below))
            yield from (os.path.join(name, file) for file in within) if within else [name]


def _entries(folder: int) -> list[tuple[str, bool]]:
    """Return the names in an open folder. The flag of each name is True for a folder that is not a link."""
    # Open the folder again, because btrfs lists the names that existed when the folder was opened.
    with opened(".", os.O_DIRECTORY, folder) as again, os.scandir(again) as entries:
        return [(entry.name, entry.is_dir(follow_symlinks=False)) for entry in entries]


def holds_only_a_checkpoint(path: str, *, is_attempt: bool = False) -> bool:
    """Return whether ``path`` is missing, or a folder with files of a checkpoint only.

    If so, removing ``path`` loses no foreign files. A folder with a set of files qualifies if the manifest names all of
    these files. An attempt at a set (``is_attempt``) qualifies by its index, which is written first.
    """
    try:
        with opened(path) as folder:
            names = set(files_under(folder))
    except FileNotFoundError:
        return True
    except NotADirectoryError:
        return False
    if all(map(is_checkpoint_file, names)) or (is_attempt and any(map(is_index, names))):
        return True
    try:
        with open(os.path.join(path, MANIFEST_NAME), "rb") as file:
            return names <= {MANIFEST_NAME, UPLOADED_NAME, *Manifest.parse(file.read(), path).files}
    except (FileNotFoundError, DamagedCheckpointError, FormatError):
        return False


def is_replaceable(path: str) -> bool:
    """Return whether a checkpoint may replace ``path``. A link is not replaceable, because its target would stay."""
    return not os.path.islink(path) and holds_only_a_checkpoint(path)


def remove_folder(path: str) -> None:
    """Remove the folder of a checkpoint, or a link to a checkpoint.

    The manifest and the indexes identify the folder, so they are removed last. If this process is killed meanwhile, a
    later save recognizes the leftover and removes it.
    """
    if os.path.islink(path):
        os.unlink(path)
        return
    with os.scandir(path) as entries:
        others = [entry for entry in entries if entry.name != MANIFEST_NAME and not is_index(entry.name)]
    for entry in others:
        if entry.is_dir(follow_symlinks=False):
            _remove_tree(entry.path)
        else:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(entry.path)
    _remove_tree(path)


def _remove_tree(path: str, above: int | None = None) -> None:
    """Remove a folder. Ignore files that other ranks have removed, even if a stale listing still shows them."""
    with contextlib.suppress(FileNotFoundError):
        with opened(path, os.O_DIRECTORY | os.O_NOFOLLOW, above) as folder:
            for name, is_folder in _entries(folder):
                with contextlib.suppress(FileNotFoundError):
                    _remove_tree(name, folder) if is_folder else os.unlink(name, dir_fd=folder)
        os.rmdir(path, dir_fd=above)


def replace_text(path: str, text: str, at: int | None = None) -> None:
    """Replace the contents of a small file by ``text``, atomically and durably. Raises ``OSError``.

    ``at``: the file's new time of modification, in nanoseconds since the epoch; None: now.
    """
    folder, name = os.path.split(path)
    new = os.path.join(folder, f".{name}.new")  # if this process is killed, the next call replaces the leftover
    with open(new, "w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        if at is not None:
            os.utime(file.fileno(), ns=(at, at))
        os.fsync(file.fileno())
    os.replace(new, path)
    sync_folder(folder)


def lock_alone(fd: int) -> bool | None:
    """Lock an open file exclusively. Return False if another process has a lock, None without support for locks."""
    return _lock(fd, fcntl.LOCK_EX)


def lock_shared(fd: int) -> None:
    """Lock an open file together with other readers. Do nothing on a file system without locks.

    A process that removes the file, or checks its lock, holds an exclusive lock for a moment. Raises ``TimeoutError``
    if another process has held the exclusive lock for 30 seconds.
    """
    _lock_soon(fd, fcntl.LOCK_SH)


def lock_alone_soon(fd: int) -> None:
    """Lock an open file exclusively, as soon as no other process holds a lock. Waits and raises as ``lock_shared``."""
    _lock_soon(fd, fcntl.LOCK_EX)


def _lock_soon(fd: int, kind: int) -> None:
    # Most locks are free, and each save takes some: so try once before the wait.
    if _lock(fd, kind) is False and not wait_until(lambda: _lock(fd, kind) is not False, SILENCE_S):
        raise TimeoutError(errno.ETIMEDOUT, f"another process has held it locked for {SILENCE_S:g} s")


def is_locked(path: str) -> bool:
    """Return whether any process holds a lock on the folder ``path``."""
    with opened(path) as fd:
        return lock_alone(fd) is False


def _lock(fd: int, how: int) -> bool | None:
    try:
        fcntl.flock(fd, how | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:
        return None
    return True


# Maximum size of the facts in a lock file, and the written size, so that a reader never gets the end of longer facts.
_FACTS_BYTES, _WRITTEN_BYTES = 4096, 1000


class LockFile:
    """An open lock file. This process holds the lock, unless another process does.

    The holder writes facts about itself to the file. Processes on any host may read them. The kernel releases the lock
    when the holder dies, even after a crash.

    Attributes:
        is_held: Whether this process holds the lock (otherwise another process does); None without support for locks.
    """

    def __init__(self, name: str, folder: int | None = None) -> None:
        """Open the file, or make it, and try to take the lock.

        Args:
            name: The path of the file.
            folder: The open folder that ``name`` is relative to.

        Raises:
            OSError: The file cannot be opened, or is a folder or a pipe.
        """
        self._name, self._folder = name, folder
        flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
        while True:
            self._file = Descriptor(os.open(name, flags, 0o600, dir_fd=folder))
            try:
                if not stat.S_ISREG(os.fstat(self._file.fileno()).st_mode):
                    raise OSError(f"{name} is no file")
                self.is_held = lock_alone(self._file.fileno())
                if not self.is_held or is_at(self._file.fileno(), name, folder):
                    return
            except BaseException:
                self.close()
                raise
            self.close()  # the last holder has removed the file just now

    def read(self) -> dict[str, Any]:
        """Return the facts of the last holder; none if it has not written them yet. Raises ``OSError``."""
        return read_facts(self._file.fileno())

    def write(self, facts: Mapping[str, Any], *, durable: bool = False) -> None:
        """Write facts about the holder. ``durable``: sync the file, for processes on other hosts.

        If there is no space, the facts stay as they are: errors of other processes then say less.
        """
        fd, text = self._file.fileno(), json.dumps(facts).ljust(_WRITTEN_BYTES).encode()
        with contextlib.suppress(OSError):
            os.pwrite(fd, text, 0)  # in one call, because processes may read the file at any moment
            os.ftruncate(fd, len(text))
            if durable:
                os.fsync(fd)

    def remove(self) -> None:
        """Remove the file. Another process may then make it, and hold its lock."""
        with contextlib.suppress(OSError):
            os.unlink(self._name, dir_fd=self._folder)

    def close(self) -> None:
        """Release the lock."""
        self._file.close()


def read_facts(fd: int) -> dict[str, Any]:
    """Return the facts in an open lock file; none if they are incomplete. Raises ``OSError``."""
    try:
        found = json.loads(os.pread(fd, _FACTS_BYTES, 0))
    except ValueError:  # the file was made just now, or is being written
        return {}
    return found if isinstance(found, dict) else {}
