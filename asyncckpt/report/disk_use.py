"""What checkpoints take of the disk, where some share files: each file counts once, where it is listed first."""

from __future__ import annotations

import os

from asyncckpt.worker.manifest import Manifest
from asyncckpt.worker.storage import storage_for


class DiskUse:
    """Counts the files of checkpoints that are listed, one checkpoint after the other."""

    def __init__(self) -> None:
        """None was listed yet."""
        self._counted: set[tuple[int, int]] = set()  # of files that have several names, the device and the inode

    def of_ours(self, path: str, manifest: Manifest) -> int:
        """The bytes that the checkpoint ``path`` adds to those before it. Raises ``StorageError``.

        Only large files are shared; of the small ones the manifest says enough.
        """
        nbytes = 0
        for name, facts in manifest.files.items():
            nbytes += self.of_file(os.path.join(path, name), facts["bytes"]) if "index" in facts else facts["bytes"]
        return nbytes

    def of_file(self, path: str, nbytes: int) -> int:
        """The bytes that a file of ``nbytes`` takes of the disk; 0: it was counted. Raises ``StorageError``."""
        its = storage_for(path).identity(path)
        if its is None:  # on an object store, where each has bytes of its own
            return nbytes
        if its.links > 1:
            if its[:2] in self._counted:
                return 0
            self._counted.add(its[:2])
        return its.allocated
