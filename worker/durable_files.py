"""The large files of the last durable save of each structure: what of the next one is the same need not be written.

A file of the next save that has the same name and the same bytes is linked (``OpenAttempt.link``). Whether it has is
told by a digest of 128 bits of each span, of what was written and of what is staged: by nothing that is a guess. What
is guessed is only whether to look before writing: of a file that was not the same last time it is not expected.
"""

from __future__ import annotations

import threading
from array import array
from collections import Counter
from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from itertools import compress
from operator import eq

from asyncckpt.storage.storage import LinkSource

# Where less than that could be linked, nobody is told.
_LEAST_BYTES = 1 << 20


@dataclass(frozen=True)
class DurableFile:
    """A large file of a durable save.

    Attributes:
        bounds: Those of its spans.
        digests: Those of its spans, of 128 bits each.
        source: What another attempt can link; None: none can.
        links: How many saves in a row have taken it by link.
        is_expected: Whether the next save is expected to have the same.
        is_proven: Whether that is sure of a file that slots share: its memory has not been laid out anew since.
    """

    bounds: array[int]
    digests: bytes
    source: LinkSource | None
    links: int = 0
    is_expected: bool = False
    is_proven: bool = True

    def unchanged_since(self, before: DurableFile) -> bytes:
        """For each span 1 if it is as it was ``before``, in the same structure, else 0."""
        ours, theirs = array("Q", self.digests), array("Q", before.digests)
        found = bytearray(map(eq, ours[::2], theirs[::2]))
        for number in compress(range(len(found)), found):  # of half a digest, few or most
            found[number] = ours[2 * number + 1] == theirs[2 * number + 1]
        return bytes(found)

    @property
    def nbytes(self) -> int:
        """Its size."""
        return self.bounds[-1]


class DurableFiles:
    """Those of one trainer's saves, by the number of the segment that they were staged in; for any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._files: dict[int, Mapping[str, DurableFile]] = {}
        self._noted: Counter[int] = Counter()

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

    def note(self, segment: int, files: Mapping[str, DurableFile], settled: Collection[str] = ()) -> None:
        """A save is durable.

        Args:
            segment: What it was staged in.
            files: Its large files, by name.
            settled: Those of which the trainer expects that they do not change.
        """
        with self._lock:
            self._noted[segment] += 1
            before = self._files.get(segment, {})
            self._files[segment] = {
                name: replace(file, is_expected=_is_expected(file, before.get(name), is_settled=name in settled))
                for name, file in files.items()
            }

    def unchanged(self, segment: int, files: Mapping[str, DurableFile], settled: Collection[str]) -> dict[str, bytes]:
        """For each of ``files``, which are not noted yet, what is as it was in the last save that is (see
        ``DurableFile.unchanged_since``); none, where it is of no use to know that: where it would not be much less to
        write if what is not settled was, or what is settled was not. Args: as of ``note``.

        It takes 0.2 us a span, and so is found out more and more rarely.
        """
        with self._lock:
            before, noted = self._files.get(segment, {}), self._noted[segment]
        if noted.bit_count() > 2:
            return {}
        found: dict[str, bytes] = {}
        gain = 0
        for name, file in files.items():
            if (last := before.get(name)) is None or last.bounds != file.bounds:
                return {}
            its = found[name] = file.unchanged_since(last)
            nbytes = sum(file.bounds[number + 1] - file.bounds[number] for number in compress(range(len(its)), its))
            if name not in settled or nbytes < file.nbytes:
                gain += nbytes
        return found if gain >= _LEAST_BYTES else {}

    def doubt(self, segment: int) -> None:
        """That memory is laid out anew."""
        with self._lock:
            its, self._noted[segment] = self._files.get(segment, {}), 0
            self._files[segment] = {name: replace(file, is_proven=False) for name, file in its.items()}

    def forget(self, segment: int) -> None:
        """That memory is for something else now."""
        with self._lock:
            self._files.pop(segment, None)
            self._noted.pop(segment, None)


def _is_expected(file: DurableFile, last: DurableFile | None, *, is_settled: bool) -> bool:
    is_same = last is not None and last.digests == file.digests
    is_new = last is None or not last.is_proven
    return is_same or (is_new and is_settled)
