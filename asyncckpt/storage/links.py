"""Links: a file that stands in several checkpoints of a file system, and was written once.

All raise ``OSError``: whoever calls says what was being done.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import logging
import os
import stat

logger = logging.getLogger(__name__)

_FICLONE = 0x40049409  # from linux/fs.h
# There is no such file any more, or what has its path now is something else.
_GONE = (errno.ENOENT, errno.ENOTDIR, errno.ELOOP)
_said: set[tuple[int, int | None]] = set()
"""The devices where nothing can be linked, and why: what the log says once."""


def facts_of(facts: os.stat_result) -> tuple[int, ...]:
    """What tells whether a file is the one that was written, and was not written to since; () of what is no file.

    Not when its inode was changed last: each link to it changes that.
    """
    if not stat.S_ISREG(facts.st_mode):
        return ()
    return facts.st_dev, facts.st_ino, facts.st_uid, facts.st_size, facts.st_mtime_ns


def recorded(name: str, folder: int) -> tuple[int, ...]:
    """The facts of the file ``name`` in the open ``folder``, by which each later change of it is seen.

    The kernel's times go by ticks of some milliseconds: what changes it in the tick in which it was written would leave
    it the same time. So it gets one that is none of the kernel's.
    """
    facts = os.stat(name, dir_fd=folder, follow_symlinks=False)
    if facts.st_nlink == 1:  # else it was recorded before it was linked
        with contextlib.suppress(OSError):
            times = facts.st_atime_ns, facts.st_mtime_ns - 1
            os.utime(name, ns=times, dir_fd=folder, follow_symlinks=False)
            facts = os.stat(name, dir_fd=folder, follow_symlinks=False)
    return facts_of(facts)


def link_file(path: str, facts: tuple[int | str, ...], folder: int, name: str) -> bool:
    """Have the file at ``path`` stand as ``name`` in the open ``folder``, too: by a hard link, or, where there can be
    none, by a copy that shares its blocks. False: neither can be, or the file is gone or not as its ``facts`` say; then
    nothing has the name.
    """
    try:
        os.link(path, name, dst_dir_fd=folder, follow_symlinks=False)
    except OSError as error:
        if error.errno in _GONE:
            return False
        return _clone(path, facts, folder, name, why_not=error)
    # Of the link: what has the path may have been exchanged a moment ago.
    if facts_of(os.stat(name, dir_fd=folder, follow_symlinks=False)) == facts:
        return True
    os.unlink(name, dir_fd=folder)
    return False


def _clone(path: str, facts: tuple[int | str, ...], folder: int, name: str, why_not: OSError) -> bool:
    try:
        source = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
    except OSError:
        return False
    try:
        if facts_of(os.fstat(source)) != facts:
            return False
        made = os.open(name, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o644, dir_fd=folder)
        try:
            fcntl.ioctl(made, _FICLONE, source)
            os.fsync(made)
            is_same = facts_of(os.fstat(source)) == facts
        except OSError:
            is_same = False
            if (what := (os.fstat(source).st_dev, why_not.errno)) not in _said:
                _said.add(what)
                logger.warning("%s is written again, as no files can be linked here: %s", path, why_not.strerror)
        finally:
            os.close(made)
    finally:
        os.close(source)
    if not is_same:
        os.unlink(name, dir_fd=folder)
    return is_same
