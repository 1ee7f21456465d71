"""What a file system does for storage: files past the page cache, durable folders, locks, and its errors as ours.

A lock (``flock``) belongs to an open descriptor: the kernel drops it when the process dies. So anybody can tell an
attempt under way from what a dead worker left behind.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import fcntl
import os
import shutil
import stat
import time
from collections.abc import Iterator, Sequence

from asyncckpt.errors import DamagedCheckpointError, StorageError
from asyncckpt.shm.segment import PAGE
from asyncckpt.worker.manifest import MANIFEST_NAME, Manifest, is_checkpoint_file, is_index
from asyncckpt.worker.storage.storage import InputFile, OutputFile

LOCK_TIMEOUT_S = 30.0
_LOCK_POLL_S = 0.01

# From linux/stat.h and linux/fcntl.h; Python has no statx before 3.15.
_AT_EMPTY_PATH = 0x1000
_STATX_DIOALIGN = 0x2000
_STATX_BYTES = 256
_STX_MASK_AT = 0
_STX_DIO_MEM_ALIGN_AT = 152
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


class LocalFile(OutputFile):
    """A new file; whether it is ``direct`` shows when it is open, and may change with a write."""

    def __init__(self, path: str, direct: bool, within: tuple[int | None, str] | None = None) -> None:
        """Create ``path``, which must not exist. Raises ``StorageError``.

        Args:
            path: The file.
            direct: Write past the page cache, if the file system can.
            within: A folder, opened, which is the one whatever has its path meanwhile, and the name there; None: look
                for it by its path.
        """
        self.path = path
        self.direct = direct
        folder, name = within or (None, path)
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
        with translated("creating a file", path):
            try:
                self._fd = os.open(name, flags | (os.O_DIRECT if direct else 0), 0o644, dir_fd=folder)
            except OSError as error:
                if not direct or error.errno != errno.EINVAL:
                    raise
                # The file system knows no direct I/O; whether the file was made before it said so differs.
                self.direct = False
                self._fd = os.open(name, flags & ~os.O_EXCL, 0o644, dir_fd=folder)

    def write(self, data: memoryview, offset: int) -> None:
        with translated("writing", self.path):
            while data:
                direct = self.direct  # as this write begins: other threads write, and may be refused, too
                try:
                    done = os.pwrite(self._fd, data, offset)
                except OSError as error:
                    if not direct or error.errno != errno.EINVAL:
                        raise
                    # Some file systems refuse direct I/O only now, or want another alignment after a short write.
                    fcntl.fcntl(self._fd, fcntl.F_SETFL, fcntl.fcntl(self._fd, fcntl.F_GETFL) & ~os.O_DIRECT)
                    self.direct = False  # only now: whoever reads it writes through the cache
                    continue
                data = data[done:]
                offset += done

    def truncate(self, nbytes: int) -> None:
        with translated("writing", self.path):
            os.ftruncate(self._fd, nbytes)

    def sync(self) -> None:
        """What went through the page cache also leaves it."""
        with translated("flushing to storage", self.path):
            os.fsync(self._fd)
            if not self.direct:
                os.posix_fadvise(self._fd, 0, 0, os.POSIX_FADV_DONTNEED)

    def close(self) -> None:
        fd, self._fd = self._fd, -1
        if fd >= 0:
            with translated("closing", self.path):
                os.close(fd)


class LocalInputFile(InputFile):
    """A file, open. If the process forks during a read, what is read may end up in the child, see open(2)."""

    def __init__(self, path: str) -> None:
        """Raises ``StorageError``, and ``DamagedCheckpointError`` where it is no file."""
        self.path = path
        self.alignment = 0
        with translated("opening", path):
            try:
                self._fd = open_regular(path, os.O_DIRECT)
                self.alignment = memory_alignment(self._fd)
            except OSError as error:
                if error.errno != errno.EINVAL:
                    raise
                self._fd = open_regular(path)

    def read(self, views: Sequence[memoryview], offset: int) -> int:
        with translated("reading", self.path):
            try:
                return self._read(views, offset)
            except OSError as error:
                if error.errno != errno.EINVAL:
                    raise
                # Some file systems refuse direct I/O only now, or want other blocks than ours.
                self.alignment = 0
                fcntl.fcntl(self._fd, fcntl.F_SETFL, fcntl.fcntl(self._fd, fcntl.F_GETFL) & ~os.O_DIRECT)
                return self._read(views, offset)

    def read_in_place(self, views: Sequence[memoryview], offset: int) -> int | None:
        with translated("reading", self.path):
            try:
                return self._read(views, offset)
            except OSError as error:
                if error.errno not in (errno.EINVAL, errno.EFAULT):  # of memory that no device may write to
                    raise
                self.alignment = 0
                return None

    def close(self) -> None:
        os.close(self._fd)

    def _read(self, views: Sequence[memoryview], offset: int) -> int:
        left = [view for view in views if view]
        done = 0
        while left:
            count = os.preadv(self._fd, left, offset + done)
            if count == 0:
                break
            done += count
            while left and count >= len(left[0]):
                count -= len(left.pop(0))
            if count:
                left[0] = left[0][count:]
        return done


# From here on all raise ``OSError``: whoever calls says what was being done.


def open_regular(path: str, flags: int = 0) -> int:
    """A descriptor of a file, for reading. Who opens a pipe or a device might wait for ever, or read without an end.

    Raises ``DamagedCheckpointError`` where it is none.
    """
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK | os.O_NOCTTY | flags)
    if not stat.S_ISREG(os.fstat(fd).st_mode):
        os.close(fd)
        raise DamagedCheckpointError("this is no file", path=path)
    return fd


@contextlib.contextmanager
def opened(path: str, flags: int = os.O_DIRECTORY) -> Iterator[int]:
    """A descriptor of a folder, or with other ``flags`` of a file."""
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | flags)
    try:
        yield fd
    finally:
        os.close(fd)


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
    except (FileNotFoundError, DamagedCheckpointError):
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
        shutil.rmtree(entry.path) if entry.is_dir(follow_symlinks=False) else os.unlink(entry.path)
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
    deadline = time.monotonic() + LOCK_TIMEOUT_S
    while _lock(fd, fcntl.LOCK_SH) is False:
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


def memory_alignment(fd: int) -> int:
    """What addresses have to be a multiple of for direct reads of the file ``fd``, in bytes; 0: nobody says.

    Linux 6.1 and later says so; it is what the device wants, from 4 bytes (most NVMe) to 512, or all of a block.
    """
    facts = (ctypes.c_uint32 * (_STATX_BYTES // 4))()
    try:
        code = _libc.statx(fd, b"", _AT_EMPTY_PATH, _STATX_DIOALIGN, facts)
    except AttributeError:  # glibc before 2.28
        return 0
    if code != 0 or not facts[_STX_MASK_AT // 4] & _STATX_DIOALIGN:
        return 0
    alignment = int(facts[_STX_DIO_MEM_ALIGN_AT // 4])
    return alignment if int(facts[_STX_DIO_MEM_ALIGN_AT // 4 + 1]) <= PAGE else 0
