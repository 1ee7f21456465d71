"""The large files of the last durable save of each structure: what of the next one is the same need not be written.

A file of the next save that has the same name and the same bytes is linked (``OpenAttempt.link``). Whether it has is
told by a digest of 128 bits of each span, of what was written and of what is staged: by nothing that is a guess. What
is guessed is only whether to look before writing: of a file that was not the same last time it is not expected.
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
        bounds: Those of its spans.
        digests: Those of its spans, of 128 bits each.
        source: What another attempt can link; None: none can.
        links: How many saves in a row have taken it by link.
        is_expected: Whether the next save is expected to have the same.
    """

    bounds: array[int]
    digests: bytes
    source: LinkSource | None
    links: int = 0
    is_expected: bool = False

    @property
    def nbytes(self) -> int:
        """Its size."""
        return self.bounds[-1]


class DurableFiles:
    """Those of one trainer's saves, by the number of the segment that they were staged in; for any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._files: dict[int, Mapping[str, DurableFile]] = {}

    def expected(self, segment: int, name: str, most_links: int) -> DurableFile | None:
        """What the file ``name`` of the next save is likely to be the same as, and may be linked to; None: write it.

        ``most_links``: how many saves in a row may have it by link.
        """
        with self._lock:
            file = self._files.get(segment, {}).get(name)
        may_be = file is not None and file.source is not None and file.is_expected and file.links < most_links
        return file if may_be else None

    def expected_bytes(self, segment: int, most_links: int) -> int:
        """How many bytes of the next save are expected to be linked."""
        with self._lock:
            names = [*self._files.get(segment, {})]
        expected = (self.expected(segment, name, most_links) for name in names)
        return sum(file.nbytes for file in expected if file is not None)

    def note(self, segment: int, files: Mapping[str, DurableFile], frozen: Collection[str] = ()) -> None:
        """Take note of a save that is durable.

        Args:
            segment: The segment that the save was staged in.
            files: Its large files, by name.
            frozen: The names of files that are likely to stay the same, as the trainer says.
        """
        with self._lock:
            before = self._files.get(segment, {})
            self._files[segment] = {
                name: replace(file, is_expected=_is_expected(file, before.get(name), is_frozen=name in frozen))
                for name, file in files.items()
            }

    def forget(self, segment: int) -> None:
        """That memory is for something else now."""
        with self._lock:
            self._files.pop(segment, None)


def _is_expected(file: DurableFile, last: DurableFile | None, *, is_frozen: bool) -> bool:
    if last is None or last.bounds != file.bounds:  # another layout says nothing of this one
        return is_frozen
    return last.digests == file.digests
