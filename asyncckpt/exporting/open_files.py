"""Files that are read now and then: no more of them are open at once than a process may have."""

from __future__ import annotations

import resource
import threading
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from asyncckpt.errors import StorageError
from asyncckpt.worker.storage import is_address, storage_for
from asyncckpt.worker.storage.storage import InputFile

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


def changed_error(path: str) -> StorageError:
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
            raise changed_error(self.path)
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
