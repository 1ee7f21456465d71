"""Files that several checkpoints share: hard links to the same bytes, so that what is damaged in one is so in all."""

from __future__ import annotations

import contextlib
import os
from typing import NamedTuple

from asyncckpt.errors import CheckpointError, DamagedCheckpointError
from asyncckpt.storage import storage_for
from asyncckpt.storage.storage import FileIdentity


def sharing(folder: str, name: str) -> list[str]:
    """The names of the other checkpoints beside ``folder`` in which the file ``name`` is the same one, in their order.

    None where nothing can be seen of that: what is said of it stands beside another error.
    """
    above, its_own = os.path.split(folder)
    known = _identity(os.path.join(folder, name))
    if known is None or known.links < 2:
        return []
    found = []
    with contextlib.suppress(CheckpointError):
        for other in sorted(storage_for(folder).names_in(above)):
            if other == its_own or other.startswith("."):  # those are attempts, and what is being removed
                continue
            its = _identity(os.path.join(above, other, name))
            if its is not None and its[:2] == known[:2]:
                found.append(other)
    return found


def _identity(path: str) -> FileIdentity | None:
    with contextlib.suppress(CheckpointError):
        return storage_for(path).identity(path)
    return None


def distrusted(folder: str, name: str) -> str:
    """See that the damaged file ``name`` of the checkpoint in ``folder`` is not taken over by a later one.

    Returns what is to be said behind the damage: which other checkpoints have it. "": none, as far as is seen.
    """
    storage_for(folder).distrust(os.path.join(folder, name))
    others = sharing(folder, name)
    if not others:
        return ""
    they_are = "they are" if len(others) > 1 else "that is"
    return f"; this file is shared with {', '.join(others)}: {they_are} damaged, too; save again"


def explained(error: DamagedCheckpointError, path: str, name: str) -> DamagedCheckpointError:
    """An error about the file at ``path``, which is ``name`` in its checkpoint, with the others that have it; as
    ``distrusted``.
    """
    more = distrusted(path.removesuffix(name).rstrip("/"), name)
    return DamagedCheckpointError(error.message + more, path=error.path, rank=error.rank, step=error.step)


class CheckedFile(NamedTuple):
    """A file, and what it was checked against: the checksums of its indexes."""

    device: int
    inode: int
    indexes: tuple[str, ...]


class CheckedFiles:
    """What was found in files that have several names, so that none is read for each of them."""

    def __init__(self) -> None:
        """Nothing was checked yet."""
        self._found: dict[CheckedFile, list[str]] = {}

    def known(self, file: CheckedFile | None) -> list[str] | None:
        """What is damaged in a file, in words; None: it was not checked yet."""
        return None if file is None else self._found.get(file)

    def add(self, file: CheckedFile | None, damages: list[str]) -> None:
        """Remember what is damaged in a file; None: it has no other name."""
        if file is not None:
            self._found[file] = damages
