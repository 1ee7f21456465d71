"""A checkpoint of ours by its indexes: what stands where, with which checksums. Without torch, and no data is read."""

from __future__ import annotations

import os
import threading
from contextlib import ExitStack, closing
from typing import TYPE_CHECKING

from asyncckpt.errors import DamagedCheckpointError
from asyncckpt.exporting.open_files import OpenFiles
from asyncckpt.loading.contents import Shard, Value, values_of
from asyncckpt.loading.data_file import read_plain
from asyncckpt.loading.source import StorageSource
from asyncckpt.report.archives import records
from asyncckpt.report.stored_item import PICKLE, StoredItem
from asyncckpt.worker.storage import storage_for
from asyncckpt.worker.storage.storage import FileIdentity, InputFile

if TYPE_CHECKING:
    from asyncckpt.exporting.stored import StoredState


class IndexedCheckpoint:
    """A checkpoint of ours, or a set of files, held against removal."""

    def __init__(self, path: str, held: ExitStack) -> None:
        """Read its manifest and its indexes.

        Args:
            path: Where it is.
            held: Lets go of it, and closes its files.

        Raises:
            CheckpointError: It is damaged, or cannot be read.
        """
        held.enter_context(storage_for(path).reading(path))
        self.path = path
        self.source = StorageSource(path)
        self._held = held
        self._lock = threading.Lock()
        self._open_files = OpenFiles()
        self._opened: dict[str, InputFile] = {}
        self._identities: dict[str, FileIdentity | None] = {}
        indexes = list(self.source.indexes())
        self.items: dict[str, list[StoredItem]] = {}
        for index in indexes:
            for item in index.items:
                self.items.setdefault(item.name, []).append(StoredItem(index, item))
        for its in self.items.values():
            its.sort(key=lambda stored: stored.box)
        files = self.source.manifest.files
        self.small = {name: files[name] for name in self.source.manifest.small_files()}
        """The small files of a set, by their names."""
        self.values = {value.name: value for value in values_of(indexes, path)}
        self.values |= {name: Value(name, "", [Shard(name, its["bytes"])]) for name, its in self.small.items()}

    def identity(self, stored: StoredItem) -> FileIdentity | None:
        """Which file an item stands in. Raises ``StorageError``."""
        name = stored.index.data
        if name not in self._identities:
            self._identities[name] = storage_for(self.path).identity(os.path.join(self.path, name))
        return self._identities[name]

    def read(self, stored: StoredItem, begin: int, end: int) -> bytes:
        """The bytes of an item from ``begin`` to ``end`` of its payload, not compared with a checksum; on any thread.

        Raises ``DamagedCheckpointError`` where the file is too short, ``StorageError``.
        """
        index, at = stored.index, stored.item.payload_at
        path = os.path.join(self.path, index.data)
        with self._lock:
            if index.data not in self._opened:
                self._opened[index.data] = self._held.enter_context(closing(self._open_files.open(path)))
            file = self._opened[index.data]
        if len(data := read_plain(file, at + begin, at + end)) < end - begin:
            raise DamagedCheckpointError("the file is damaged: it is shorter than it was written", path=path)
        return data

    def data(self, name: str) -> bytes:
        """The bytes of the object, the record or the small file ``name``; those of an object with its space to grow.

        Raises ``DamagedCheckpointError``, ``StorageError``.
        """
        if name in self.small:
            return self.source.read(name)
        (stored,) = self.items[name]
        nbytes = stored.item.payload_bytes
        if stored.item.kind == "record" and stored.grows:
            its_records = records(os.path.join(self.path, stored.index.data))
            nbytes = next((size for each, size in its_records if each.endswith(PICKLE)), nbytes)
        return self.read(stored, 0, nbytes)

    def state(self, names: list[str]) -> StoredState:
        """The tensors ``names`` as a stored state, whose bytes are compared with their checksums when they are read.

        Raises ``DamagedCheckpointError``, ``StorageError``.
        """
        # Only here: all else can be looked at without torch.
        from asyncckpt.report.indexed_state import state_of

        return state_of(self.source, {name: self.items[name] for name in names}, self._held)
