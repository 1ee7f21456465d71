"""Open the files of a checkpoint to read, within the process's limit of open files.

Reads compare the checksums of a checkpoint of this library. Files of stock DCP have no checksums.
"""

from __future__ import annotations

import os
import resource
from collections.abc import Sequence
from contextlib import ExitStack, closing

from asyncckpt.errors import DamagedCheckpointError, StorageError
from asyncckpt.format.index import Index, Item
from asyncckpt.loading.data_file import ChecksummedFile, StoredFile
from asyncckpt.loading.rank_files import RankFiles
from asyncckpt.loading.source import StorageSource
from asyncckpt.storage import is_address, storage_for
from asyncckpt.storage.storage import FileStamp, InputFile

# The export may hold this part (1 / _SHARE) of the process's descriptors. All others are for other work.
_SHARE = 4
_UNLIMITED = 4096


def _changed_error(path: str) -> StorageError:
    """Return the error for a file that has changed since the plan was made."""
    return StorageError("this file was changed or replaced while it was read: try again", path=path)


class _Reopened(InputFile):
    """A file that is opened for each read, to hold no descriptor. It must be the same file each time."""

    def __init__(self, path: str) -> None:
        self.path = path
        self.alignment = 0
        self._storage = storage_for(path)
        self._stamp = self._storage.stamp(path)

    def read(self, views: Sequence[memoryview], offset: int) -> int:
        with closing(self._storage.open(self.path)) as file:
            if self._storage.stamp(self.path) != self._stamp:
                raise _changed_error(self.path)
            return file.read(views, offset)

    def read_in_place(self, views: Sequence[memoryview], offset: int) -> int | None:
        return None

    def close(self) -> None:
        pass


class SourceFiles:
    """The files of a folder. All methods raise ``DamagedCheckpointError`` and ``StorageError``."""

    def __init__(self, folder: str, held: ExitStack) -> None:
        """Open nothing yet. ``held`` closes the files that stay open."""
        self.folder = folder
        self._held = held
        self._storage = storage_for(folder)
        limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
        self._left = _UNLIMITED if limit < 0 else limit // _SHARE  # number of further files that may be held open
        self._stamps: dict[str, FileStamp | None] = {}  # by path: the stamp of the file when it was first watched

    def watch(self, name: str) -> None:
        """Remember the state of the file ``name`` for ``check_unchanged``."""
        path = os.path.join(self.folder, name)
        self._stamps.setdefault(path, self._storage.stamp(path))

    def check_unchanged(self) -> None:
        """Raise ``StorageError`` if a watched file has changed."""
        for path, stamp in self._stamps.items():
            if self._storage.stamp(path) != stamp:
                raise _changed_error(path)

    def plain(self, name: str) -> InputFile:
        """Open the file ``name`` without checks. The caller closes the file."""
        return self._storage.open(os.path.join(self.folder, name))

    def open(self, name: str, places: Sequence[tuple[str, int, int]]) -> ChecksummedFile:
        """Open a file without checksums, and watch it.

        Args:
            name: The file.
            places: For each value in the file: its name, first byte, and number of bytes.

        Returns:
            The file, with an index without checksums.

        Raises:
            DamagedCheckpointError: The file is missing, or ends before a value does.
            StorageError: The file cannot be read.
        """
        self.watch(name)
        size = self._storage.size(path := os.path.join(self.folder, name))
        if size is None:
            raise DamagedCheckpointError("a file of this checkpoint is missing", path=path)
        for value, at, nbytes in places:
            if at < 0 or nbytes < 0 or at + nbytes > size:
                raise DamagedCheckpointError(
                    f"the file is damaged: it has {size:,} bytes, and {value!r} stands from {at:,} to {at + nbytes:,}",
                    path=path,
                )
        items = [Item(value, "", "", [], [], at, nbytes, at, nbytes) for value, at, nbytes in places]
        return self._held.enter_context(closing(StoredFile(self._opened(path), Index(name, size, items, ()))))

    def open_from(self, source: StorageSource | RankFiles, name: str) -> ChecksummedFile:
        """Open the file ``name`` of a checkpoint. Its checksums are compared, if there are any."""
        return self._held.enter_context(closing(source.open(name, self._opened)))

    def _opened(self, path: str) -> InputFile:
        if self._left <= 0 and not is_address(path):  # a file on an object store holds no descriptor
            return _Reopened(path)
        self._left -= 1
        return self._storage.open(path)
