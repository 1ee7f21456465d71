"""The interface of all kinds of storage. ``storage_for``, in ``__init__.py``, picks the kind by the path.

A new kind implements the classes here and passes ``tests/support/storage_contract.py``. Code that treats an address
(``scheme://``) unlike a path asks ``is_address``, also outside of this folder.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import AbstractContextManager, closing
from typing import NamedTuple

from asyncckpt.errors import CheckpointExistsError
from asyncckpt.format.write_request import Existing


class OutputFile(ABC):
    """A new file while it is written: ``write`` it, ``sync`` it, ``close`` it.

    Several threads may call ``write`` at once. The other methods are called when no write is under way. The caller may
    reuse the memory of a write when ``sync`` or ``close`` has returned. The bytes are durable when ``sync`` has
    returned, and not before.
    """

    path: str
    """The path, for errors."""
    direct: bool
    """Whether the bytes bypass the page cache. Then the length of ``data`` and ``offset`` are multiples of the page."""
    piece_bytes: int = 64 << 20
    """The best number of bytes for one write. A disk is as fast with 4 MiB, two at a time. But with larger pieces the
    threads that write, checksum and copy interfere less. On two cores a save is durable 2 to 5% sooner than with 16
    MiB."""

    @abstractmethod
    def write(self, data: memoryview, offset: int) -> None:
        """Write all of ``data`` at ``offset``, in bytes. Raises ``StorageError``."""

    @abstractmethod
    def truncate(self, nbytes: int) -> None:
        """Cut the file to ``nbytes``, because direct writes are whole pages. Raises ``StorageError``."""

    @abstractmethod
    def sync(self) -> None:
        """Return when all written bytes are durable. Raises ``StorageError``."""

    @abstractmethod
    def close(self) -> None:
        """Release the file's resources. Safe to call twice."""


class InputFile(ABC):
    """A large file while it is read. Several threads may read at once. ``close`` the file when no read is under way.

    Offsets and lengths of reads are whole pages. The memory begins on a page, except in ``read_in_place``.
    """

    path: str
    """The path, for errors."""
    run_bytes: int = 2 << 20
    """The best number of bytes for one read. A disk is not faster with more."""
    alignment: int
    """The address alignment for ``read_in_place``, in bytes; 0 if it is not possible. A read may change it to 0."""

    @abstractmethod
    def read(self, views: Sequence[memoryview], offset: int) -> int:
        """Fill ``views``, one after the other, with the bytes from ``offset`` on.

        Returns the number of bytes read, which is smaller than requested at the end of the file. Raises
        ``StorageError``.
        """

    @abstractmethod
    def read_in_place(self, views: Sequence[memoryview], offset: int) -> int | None:
        """Read as ``read`` does, into memory of this ``alignment``. Return None if storage refuses the memory."""

    @abstractmethod
    def close(self) -> None:
        """Release the file's resources."""


class LinkSource(NamedTuple):
    """A durable file of a checkpoint that later checkpoints may share: its place, and facts to detect a change."""

    place: str
    facts: tuple[int | str, ...]


class OpenAttempt(ABC):
    """An attempt at a checkpoint, or at a single file, as opened by one rank's worker.

    All ranks ``create`` their files in the same attempt. When all files of all ranks are durable, the first rank calls
    ``finalize``. Then every rank calls ``release``, or, if the save has failed, ``discard``. Until then the attempt
    counts as under way, unless the process dies.
    """

    path: str
    """The path that is written to, for errors."""
    inode: int | None = None
    """The inode of a single file after its creation, by which ``Storage.resolve`` finds the file. A checkpoint needs
    none, because its manifest names the attempt."""

    @abstractmethod
    def create(self, name: str, *, large: bool) -> OutputFile:
        """Create a file. With ``large`` it is written in aligned pieces, past the page cache.

        The name of a single file does not matter. Raises ``StorageError``.
        """

    def copy(self, name: str, nbytes: int, parts: Callable[[], Iterator[memoryview]]) -> None:
        """Create a file of ``parts``, one after the other, ``nbytes`` in all, durably.

        ``parts`` is called again if all has to be sent once more. Raises ``StorageError``, and the errors of ``parts``.
        """
        with closing(self.create(name, large=False)) as file:
            at = 0
            for part in parts():
                file.write(part, at)
                at += len(part)
            file.sync()

    def link_source(self, name: str) -> LinkSource | None:
        """Return the link source of a durable file of this attempt, for later attempts; None if they cannot link it.

        The source is valid once this attempt is finalized. Raises ``StorageError``.
        """
        return None

    def link(self, name: str, source: LinkSource) -> bool:
        """Link a file of another checkpoint as ``name``, without writing its bytes again.

        Returns False if the file is gone, has changed, or cannot be linked on this storage. Then ``name`` does not
        exist. Raises ``StorageError`` if this attempt was revoked.
        """
        return False

    @abstractmethod
    def names(self) -> set[str]:
        """Return the files that all ranks have created, as far as this host can see them. Raises ``StorageError``."""

    def missing(self, names: Collection[str]) -> set[str]:
        """Return the ``names`` of files, of all ranks, that this host cannot see. Raises ``StorageError``."""
        return set(names) - self.names()

    @abstractmethod
    def finalize(self, existing: Existing) -> None:
        """Give the attempt its final name. One atomic step decides. On return the result is durable.

        The first rank calls this once, when all files are durable. ``existing`` says what to do with a checkpoint that
        has the name. A single file is always replaced. Raises ``CheckpointExistsError`` if the existing checkpoint does
        not allow it. Raises ``StorageError`` if storage refuses, or if the attempt was revoked. After an error the
        final place is unchanged.
        """

    def is_revoked(self) -> bool:
        """Return whether another process has removed this attempt, as far as this host knows. Raises nothing."""
        return False

    @abstractmethod
    def discard(self, names: Sequence[str] | None = None) -> None:
        """Remove the files ``names`` (None: the whole attempt), as far as storage allows, and ``release`` the attempt.

        Only the first rank discards the whole attempt, because no other rank is sure that it is not finalized
        meanwhile. Raises nothing.
        """

    @abstractmethod
    def release(self) -> None:
        """Stop counting as under way. The written files stay. Safe to call twice."""


class Resolution(NamedTuple):
    """The end of an attempt: whether it ``is_finalized``, and the revoked ``leftover`` for ``Storage.remove``."""

    is_finalized: bool
    leftover: str | None


class FileStamp(NamedTuple):
    """Facts that tell whether a file is still the same, unchanged file.

    ``modified``: nanoseconds since the epoch, by the clock of the storage.
    """

    modified: int
    nbytes: int
    inode: int


class FileIdentity(NamedTuple):
    """The file that a path leads to. Two paths with the same ``device`` and ``inode`` lead to the same file.

    ``links``: number of names of the file. ``allocated``: bytes that it takes on the disk.
    """

    device: int
    inode: int
    links: int
    allocated: int


class Storage(ABC):
    """One kind of storage. Any thread and any process may call it.

    **Writing** is done by the workers, each rank's for its own files, in this order:

    1. ``begin_checkpoint`` on all ranks, with the same attempt, or ``begin_file``. Nothing is durable yet.
    2. ``OpenAttempt.create``, and ``write``, ``sync``, ``close`` of each file. After its ``sync`` a file is durable,
       but not yet part of a checkpoint.
    3. ``OpenAttempt.finalize`` on the first rank, after all other ranks have reported. It contains the one atomic step
       that decides. Before this step the final place has its old contents, whole. After it the place has the new
       checkpoint.
    4. ``OpenAttempt.release`` or ``discard`` on all ranks.

    **Resolving.** A process that must know how an attempt ends, and is not told in time, calls ``resolve``. It revokes
    the attempt by a step that competes with the atomic step of ``finalize``. Exactly one of the two steps succeeds, and
    decides the attempt for all processes. After ``resolve`` has answered, nothing changes the answer.

    **Reading** is done by trainers and tools. They look with ``names_in``, ``exists``, ``size``, and read with ``read``
    and ``open``. Meanwhile they hold ``reading``, during which ``remove_checkpoint`` does nothing.

    Paths are absolute. Every method raises ``StorageError`` if storage refuses, and never an ``OSError``.
    """

    has_locks: bool = True
    """Whether other processes can see who is writing, and what is being read."""

    @abstractmethod
    def begin_checkpoint(
        self, final: str, attempt: str, nbytes: int, orphan_s: float | None = None, *, linked_bytes: int = 0
    ) -> OpenAttempt:
        """Begin an attempt at the checkpoint ``final``, or join the attempt that another rank has begun.

        Args:
            final: The final path. Missing folders above it are created.
            attempt: Name of the attempt, which no other save uses.
            nbytes: Number of bytes of this rank's part, which need free space.
            orphan_s: Minimum age, in seconds, of orphans beside ``final`` to remove first; None: remove none.
            linked_bytes: Number of these bytes that are expected to be linked, and to take no space.

        Returns:
            The attempt, to be released or discarded.

        Raises:
            StorageError: There is too little space, or storage refuses.
        """

    @abstractmethod
    def begin_file(self, final: str, attempt: str, nbytes: int, orphan_s: float) -> OpenAttempt:
        """Begin an attempt at a single file, in an existing folder. The other ranks do not take part.

        The arguments, the result and the errors are as for ``begin_checkpoint``.
        """

    @abstractmethod
    def resolve(self, final: str, attempt: str, existing: Existing, inode: int | None = None) -> Resolution:
        """Find out whether an attempt is finalized. If it is not, ensure that it never will be.

        Args:
            final: The attempt's final path.
            attempt: Name of the attempt.
            existing: As given to ``finalize``.
            inode: ``OpenAttempt.inode``, of a single file.

        Returns:
            The answer, which is the same for all callers, and the leftover to be removed.

        Raises:
            StorageError: Storage does not answer, and the attempt may end either way.
        """

    @abstractmethod
    def revoke(self, final: str, attempt: str) -> str | None:
        """Ensure that an ``attempt`` at ``final`` never will be finalized, unless it already is.

        Returns the revoked leftover, for ``remove``. Returns None if there was none, or if storage is read-only for
        this process. Raises ``StorageError`` if the fate of the attempt is unknown.
        """

    @abstractmethod
    def remove(self, leftover: str | None) -> None:
        """Remove a revoked leftover, as far as storage allows. With None, do nothing."""

    @abstractmethod
    def is_finalized(self, final: str, attempt: str, inode: int | None = None) -> bool:
        """Return whether the checkpoint or file at ``final`` comes from this attempt. Changes nothing.

        The arguments are as for ``resolve``. Raises ``DamagedCheckpointError`` if the manifest there is unreadable.
        """

    @abstractmethod
    def may_put(self, path: str, existing: Existing) -> bool:
        """Return whether ``existing`` allows a checkpoint to be put at ``path``."""

    def check_writable(self, path: str) -> None:
        """Raise ``StorageError`` if this process could not create ``path``, as far as this is known without a write."""
        return

    @abstractmethod
    def check_file_place(self, path: str) -> None:
        """Raise ``StorageError`` unless a single file can be put at ``path``. Includes ``check_writable``."""

    @abstractmethod
    def names_in(self, folder: str) -> list[str]:
        """Return the names in ``folder``, in no order. A missing folder has no names."""

    def stamps_in(self, folder: str, name: str) -> dict[str, FileStamp | None] | None:
        """Return all ``names_in`` a folder, each with the stamp of its file ``name``.

        Returns None if single calls are the better way to get them.
        """
        return None

    @abstractmethod
    def exists(self, path: str) -> bool:
        """Return whether anything is at ``path``."""

    @abstractmethod
    def size(self, path: str) -> int | None:
        """Return the size of the file ``path`` in bytes; None if it is missing."""

    @abstractmethod
    def stamp(self, path: str) -> FileStamp | None:
        """Return the stamp that tells the file ``path`` from another; None if it is missing."""

    def identity(self, path: str) -> FileIdentity | None:
        """Return the identity of the file at ``path``, to find files that several checkpoints share as hard links.

        Returns None if the file is missing, and on storage without links, where each path has its own bytes.
        """
        return None

    def distrust(self, path: str) -> None:
        """Prevent later checkpoints from linking the damaged file ``path``.

        A save links a file only if its size, owner and times are as recorded. So on storage with links, this sets the
        time of modification to now. Raises nothing, even if this user may not do that.
        """
        return  # without links there is nothing to prevent

    @abstractmethod
    def read(self, path: str) -> bytes:
        """Return all bytes of the small file ``path``. Raises ``DamagedCheckpointError`` if it is no regular file."""

    @abstractmethod
    def open(self, path: str) -> InputFile:
        """Open the large file ``path``, to be read in ranges, and closed. Raises as ``read``."""

    @abstractmethod
    def reading(self, path: str) -> AbstractContextManager[None]:
        """Protect the checkpoint ``path`` from removal. Raises ``CheckpointNotFoundError`` if the folder is missing."""

    @abstractmethod
    def attempts_under_way(self, folder: str) -> list[str]:
        """Return the paths of the attempts in ``folder`` that some worker is still writing."""

    @abstractmethod
    def take_name(self, path: str) -> str | None:
        """Take the final name from a checkpoint that nobody reads, durably, or from a file.

        Returns the rest of it, for ``remove`` ("": nothing is left), or None if somebody reads the checkpoint.
        """

    def remove_checkpoint(self, path: str) -> bool:
        """Remove a checkpoint, its final name first. Return False, and keep it, if somebody reads it."""
        leftover = self.take_name(path)
        self.remove(leftover or None)
        return leftover is not None

    @abstractmethod
    def advance(self, path: str, text: str, at: int) -> bool:
        """Have the small file ``path`` hold ``text``, in one step and durably.

        Return False, and change nothing, if the file is newer than ``at``, in nanoseconds since the epoch. The file
        gets that time. An object store keeps no such time: there the last call wins.
        """

    @abstractmethod
    def set_aside(self, path: str, why: str) -> None:
        """Rename a checkpoint to ``path.why-1``, or the next free number, durably. Remove no files."""


_WHY_TAKEN = {
    "replace": "there is something here that is not a checkpoint, or not only one; move it away or save elsewhere",
    "join": "there is something here that is no folder; move it away or save elsewhere",
    "refuse": "there is something here already, and a checkpoint never replaces another by accident;"
    " remove it first, or save under another step",
}


def exists_error(path: str, existing: Existing, step: int | None = None) -> CheckpointExistsError:
    """Return the error for a final path that is taken.

    Args:
        path: The final path.
        existing: The allowed action, as in ``may_put``.
        step: The step to be saved there.
    """
    return CheckpointExistsError(_WHY_TAKEN[existing], path=path, step=step)
