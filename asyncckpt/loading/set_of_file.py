"""Which set of ours a file is in, in whose folder or below it: its manifest has the checksums. Without torch."""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Iterator
from contextlib import ExitStack

from asyncckpt.errors import StorageError
from asyncckpt.format.manifest import MANIFEST_NAME
from asyncckpt.loading.source import StorageSource
from asyncckpt.storage import is_address, storage_for

logger = logging.getLogger(__name__)


class SetsOfFiles:
    """The sets that files are in, each looked for once, and held against removal.

    All methods raise ``DamagedCheckpointError`` and ``StorageError``.
    """

    def __init__(self, held: ExitStack) -> None:
        """Look at nothing yet. ``held`` lets go of the sets."""
        self._held = held
        self._sets: dict[str, tuple[StorageSource, str] | None] = {}  # by the folder of a file

    def with_file(self, path: str) -> tuple[StorageSource, str] | None:
        """The set that has the file ``path``, and the name that it has there; None: it is of none."""
        # A link out of a set has taken the place of a file of it; one into a set leads to a file of that.
        for each in (path,) if is_address(path) else (path, os.path.realpath(path)):
            folder, base = os.path.split(each)
            if folder not in self._sets:
                self._sets[folder] = self._around(folder)
            if (found := self._sets[folder]) is not None and (its := f"{found[1]}{base}") in found[0].manifest.files:
                return found[0], its
        return None

    def _around(self, folder: str) -> tuple[StorageSource, str] | None:
        """Find the set that ``folder`` is in, and what the names of its files begin with there."""
        for above in _upwards(folder):
            if _is_set(above, folder):
                self._held.enter_context(storage_for(above).reading(above))  # retention leaves it alone
                return StorageSource(above), folder[len(above) :].lstrip("/") + "/" * (folder != above)
        return None


def _is_set(above: str, folder: str) -> bool:
    """Whether a set stands ``above``: what else is called as its manifest is somebody else's."""
    storage, name = storage_for(above), os.path.join(above, MANIFEST_NAME)
    try:
        if not storage.exists(name):
            return False
        found = json.loads(storage.read(name))
        return isinstance(found, dict) and found.keys() >= {"attempt", "files"}
    except (ValueError, RecursionError):
        return above == folder  # it is damaged, if it is one
    except StorageError as error:  # as on a store where only some keys may be read
        if above == folder:
            raise
        logger.info("whether %s is a set of files cannot be seen: %s", above, error)
        return False


def _upwards(folder: str) -> Iterator[str]:
    """``folder`` and those above it, but for the root of the file system, or of all buckets."""
    is_object = is_address(folder)
    while folder != (above := os.path.dirname(folder)) and is_address(folder) == is_object:
        yield folder
        folder = above
