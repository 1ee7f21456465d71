"""What is done to checkpoints on local storage: found by one name, removed, linked to."""

from __future__ import annotations

import contextlib
import logging
import os
import re
from pathlib import Path

from fsspec.core import url_to_fs
from fsspec.implementations.local import LocalFileSystem

from asyncckpt.extension import storage_for

logger = logging.getLogger(__name__)

AnyPath = str | Path
"""As Lightning has paths."""


def local_place(path: AnyPath) -> str | None:
    """The place of a local file, by one name for all ways to it; None for one elsewhere. A link is a place itself."""
    system, place = url_to_fs(str(path))
    return place_of(place) if isinstance(system, LocalFileSystem) else None


def place_of(path: AnyPath) -> str:
    """As ``local_place``, of a path that is local."""
    folder, name = os.path.split(os.path.abspath(path))
    return os.path.join(os.path.realpath(folder), name)


def is_needed_at_once(path: AnyPath) -> bool:
    """Whether Lightning takes for granted that this checkpoint is there when the call returns, and makes it where that
    may be in the middle of another save: before a job is requeued by Slurm (in the handler of its signal), and at the
    end of processes that it has launched, for the process that did.
    """
    return re.fullmatch(r"hpc_ckpt_\d+\.ckpt|\.temp\.ckpt", os.path.basename(path)) is not None


def remove(place: str) -> None:
    """Remove a file or a folder. A folder loses its name first, so that no half of it is taken for a checkpoint."""
    with contextlib.suppress(FileNotFoundError):
        if os.path.islink(place) or not os.path.isdir(place):
            os.unlink(place)
        elif not storage_for(place).remove_checkpoint(place):
            logger.warning("%s is not removed: somebody reads it", place)


def link(place: str, target: str) -> None:
    """Make a symbolic link to ``target`` in the place of what is there, in one step but for a folder."""
    if os.path.isdir(place) and not os.path.islink(place):
        remove(place)
    new = _beside(place)
    new.symlink_to(target)
    new.replace(place)


def is_linked_to(place: str) -> bool:
    """Whether a symbolic link in the same folder leads to it."""
    with contextlib.suppress(FileNotFoundError), os.scandir(os.path.dirname(place)) as entries:
        return any(each.is_symlink() and os.path.realpath(each.path) == place for each in entries)
    return False


def _beside(place: str) -> Path:
    """A hidden name in the same folder, with nothing there."""
    folder, name = os.path.split(place)
    hidden = Path(folder, f".{name}.link")
    hidden.unlink(missing_ok=True)
    return hidden
