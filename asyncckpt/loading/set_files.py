"""Read the large files of a set of files, from the memory of this rank's previous trainer or from storage."""

from __future__ import annotations

from contextlib import ExitStack, closing

from asyncckpt.loading.data_file import fetch, read_pool
from asyncckpt.loading.image_files import HeldImages
from asyncckpt.loading.source import StorageSource
from asyncckpt.shm.memcpy import address_of


class SetFiles:
    """The large files of a checkpoint, with a checksum of every byte. The caller has to close this object."""

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
        """Fill ``into`` with the file ``name``, and compare the checksums. Return False if the file is not a large one.

        Raises ``DamagedCheckpointError``, ``StorageError``.
        """
        if "index" not in self._stored.manifest.files.get(name, ()):
            return False
        found = self._image.large_file(name, self._stored.index(name)) if self._image is not None else None
        with closing(found or self._stored.open(name)) as file, read_pool(file.path) as pool:
            fetch({name: file}, [(name, 0, len(into), address_of(into))], pool)
        return True

    def close(self) -> None:
        """Release the memory."""
        self._held.close()
