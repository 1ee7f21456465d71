"""What a file system does for storage: durable folders, locks, and its errors as ours.

A lock (``flock``) belongs to an open descriptor: the kernel drops it when the process dies. So anybody can tell an
attempt under way from what a dead worker left behind.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import shutil
import stat
import time
from collections.abc import Iterator

from asyncckpt.errors import DamagedCheckpointError, FormatError, StorageError, unless_interrupt
from asyncckpt.format.manifest import MANIFEST_NAME, Manifest, is_checkpoint_file, is_index
from asyncckpt.shm.segment import close

LOCK_TIMEOUT_S = 30.0
_LOCK_POLL_S = 0.01
_MOST_AT_ONCE = 1 << 30

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
    except unless_interrupt(OSError) as error:
        advice = _ADVICE.get(error.errno or 0, "look at the storage there")
        raise StorageError(f"{doing} failed: {error.strerror or error}; {advice}", path=path) from error


# From here on all raise ``OSError``: whoever calls says what was being done.


def open_regular(path: str, flags: int = 0) -> int:
    """A descriptor of a file, for reading. Who opens a pipe or a device might wait for ever, or read without an end.

    Raises ``DamagedCheckpointError`` where it is none.
    """
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK | os.O_NOCTTY | flags)
    if not stat.S_ISREG(os.fstat(fd).st_mode):
        os.close(fd)
        raise DamagedCheckpointError("this is no file", path=path)
    # Without this some network file systems answer reads with EAGAIN.
    fcntl.fcntl(fd, fcntl.F_SETFL, fcntl.fcntl(fd, fcntl.F_GETFL) & ~os.O_NONBLOCK)
    return fd


def read_all(fd: int, nbytes: int) -> bytes:
    """Read up to ``nbytes`` of a file. Python's own file objects take an EAGAIN for the end of the file."""
    parts = []
    while nbytes > 0 and (part := os.read(fd, min(nbytes, _MOST_AT_ONCE))):
        parts.append(part)
        nbytes -= len(part)
    return b"".join(parts)


@contextlib.contextmanager
def opened(path: str, flags: int = os.O_DIRECTORY, folder: int | None = None) -> Iterator[int]:
    """A descriptor of a folder, or with other ``flags`` of a file; ``folder``: what ``path`` is relative to."""
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | flags, dir_fd=folder)
    try:
        yield fd
    finally:
        close(fd)


def sync_folder(path: str) -> None:
    """Make the entries of a folder durable."""
    with opened(path) as fd:
        try:
            os.fsync(fd)
        except OSError as error:
            if error.errno != errno.EINVAL:  # some network file systems have nothing to sync for a folder
                raise


def make_folder(path: str) -> None:
    """Make ``path`` and what is missing above it, each entry durable."""
    if os.path.isdir(path):
        return
    parent = os.path.dirname(path)
    if parent != path:
        make_folder(parent)
    with contextlib.suppress(FileExistsError):
        os.mkdir(path, 0o755)
    if not os.path.isdir(path):
        raise NotADirectoryError(errno.ENOTDIR, "it is a file", path)
    sync_folder(parent)


def files_under(folder: int) -> Iterator[str]:
    """The files in an opened folder and below it, by their paths in it, with folders that have none, and links."""
    for above, folders, names, fd in os.fwalk(dir_fd=folder):
        links = [name for name in folders if stat.S_ISLNK(os.lstat(name, dir_fd=fd).st_mode)]
        within = [*names, *links] if folders or names or above == "." else [""]
        yield from (os.path.normpath(os.path.join(above, name)) for name in within)


def holds_only_a_checkpoint(path: str, *, is_attempt: bool = False) -> bool:
    """Whether ``path`` is free, or a folder of a checkpoint's files alone: with it, nobody else's files are lost.

    A set of files is one where its manifest names them all; an ``is_attempt`` at one has an index from the beginning.
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
            return names <= {MANIFEST_NAME, *Manifest.parse(file.read(), path).files}
    except (FileNotFoundError, DamagedCheckpointError, FormatError):
        return False


def is_replaceable(path: str) -> bool:
    """Whether a checkpoint may take the place of what is at ``path``. Not that of a link: what it leads to stays."""
    return not os.path.islink(path) and holds_only_a_checkpoint(path)


def remove_folder(path: str) -> None:
    """Remove the folder of a checkpoint, or a link to one. What it is known by goes last: what is left of it when this
    is killed, a later save removes.
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


def _remove_tree(path: str) -> None:
    """Remove a folder from which other ranks may be removing their files: a try that ends early has one file less."""
    while os.path.lexists(path):
        with contextlib.suppress(FileNotFoundError):
            shutil.rmtree(path)


def replace_text(path: str, text: str) -> None:
    """Have a small file hold ``text``, in one step and durably. Raises ``OSError``."""
    folder, name = os.path.split(path)
    new = os.path.join(folder, f".{name}.new")  # whoever is killed leaves one that the next replaces
    with open(new, "w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    os.replace(new, path)
    sync_folder(folder)


def lock_alone(fd: int) -> bool | None:
    """Lock what is open, alone; False where somebody else holds it, None where the file system has no locks."""
    return _lock(fd, fcntl.LOCK_EX)


def lock_shared(fd: int) -> None:
    """Lock what is open together with others; nothing happens on a file system without locks.

    Who removes it, or looks whether it is locked, has it alone for a moment: it is a ``TimeoutError`` when another
    process has had it alone for 30 seconds.
    """
    _lock_soon(fd, fcntl.LOCK_SH)


def lock_alone_soon(fd: int) -> None:
    """Lock what is open, alone, as soon as nobody else holds it; as ``lock_shared`` in all else."""
    _lock_soon(fd, fcntl.LOCK_EX)


def _lock_soon(fd: int, kind: int) -> None:
    deadline = time.monotonic() + LOCK_TIMEOUT_S
    while _lock(fd, kind) is False:
        if time.monotonic() > deadline:
            raise TimeoutError(errno.ETIMEDOUT, f"another process has held it locked for {LOCK_TIMEOUT_S:g} s")
        time.sleep(_LOCK_POLL_S)


def is_locked(path: str) -> bool:
    """Whether somebody holds the folder ``path``."""
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
