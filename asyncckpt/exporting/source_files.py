"""The files of a checkpoint that is read: no more of them are open at once than a process may have.

Files of a checkpoint of ours are compared with their checksums; those of stock DCP have none.
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

# Of the descriptors that this process may have, one in so many; the others are for what else it does.
_SHARE = 4
_FEWEST, _MOST = 8, 4096


@dataclass
class _Held:
    """A file that is open, and how many are reading it."""

    file: InputFile
    readers: int = 0


class OpenFiles:
    """Of files that are to be read, those that are open: the ones that were read last, and all that are being read."""

    def __init__(self) -> None:
        """None is open yet."""
        most = resource.getrlimit(resource.RLIMIT_NOFILE)[0] // _SHARE  # negative: there is no limit
        self._most = _MOST if most < 0 else min(max(most, _FEWEST), _MOST)
        self._lock = threading.Lock()
        self._held: OrderedDict[_Reopened, _Held] = OrderedDict()

    def open(self, path: str) -> InputFile:
        """A file, to be closed. Raises ``DamagedCheckpointError``, ``StorageError``; reading it does so, too."""
        if is_address(path):  # no descriptor is held
            return storage_for(path).open(path)
        file = _Reopened(self, path)
        with self.reading(file):
            return file

    @contextmanager
    def reading(self, file: _Reopened) -> Iterator[InputFile]:
        """The file itself, open until the context ends."""
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
        """Close what nobody is reading."""
        with self._lock:
            if (held := self._held.pop(file, None)) is not None:
                held.file.close()

    def _close_some(self) -> None:
        """Make room for one more, if possible."""
        while len(self._held) >= self._most:
            idle = next((file for file, held in self._held.items() if not held.readers), None)
            if idle is None:
                return
            self._held.pop(idle).file.close()


def _changed_error(path: str) -> StorageError:
    """What to say where a file is not the one that was planned with."""
    return StorageError("this file was changed or replaced while it was read: try again", path=path)


class _Reopened(InputFile):
    """A file that is opened when it is read, and has to be the same each time."""

    def __init__(self, files: OpenFiles, path: str) -> None:
        self.path = path
        self.alignment = 0
        self._files = files
        self._stamp = storage_for(path).stamp(path)

    def open_again(self) -> InputFile:
        """Raises ``StorageError`` where it is another one."""
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
        """Look at nothing yet. ``held`` closes what is opened: not all of it is at once."""
        self.folder = folder
        self._held = held
        self._storage = storage_for(folder)
        self._files = OpenFiles()
        self._stamps: dict[str, FileStamp | None] = {}  # by the path, as it was when that was first looked at

    def watch(self, name: str) -> None:
        """Note how the file ``name`` is now, for ``check_unchanged``."""
        path = os.path.join(self.folder, name)
        self._stamps.setdefault(path, self._storage.stamp(path))

    def check_unchanged(self) -> None:
        """Raise ``StorageError`` if a watched file has changed."""
        for path, stamp in self._stamps.items():
            if self._storage.stamp(path) != stamp:
                raise _changed_error(path)

    def plain(self, name: str) -> InputFile:
        """Open the file ``name`` as it is, to be closed."""
        return self._files.open(os.path.join(self.folder, name))

    def open(self, name: str, places: Sequence[tuple[str, int, int]]) -> ChecksummedFile:
        """Open a file without checksums, and watch it.

        Args:
            name: The file.
            places: Of each value in it the name, the first byte, and how many there are.

        Returns:
            The file, with an index that has no checksums.

        Raises:
            DamagedCheckpointError: It is missing, or ends before a value does.
            StorageError: It cannot be read.
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
        """Open the file ``name`` of a checkpoint of ours."""
        return self._held.enter_context(closing(source.open(name, self._files.open)))
