"""Remember the large files of the last durable save of each structure, so that the next save can link them.

A file of the next save is linked if it has the same name and the same bytes (``OpenAttempt.link``). Digests of 128 bits
of each span decide whether the bytes are the same. A comparison costs time, so only promising files are compared: files
that were the same last time, and new files that the trainer calls frozen.
"""

from __future__ import annotations

import threading
from array import array
from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace

from asyncckpt.storage.storage import LinkSource


@dataclass(frozen=True)
class DurableFile:
    """A large file of a durable save.

    Attributes:
        bounds: The bounds of its spans, in bytes.
        digests: The digests of its spans, of 128 bits each.
        source: The source for a link; None: the file cannot be linked.
        links: The number of saves in a row that have linked the file.
        is_expected: Whether the next save is expected to have the same file.
    """

    bounds: array[int]
    digests: bytes
    source: LinkSource | None
    links: int = 0
    is_expected: bool = False

    @property
    def nbytes(self) -> int:
        """The size in bytes."""
        return self.bounds[-1]


class DurableFiles:
    """The large files of one trainer, by the number of the segment they were staged in. Any thread may call."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._files: dict[int, Mapping[str, DurableFile]] = {}

    def expected(self, segment: int, name: str, most_links: int) -> DurableFile | None:
        """Return the file to compare with the file ``name`` of the next save; None: write it without a comparison.

        ``most_links``: the number of saves in a row that may link one file.
        """
        with self._lock:
            file = self._files.get(segment, {}).get(name)
        may_be = file is not None and file.source is not None and file.is_expected and file.links < most_links
        return file if may_be else None

    def expected_bytes(self, segment: int, most_links: int) -> int:
        """Return the number of bytes of the next save that are expected to be linked."""
        with self._lock:
            names = [*self._files.get(segment, {})]
        expected = (self.expected(segment, name, most_links) for name in names)
        return sum(file.nbytes for file in expected if file is not None)

    def note(self, segment: int, files: Mapping[str, DurableFile], frozen: Collection[str] = ()) -> None:
        """Take note of a save that is durable.

        Args:
            segment: The segment that the save was staged in.
            files: Its large files, by name.
            frozen: The names of its files with frozen tensors.
        """
        with self._lock:
            before = self._files.get(segment, {})
            self._files[segment] = {
                name: replace(file, is_expected=_is_expected(file, before.get(name), is_frozen=name in frozen))
                for name, file in files.items()
            }

    def forget(self, segment: int) -> None:
        """Forget the files of a segment that is released."""
        with self._lock:
            self._files.pop(segment, None)


def _is_expected(file: DurableFile, last: DurableFile | None, *, is_frozen: bool) -> bool:
    if last is None or last.bounds != file.bounds:  # a file with another layout cannot be compared
        return is_frozen
    return last.digests == file.digests
