"""The output of an export: a hidden folder or file beside its final place, renamed in one step once it is durable.

A killed export leaves its hidden folder or file, unlocked. The next export to the same place removes the leftover. The
hidden name differs from the name of a checkpoint attempt, because a load of the root would wait for an attempt.
"""

from __future__ import annotations

import contextlib
import os
import re
import secrets
import shutil
import stat
from collections.abc import Iterator

from asyncckpt.errors import CheckpointExistsError, StorageError
from asyncckpt.storage import absolute, is_address
from asyncckpt.storage.file_system import (
    lock_alone,
    make_folder,
    opened,
    translated,
)
from asyncckpt.storage.local import require_space
from asyncckpt.storage.partial import NewFile, PartialFolder
from asyncckpt.storage.storage import OpenAttempt

_SUFFIX = "export"


def place_for(out: str | os.PathLike[str], *, is_file: bool) -> str:
    """Return the absolute path of ``out``, after checking that an export may go there.

    Args:
        out: The requested path.
        is_file: Whether the output is a file, not a folder.

    Raises:
        CheckpointExistsError: Something exists there already.
        StorageError: The path is on an object store, or cannot be examined.
    """
    path = absolute(out)
    if is_address(path):
        raise StorageError("an export goes to a file system: export to a folder, and copy that to the store", path=path)
    with translated("looking at the place", path):
        is_empty = not is_file and os.path.isdir(path) and not os.path.islink(path) and not os.listdir(path)
        if os.path.lexists(path) and not is_empty:
            raise _taken(path)
    return path


def _taken(path: str) -> CheckpointExistsError:
    return CheckpointExistsError(
        "there is something here already, and an export replaces nothing: remove it, or export to another place",
        path=path,
    )


@contextlib.contextmanager
def output(path: str, nbytes: int, *, is_file: bool) -> Iterator[OpenAttempt]:
    """Make a new folder or file. It appears at ``path``, complete and durable, if the context ends without an error.

    Args:
        path: A path returned by ``place_for``. Missing parent folders are made.
        nbytes: The number of bytes to write; there must be space for them.
        is_file: Whether the output is a file.

    Yields:
        The attempt in which files are created.

    Raises:
        CheckpointExistsError: Something has appeared at ``path`` meanwhile.
        StorageError: There is too little space, or storage refuses.
    """
    parent, name = os.path.split(path)
    with translated("making a folder", parent):
        make_folder(parent)
        _remove_leftovers(parent, name)
        require_space(parent, path, "export", nbytes)
    hidden = os.path.join(parent, f".{name}.{secrets.token_hex(6)}.{_SUFFIX}")
    attempt: NewFile | PartialFolder
    if is_file:
        attempt = NewFile(hidden, path, direct=True)
    else:
        attempt = folder = PartialFolder(hidden, path, direct=True)
        with translated("making a folder", hidden):
            folder.make()
    try:
        yield attempt
        place_for(path, is_file=is_file)
        try:
            attempt.finalize("refuse")
        except CheckpointExistsError as error:
            raise _taken(path) from error
    except BaseException:
        attempt.discard()
        raise
    attempt.release()


def _remove_leftovers(parent: str, name: str) -> None:
    """Remove the leftovers of killed exports to the same place. Raises ``OSError``."""
    its = re.compile(rf"\.{re.escape(name)}\.[0-9a-f]{{12}}\.{_SUFFIX}")
    for each in filter(its.fullmatch, os.listdir(parent)):
        path = os.path.join(parent, each)
        with contextlib.suppress(FileNotFoundError):
            facts = os.lstat(path)
            is_folder = stat.S_ISDIR(facts.st_mode)
            if facts.st_uid != os.geteuid() or not (is_folder or stat.S_ISREG(facts.st_mode)):
                continue
            with opened(path, os.O_NOFOLLOW) as fd:
                if lock_alone(fd):
                    shutil.rmtree(path) if is_folder else os.unlink(path)
