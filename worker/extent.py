"""Extents: where the bytes of a part stand in a file that several ranks write together."""

from __future__ import annotations

from array import array
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import NamedTuple

from asyncckpt.errors import DamagedCheckpointError


class Extent(NamedTuple):
    """Some of a part: ``runs`` of ``run_bytes`` each.

    In the part they stand one after the other, from ``at`` on; in the file, from ``begin`` on, one every ``stride``
    bytes. All in bytes.
    """

    at: int
    run_bytes: int
    runs: int
    begin: int
    stride: int

    @property
    def nbytes(self) -> int:
        """Of all runs."""
        return self.run_bytes * self.runs

    @property
    def end(self) -> int:
        """Where the last run ends in the file."""
        return self.begin + (self.runs - 1) * self.stride + self.run_bytes

    def cut(self, begin: int, end: int) -> Iterator[Extent]:
        """Those of its bytes that stand between ``begin`` and ``end`` of the part."""
        begin, end = max(begin - self.at, 0), min(end - self.at, self.nbytes)
        while begin < end:
            number, skipped = divmod(begin, self.run_bytes)
            whole = 0 if skipped else (end - begin) // self.run_bytes
            run = self.run_bytes if whole else min(self.run_bytes - skipped, end - begin)
            its = Extent(self.at + begin, run, whole or 1, self.begin + number * self.stride + skipped, self.stride)
            yield its
            begin += its.nbytes


def packed(extents: Sequence[Extent]) -> array[int]:
    """As numbers, for a region of a segment."""
    return array("Q", (number for extent in extents for number in extent))


def unpacked(numbers: Sequence[int]) -> list[Extent]:
    """What was ``packed``."""
    return [Extent(*numbers[at : at + 5]) for at in range(0, len(numbers), 5)]


def check_whole(extents: Sequence[Extent], nbytes: int, path: str) -> None:
    """That ``extents``, those of all parts, are as many bytes as the file ``path`` of ``nbytes`` has, and in it; single
    runs not twice.

    Raises ``DamagedCheckpointError``.
    """
    found = sum(extent.nbytes for extent in extents)
    single = sorted((extent.begin, extent.end) for extent in extents if extent.runs == 1)
    is_twice = any(end > begin for (_, end), (begin, _) in pairwise(single))
    if found != nbytes or is_twice or max((extent.end for extent in extents), default=0) > nbytes:
        raise DamagedCheckpointError(
            f"the indexes of this file are of parts with {found:,} bytes, and it has {nbytes:,}", path=path
        )


class Extents:
    """Finds those of a part."""

    def __init__(self, extents: Sequence[Extent]) -> None:
        """``extents``: in the order of the part."""
        self._all = extents
        self._begins = [each.at for each in extents]

    def between(self, begin: int, end: int) -> Iterator[Extent]:
        """What is between ``begin`` and ``end`` of the part, cut to that."""
        for number in range(max(bisect_right(self._begins, begin) - 1, 0), len(self._all)):
            if self._begins[number] >= end:
                break
            yield from self._all[number].cut(begin, end)


def check_order(extents: Sequence[Extent], nbytes: int) -> None:
    """Check that they are in their order within a part of ``nbytes``. Raises ``ValueError``, ``TypeError``."""
    end = 0
    if any(type(number) is not int for extent in extents for number in extent):
        raise ValueError("an extent that is no numbers")
    for extent in extents:
        if (
            extent.at < end
            or extent.run_bytes < 1
            or extent.runs < 1
            or extent.begin < 0
            or extent.stride < extent.run_bytes
        ):
            raise ValueError("an extent that cannot be")
        end = extent.at + extent.nbytes
    if end > nbytes:
        raise ValueError("an extent outside of the part")
