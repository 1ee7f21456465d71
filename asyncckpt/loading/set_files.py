"""Read the files of a set. Large files come from the memory of this rank's previous trainer, or else from storage."""

from __future__ import annotations

import logging
from contextlib import ExitStack, closing

from asyncckpt.errors import DamagedCheckpointError
from asyncckpt.loading.data_file import fill
from asyncckpt.loading.image_files import HeldImages
from asyncckpt.loading.source import StorageSource

logger = logging.getLogger(__name__)


class SetFiles:
    """The files of a checkpoint, with a checksum of every byte. The caller has to close this object."""

    def __init__(self, path: str, memory: HeldImages | None) -> None:
        """Find the checkpoint ``path`` in storage, and the image of this rank in ``memory``.

        Raises ``CheckpointNotFoundError``, ``DamagedCheckpointError``, ``StorageError``.
        """
        self.path, self._stored, self._held = path, StorageSource(path), ExitStack()
        mine = [each for each in memory.images if each.request.attempt == self._stored.attempt] if memory else []
        self._image = memory.files(mine[0]) if memory and mine else None
        if self._image is not None:
            self._held.enter_context(closing(self._image))

    def read(self, name: str, into: memoryview) -> bool:
        """Fill ``into`` with the file ``name``, and compare the checksums. Return False if there is no such file.

        Raises ``DamagedCheckpointError``, ``StorageError``.
        """
        facts = self._stored.manifest.files.get(name)
        if facts is None:
            return False
        if "index" not in facts:
            into[:] = self._stored.read(name)
            return True
        if self._image is not None and (file := self._image.large_file(name, self._stored.index(name))) is not None:
            try:
                fill(into, file)
                return True
            except DamagedCheckpointError as error:
                logger.warning("the files are not loaded from memory: %s", error)
                self._image = None
        fill(into, self._stored.open(name))
        return True

    def close(self) -> None:
        """Release the memory."""
        self._held.close()
