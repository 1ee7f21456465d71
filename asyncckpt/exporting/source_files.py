"""The files that something is read from: what stands in a checkpoint of ours is checked, others have no checksums."""

from __future__ import annotations

import os
from collections.abc import Sequence
from contextlib import ExitStack, closing

from asyncckpt.errors import DamagedCheckpointError
from asyncckpt.exporting.open_files import OpenFiles, changed_error
from asyncckpt.exporting.stored import fetch
from asyncckpt.loading.data_file import ChecksummedFile, MemoryFile, StoredFile, read_plain, read_pool
from asyncckpt.loading.set_of_file import SetsOfFiles
from asyncckpt.loading.source import StorageSource
from asyncckpt.shm.memcpy import address_of
from asyncckpt.worker.index import Index, Item
from asyncckpt.worker.storage import is_address, storage_for
from asyncckpt.worker.storage.storage import FileStamp, InputFile


class SourceFiles:
    """The files of a folder. Those that a set of ours has are known by its manifest, in that folder or one above it:
    their bytes are compared with its checksums, and the set is held against removal.

    All methods raise ``DamagedCheckpointError`` and ``StorageError``.
    """

    def __init__(self, folder: str, held: ExitStack) -> None:
        """Look at nothing yet. ``held`` closes what is opened: not all of it is at once."""
        self.folder = folder
        self._held = held
        self._storage = storage_for(folder)
        self._files = OpenFiles()
        self._sets = SetsOfFiles(held)
        self._stamps: dict[str, FileStamp | None] = {}  # by the path, as it was when that was first looked at
        self._checked: dict[str, ChecksummedFile | None] = {}

    def in_set(self, name: str) -> tuple[StorageSource, str] | None:
        """The set that has the file ``name``, and the name that it has there; None: it is of none."""
        path = self.path(name)
        if path not in self._stamps:
            self._stamps[path] = self._storage.stamp(path)
        return self._sets.with_file(path)

    def names(self) -> list[str]:
        """What is in the folder: on an object store, where it is in a set, what that says."""
        found = self._sets.around(self.folder) if is_address(self.folder) else None
        if found is None:
            return self._storage.names_in(self.folder)
        source, within = found
        below = [name.removeprefix(within) for name in source.manifest.files if name.startswith(within)]
        return [name for name in below if "/" not in name]

    def check_unchanged(self) -> None:
        """Raise ``StorageError`` where a file is not the one that it was at first."""
        for path, stamp in self._stamps.items():
            if self._storage.stamp(path) != stamp:
                raise changed_error(path)

    def path(self, name: str) -> str:
        """Where the file ``name`` is."""
        return os.path.join(self.folder, name)

    def checked(self, name: str) -> ChecksummedFile | None:
        """Return the file ``name`` of a set, open; None: it is to be read as it is, as it is of none."""
        if name not in self._checked:
            self._checked[name] = self._open_checked(name)
        return self._checked[name]

    def plain(self, name: str) -> InputFile:
        """The file ``name`` as it is, to be closed."""
        return self._files.open(self.path(name))

    def read(self, name: str) -> bytes:
        """All of the small file ``name``."""
        if (found := self.in_set(name)) is not None:
            source, its = found
            return source.read(its)
        return self._storage.read(self.path(name))

    def head(self, name: str, nbytes: int) -> bytes:
        """The first bytes of the file ``name``, or as many as it has."""
        if (file := self.checked(name)) is not None:
            return read_bytes(file, 0, min(nbytes, file.index.nbytes))
        with closing(self.plain(name)) as plain:
            return read_plain(plain, 0, nbytes)

    def open(self, name: str, places: Sequence[tuple[str, int, int]]) -> ChecksummedFile:
        """Open a file.

        Args:
            name: The file.
            places: Of each value in it the name, the first byte, and how many there are.

        Returns:
            The file. One that has no checksums has an index without them.

        Raises:
            DamagedCheckpointError: It is missing, or ends before a value does.
            StorageError: It cannot be read.
        """
        path, file = self.path(name), self.checked(name)
        size = self._storage.size(path) if file is None else file.index.nbytes
        if size is None:
            raise DamagedCheckpointError("a file of this checkpoint is missing", path=path)
        for value, at, nbytes in places:
            if at < 0 or nbytes < 0 or at + nbytes > size:
                raise DamagedCheckpointError(
                    f"the file is damaged: it has {size:,} bytes, and {value!r} stands from {at:,} to {at + nbytes:,}",
                    path=path,
                )
        if file is not None:
            return file
        items = [Item(value, "", "", [], [], at, nbytes, at, nbytes) for value, at, nbytes in places]
        return self._held.enter_context(closing(StoredFile(self.plain(name), Index(name, size, items, ()))))

    def open_from(self, source: StorageSource, name: str) -> ChecksummedFile:
        """Open the file ``name`` of a checkpoint of ours."""
        return self._held.enter_context(closing(source.open(name, self._files.open)))

    def _open_checked(self, name: str) -> ChecksummedFile | None:
        if (found := self.in_set(name)) is None:
            return None
        source, its = found
        if "index" in source.manifest.files[its]:
            return self.open_from(source, its)
        data = source.read(its)  # it is small, has one checksum, and is not read again
        return MemoryFile(os.path.join(source.path, its), Index(name, len(data), [], ()), memoryview(bytearray(data)))


def check(file: ChecksummedFile, ranges: Sequence[tuple[int, int]]) -> None:
    """Compare the checksums of parts of a file, if it has some. Raises ``DamagedCheckpointError``, ``StorageError``."""
    if ranges and file.index.checksums:
        with read_pool(file.path) as pool, file.read(ranges, pool) as runs:
            for run in runs:
                if run.damages:
                    raise file.explained(run.damages[0])


def read_bytes(file: ChecksummedFile, begin: int, end: int) -> bytes:
    """The bytes from ``begin`` to ``end`` of a file, checked. Raises ``DamagedCheckpointError``, ``StorageError``."""
    data = bytearray(end - begin)
    with read_pool(file.path) as pool:
        fetch(file, [(begin, end, address_of(memoryview(data)))] if data else [], pool)
    return bytes(data)
