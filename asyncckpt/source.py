"""Where a checkpoint is read from."""

from __future__ import annotations

import os
from typing import Protocol

from asyncckpt.catalog import check_size, read_checked, read_index
from asyncckpt.spans import DataFile, SpanFile
from asyncckpt.worker.manifest import METADATA_NAME, Manifest


class Source(Protocol):
    """The files of one checkpoint, wherever they are."""

    def metadata(self) -> bytes:
        """DCP's ``.metadata``, checked."""

    def data_files(self) -> list[str]:
        """The names of its data files."""

    def open(self, name: str) -> SpanFile:
        """The data file ``name``, to be closed."""


class FolderSource:
    """A checkpoint in storage."""

    def __init__(self, path: str, manifest: Manifest) -> None:
        self.path = path
        self._manifest = manifest

    def metadata(self) -> bytes:
        """Raises ``DamagedCheckpointError``, ``StorageError``."""
        return read_checked(self.path, self._manifest, METADATA_NAME)

    def data_files(self) -> list[str]:
        """As its manifest says."""
        return list(self._manifest.data_files())

    def open(self, name: str) -> SpanFile:
        """Raises ``DamagedCheckpointError``, ``StorageError``."""
        check_size(self.path, self._manifest, name)
        index = read_index(self.path, self._manifest, name)
        return DataFile(os.path.join(self.path, name), index)
