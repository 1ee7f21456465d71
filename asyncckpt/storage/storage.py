"""The interface of all kinds of storage. ``storage_for``, in ``__init__.py``, picks the kind by the path.

A new kind implements these classes and passes ``tests/support/storage_contract.py``. Code inside and outside this
package calls ``is_address`` to tell an address (``scheme://``) from a path.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import AbstractContextManager, closing
from typing import NamedTuple

from asyncckpt.errors import CheckpointExistsError
from asyncckpt.format.write_request import Existing
from asyncckpt.shm.segment import BLOCK


class OutputFile(ABC):
    """A new file that is being written. Call ``write``, then ``sync``, then ``close``.

    Several threads may call ``write`` at once. Call the other methods when no write is under way. The caller may reuse
    the memory of a write when ``sync`` or ``close`` has returned. The bytes are durable only when ``sync`` has
    returned.
    """

    path: str
    """The path, for errors."""
    direct: bool
    """Whether the bytes bypass the page cache. If so, ``offset`` and the length of ``data`` are multiples of
    ``block_bytes``."""
    block_bytes: int = BLOCK
    """The unit of direct writes: ``BLOCK`` or more."""
    piece_bytes: int = 64 << 20
    """The best number of bytes for one write. A disk reaches its full speed with two writes of 4 MiB at a time. But
    with larger pieces, the threads that write, checksum and copy interfere less. On two cores, a save is durable 2 to
    5% sooner than with 16 MiB."""

    @abstractmethod
    def write(self, data: memoryview, offset: int) -> None:
        """Write all of ``data`` at ``offset``, in bytes. Raises ``StorageError``."""

    @abstractmethod
    def truncate(self, nbytes: int) -> None:
        """Cut the file to ``nbytes``, because direct writes are whole blocks. Raises ``StorageError``."""

    @abstractmethod
    def sync(self) -> None:
        """Return when all written bytes are durable. Raises ``StorageError``."""

    @abstractmethod
    def close(self) -> None:
        """Release the file's resources. Safe to call twice."""


class InputFile(ABC):
    """A large file that is being read. Several threads may read at once. ``close`` the file when no read is under way.

    The memory of a read begins on a page, except in ``read_in_place``.
    """

    path: str
    """The path, for errors."""
    run_bytes: int = 2 << 20
    """The best number of bytes for one read. A disk is not faster with more."""
    block_bytes: int = BLOCK
    """Offsets and lengths of reads are multiples of this. At least ``BLOCK``."""
    alignment: int
    """The address alignment for ``read_in_place``, in bytes; 0: not supported. A read may change the value to 0."""

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
    """A durable file that later checkpoints may share: the place of the file, and facts to detect a change."""

    place: str
    facts: tuple[int | str, ...]


class OpenAttempt(ABC):
    """An attempt at a checkpoint, or at a single file, as opened by one rank's worker.

    All ranks ``create`` their files in the same attempt. When all files of all ranks are durable, the first rank calls
    ``finalize``. In the end every rank calls ``release``, or ``discard`` if the save has failed. Until then the attempt
    counts as under way, unless the process dies.
    """

    path: str
    """The path of the attempt, for errors."""
    inode: int | None = None
    """The inode of a single file after its creation. ``Storage.resolve`` finds the file by its inode. None for a
    checkpoint, because its manifest names the attempt."""

    @abstractmethod
    def create(self, name: str, *, large: bool) -> OutputFile:
        """Create a file. A ``large`` file is written in aligned pieces, past the page cache.

        The name of a single file does not matter. Raises ``StorageError``.
        """

    def copy(self, name: str, nbytes: int, parts: Callable[[], Iterator[memoryview]]) -> None:
        """Create a durable file from consecutive ``parts``, with ``nbytes`` bytes in total.

        ``parts`` is called again if the file has to be sent again. Raises ``StorageError``, and the errors of
        ``parts``.
        """
        with closing(self.create(name, large=False)) as file:
            at = 0
            for part in parts():
                file.write(part, at)
                at += len(part)
            file.sync()

    def link_source(self, name: str) -> LinkSource | None:
        """Return the link source of a durable file of this attempt, for later attempts; None if links are impossible.

        The source is valid once this attempt is finalized. Raises ``StorageError``.
        """
        return None

    def link(self, name: str, source: LinkSource) -> bool:
        """Link a file of another checkpoint as ``name``, without writing its bytes again.

        Returns False, without creating ``name``, if the file is gone, has changed, or cannot be linked on this storage.
        Raises ``StorageError`` if this attempt was revoked.
        """
        return False

    @abstractmethod
    def names(self) -> set[str]:
        """Return the files that all ranks have created, as far as this host can see them. Raises ``StorageError``."""

    def read(self, name: str) -> bytes | None:
        """Return the bytes of a file of a checkpoint's attempt, written by any rank; None if it is not there.

        Another rank may be writing the file. Raises ``StorageError``.
        """
        return None

    def claim(self, name: str) -> bool:
        """Create an empty file in a checkpoint's attempt. Return False if it is there already. Raises ``StorageError``.

        Exactly one process gets True.
        """
        raise NotImplementedError

    def missing(self, names: Collection[str]) -> set[str]:
        """Return the ``names`` of files, of all ranks, that this host cannot see. Raises ``StorageError``."""
        return set(names) - self.names()

    @abstractmethod
    def finalize(self, existing: Existing) -> None:
        """Give the attempt its final name. One atomic step decides. On return the result is durable.

        The first rank calls this once, when all files are durable. ``existing`` says what to do with a checkpoint that
        already has the name. A single file is always replaced. Raises ``CheckpointExistsError`` if ``existing`` does
        not allow to replace or join what is at the final place. Raises ``StorageError`` if storage refuses, or if the
        attempt was revoked. After an error, the final place is unchanged.
        """

    def is_revoked(self) -> bool:
        """Return whether another process has removed this attempt, as far as this host knows. Raises nothing."""
        return False

    @abstractmethod
    def discard(self, names: Sequence[str] | None = None) -> None:
        """Remove the files ``names`` (None: the whole attempt), as far as storage allows, and ``release`` the attempt.

        Only the first rank discards the whole attempt, because other ranks cannot know whether it is being finalized.
        Raises nothing.
        """

    @abstractmethod
    def release(self) -> None:
        """End the attempt on this rank, so that it no longer counts as under way. Files stay. Safe to call twice."""


class Resolution(NamedTuple):
    """The end of an attempt: whether it ``is_finalized``, and the revoked ``leftover`` for ``Storage.remove``."""

    is_finalized: bool
    leftover: str | None


class FileStamp(NamedTuple):
    """Facts that identify an unchanged file.

    ``modified``: nanoseconds since the epoch, by the clock of the storage.
    """

    modified: int
    nbytes: int
    inode: int


class FileIdentity(NamedTuple):
    """The file that a path leads to. Two paths with the same ``device`` and ``inode`` lead to the same file.

    ``links``: number of names of the file. ``allocated``: bytes that the file takes on the disk.
    """

    device: int
    inode: int
    links: int
    allocated: int


class Storage(ABC):
    """One kind of storage. Any thread and any process may call it.

    **Writing.** The workers write. The worker of each rank writes the rank's own files, in this order:

    1. ``begin_checkpoint`` on all ranks, with the same attempt, or ``begin_file``. Nothing is durable yet.
    2. ``OpenAttempt.create``, and ``write``, ``sync``, ``close`` of each file. After its ``sync`` a file is durable,
       but not yet part of a checkpoint.
    3. ``OpenAttempt.finalize`` on the first rank, after all other ranks have reported. It contains the one atomic step
       that decides. Before this step, the final place has its complete old contents. After the step, the place has the
       new checkpoint.
    4. ``OpenAttempt.release`` or ``discard`` on all ranks.

    **Resolving.** A process calls ``resolve`` if it needs the outcome of an attempt, and does not learn the outcome in
    time. ``resolve`` revokes the attempt by a step that competes with the atomic step of ``finalize``. Exactly one of
    the two steps succeeds, and decides the attempt for all processes. The answer of ``resolve`` never changes.

    **Reading.** Trainers and tools look up files with ``names_in``, ``exists`` and ``size``, and read files with
    ``read`` and ``open``. Meanwhile they hold ``reading``, during which ``remove_checkpoint`` does nothing.

    Paths are absolute. Every method raises ``StorageError`` if storage refuses, and never an ``OSError``.
    """

    has_locks: bool = True
    """Whether locks show other processes that a checkpoint is being written or read."""

    @abstractmethod
    def begin_checkpoint(
        self, final: str, attempt: str, nbytes: int, orphan_s: float | None = None, *, linked_bytes: int = 0
    ) -> OpenAttempt:
        """Begin an attempt at the checkpoint ``final``, or join the attempt that another rank has begun.

        Args:
            final: The final path. Missing folders above it are created.
            attempt: Name of the attempt, which no other save uses.
            nbytes: Number of bytes of this rank's part, which need free space.
            orphan_s: Minimum age, in seconds, of orphans beside ``final`` to remove first; None: remove no orphans.
            linked_bytes: How many of these bytes will probably be linked, and take no space.

        Returns:
            The attempt. The caller must release or discard it.

        Raises:
            StorageError: There is too little space, or storage refuses.
        """

    @abstractmethod
    def has_claimed(self, final: str, attempt: str, name: str) -> bool:
        """Return whether a process has claimed ``name`` in an attempt at the checkpoint ``final``."""

    @abstractmethod
    def begin_file(self, final: str, attempt: str, nbytes: int, orphan_s: float) -> OpenAttempt:
        """Begin an attempt at a single file, in an existing folder. The other ranks do not take part.

        The arguments, the result and the errors are as for ``begin_checkpoint``.
        """

    @abstractmethod
    def resolve(self, final: str, attempt: str, existing: Existing, inode: int | None = None) -> Resolution:
        """Find out whether an attempt is finalized. If not, revoke the attempt, so that it never will be.

        Args:
            final: The attempt's final path.
            attempt: Name of the attempt.
            existing: As given to ``finalize``.
            inode: ``OpenAttempt.inode``, of a single file.

        Returns:
            The answer, which is the same for all callers, and the leftover to remove.

        Raises:
            StorageError: Storage does not answer. The attempt may end either way.
        """

    @abstractmethod
    def revoke(self, final: str, attempt: str) -> str | None:
        """Ensure that an ``attempt`` at ``final`` will never be finalized, unless it already is.

        Returns the revoked leftover, for ``remove``. Returns None if there was no leftover, or if storage is read-only
        for this process. Raises ``StorageError`` if the outcome of the attempt is unknown.
        """

    @abstractmethod
    def remove(self, leftover: str | None) -> None:
        """Remove a revoked leftover, as far as storage allows. Do nothing for None."""

    @abstractmethod
    def is_finalized(self, final: str, attempt: str, inode: int | None = None) -> bool:
        """Return whether the checkpoint or file at ``final`` comes from this attempt. Changes nothing.

        The arguments are as for ``resolve``. Raises ``DamagedCheckpointError`` if the manifest there is unreadable.
        """

    @abstractmethod
    def may_put(self, path: str, existing: Existing) -> bool:
        """Return whether ``existing`` allows a checkpoint to be put at ``path``."""

    def check_writable(self, path: str) -> None:
        """Raise ``StorageError`` if it is known without a write that this process cannot create ``path``."""
        return

    @abstractmethod
    def check_file_place(self, path: str) -> None:
        """Raise ``StorageError`` unless a single file can be put at ``path``. Includes ``check_writable``."""

    @abstractmethod
    def names_in(self, folder: str) -> list[str]:
        """Return the names in ``folder``, in no order. A missing folder has no names."""

    def stamps_in(self, folder: str, name: str) -> dict[str, FileStamp | None] | None:
        """Return all ``names_in`` a folder, each with the stamp of its file ``name``.

        Returns None if single calls are cheaper on this storage.
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
        """Return the stamp of the file ``path``, which tells it from other files; None if the file is missing."""

    def identity(self, path: str) -> FileIdentity | None:
        """Return the identity of the file at ``path``, to find files that several checkpoints share as hard links.

        Returns None if the file is missing, and on storage without links, where each path has its own bytes.
        """
        return None

    def distrust(self, path: str) -> None:
        """Prevent later checkpoints from linking the damaged file ``path``.

        A save links a file only if its size, owner and times are as recorded. So on storage with links, this method
        sets the time of modification to now. Raises nothing, even if this user may not change the file.
        """
        return  # storage without links has nothing to do

    @abstractmethod
    def read(self, path: str) -> bytes:
        """Return all bytes of the small file ``path``. Raises ``DamagedCheckpointError`` if not a regular file."""

    @abstractmethod
    def open(self, path: str) -> InputFile:
        """Open the large file ``path`` for reading in ranges. The caller must close it. Raises as ``read``."""

    @abstractmethod
    def reading(self, path: str) -> AbstractContextManager[None]:
        """Protect the checkpoint ``path`` from removal. Raises ``CheckpointNotFoundError`` if the folder is missing."""

    @abstractmethod
    def attempts_under_way(self, folder: str) -> list[str]:
        """Return the paths of the attempts in ``folder`` that a worker is still writing."""

    @abstractmethod
    def take_name(self, path: str) -> str | None:
        """Take the final name from a file, or from a checkpoint that no process reads, durably.

        Returns the leftover, for ``remove`` ("": nothing is left). Returns None if a process reads the checkpoint.
        """

    def remove_checkpoint(self, path: str) -> bool:
        """Remove a checkpoint, its final name first. Return False, and remove nothing, if a process reads it."""
        leftover = self.take_name(path)
        self.remove(leftover or None)
        return leftover is not None

    @abstractmethod
    def advance(self, path: str, text: str, at: int) -> bool:
        """Write ``text`` to the small file ``path``, atomically and durably.

        Set the file's time of modification to ``at``, in nanoseconds since the epoch. Return False, and change nothing,
        if the file is newer than ``at``. An object store has no such times, so the last call wins.
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
    """Return the error for a final path that already exists.

    Args:
        path: The final path.
        existing: The allowed action, as in ``may_put``.
        step: The step to be saved there.
    """
    return CheckpointExistsError(_WHY_TAKEN[existing], path=path, step=step)
