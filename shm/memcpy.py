"""Copies and comparisons by address. Batches of copies bypass the CPU caches if the extension is compiled."""

from __future__ import annotations

import ctypes
import operator
import os
from array import array
from bisect import bisect_left, bisect_right
from collections import deque
from collections.abc import Callable, Sequence
from importlib.machinery import EXTENSION_SUFFIXES
from itertools import accumulate
from typing import Any, NamedTuple


def compiled(beside: str, name: str, kind: type[ctypes.CDLL] = ctypes.CDLL) -> Any:
    """Load a compiled library of functions. Return None if the library was not built.

    Args:
        beside: A file in the same folder.
        name: Name of the library's source file, without the ending.
        kind: Whether a call releases Python's lock (``CDLL``) or keeps it (``PyDLL``).
    """
    stem = os.path.join(os.path.dirname(beside), name)
    path = next(filter(os.path.exists, map(stem.__add__, EXTENSION_SUFFIXES)), None)
    return None if path is None else kind(path)


# Arguments: target, source, number of bytes. Other threads run during the copy. ctypes.memmove would also make an int
# of the returned pointer.
memcpy = ctypes.CDLL(None).memcpy
# This variant keeps Python's lock, for small copies. Otherwise each copy would wait to get the lock back.
memcpy_holding = ctypes.PyDLL(None).memcpy
for _function in (memcpy, memcpy_holding):
    _function.restype = None
    _function.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t]

# Arguments: two addresses, number of bytes. Returns 0 if the bytes are equal.
memcmp = ctypes.CDLL(None).memcmp
memcmp.restype = ctypes.c_int
memcmp.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t]

# Copies of at least this size release Python's lock, so that several threads copy.
_COPY_ALONE_BYTES = 256 << 10


def _compiled(name: str, result: type[ctypes.c_size_t] | None, *arguments: type) -> Callable[..., Any] | None:
    """Return a function of ``_copies.c``; None if it is not compiled."""
    if (library := compiled(__file__, "_copies")) is None:
        return None
    function: Any = getattr(library, name)
    function.restype, function.argtypes = result, arguments
    return function  # type: ignore[no-any-return]


_VOID, _SIZE = ctypes.c_void_p, ctypes.c_size_t
_copy_many = _compiled("asyncckpt_copy_many", None, _VOID, _VOID, _VOID, _SIZE)
differing = _compiled("asyncckpt_differing", _SIZE, _VOID, _VOID, _SIZE, _VOID, _SIZE)
"""Finds 16-bit words that differ, see ``_copies.c``; None if it is not compiled."""
BLOCK = 4096
"""The room that ``differing`` needs beyond the maximum number of words."""
IS_COMPILED = _copy_many is not None
"""Whether ``copy_many`` bypasses the CPU caches and releases Python's lock."""


def copy_many(to: array[int], source: array[int], sizes: array[int]) -> None:
    """Copy ``sizes[i]`` bytes from address ``source[i]`` to address ``to[i]``, for all i. All arrays are of type "Q".

    The copied bytes bypass the CPU caches, so use this function for data that is not read soon.
    """
    if _copy_many is not None:
        _copy_many(*(each.buffer_info()[0] for each in (to, source, sizes)), len(to))
        return
    copy = memcpy if sizes and sum(sizes) >= _COPY_ALONE_BYTES * len(sizes) else memcpy_holding
    deque(map(copy, to, source, sizes), maxlen=0)


def address_of(data: memoryview) -> int:
    """Return the address of the bytes of ``data``, which must be writable and not empty."""
    return ctypes.addressof(ctypes.c_char.from_buffer(data))


def memory_at(address: int, nbytes: int) -> memoryview:
    """Return a writable view of the ``nbytes`` at ``address``. The caller keeps the memory alive."""
    return memoryview((ctypes.c_char * nbytes).from_address(address)).cast("B")


class Destination(NamedTuple):
    """The bytes from ``begin`` to ``end`` of a file, and the memory ``address`` that they go to."""

    begin: int
    end: int
    address: int


class Destinations:
    """The memory that parts of a file go to. The parts are stored as columns, because there may be 100,000 of them.

    The creator keeps the memory alive. Several threads may call ``fill`` for different parts of the file.
    """

    def __init__(self, begins: Sequence[int], ends: Sequence[int], addresses: Sequence[int]) -> None:
        """Store the columns.

        Args:
            begins: The first byte of each part, in rising order. Parts may overlap.
            ends: The end of each part. No part is empty.
            addresses: The target address of each part.
        """
        self._begins, self._ends, self._addresses = array("Q", begins), array("Q", ends), array("Q", addresses)
        # Tied tensors have the same bytes, and boxes may contain each other. Then a part between two others may stick
        # out.
        self._overlap = any(map(operator.lt, begins[1:], ends))
        self._reach = array("Q", accumulate(ends, max)) if self._overlap else self._ends
        # The first bytes and the ends of all parts in memory, in rising order.
        firsts: Sequence[int] = addresses
        lasts: Sequence[int] = list(map(operator.add, addresses, map(operator.sub, ends, begins)))
        if any(map(operator.gt, firsts, firsts[1:])):
            firsts, lasts = zip(*sorted(zip(firsts, lasts, strict=True)), strict=True)
        self.tied = any(map(operator.lt, firsts[1:], lasts))
        """Whether some parts share memory. Such destinations must be filled one after the other."""

    def only(self, begin: int, end: int) -> Destination | None:
        """Return the only destination that overlaps bytes ``begin`` to ``end``; None if there are none or several."""
        first, last = self._touched(begin, end)
        if self.tied or last != first + 1:  # the caller checks bytes in the target, so no other part may write them
            return None
        return Destination(self._begins[first], self._ends[first], self._addresses[first])

    def fill(self, begin: int, data: memoryview) -> None:
        """Copy ``data``, which begins at byte ``begin`` of the file, to all destinations that it overlaps."""
        if not data:
            return
        begins, ends, addresses = self._begins, self._ends, self._addresses
        end = begin + len(data)
        first, last = self._touched(begin, end)
        if first >= last:
            return
        # For 100,000 small parts each microsecond would be a tenth of a second. So only the parts at the edges, which
        # may stick out, are cut. If parts overlap, any of them may stick out.
        cut = range(first, last) if self._overlap else sorted({first, last - 1})
        to, froms, until = addresses[first:last], begins[first:last], ends[first:last]
        for number in cut:
            at = number - first
            froms[at] = min(max(begins[number], begin), end)
            until[at] = max(min(ends[number], end), froms[at])
            to[at] += froms[at] - begins[number]
        sizes = array("Q", map(operator.sub, until, froms))
        copy_many(to, array("Q", map((address_of(data) - begin).__add__, froms)), sizes)

    def _touched(self, begin: int, end: int) -> tuple[int, int]:
        """Return the range (first, last + 1) of parts that overlap a piece of the file.

        If parts overlap each other, the range may include a few parts outside of the piece.
        """
        return bisect_right(self._reach, begin), bisect_left(self._begins, end)
