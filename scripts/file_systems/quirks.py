"""A FUSE file system that mirrors a folder, with selectable quirks of network file systems.

Run as a program: ``python quirks.py FOLDER MOUNT QUIRK...``. It serves until it is unmounted. Needs root, ``mfusepy``.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import importlib
import os
import stat
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

QUIRKS = {
    "no O_DIRECT": "opening with O_DIRECT answers EINVAL, after creating the file",
    "no hard links": "link answers EPERM",
    "no hard links, EOPNOTSUPP": "link answers EOPNOTSUPP",
    "no locks": "flock answers ENOLCK, of folders too (by a library that is preloaded)",
    "no locks, ENOSYS": "flock answers ENOSYS",
    "no chmod": "chmod and chown answer EPERM",
    "empty statfs": "statvfs answers zeros",
    "inodes change at rename": "a renamed file or folder has another inode number",
    "inodes never stay": "each look at a file or folder shows another inode number",
    "no fallocate": "fallocate answers EOPNOTSUPP",
    "no rename flags": "renameat2 answers EINVAL to any flag",
    "no fsync of folders": "fsync of a folder answers EINVAL",
    "stale handles": "now and then a read or a stat of an open file answers ESTALE, once",
    "silly renames": "an open file that is removed stays in its folder under a hidden name until it is closed",
    "old listings": "a listing is that of 30 s before, but for the host's own changes, as with NFS",
    "old listings of own": "a listing is that of 30 s before",
    "late names": "a new name is found by other hosts 3 s later",
    "times in seconds": "times are whole seconds",
}
HOST = "FILE_SYSTEMS_HOST"
OLD_S = 30.0
LATE_S = 3.0
STALE_EVERY = 97
_libc = ctypes.CDLL(None, use_errno=True)
_AT_FDCWD = -100
_NOREPLACE, _EXCHANGE = 1, 2


def refuse(code: int) -> OSError:
    return OSError(code, os.strerror(code))


def host_of(process: int) -> int:
    """Return the host of a process, from ``FILE_SYSTEMS_HOST`` in its initial environment."""
    with contextlib.suppress(OSError):
        for variable in Path(f"/proc/{process}/environ").read_bytes().split(b"\0"):
            if variable.startswith(HOST.encode() + b"="):
                return int(variable.partition(b"=")[2])
    return 0


class Names:
    """New names, with the hosts that know them: the creator, and hosts that have seen the name."""

    def __init__(self) -> None:
        self._made: dict[str, tuple[float, set[int]]] = {}
        self._lock = threading.Lock()

    def make(self, path: str, host: int) -> None:
        with self._lock:
            self._made[path] = time.monotonic(), {host}

    def show(self, path: str, host: int) -> None:
        """Note that an error of the server, such as EEXIST, has shown the name to this host."""
        with self._lock:
            if path in self._made:
                self._made[path][1].add(host)

    def is_late(self, path: str, host: int) -> bool:
        with self._lock:
            made, seen = self._made.get(path, (0.0, set[int]()))
            if time.monotonic() - made > LATE_S:
                self._made.pop(path, None)
                return False
            return host not in seen


class Listings:
    """The listings last returned to each host."""

    def __init__(self, *, own_changes: bool) -> None:
        self._given: dict[tuple[int, int, int], tuple[float, list[str]]] = {}
        self._own_changes = own_changes
        self._lock = threading.Lock()

    def of(self, fd: int, host: int) -> list[str]:
        facts, now = os.fstat(fd), time.monotonic()
        with self._lock:
            given = self._given.get(key := (facts.st_dev, facts.st_ino, host))
            if given is None or now - given[0] > OLD_S:
                self._given[key] = given = now, os.listdir(fd)
            return given[1]

    def change(self, path: str, host: int) -> None:
        if self._own_changes:
            with contextlib.suppress(OSError):
                facts = os.lstat(os.path.dirname(path))
                with self._lock:
                    self._given.pop((facts.st_dev, facts.st_ino, host), None)


class Mirror:
    """The file system operations. ``fh`` is a descriptor of the mirrored file or folder."""

    use_ns = True

    def __init__(self, folder: str, quirks: set[str], context: Any) -> None:
        self._folder = folder
        self._quirks = quirks
        self._context = context
        self._names = Names()
        self._old = Listings(own_changes="old listings" in quirks)
        self._renames: Counter[int] = Counter()
        self._created: dict[int, int] = {}  # descriptors, by thread of libfuse
        self._looks = 0

    def _at(self, path: str) -> str:
        return self._folder + path

    def _me(self) -> int:
        return host_of(self._context()[2])

    def _has(self, *quirks: str) -> bool:
        return not self._quirks.isdisjoint(quirks)

    def _made(self, path: str, *, is_new: bool = True) -> None:
        """Note a new name, and give the file to the user who created it."""
        if self._has("late names"):
            self._names.make(path, self._me())
        if is_new:
            user, group, _ = self._context()
            os.lchown(self._at(path), user, group)
        self._changed(path)

    def _changed(self, *paths: str) -> None:
        if self._has("old listings", "old listings of own"):
            for path in paths:
                self._old.change(self._at(path), self._me())

    @contextlib.contextmanager
    def _telling(self, path: str) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            if self._has("late names") and error.errno in (errno.EEXIST, errno.ENOTEMPTY):
                self._names.show(path, self._me())
            raise

    def _perhaps_stale(self) -> None:
        if self._has("stale handles"):
            self._looks += 1
            if self._looks % STALE_EVERY == 0:
                raise refuse(errno.ESTALE)

    # ------------------------------------------------------------------------------------------------- what is there

    def getattr(self, path: str, fh: int | None = None) -> dict[str, Any]:
        if fh is not None and self._created.pop(threading.get_native_id(), None) != fh:
            self._perhaps_stale()  # except for libfuse's own look at a new file
        elif self._has("late names") and self._names.is_late(path, self._me()):
            raise refuse(errno.ENOENT)
        facts = os.fstat(fh) if fh is not None else os.lstat(self._at(path))
        names = "st_mode", "st_nlink", "st_uid", "st_gid", "st_size", "st_blocks", "st_ino"
        its = {name: getattr(facts, name) for name in names}
        its |= {f"st_{kind}": getattr(facts, f"st_{kind}_ns") for kind in ("atime", "mtime", "ctime")}
        if self._has("times in seconds"):
            its |= {name: value // 10**9 * 10**9 for name, value in its.items() if name.endswith("time")}
        if self._has("inodes change at rename"):
            its["st_ino"] += self._renames[facts.st_ino] << 32
        if self._has("inodes never stay"):
            self._looks += 1
            its["st_ino"] += self._looks << 32
        return its

    def readlink(self, path: str) -> str:
        return os.readlink(self._at(path))

    def statfs(self, path: str) -> dict[str, int]:
        facts = os.statvfs(self._folder)
        return {
            name: 0 if self._has("empty statfs") else getattr(facts, name)
            for name in dir(facts)
            if name.startswith("f_") and name not in ("f_fsid", "f_flag")
        }

    def opendir(self, path: str) -> int:
        return os.open(self._at(path), os.O_RDONLY | os.O_DIRECTORY)

    def readdir(self, path: str, fh: int) -> list[tuple[str, None, int]]:
        # Pytest needs current listings of the folder above those of the tests.
        is_old = self._has("old listings", "old listings of own") and path.count("/") > 1
        names = self._old.of(fh, self._me()) if is_old else os.listdir(fh)
        return [(name, None, 0) for name in (".", "..", *names)]

    def releasedir(self, path: str, fh: int) -> int:
        os.close(fh)
        return 0

    def fsyncdir(self, path: str, datasync: int, fh: int) -> int:
        if self._has("no fsync of folders"):
            raise refuse(errno.EINVAL)
        return 0

    # ------------------------------------------------------------------------------------------------- names

    def mkdir(self, path: str, mode: int) -> int:
        with self._telling(path):
            os.mkdir(self._at(path), mode)
        self._made(path)
        return 0

    def symlink(self, target: str, source: str) -> int:
        with self._telling(target):
            Path(self._at(target)).symlink_to(source)
        self._made(target)
        return 0

    def mknod(self, path: str, mode: int, dev: int) -> int:
        with self._telling(path):
            os.mknod(self._at(path), mode, dev)
        self._made(path)
        return 0

    def link(self, target: str, source: str) -> int:
        if self._has("no hard links"):
            raise refuse(errno.EPERM)
        if self._has("no hard links, EOPNOTSUPP"):
            raise refuse(errno.EOPNOTSUPP)
        with self._telling(target):
            os.link(self._at(source), self._at(target), follow_symlinks=False)
        self._made(target, is_new=False)
        return 0

    def unlink(self, path: str) -> int:
        os.unlink(self._at(path))
        self._changed(path)
        return 0

    def rmdir(self, path: str) -> int:
        os.rmdir(self._at(path))
        self._changed(path)
        return 0

    def rename_with(self, old: str, new: str, flags: int) -> int:
        if flags and self._has("no rename flags"):
            raise refuse(errno.EINVAL)
        inodes = {os.lstat(self._at(path)).st_ino for path in ([old, new] if flags & _EXCHANGE else [old])}
        with self._telling(new):
            one, other = os.fsencode(self._at(old)), os.fsencode(self._at(new))
            if _libc.renameat2(_AT_FDCWD, one, _AT_FDCWD, other, flags):
                raise refuse(ctypes.get_errno())
        self._renames.update(inodes)
        self._made(new, is_new=False)
        self._changed(old)
        return 0

    def chmod(self, path: str, mode: int) -> int:
        if self._has("no chmod"):
            raise refuse(errno.EPERM)
        os.chmod(self._at(path), mode)
        return 0

    def chown(self, path: str, uid: int, gid: int) -> int:
        if self._has("no chmod"):
            raise refuse(errno.EPERM)
        os.lchown(self._at(path), uid, gid)
        return 0

    def utimens(self, path: str, times: tuple[int, int] | None = None) -> int:
        os.utime(self._at(path), ns=times, follow_symlinks=False) if times else os.utime(self._at(path))
        return 0

    # ------------------------------------------------------------------------------------------------- files

    def open(self, path: str, flags: int) -> int:
        if self._has("no O_DIRECT") and flags & os.O_DIRECT:
            raise refuse(errno.EINVAL)
        return self._opened(path, flags)

    def create(self, path: str, mode: int, flags: int = 0) -> int:
        is_new = not os.path.lexists(self._at(path))
        with self._telling(path):
            fd = self._opened(path, flags | os.O_CREAT, stat.S_IMODE(mode))
        if is_new:
            self._made(path)
        elif self._has("late names"):
            self._names.show(path, self._me())
        if self._has("no O_DIRECT") and flags & os.O_DIRECT:
            os.close(fd)
            raise refuse(errno.EINVAL)
        self._created[threading.get_native_id()] = fd
        return fd

    def _opened(self, path: str, flags: int, mode: int = 0) -> int:
        # The kernel may read from a file opened for writing, and computes the offset of an append itself.
        flags &= ~(os.O_DIRECT | os.O_APPEND | os.O_NOFOLLOW)
        if flags & os.O_ACCMODE == os.O_WRONLY:
            flags = flags & ~os.O_ACCMODE | os.O_RDWR
        return os.open(self._at(path), flags, mode)

    def read(self, path: str, size: int, offset: int, fh: int) -> bytes:
        self._perhaps_stale()
        return os.pread(fh, size, offset)

    def write(self, path: str, data: bytes, offset: int, fh: int) -> int:
        return os.pwrite(fh, data, offset)

    def truncate(self, path: str, length: int, fh: int | None = None) -> int:
        os.truncate(self._at(path) if fh is None else fh, length)
        return 0

    def fallocate(self, path: str, mode: int, offset: int, size: int, fh: int) -> int:
        if self._has("no fallocate"):
            raise refuse(errno.EOPNOTSUPP)
        if _libc.fallocate(fh, mode, ctypes.c_int64(offset), ctypes.c_int64(size)):
            raise refuse(ctypes.get_errno())
        return 0

    def fsync(self, path: str, datasync: int, fh: int) -> int:
        return 0

    def flush(self, path: str, fh: int) -> int:
        return 0

    def release(self, path: str, fh: int) -> int:
        os.close(fh)
        return 0


def main() -> None:
    folder, mount, *quirks = sys.argv[1:]
    mfusepy: Any = importlib.import_module("mfusepy")  # optional

    class Fuse(mfusepy.FUSE):  # type: ignore[misc]
        """A FUSE server that passes rename flags on."""

        def rename_fuse_3(self, old: bytes, new: bytes, flags: int) -> int:
            return int(self.operations.rename_with(os.fsdecode(old), os.fsdecode(new), flags))

    class Served(Mirror, mfusepy.Operations):  # type: ignore[misc]
        def init_with_config(self, connection: Any, config: Any) -> None:
            config.use_ino = True
            config.hard_remove = "silly renames" not in quirks
            config.attr_timeout = config.entry_timeout = config.negative_timeout = 0

        def rename(self, old: str, new: str) -> int:
            return self.rename_with(old, new, 0)

    os.umask(0)
    served = Served(str(Path(folder).resolve()), {*quirks}, mfusepy.fuse_get_context)
    Fuse(served, mount, foreground=True, allow_other=True, default_permissions=True, fsname="asyncckpt-quirks")


if __name__ == "__main__":
    main()
