"""Archives of ``torch.save``, without torch: their records, and the CRC-32 that each has."""

from __future__ import annotations

import io
import zipfile
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass, field

from asyncckpt.errors import CheckpointError, DamagedCheckpointError
from asyncckpt.loading.data_file import read_plain
from asyncckpt.worker.storage import storage_for
from asyncckpt.worker.storage.storage import InputFile

_READ_BYTES, _BUFFER_BYTES = 1 << 20, 256 << 10


@dataclass
class CheckedRecords:
    """How many archives there are, how many of their records were compared with their CRC-32, how many have none, how
    many are compressed, and what is damaged, in words.
    """

    archives: int = 0
    compared: int = 0
    without: int = 0
    packed: int = 0
    damages: list[str] = field(default_factory=list)

    def add(self, its: CheckedRecords) -> None:
        """Count also what was found in another archive; not its damages."""
        self.archives += its.archives
        self.compared += its.compared
        self.without += its.without
        self.packed += its.packed


def check_records(
    file: InputFile, begin: int, end: int, found: CheckedRecords, progress: Callable[[int], object]
) -> None:
    """Read all records of an archive. Raises ``StorageError``.

    Args:
        file: What it stands in.
        begin: Its first byte there.
        end: Where it ends.
        found: Is added to.
        progress: Is called with the bytes read since the last call.
    """
    found.archives += 1
    with _opened(file, begin, end) as archive:
        if isinstance(archive, str):
            found.damages.append(archive)
            return
        for info in archive.infolist():
            if info.compress_type != zipfile.ZIP_STORED:  # torch.save compresses nothing, and a few bytes may be a TiB
                found.packed += 1
                continue
            if info.CRC == 0 and info.file_size:  # torch.save was told to take none
                found.without += 1
                continue
            found.compared += 1
            if (damage := _damage(archive, info, progress)) is not None:
                found.damages.append(f"{info.filename}: {damage}")


def records(path: str) -> list[tuple[str, int]]:
    """The names and sizes of the records in the archive at ``path``. Raises ``DamagedCheckpointError``."""
    storage = storage_for(path)
    with closing(storage.open(path)) as file, _opened(file, 0, storage.size(path) or 0) as archive:
        if isinstance(archive, str):
            raise DamagedCheckpointError(f"the file is damaged: {archive}", path=path)
        return [(info.filename, info.file_size) for info in archive.infolist()]


@contextmanager
def _opened(file: InputFile, begin: int, end: int) -> Iterator[zipfile.ZipFile | str]:
    """The archive, or why there is none."""
    window = io.BufferedReader(_Window(file, begin, end), _BUFFER_BYTES)
    try:
        archive = zipfile.ZipFile(window)
    except CheckpointError:
        raise
    except Exception as error:  # what is damaged fails in many ways
        yield f"it cannot be read as an archive: {error or type(error).__name__}"
        return
    with archive:
        yield archive


def _damage(archive: zipfile.ZipFile, info: zipfile.ZipInfo, progress: Callable[[int], object]) -> str | None:
    try:
        with archive.open(info) as record:
            while data := record.read(_READ_BYTES):
                progress(len(data))
    except CheckpointError:
        raise
    except Exception as error:
        return str(error) or type(error).__name__
    return None


class _Window(io.RawIOBase):
    """A part of a file, as a file."""

    def __init__(self, file: InputFile, begin: int, end: int) -> None:
        self._file, self._begin, self._nbytes = file, begin, end - begin
        self._at = 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        at = offset + {io.SEEK_SET: 0, io.SEEK_CUR: self._at, io.SEEK_END: self._nbytes}[whence]
        if at < 0:
            raise ValueError("before the begin of the file")
        self._at = at
        return at

    def readinto(self, into: memoryview) -> int:  # type: ignore[override]
        begin = self._begin + self._at
        nbytes = max(0, min(len(into), _READ_BYTES, self._nbytes - self._at))
        data = read_plain(self._file, begin, begin + nbytes) if nbytes else b""
        into[: len(data)] = data
        self._at += len(data)
        return len(data)
