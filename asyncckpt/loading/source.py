"""Where a checkpoint is read from: its files, wherever they are, each checked against what was written."""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Protocol

from asyncckpt.errors import DamagedCheckpointError
from asyncckpt.loading.catalog import read_manifest
from asyncckpt.loading.data_file import ChecksummedFile, StoredFile
from asyncckpt.worker.manifest import METADATA_NAME, Index, checksum, index_name
from asyncckpt.worker.storage import storage_for


class Source(Protocol):
    """The files of one checkpoint, wherever they are."""

    def metadata(self) -> bytes:
        """DCP's ``.metadata``, checked."""

    def data_files(self) -> list[str]:
        """The names of its data files."""

    def open(self, name: str) -> ChecksummedFile:
        """The data file ``name``, to be closed."""


class StorageSource:
    """The checkpoint ``path`` in storage. All methods raise ``DamagedCheckpointError`` and ``StorageError``."""

    def __init__(self, path: str) -> None:
        """Read its ``manifest``. Raises also ``CheckpointNotFoundError``."""
        self.path = path
        self.manifest = read_manifest(path)
        self._storage = storage_for(path)

    def metadata(self) -> bytes:
        return self.read(METADATA_NAME)

    def data_files(self) -> list[str]:
        return list(self.manifest.data_files())

    def open(self, name: str) -> ChecksummedFile:
        self.check_size(name)
        return StoredFile(os.path.join(self.path, name), self.index(name))

    def index(self, data: str) -> Index:
        """The index of the data file ``data``, checked."""
        name = index_name(data)
        return Index.parse(self.read(name), os.path.join(self.path, name))

    def indexes(self) -> Iterator[Index]:
        """The indexes of all data files."""
        return map(self.index, self.manifest.data_files())

    def read(self, name: str) -> bytes:
        """All of the small file ``name``, if its bytes are those that were written."""
        facts = self.manifest.files.get(name)
        if facts is None:
            raise DamagedCheckpointError(f"the manifest knows no {name}", path=self.path)
        self.check_size(name)
        data = self._storage.read(file := os.path.join(self.path, name))
        if f"{checksum(data):016x}" != facts["xxh3"]:
            raise DamagedCheckpointError("the file is damaged: its checksum does not match", path=file)
        return data

    def check_size(self, name: str) -> None:
        """Raise ``DamagedCheckpointError`` unless the file ``name`` is there, with the size it was written with."""
        size = self._storage.size(file := os.path.join(self.path, name))
        if size is None:
            raise DamagedCheckpointError("a file of this checkpoint is missing", path=file)
        if size != (written := self.manifest.files[name]["bytes"]):
            raise DamagedCheckpointError(
                f"the file is damaged: it has {size:,} bytes and was written with {written:,}", path=file
            )
