"""The storage seam: the interface that a kind of storage implements; ``storage_for`` picks the kind by the path."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import AbstractContextManager, closing
from typing import NamedTuple

from asyncckpt.errors import CheckpointExistsError
from asyncckpt.format.write_request import Existing


class OutputFile(ABC):
    """A new file while it is written: ``write`` it, ``sync`` it, ``close`` it.

    Any thread may ``write``, several at once; the other calls are made when no write is under way. The memory of a
    write may change again when ``sync`` or ``close`` has returned. The bytes are durable when ``sync`` has, and not
    before.
    """

    path: str
    """For errors."""
    direct: bool
    """Whether its bytes bypass the page cache. Then ``data`` and ``offset`` of a write are multiples of the page."""
    piece_bytes: int = 64 << 20
    """How much is best written at once. A disk is as fast with 4 MiB, two at a time; but with this, the threads that
    write, checksum and copy are less in each other's way: on two cores a save is durable 2 to 5% sooner than with 16.
    """

    @abstractmethod
    def write(self, data: memoryview, offset: int) -> None:
        """Write all of ``data`` at ``offset``, in bytes. Raises ``StorageError``."""

    @abstractmethod
    def truncate(self, nbytes: int) -> None:
        """Cut off what is behind ``nbytes``: direct writes are of whole pages. Raises ``StorageError``."""

    @abstractmethod
    def sync(self) -> None:
        """Return when all that was written is durable. Raises ``StorageError``."""

    @abstractmethod
    def close(self) -> None:
        """Give back what it holds; safe to call twice."""


class InputFile(ABC):
    """A large file while it is read, by any thread, several at once; ``close`` it when no read is under way.

    Offsets and lengths of reads are whole pages, and so are the addresses of the memory, but for ``read_in_place``.
    """

    path: str
    """Where it is; for errors."""
    run_bytes: int = 2 << 20
    """How much is best read at once: so much that a disk is as fast as with more."""
    alignment: int
    """What addresses have to be a multiple of for ``read_in_place``; 0: not possible, which a read may find out."""

    @abstractmethod
    def read(self, views: Sequence[memoryview], offset: int) -> int:
        """Fill ``views``, one after the other, with what stands from ``offset`` on.

        Returns how many bytes that is: fewer than asked for where the file ends. Raises ``StorageError``.
        """

    @abstractmethod
    def read_in_place(self, views: Sequence[memoryview], offset: int) -> int | None:
        """As ``read``, to any memory of this ``alignment``; None: storage refuses that memory after all."""

    @abstractmethod
    def close(self) -> None:
        """Give back what it holds."""


class LinkSource(NamedTuple):
    """A durable file of a checkpoint, that later ones may have, too: where it is, and what tells if it is as it was."""

    place: str
    facts: tuple[int | str, ...]


class OpenAttempt(ABC):
    """An attempt at a checkpoint, or at a single file, as one rank's worker has it open.

    All ranks ``create`` their files in the same attempt. When all files of all ranks are durable, the first rank calls
    ``finalize``. Then every rank calls ``release``, or, if the save has failed, ``discard``. Until one of these, the
    attempt counts as under way; of a process that dies it does not.
    """

    path: str
    """Where it is written, for errors."""
    inode: int | None = None
    """Of a single file that was created: by it ``Storage.resolve`` knows the file. A manifest names its attempt."""

    @abstractmethod
    def create(self, name: str, *, large: bool) -> OutputFile:
        """A new file; ``large``: written in aligned pieces, past the page cache. The name of a single file does not
        matter. Raises ``StorageError``.
        """

    def copy(self, name: str, nbytes: int, parts: Callable[[], Iterator[memoryview]]) -> None:
        """Make a file of ``parts``, one after the other, ``nbytes`` in all, durably.

        ``parts`` may be called again, where all has to be sent once more. Raises ``StorageError``, and what they raise.
        """
        with closing(self.create(name, large=False)) as file:
            at = 0
            for part in parts():
                file.write(part, at)
                at += len(part)
            file.sync()

    def link_source(self, name: str) -> LinkSource | None:
        """What a file that is durable is known by once this is finalized; None: no other attempt can have it.

        Raises ``StorageError``.
        """
        return None

    def link(self, name: str, source: LinkSource) -> bool:
        """Have a file of another checkpoint stand here, too, as ``name``, and none of its bytes written again.

        False: it is gone, or not as it was, or this kind of storage cannot; then nothing has the name. Raises
        ``StorageError`` where this attempt was revoked.
        """
        return False

    @abstractmethod
    def names(self) -> set[str]:
        """The files that all ranks have created, as far as they are seen from here. Raises ``StorageError``."""

    def missing(self, names: Collection[str]) -> set[str]:
        """Return those of ``names``, files of all ranks, that cannot be seen from here. Raises ``StorageError``."""
        return set(names) - self.names()

    @abstractmethod
    def finalize(self, existing: Existing) -> None:
        """Give the attempt its final name. One step of this decides; when it returns, the result is durable.

        Called once, on the first rank, when all files are durable. ``existing`` says what becomes of a checkpoint that
        has the name; a single file is always replaced. Raises ``CheckpointExistsError`` where that is not possible,
        ``StorageError`` where storage refuses, also when the attempt was revoked: then what had the name still has it.
        """

    @abstractmethod
    def discard(self, names: Sequence[str] | None = None) -> None:
        """Remove the files ``names``, None: the whole attempt, as far as storage allows, and ``release`` it.

        Only the first rank discards it whole: it alone is sure that the attempt is not finalized meanwhile. Raises
        nothing.
        """

    @abstractmethod
    def release(self) -> None:
        """Stop counting as under way; what was written stays. Safe to call twice."""


class Resolution(NamedTuple):
    """How an attempt has ended: whether it ``is_finalized``; ``leftover``: what was revoked, for ``Storage.remove``."""

    is_finalized: bool
    leftover: str | None


class FileStamp(NamedTuple):
    """Tells whether a file is still the one that was looked at. ``modified``: nanoseconds since the epoch, by the clock
    of the storage.
    """

    modified: int
    nbytes: int
    inode: int


class FileIdentity(NamedTuple):
    """Which file a path leads to: with the same ``device`` and ``inode`` it is the same one, under another name.

    ``links``: how many names it has. ``allocated``: the bytes that it takes on the disk.
    """

    device: int
    inode: int
    links: int
    allocated: int


class Storage(ABC):
    """One kind of storage. It may be called from any thread and any process.

    **Writing** is done by the workers, each rank's for its own files, in this order:

    1. ``begin_checkpoint`` on all ranks, with the same attempt, or ``begin_file``. Nothing is durable yet.
    2. ``OpenAttempt.create``, and ``write``, ``sync``, ``close`` of each file. From its ``sync`` on a file is durable,
       but no part of a checkpoint.
    3. ``OpenAttempt.finalize`` on the first rank, which has heard from all others. It contains the one atomic step
       that decides: before it, what was at the final place is there, whole; after it, the new checkpoint is.
    4. ``OpenAttempt.release`` or ``discard`` on all ranks.

    **Resolving.** Whoever has to know how an attempt ends, and is not told in time, calls ``resolve``. It revokes the
    attempt by a step that competes with the one of ``finalize``. Exactly one of the two succeeds, and that is how the
    attempt has ended for everybody: after ``resolve`` has answered, nothing changes the answer.

    **Reading** is done by trainers and tools: they look with ``names_in``, ``exists``, ``size``, read with ``read`` and
    ``open``, and take ``reading`` meanwhile, against which ``remove_checkpoint`` does nothing.

    Paths are absolute. Every method raises ``StorageError`` where storage refuses, and never an ``OSError``.
    """

    has_locks: bool = True
    """Whether it is seen who is writing, and what is being read."""

    @abstractmethod
    def begin_checkpoint(
        self, final: str, attempt: str, nbytes: int, orphan_s: float | None = None, *, linked_bytes: int = 0
    ) -> OpenAttempt:
        """Begin an attempt at the checkpoint ``final``, or join the one that another rank has begun.

        Args:
            final: The path it will have. Missing folders above it are made.
            attempt: The name of the attempt, which no other save uses.
            nbytes: How many bytes this rank's part has; there must be space for them.
            orphan_s: Remove first what dead workers left beside it that many seconds ago, or earlier; None: nothing.
            linked_bytes: How many of them are expected to be linked, and to take no space.

        Returns:
            The attempt, to be released or discarded.

        Raises:
            StorageError: There is too little space, or storage refuses.
        """

    @abstractmethod
    def begin_file(self, final: str, attempt: str, nbytes: int, orphan_s: float) -> OpenAttempt:
        """Begin an attempt at a single file, in a folder that is there; the other ranks have no part in it.

        Args: as those of ``begin_checkpoint``; so are the result and what is raised.
        """

    @abstractmethod
    def resolve(self, final: str, attempt: str, existing: Existing, inode: int | None = None) -> Resolution:
        """Find out whether an attempt is finalized, and if it is not, see that it never will be.

        Args:
            final: The path it was to have.
            attempt: Its name.
            existing: As given to ``finalize``.
            inode: ``OpenAttempt.inode``, of a single file.

        Returns:
            The answer, which is the same for all that ask, and what is to be removed.

        Raises:
            StorageError: Storage does not say, and the attempt may end either way.
        """

    @abstractmethod
    def revoke(self, final: str, attempt: str) -> str | None:
        """See that an ``attempt`` at ``final`` that is not finalized never will be.

        Returns what was revoked, for ``remove``; None where there was nothing, or storage may not be changed at all.
        Raises ``StorageError`` where it is not known what has become of the attempt.
        """

    @abstractmethod
    def remove(self, leftover: str | None) -> None:
        """Remove what was revoked, as far as storage allows; None: nothing."""

    @abstractmethod
    def is_finalized(self, final: str, attempt: str, inode: int | None = None) -> bool:
        """Whether what is at a final place comes from a certain attempt. Changes nothing.

        Args: as those of ``resolve``. Raises ``DamagedCheckpointError`` where what is there does not say that.
        """

    @abstractmethod
    def may_put(self, path: str, existing: Existing) -> bool:
        """Whether ``existing`` allows a checkpoint to be put at ``path``."""

    def check_writable(self, path: str) -> None:
        """Raise ``StorageError`` if this process could not create ``path``, as far as storage tells without a write."""
        return

    @abstractmethod
    def check_file_place(self, path: str) -> None:
        """Raise ``StorageError`` unless a single file can be put at ``path``, as ``check_writable`` does, too."""

    @abstractmethod
    def names_in(self, folder: str) -> list[str]:
        """The names in ``folder``, in no order; none where there is no such folder."""

    def stamps_in(self, folder: str, name: str) -> dict[str, FileStamp | None] | None:
        """All ``names_in`` a folder, and the stamp of the file ``name`` in each; None: they are better asked for one by
        one.
        """
        return None

    @abstractmethod
    def exists(self, path: str) -> bool:
        """Whether anything is at ``path``."""

    @abstractmethod
    def size(self, path: str) -> int | None:
        """The bytes of the file ``path``; None where it is missing."""

    @abstractmethod
    def stamp(self, path: str) -> FileStamp | None:
        """What tells the file ``path`` from another; None where it is missing."""

    def identity(self, path: str) -> FileIdentity | None:
        """Which file is at ``path``, so that those are told that several checkpoints share as hard links.

        None where it is missing, and where storage has no links: there each path has bytes of its own.
        """
        return None

    def distrust(self, path: str) -> None:
        """See that no later checkpoint takes over the file ``path``, whose bytes were found to be damaged.

        Who writes takes over only files whose size, owner and times are as recorded: where there are links, this
        changes its time of modification to now. Raises nothing, also where this user may not do that.
        """
        return  # without links none is taken over

    @abstractmethod
    def read(self, path: str) -> bytes:
        """All bytes of the small file ``path``. Raises ``DamagedCheckpointError`` where it is no file."""

    @abstractmethod
    def open(self, path: str) -> InputFile:
        """The large file ``path``, to be read in ranges, and closed. Raises as ``read``."""

    @abstractmethod
    def reading(self, path: str) -> AbstractContextManager[None]:
        """Hold the checkpoint ``path`` against removal. Raises ``CheckpointNotFoundError`` where there is no folder."""

    @abstractmethod
    def attempts_under_way(self, folder: str) -> list[str]:
        """The attempts in ``folder`` that some worker is still writing, as paths."""

    @abstractmethod
    def take_name(self, path: str) -> str | None:
        """Take the final name from a checkpoint that nobody reads, durably, or from a file.

        Returns the rest of it, for ``remove`` ("": nothing is left), or None if somebody reads the checkpoint.
        """

    def remove_checkpoint(self, path: str) -> bool:
        """Remove a checkpoint that nobody reads, its final name first; False where somebody reads it."""
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
        """Give a checkpoint another name, ``path.why-1``, durably, and remove nothing of it."""


_WHY_TAKEN = {
    "replace": "there is something here that is not a checkpoint, or not only one; move it away or save elsewhere",
    "join": "there is something here that is no folder; move it away or save elsewhere",
    "refuse": "there is something here already, and a checkpoint never replaces another by accident;"
    " remove it first, or save under another step",
}


def exists_error(path: str, existing: Existing, step: int | None = None) -> CheckpointExistsError:
    """The error for a place that is taken.

    Args:
        path: The final path.
        existing: What is allowed, as in ``may_put``.
        step: The step to be saved there.
    """
    return CheckpointExistsError(_WHY_TAKEN[existing], path=path, step=step)
