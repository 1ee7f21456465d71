"""Open the files of a checkpoint to read, within the limit of open files of the process.

Files of a checkpoint of this library are compared with their checksums; files of stock DCP have none.
"""

from __future__ import annotations

import os
import resource
import threading
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass

from asyncckpt.errors import DamagedCheckpointError, StorageError
from asyncckpt.format.index import Index, Item
from asyncckpt.loading.data_file import ChecksummedFile, StoredFile
from asyncckpt.loading.source import StorageSource
from asyncckpt.storage import is_address, storage_for
from asyncckpt.storage.storage import FileStamp, InputFile

# The divisor of the process's limit of descriptors; the rest is for the other work of the process.
_SHARE = 4
_FEWEST, _MOST = 8, 4096


@dataclass
class _Held:
    """An open file, and the number of its readers."""

    file: InputFile
    readers: int = 0


class OpenFiles:
    """The open files among the files to read: the last ones that were read, and all files that are being read."""

    def __init__(self) -> None:
        """Open nothing yet."""
        most = resource.getrlimit(resource.RLIMIT_NOFILE)[0] // _SHARE  # negative: no limit
        self._most = _MOST if most < 0 else min(max(most, _FEWEST), _MOST)
        self._lock = threading.Lock()
        self._held: OrderedDict[_Reopened, _Held] = OrderedDict()

    def open(self, path: str) -> InputFile:
        """Open a file.

        The caller closes it. Raises ``DamagedCheckpointError``, ``StorageError``; reading does so, too.
        """
        if is_address(path):  # no descriptor is held
            return storage_for(path).open(path)
        file = _Reopened(self, path)
        with self.reading(file):
            return file

    @contextmanager
    def reading(self, file: _Reopened) -> Iterator[InputFile]:
        """Yield the real file, open until the context ends."""
        with self._lock:
            held = self._held.pop(file, None)
            if held is None:
                self._close_some()
                held = _Held(file.open_again())
            self._held[file] = held
            held.readers += 1
        try:
            yield held.file
        finally:
            with self._lock:
                held.readers -= 1

    def close(self, file: _Reopened) -> None:
        """Close a file that is not being read."""
        with self._lock:
            if (held := self._held.pop(file, None)) is not None:
                held.file.close()

    def _close_some(self) -> None:
        """Make room for one more file, if possible."""
        while len(self._held) >= self._most:
            idle = next((file for file, held in self._held.items() if not held.readers), None)
            if idle is None:
                return
            self._held.pop(idle).file.close()


def _changed_error(path: str) -> StorageError:
    """Return the error for a file that has changed since the plan was made."""
    return StorageError("this file was changed or replaced while it was read: try again", path=path)


class _Reopened(InputFile):
    """A file that is opened when it is read, and must be the same file each time."""

    def __init__(self, files: OpenFiles, path: str) -> None:
        self.path = path
        self.alignment = 0
        self._files = files
        self._stamp = storage_for(path).stamp(path)

    def open_again(self) -> InputFile:
        """Open the file. Raises ``StorageError`` if it was replaced."""
        storage = storage_for(self.path)
        if storage.stamp(self.path) != self._stamp:
            raise _changed_error(self.path)
        file = storage.open(self.path)
        self.alignment = file.alignment
        return file

    def read(self, views: Sequence[memoryview], offset: int) -> int:
        with self._files.reading(self) as file:
            return file.read(views, offset)

    def read_in_place(self, views: Sequence[memoryview], offset: int) -> int | None:
        with self._files.reading(self) as file:
            done = file.read_in_place(views, offset)
            self.alignment = file.alignment
            return done

    def close(self) -> None:
        self._files.close(self)


class SourceFiles:
    """The files of a folder. All methods raise ``DamagedCheckpointError`` and ``StorageError``."""

    def __init__(self, folder: str, held: ExitStack) -> None:
        """Open nothing yet. ``held`` closes the files; not all of them are open at once."""
        self.folder = folder
        self._held = held
        self._storage = storage_for(folder)
        self._files = OpenFiles()
        self._stamps: dict[str, FileStamp | None] = {}  # by path, as of the first look

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
        """Open the file ``name`` without checks. The caller closes it."""
        return self._files.open(os.path.join(self.folder, name))

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
        return self._held.enter_context(closing(StoredFile(self.plain(name), Index(name, size, items, ()))))

    def open_from(self, source: StorageSource, name: str) -> ChecksummedFile:
        """Open the file ``name`` of a checkpoint of this library."""
        return self._held.enter_context(closing(source.open(name, self._files.open)))
