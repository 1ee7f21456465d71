"""Tiers of a run: the folder for saves and, if that is a local folder, the root for uploads.

A load takes the newest checkpoint of all tiers. If several tiers have it, the nearest readable copy is loaded.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager
from functools import partial
from typing import Literal

from asyncckpt.errors import CheckpointNotFoundError, DamagedCheckpointError, StorageError
from asyncckpt.format.write_request import WriteRequest
from asyncckpt.loading.load import opened
from asyncckpt.loading.source import (
    Candidate,
    Source,
    check_root,
    find_step,
    read_manifest,
    stands_there,
    wait_for_attempts,
)
from asyncckpt.ranks.ranks import Ranks
from asyncckpt.storage import (
    absolute,
    complete_steps,
    is_address,
    set_aside,
    split_place,
    step_folder,
    step_of,
    tier_folders,
)
from asyncckpt.storage.file_system import make_folder
from asyncckpt.storage.history import Origin, StoredStep, newest_step, older_step, origin_of
from asyncckpt.storage.uploader import has_uploaded

logger = logging.getLogger(__name__)


class Tiers:
    """The folders of a run's checkpoints. They never change, and are the same on all ranks."""

    def __init__(self, root: str, local_root: str | None, begin_from: Sequence[str] = ()) -> None:
        """Make the folders of the run that are missing.

        Args:
            root: The folder of the checkpoints; with a ``local_root``, of the uploaded checkpoints. An absolute path,
                or an address.
            local_root: A folder on faster disks, in which checkpoints of this root get a folder of their own; None for
                no local folder.
            begin_from: Other roots, and checkpoints of other roots. A load looks at them, too, and nothing is written
                there.

        Raises:
            CheckpointExistsError: As ``check_root``. An object store is checked only by a load.
            StorageError: A folder cannot be made.
        """
        for folder in (root, *([] if local_root is None else [absolute(local_root)])):
            if not is_address(folder):
                check_root(folder)
        self.root = root
        self.roots = tier_folders(root, local_root)
        """The folders, the nearest first. Saves go to the nearest."""
        self.places = (*self.roots, *map(absolute, begin_from))
        """The places that a load looks at, the nearest first: the folders, and those of other runs."""
        self.local = None if local_root is None else self.roots[0]
        for folder in self.roots:
            if not is_address(folder):
                _make_folder(folder)

    def check_local(self) -> None:
        """Raise ``StorageError`` if the root is empty although steps were uploaded to it.

        Its disk may not be mounted, or a user has removed the run without noticing the local folder.
        """
        if self.local is not None and has_uploaded(self.local) and not complete_steps(self.root):
            raise StorageError(
                f"there are no checkpoints here, and some were uploaded from {self.local}: see that this is mounted;"
                " or, to begin anew, remove that folder, too",
                path=self.root,
            )

    def steps(self) -> list[int]:
        """Return the steps that have a complete checkpoint, ascending."""
        return complete_steps(*self.places)

    def newest(self, timeout: float) -> int | None:
        """Wait until no dead trainer's worker writes, and return the newest step.

        Raises ``StorageError``, and ``CheckpointNotFoundError`` if the run has no checkpoint, and the one to begin from
        is not there.
        """
        self._settle(timeout)
        if (found := newest_step(*self.places)) is None:
            check_root(self.root)
        return found

    def origin(
        self, step: int, unfinished: Sequence[WriteRequest] = (), *, goes_back: bool, began: float | None
    ) -> Origin:
        """Return the origin of a run that has loaded ``step``.

        See ``origin_of`` for the other arguments. Raises ``StorageError``.
        """
        return origin_of(step, *self.places, unfinished=unfinished, goes_back=goes_back, began=began)

    def candidates(self, step: int | None, timeout: float, ranks: Ranks, *, fallback: bool) -> Iterator[Candidate]:
        """Yield the checkpoints to try, one after the other, the same on all ranks, until one is loaded.

        Args:
            step: The step; None: the newest.
            timeout: Seconds to wait for workers that are still writing.
            ranks: The ranks that load together.
            fallback: If a checkpoint cannot be read, try the next older checkpoint, and set a damaged one aside.

        Raises:
            CheckpointError: There is no checkpoint, or nothing else can be tried.
        """
        look = partial(self._find, step, timeout)
        copies = ranks.from_first(look)
        while True:
            step, root = copies.pop(0)
            found = _StoredCheckpoint(step, root, "local" if root == self.local else "storage", ranks)
            attempt = None
            with found.tried():
                attempt = ranks.from_first(lambda: read_manifest(found.path).attempt)  # noqa: B023
            if attempt is not None:
                yield found
            if found.is_loaded:
                return
            words, is_damaged = str(found.failure), isinstance(found.failure, DamagedCheckpointError)
            if attempt and ranks.from_first(partial(stands_there, found.path, attempt)) != "still":
                logger.warning("step %d was saved again or removed while it was loaded: %s", step, words)
                found.failure = None  # its traceback has the states of the load
                copies = ranks.from_first(look)
                continue
            if not copies and fallback:
                copies = _copies(ranks.from_first(partial(older_step, step, *self.places)))
            if not copies:
                found.raise_failure()
            found.failure = None
            if fallback and is_damaged and root in self.roots:
                ranks.from_first(partial(set_aside, root, step))
            logger.error("step %d cannot be loaded, falling back to step %d in %s: %s", step, *copies[0], words)

    def _find(self, step: int | None, timeout: float) -> list[tuple[int, str]]:
        """Return the step and the root of each copy. For the newest step, first wait as ``newest`` does."""
        if step is None:
            self._settle(timeout)
        return find_step(step, *self.places, root=self.root)

    def _settle(self, timeout: float) -> None:
        """Wait until no dead trainer's worker writes. Raises as ``newest``, and as ``check_root``."""
        if split_place(self.root)[1] is not None:  # an object store was not looked at before
            check_root(self.root)
        wait_for_attempts(self.roots[0], timeout, self.root)
        begin = self.places[len(self.roots) :]
        missing = [place for place in begin if step_of(place) is not None and split_place(place)[1] is None]
        if missing and not complete_steps(*self.roots):
            raise CheckpointNotFoundError("there is no checkpoint to begin from", path=missing[0])


class _StoredCheckpoint(Candidate):
    """A checkpoint in a tier."""

    def __init__(self, step: int, root: str, tier: Literal["local", "storage"], ranks: Ranks) -> None:
        self.step, self.path = step, step_folder(root, step)
        self.tier = tier
        self._ranks = ranks

    def opened(self) -> AbstractContextManager[Source | None]:
        return opened(self.path, self._ranks, may_be_stock=False)


def _copies(found: StoredStep | None) -> list[tuple[int, str]]:
    """Return the step and the root of each copy, the nearest first."""
    return [] if found is None else [(found.step, root) for root in found.roots]


def _make_folder(path: str) -> None:
    try:
        make_folder(path, 0o777)
    except OSError as error:
        why = "this is a file" if os.path.lexists(path) else error.strerror
        raise StorageError(f"making the folder for checkpoints failed: {why}; choose another", path=path) from error
