"""Attempts of ``local.py``: hidden beside the final place, locked, and finalized by one rename.

The attempt at a checkpoint is a folder, and the attempt at a single file is a file. Each rank's worker holds a lock on
the attempt until it is finalized or discarded.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import fcntl
import itertools
import logging
import os
import re
import secrets
import stat
from collections.abc import Collection, Sequence
from pathlib import PurePath

import xxhash

from asyncckpt.budgets import ANSWER_S, POLL_S
from asyncckpt.errors import StorageError
from asyncckpt.format.manifest import MANIFEST_NAME, METADATA_NAME, is_index
from asyncckpt.format.write_request import Existing
from asyncckpt.storage.file_system import (
    files_under,
    is_at,
    is_replaceable,
    lock_shared,
    opened,
    remove_folder,
    sync_folder,
    translated,
)
from asyncckpt.storage.local_file import LocalFile
from asyncckpt.storage.storage import LinkSource, OpenAttempt, exists_error
from asyncckpt.threads import wait_until

logger = logging.getLogger(__name__)

# From linux/fcntl.h and linux/fs.h.
_AT_FDCWD = -100
_RENAME_NOREPLACE, _RENAME_EXCHANGE = 1, 2
_libc = ctypes.CDLL(None, use_errno=True)


def rename(one: str, other: str) -> None:
    """Rename as ``os.rename`` does. Ignore an error if the rename was done.

    A network file system may retry a call that was done, and then answer with an error.
    """
    before = os.lstat(one)
    try:
        os.rename(one, other)
    except OSError:
        if not _is_at(before, other):
            raise


def _is_at(before: os.stat_result, path: str) -> bool:
    try:
        return os.path.samestat(before, os.lstat(path))
    except OSError:
        return False


def set_aside(path: str, why: str) -> str:
    """Give the file or folder at ``path`` another name, with ``why`` as a suffix, durably. Return the new path."""
    aside = next(name for number in itertools.count(1) if not os.path.lexists(name := f"{path}.{why}-{number}"))
    rename(path, aside)
    try:
        sync_folder(os.path.dirname(path))
    except OSError:
        rename(aside, path)
        raise
    return aside


def exchange(one: str, other: str) -> bool:
    """Exchange two names atomically. Return False if the file system or the kernel does not support this.

    Ignore an error if the exchange was done, as ``rename`` does.
    """
    before = os.lstat(one)
    try:
        return _renameat2(one, other, _RENAME_EXCHANGE)
    except OSError:
        if not _is_at(before, other):
            raise
        return True


def rename_new(one: str, other: str) -> None:
    """Rename a file as ``rename`` does, but raise ``FileExistsError`` if the new name exists.

    The check is atomic unless the file system has neither ``RENAME_NOREPLACE`` nor hard links.
    """
    before = os.lstat(one)
    try:
        if not _renameat2(one, other, _RENAME_NOREPLACE):
            _link(one, other)
    except OSError:
        if not _is_at(before, other):
            raise
    with contextlib.suppress(OSError):  # after a hard link; a failure only leaves an orphan
        os.unlink(one)


def _link(one: str, other: str) -> None:
    """Give a file a second name, or rename it on a file system without hard links."""
    try:
        os.link(one, other)
    except FileExistsError:
        raise
    except OSError:
        if os.path.lexists(other):
            raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), other) from None
        rename(one, other)


def _renameat2(one: str, other: str, flags: int) -> bool:
    """Call renameat2. Return False if the file system or the kernel does not support it."""
    try:
        rename = _libc.renameat2
    except AttributeError:  # glibc before 2.28
        return False
    if rename(_AT_FDCWD, os.fsencode(one), _AT_FDCWD, os.fsencode(other), flags) == 0:
        return True
    code = ctypes.get_errno()
    if code in (errno.EINVAL, errno.ENOSYS, errno.ENOTSUP, errno.EPERM):  # EPERM: of a seccomp profile
        return False
    raise OSError(code, os.strerror(code), other)


_FICLONE = 0x40049409  # from linux/fs.h
# Errors of a path that no longer exists, or now leads to another file.
_GONE = (errno.ENOENT, errno.ENOTDIR, errno.ELOOP)
_said: set[tuple[int, int | None]] = set()
"""Devices that cannot link files, with the error. Each pair is logged only once."""


def facts_of(facts: os.stat_result) -> tuple[int, ...]:
    """Return the facts that identify an unchanged file; () if it is not a regular file.

    The inode's change time is not included, because each new link changes it.
    """
    if not stat.S_ISREG(facts.st_mode):
        return ()
    return facts.st_dev, facts.st_ino, facts.st_uid, facts.st_size, facts.st_mtime_ns


def recorded(name: str, folder: int) -> tuple[int, ...]:
    """Return facts of the file ``name`` in the open ``folder`` that differ after any later change of the file.

    The kernel's times advance in ticks of some milliseconds. A change in the same tick as the last write would leave
    the time of modification unchanged. So this function gives the file a time that is not a tick of the kernel.
    """
    facts = os.stat(name, dir_fd=folder, follow_symlinks=False)
    if facts.st_nlink == 1:  # otherwise the facts were recorded before the file was linked
        with contextlib.suppress(OSError):
            times = facts.st_atime_ns, facts.st_mtime_ns - 1
            os.utime(name, ns=times, dir_fd=folder, follow_symlinks=False)
            facts = os.stat(name, dir_fd=folder, follow_symlinks=False)
    return facts_of(facts)


def link_file(path: str, facts: tuple[int | str, ...], folder: int, name: str) -> bool:
    """Link the file at ``path`` as ``name`` in the open ``folder``, or clone it if hard links are not possible.

    A clone is a copy that shares the file's blocks. Returns False if neither is possible, or if the file is gone or
    does not match ``facts``. Then ``name`` does not exist.
    """
    try:
        os.link(path, name, dst_dir_fd=folder, follow_symlinks=False)
    except OSError as error:
        if error.errno in _GONE:
            return False
        return _clone(path, facts, folder, name, why_not=error)
    # Check the link, because the file at ``path`` may have been exchanged a moment ago.
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


# Suffixes of hidden names beside a checkpoint.
PARTIAL_SUFFIX = ".partial"
"""Suffix of an attempt that is being written."""
TRASH_SUFFIX = ".asyncckpt-trash"
"""Suffix of a folder that is being removed."""
OLD_SUFFIX = ".asyncckpt-old"
"""Suffix of an old checkpoint while another checkpoint takes its name."""

SHORTENED = "asyncckpt-"
"""Prefix of the short name that replaces a name too long for the suffixes."""
# A name may have 255 bytes. Two dots and the longest suffix are added.
_LONGEST_NAME = 255 - 2 - len(TRASH_SUFFIX)

# Errors of file systems that cannot rename folders. EMFILE comes from gcsfuse.
_NO_RENAME = (errno.EMFILE, errno.ENOSYS, errno.EOPNOTSUPP, errno.EXDEV)

CHECKPOINT_ATTEMPT = re.compile(r"\.(.+)\.[0-9a-f]+-\d+(?:\.partial|\.asyncckpt-old)")
FILE_ATTEMPT = re.compile(r"\..+\.[0-9a-f]{12}-\d+\.partial")


def attempt_path(final: str, attempt: str) -> str:
    """Return the path of the ``attempt`` at ``final`` until it is finalized."""
    parent, name = os.path.split(final)
    if len(os.fsencode(name)) + len(attempt) > _LONGEST_NAME:
        name = SHORTENED + xxhash.xxh3_128_hexdigest(os.fsencode(name))
    return os.path.join(parent, f".{name}.{attempt}{PARTIAL_SUFFIX}")


class _Partial(OpenAttempt):
    def __init__(self, path: str, final: str, direct: bool) -> None:
        self.path = path
        self._final = final
        self._direct = direct
        self._fd = -1

    def release(self) -> None:
        fd, self._fd = self._fd, -1
        if fd >= 0:
            os.close(fd)

    def is_revoked(self) -> bool:
        with contextlib.suppress(OSError):
            return not is_at(self._fd, self.path)
        return False

    def _has_final_name(self) -> bool:
        with contextlib.suppress(OSError):
            return os.path.samestat(os.fstat(self._fd), os.stat(self._final))
        return False

    def _hold(self, flags: int = 0) -> None:
        """Open the attempt and lock it. Raises ``OSError``."""
        self._fd = os.open(self.path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | flags)
        is_at(self._fd, self.path)  # raises OSError without lasting inode numbers
        lock_shared(self._fd)


class PartialFolder(_Partial):
    """A checkpoint being written. Files are created in the open folder, even if its path has changed."""

    def __init__(self, path: str, final: str, direct: bool) -> None:
        super().__init__(path, final, direct)
        self._linked: dict[str, tuple[int | str, ...]] = {}  # facts of the files that are hard links
        self._is_empty = True

    def make(self) -> None:
        """Create the folder, unless another rank has created it, and lock it. Raises ``OSError``, ``StorageError``."""
        with contextlib.suppress(FileExistsError):
            os.mkdir(self.path, 0o755)
        try:
            self._hold(os.O_DIRECTORY)
            is_ours = self._is_ours()
        except OSError as error:
            if error.errno not in (errno.ENOTDIR, errno.ELOOP):
                raise
            is_ours = False
        if not is_ours:
            self.release()
            raise StorageError(
                "another program has replaced this path; nothing is written there: check which programs write to its"
                " parent folder",
                path=self.path,
            )

    def create(self, name: str, *, large: bool) -> LocalFile:
        path = os.path.join(self.path, name)
        self._make_folders(name)
        file = LocalFile(path, large and self._direct, (self._fd, name))
        try:
            with translated("creating a file", path):
                self._check_in_place(name)
                if self._is_empty and is_index(name):
                    # The index of a set of files marks the folder as ours. If a power cut lost this mark, a later save
                    # would take the other files for foreign files, and never remove them.
                    sync_folder(self.path)
                self._is_empty = False
        except BaseException:
            file.close()
            raise
        return file

    def link_source(self, name: str) -> LinkSource:
        with translated("looking at a file", os.path.join(self.path, name)):
            # For a link, return the facts from the link's check, because the file may have been changed or distrusted
            # since.
            facts = self._linked.get(name) or recorded(name, self._fd)
        return LinkSource(os.path.join(self._final, name), facts)

    def link(self, name: str, source: LinkSource) -> bool:
        self._make_folders(name)
        with translated("linking a file", os.path.join(self.path, name)):
            is_linked = link_file(source.place, source.facts, self._fd, name)
            self._check_in_place(name if is_linked else None)
            if is_linked:
                its = os.stat(name, dir_fd=self._fd, follow_symlinks=False)
                if (its.st_dev, its.st_ino) == source.facts[:2]:  # otherwise the file is a clone
                    self._linked[name] = source.facts
        return is_linked

    def names(self) -> set[str]:
        with translated("listing", self.path):
            return set(files_under(self._fd))

    def read(self, name: str) -> bytes | None:
        with translated("reading", os.path.join(self.path, name)):
            try:
                with opened(name, os.O_NOFOLLOW, self._fd) as fd, open(fd, "rb", closefd=False) as file:
                    return file.read()
            except FileNotFoundError:
                return None
            except OSError as error:
                if error.errno != errno.ESTALE:  # another host has removed the file
                    raise
                return None

    def claim(self, name: str) -> bool:
        self._make_folders(name)
        with translated("creating a file", os.path.join(self.path, name)):
            try:
                os.close(os.open(name, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o644, dir_fd=self._fd))
            except FileExistsError:
                return False
            self._check_in_place(name)
        return True

    def missing(self, names: Collection[str]) -> set[str]:
        """Return the names that do not exist. Look up each unlisted name repeatedly for some seconds.

        A client of a network file system may return a stale listing that lacks files of other hosts.
        """
        left = super().missing(names)

        def are_found() -> bool:
            nonlocal left
            left = {name for name in left if not self._has(name)}
            return not left

        if left:
            with translated("looking at a file", self.path):
                wait_until(are_found, ANSWER_S, 5 * POLL_S)
        return left

    def _has(self, name: str) -> bool:
        with contextlib.suppress(FileNotFoundError):
            os.stat(name, dir_fd=self._fd, follow_symlinks=False)
            return True
        return False

    def finalize(self, existing: Existing) -> None:
        """Finalize the checkpoint. For every value of ``existing``, replace an empty folder at the final place."""
        final = self._final
        with translated("flushing a folder", self.path):
            self._check_in_place(None)
            for folder in {str(above) for name in files_under(self._fd) for above in PurePath(name).parents}:
                sync_folder(os.path.join(self.path, folder))
        is_taken = existing == "join" and os.path.isdir(final)
        with translated("finalizing the checkpoint", final):
            try:
                if not is_taken:
                    rename(self.path, final)
            except OSError as error:
                if error.errno in _NO_RENAME:
                    raise StorageError(
                        f"this file system cannot rename a folder ({error.strerror}), as a commit needs: mount it with"
                        " renames of folders (gcsfuse: --rename-dir-limit), or save to the address of the bucket",
                        path=final,
                    ) from error
                if error.errno not in (errno.ENOTEMPTY, errno.EEXIST, errno.ENOTDIR):
                    raise
                is_taken = True
            if is_taken and existing == "join" and os.path.isdir(final):
                _join(self.path, final)
            elif is_taken and existing == "set aside":
                self._set_aside()
            elif is_taken and existing == "replace" and is_replaceable(final):
                self._replace()
            elif is_taken:
                raise exists_error(final, existing)
        parent = os.path.dirname(final)
        with translated("flushing a folder", parent):
            try:
                sync_folder(parent)
            except OSError:
                if not is_taken:
                    rename(final, self.path)  # readers must not find a failed save
                raise

    def discard(self, names: Sequence[str] | None = None) -> None:
        """Remove files, and folders that become empty."""
        with contextlib.suppress(OSError):
            if is_at(self._fd, self.path) and names is None:
                remove_folder(self.path)
            elif is_at(self._fd, self.path):
                for name in names or ():
                    with contextlib.suppress(OSError):
                        os.unlink(os.path.join(self.path, name))
                folders = {folder for name in names or () for folder in PurePath(self.path, name).parents}
                below = [folder for folder in folders if folder.is_relative_to(self.path)]
                for folder in [*sorted(below, key=lambda folder: -len(folder.parts)), PurePath(self.path)]:
                    with contextlib.suppress(OSError):  # other ranks have files there
                        os.rmdir(folder)
        self.release()

    def _make_folders(self, name: str) -> None:
        """Create the folders above the file ``name``."""
        with translated("making a folder", os.path.join(self.path, name)):
            for at, character in enumerate(name):
                if character == "/":
                    with contextlib.suppress(FileExistsError):
                        os.mkdir(name[:at], 0o755, dir_fd=self._fd)

    def _check_in_place(self, name: str | None) -> None:
        """If the attempt was revoked, remove the file ``name`` and raise ``OSError``."""
        if not is_at(self._fd, self.path):
            if name is not None:
                os.unlink(name, dir_fd=self._fd)
            raise FileNotFoundError(errno.ENOENT, "this attempt was revoked, or its folder moved away")

    def _is_ours(self) -> bool:
        """Return whether the locked attempt has the owner that files of this process get here. Raises ``OSError``."""
        owner = os.fstat(self._fd).st_uid
        if owner == os.geteuid():
            return True
        # A server may map our files to another user, as NFS does with files of root.
        name = f".{secrets.token_hex(6)}"
        probe = os.open(name, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600, dir_fd=self._fd)
        try:
            return os.fstat(probe).st_uid == owner
        finally:
            os.close(probe)
            os.unlink(name, dir_fd=self._fd)

    def _set_aside(self) -> None:
        """Rename the existing checkpoint and take its final name. An existing link is removed. Raises ``OSError``."""
        final, aside = self._final, None
        with contextlib.suppress(FileNotFoundError):  # retention may just have removed the checkpoint
            aside = set_aside(final, "abandoned")
        try:
            rename(self.path, final)
            try:
                sync_folder(os.path.dirname(final))
            except OSError:
                rename(final, self.path)
                raise
        except OSError:
            if aside is not None:
                rename(aside, final)
            raise
        if aside is not None and os.path.islink(aside):
            with contextlib.suppress(OSError):
                os.unlink(aside)
        elif aside is not None:
            logger.warning("%s was saved again; the previous checkpoint is in %s", final, aside)

    def _replace(self) -> None:
        """Take the final name of an existing checkpoint, durably, and remove the old checkpoint. Raises ``OSError``."""
        old, final = self.path, self._final
        is_exchanged = exchange(self.path, final)
        if not is_exchanged:
            # This file system cannot exchange names. For a moment no checkpoint has the final name, and the complete
            # old checkpoint stands beside it.
            old = self.path.removesuffix(PARTIAL_SUFFIX) + OLD_SUFFIX
            rename(final, old)
            try:
                rename(self.path, final)
            except OSError:
                rename(old, final)
                raise
        try:
            sync_folder(os.path.dirname(final))
        except OSError:
            if is_exchanged:
                exchange(self.path, final)
            else:
                rename(final, self.path)
                rename(old, final)
            raise
        with contextlib.suppress(OSError):
            remove_folder(old)


class PartialFile(_Partial):
    """A single file being written."""

    _is_created = False

    def create(self, name: str, *, large: bool) -> LocalFile:
        file = LocalFile(self.path, direct=large and self._direct)
        self._is_created = True
        try:
            with translated("locking a file", self.path):
                self._hold()
                self.inode = os.fstat(self._fd).st_ino
        except BaseException:
            file.close()
            raise
        return file

    def names(self) -> set[str]:
        return {os.path.basename(self.path)} if self._is_created else set()

    def finalize(self, existing: Existing) -> None:
        """Finalize the file, with the permissions of the file that it replaces. A link is replaced.

        If the file system cannot exchange names, the new file stays even if flushing the folder fails.
        """
        final, before = self._final, None
        with translated("finalizing the file", final):
            with contextlib.suppress(FileNotFoundError):
                before = os.lstat(final).st_mode
            if before is not None and stat.S_ISREG(before):
                with contextlib.suppress(OSError):  # a file system without permissions refuses
                    os.chmod(self.path, stat.S_IMODE(before))
            is_exchanged = before is not None and not stat.S_ISDIR(before) and exchange(self.path, final)
            if not is_exchanged:
                rename(self.path, final)
        parent = os.path.dirname(final)
        with translated("flushing a folder", parent):
            try:
                sync_folder(parent)
            except OSError:  # readers must not find a failed save
                if is_exchanged:
                    exchange(self.path, final)
                elif before is None and self._has_final_name():
                    rename(final, self.path)
                raise
        if is_exchanged:
            with contextlib.suppress(OSError):  # a failure only leaves an orphan
                os.unlink(self.path)

    def discard(self, names: Sequence[str] | None = None) -> None:
        if self._is_created:
            with contextlib.suppress(OSError):
                os.unlink(self.path)
        self.release()


class NewFile(PartialFile):
    """A single file being written that replaces nothing."""

    def finalize(self, existing: Existing) -> None:
        """Finalize the file. Raises ``CheckpointExistsError`` if the name is taken, for every value of ``existing``."""
        with translated("finalizing the file", self._final):
            try:
                rename_new(self.path, self._final)
            except FileExistsError as error:
                raise exists_error(self._final, "refuse") from error
        parent = os.path.dirname(self._final)
        with translated("flushing a folder", parent):
            try:
                sync_folder(parent)
            except OSError:
                if self._has_final_name():
                    rename(self._final, self.path)  # readers must not find a failed save
                raise


def undo_join(leftover: str, final: str) -> None:
    """Remove ``.metadata`` from ``final`` if the attempt in ``leftover`` was revoked during its join to ``final``.

    A join moves ``.metadata`` just before the manifest. Without its removal, DCP would find a checkpoint in ``final``.
    Raises ``OSError``.
    """
    if METADATA_NAME not in (names := os.listdir(leftover)) and MANIFEST_NAME in names:
        os.unlink(os.path.join(final, METADATA_NAME))


def _join(folder: str, final: str) -> None:
    """Move the files in ``folder`` into ``final``, durably: first the data, last ``.metadata`` and the manifest.

    First of all, remove ``.metadata`` and the manifest of a checkpoint in ``final``, because the moved files may
    overwrite its files.
    """
    if os.stat(folder).st_dev != os.stat(final).st_dev:
        raise OSError(errno.EXDEV, "the path is on another file system than its parent folder; save into a subfolder")
    last = [METADATA_NAME, MANIFEST_NAME]
    for name in reversed(last):
        with contextlib.suppress(FileNotFoundError):
            os.unlink(os.path.join(final, name))
    sync_folder(final)
    present = os.listdir(folder)
    for names in ([name for name in present if name not in last], [name for name in last if name in present]):
        for name in names:
            rename(os.path.join(folder, name), os.path.join(final, name))
            with contextlib.suppress(FileNotFoundError):
                os.unlink(os.path.join(folder, name))  # rename(2) keeps a hard link to the same file
        sync_folder(final)
    with contextlib.suppress(OSError):  # the checkpoint is already final
        os.rmdir(folder)
