"""Orphans: what killed workers left beside checkpoints, told from what is under way or belongs to others.

An orphan is known by its name, by what is in it, by its owner, this user, by the lock that nobody holds on it, and by
its age: nothing in it was changed after ``before``, a time of that file system in seconds.
"""

from __future__ import annotations

import logging
import os
import shutil
import stat

from asyncckpt.worker.storage.folders import holds_only_a_checkpoint
from asyncckpt.worker.storage.locks import lock_alone, opened
from asyncckpt.worker.storage.names import CHECKPOINT_ATTEMPT, FILE_ATTEMPT, OLD_SUFFIX, TRASH_SUFFIX

logger = logging.getLogger(__name__)

# Where there are no locks, whoever is writing has a day before it counts as dead.
_NO_LOCKS_S = 86400.0


def sweep_checkpoints(root: str, before: float) -> None:
    """Remove orphaned attempts at checkpoints, and half-removed checkpoints, in ``root``. Raises ``OSError``.

    A checkpoint that was to make way for another that never came gets its name back.
    """
    with os.scandir(root) as entries:
        names = [entry.name for entry in entries if entry.is_dir(follow_symlinks=False)]
    for name in names:
        attempt = CHECKPOINT_ATTEMPT.fullmatch(name)
        if attempt is None and not (name.startswith(".") and name.endswith(TRASH_SUFFIX)):
            continue
        final = os.path.join(root, attempt[1]) if attempt is not None and name.endswith(OLD_SUFFIX) else None
        _sweep(os.path.join(root, name), before, final)


def sweep_files(folder: str, before: float) -> None:
    """Remove orphaned attempts at single files in ``folder``. Raises ``OSError``."""
    with os.scandir(folder) as entries:
        paths = [entry.path for entry in entries if FILE_ATTEMPT.fullmatch(entry.name)]
    for path in paths:
        _sweep(path, before, None, is_file=True)


def _sweep(path: str, before: float, final: str | None, *, is_file: bool = False) -> None:
    """Remove ``path`` if it is an orphan, or rename it to ``final`` if that is given and free."""
    try:
        if not _is_orphan(path, before, is_file=is_file):
            return
        if final is not None and not os.path.lexists(final):
            logger.warning("%s gets its name back: a worker was killed while it was being replaced", final)
            os.rename(path, final)
            return
        logger.warning("removing %s, which a worker left that was killed", path)
        os.unlink(path) if is_file else shutil.rmtree(path)
    except OSError as error:
        logger.info("%s stays: %s", path, error)


def _is_orphan(path: str, before: float, *, is_file: bool) -> bool:
    facts = os.lstat(path)
    is_ours = stat.S_ISREG(facts.st_mode) if is_file else holds_only_a_checkpoint(path)
    if facts.st_uid != os.geteuid() or not is_ours:
        return False
    with opened(path, 0 if is_file else os.O_DIRECTORY) as fd:
        is_free = lock_alone(fd)
        if is_free is False:
            return False
        changed = [os.fstat(fd).st_mtime]
        if not is_file:
            with os.scandir(fd) as entries:
                changed += [entry.stat(follow_symlinks=False).st_mtime for entry in entries]
        return max(changed) <= (before if is_free else before - _NO_LOCKS_S)
